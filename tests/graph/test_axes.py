"""Properties of axes: cutting, joining, flattening and unifying keep lengths right and equal things equal."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from peel.graph import axes
from peel.graph.axes import Axis, axis_size, constant, expand, is_free, symbols_of, unknown


def form(axis: Axis) -> dict[object, int]:
    """The length of an axis as multiples of its unknowns (fixed ones as a plain number)."""
    total: dict[object, int] = {}
    for atom, inner in expand(axis):
        key: object = atom.symbol if atom.symbol.fixed is None else "fixed"
        total[key] = total.get(key, 0) + inner * (1 if atom.symbol.fixed is None else atom.symbol.size)
    return {key: value for key, value in total.items() if value}


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@st.composite
def two_ways_to_cut(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    total = draw(st.integers(2, 40))

    def partition() -> list[int]:
        points = sorted({0, total, *draw(st.lists(st.integers(1, total - 1), max_size=4))})
        return [b - a for a, b in itertools.pairwise(points)]

    return partition(), partition()


@given(two_ways_to_cut(), st.booleans())
def test_unified_axes_are_the_same_axis(cuts: tuple[list[int], list[int]], with_constant: bool) -> None:
    first, second = ([unknown(length) for length in cut] for cut in cuts)
    if with_constant:
        first[0] = constant(cuts[0][0], "given")
    a, b = (tuple(segment for piece in pieces for segment in piece) for pieces in (first, second))
    axes.unify(a, b, "test")
    assert axis_size(a) == axis_size(b) == sum(cuts[0])
    assert form(a) == form(b)
    if not with_constant:
        assert expand(a) == expand(b)
    for piece, length in zip([*first, *second], [*cuts[0], *cuts[1]], strict=False):
        assert axis_size(expand(piece)) == length


@given(two_ways_to_cut())
def test_joining_the_pieces_of_a_cut_gives_the_axis(cuts: tuple[list[int], list[int]]) -> None:
    axis = tuple(segment for length in cuts[0] for segment in unknown(length))
    pieces = axes.cut(axis, cuts[1], "test")
    assert [axis_size(expand(piece)) for piece in pieces] == cuts[1]
    assert expand(tuple(segment for piece in pieces for segment in piece)) == expand(axis)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5))
def test_unmerge_reverses_merge(outer: int, channels: int, inner: int) -> None:
    axis = unknown(channels)
    flat = axes.merge([constant(outer), axis, constant(inner)], "test")
    assert axis_size(flat) == outer * channels * inner
    back = axes.unmerge(flat, [outer, channels, inner], "test")
    assert [axis_size(dim) for dim in back] == [outer, channels, inner]
    if channels > 1:
        assert form(back[1]) == form(axis)


@given(st.integers(2, 4), st.integers(1, 6))
def test_rows_of_a_matrix_share_one_unit(rows: int, length: int) -> None:
    axis = unknown(rows * length)
    axes.unmerge(axis, [rows, length], "test")
    (symbols,) = [{atom.symbol for atom, _ in expand(axis)}]
    assert len(symbols) == (1 if rows * length > 1 else len(symbols))


@given(two_ways_to_cut())
def test_same_size_ties_lengths_but_not_channels(cuts: tuple[list[int], list[int]]) -> None:
    a, b = (tuple(segment for length in cut for segment in unknown(length)) for cut in cuts)
    axes.same_size(a, b, "test")
    assert form(a) == form(b)
    assert not {atom for atom, _ in expand(a)} & {atom for atom, _ in expand(b)}


def test_unifying_with_a_constant_fixes_with_its_reason() -> None:
    axis = (*unknown(4), *unknown(6))
    axes.unify(axis, (*unknown(7), *constant(3, "given")), "test")
    assert [atom.symbol.fixed for atom, _ in expand(axis)] == [None, None, "given"]
    assert is_free(axis)


def test_flattening_two_channel_axes_fixes_both() -> None:
    a, b = unknown(4), unknown(6)
    flat = axes.merge([a, b], "test")
    assert axis_size(flat) == 24
    assert not is_free(a)
    assert not is_free(b)


def test_the_last_axis_of_a_view_can_change() -> None:
    axis = unknown(24)
    parts = axes.unmerge(axis, [2, 3, 1, 4], "test")
    assert [axis_size(part) for part in parts] == [2, 3, 1, 4]
    assert [i for i, part in enumerate(parts) if is_free(part)] == [3]
    (symbol,) = symbols_of(axis)
    assert symbol.size == 4


def test_a_constant_without_a_reason_gives_a_reason_to_what_it_fixes() -> None:
    for first, second in ((unknown(8), constant(8)), (constant(8), unknown(8))):
        axes.unify(first, second, "add in block")
        (symbol,) = symbols_of(first)
        assert symbol.fixed == "add in block: the other side has a constant length"

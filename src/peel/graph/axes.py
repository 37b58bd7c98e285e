"""Axes of tensors as lists of segments, and the unknowns they are made of.

Two questions about a channel axis are kept apart:

* *how many* channels: a `Symbol`, one unknown integer. Symbols that must be equal are merged. A symbol
  becomes a tie.
* *which* channels: an `Atom`, a run of channels in a certain order. Atoms whose channels must be kept or cut
  together are merged.

An axis is a tuple of `Segment(atom, inner)`: the channels of the atom in order, each repeated `inner` times
(flattening a feature map of 7x7 gives `inner` 49). Concatenation joins tuples; a split cuts them. Where a cut
falls inside an atom, the atom gets two parts, everywhere at once; a merged atom has one part, the other atom.
`expand` replaces atoms by their parts. `unify` walks along two axes, cutting and merging as it goes.

A symbol may be *fixed*, with a reason. Constants are symbols that are fixed from the start.

An atom is *inexact* if cutting it is not exactly zeroing it: a channel shuffle interleaves it with
others, a layer norm takes statistics over it. Its size is still free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from typing import NamedTuple

#: A flattened axis of more segments than this is fixed: no known network needs it, and it would be slow.
_MAX_SEGMENTS = 4096


@dataclass(slots=True, eq=False)
class Symbol:
    """How many channels: one unknown integer, `size` in the original network."""

    size: int
    fixed: str | None = None
    causes: dict[str, None] = field(default_factory=dict)
    parts: tuple[tuple[Symbol, int], ...] = ()
    """The symbols that this one is the sum of, with multiplicities. One part: it was merged into that."""


@dataclass(slots=True, eq=False)
class Atom:
    """Which channels: a run of `symbol` channels in a certain order."""

    symbol: Symbol
    inexact: str | None = None
    parts: tuple[Segment, ...] = ()


class Segment(NamedTuple):
    atom: Atom
    inner: int


Axis = tuple[Segment, ...]

Value = tuple[Axis, ...]
"""A tensor as the analysis sees it: its axes."""


def expand(axis: Iterable[Segment]) -> Axis:
    """The axis in terms of atoms without parts. Their symbols have no parts either."""
    done: list[Segment] = []
    stack = list(axis)[::-1]
    while stack:
        atom, inner = stack.pop()
        if not atom.parts:
            # The symbol may have been split or merged through another atom: do the same to this one.
            atom.parts = tuple(Segment(Atom(part, atom.inexact), times) for part, times in atom.symbol.parts)
        if atom.parts:
            stack.extend(Segment(part, times * inner) for part, times in reversed(atom.parts))
        else:
            done.append(Segment(atom, inner))
    return tuple(done)


def repeat_each(axis: Axis, times: int) -> Axis:
    """The axis with each channel repeated `times` times in place."""
    return tuple(Segment(atom, inner * times) for atom, inner in expand(axis))


def replace_axis(value: Value, dim: int, axis: Axis) -> Value:
    axes = list(value)
    axes[dim] = axis
    return tuple(axes)


def symbols_of(axis: Axis) -> list[Symbol]:
    """The distinct symbols of an axis, in order."""
    return list(dict.fromkeys(atom.symbol for atom, _ in expand(axis)))


def axis_size(axis: Iterable[Segment]) -> int:
    """The length of the axis in the original network."""
    return sum(atom.symbol.size * inner for atom, inner in axis)


def is_free(axis: Axis) -> bool:
    """Whether any part of the axis can change."""
    return any(atom.symbol.fixed is None for atom, _ in expand(axis))


def constant(size: int, reason: str = "") -> Axis:
    """An axis that cannot change."""
    return (Segment(Atom(Symbol(size, fixed=reason)), 1),)


def unknown(size: int) -> Axis:
    """An axis of which only the length is known."""
    return (Segment(Atom(Symbol(size)), 1),)


# What must be equal. These functions change the atoms and symbols of the axes in place.


def fix(axis: Axis, reason: str) -> None:
    """The axis keeps its length. The first reason given is kept."""
    for symbol in symbols_of(axis):
        if symbol.fixed is None:
            symbol.fixed = reason


def mark_inexact(axis: Axis, reason: str) -> None:
    """Cutting the axis is not exactly zeroing it."""
    for atom, _ in expand(axis):
        if atom.inexact is None:
            atom.inexact = reason


def same_size(first: Axis, second: Axis, cause: str) -> None:
    """The two axes keep the same length, but need not keep the same channels."""
    if is_free((*first, *second)):
        # The same symbols, but atoms of their own.
        a, b = (tuple(Segment(Atom(atom.symbol), n) for atom, n in expand(axis)) for axis in (first, second))
        unify(a, b, cause)


def unify(first: Axis, second: Axis, cause: str) -> None:
    """The two axes hold the same channels in the same order. Their original lengths must agree."""
    reason = f"{cause}: channels do not line up"
    # Walk along both axes. The longer of two segments is cut where the shorter one ends, so that the two that
    # are matched have the same length. Lists are reversed: the next segment is taken from the end.
    left, right = list(first)[::-1], list(second)[::-1]
    while left and right:
        x, y = _next(left), _next(right)
        size_x, size_y = axis_size((x,)), axis_size((y,))
        if size_x == size_y:
            _match(x, y, cause)
        else:
            left.extend(reversed(_divide(x, size_y, reason)))
            right.extend(reversed(_divide(y, size_x, reason)))


def _next(rest: list[Segment]) -> Segment:
    """Take the first segment without parts from a reversed axis."""
    rest.extend(reversed(expand((rest.pop(),))))
    return rest.pop()


def _divide(segment: Segment, length: int, reason: str) -> Axis:
    """Cut a segment without parts after `length`. Where that is inside a channel, fix it, with the reason."""
    symbol, size = segment.atom.symbol, axis_size((segment,))
    if length >= size:
        return (segment,)
    # The symbol becomes the sum of two, in every axis that it is in: `expand` replaces it there.
    if symbol.fixed is None and length % segment.inner == 0:
        sizes = (length // segment.inner, (size - length) // segment.inner)
        symbol.parts = tuple((Symbol(part, causes=dict(symbol.causes)), 1) for part in sizes)
        return expand((segment,))
    fix((segment,), reason)
    return (*constant(length, symbol.fixed or ""), *constant(size - length, symbol.fixed or ""))


def _match(x: Segment, y: Segment, cause: str) -> None:
    """The two segments, of the same length and without parts, hold the same channels."""
    (a, m), (b, k) = x, y
    if m != k and not is_free((x, y)):
        return
    # At position p one axis has channel p // m, the other p // k. Runs of m and of k that overlap chain up to
    # runs of lcm(m, k): these are kept or cut as a whole, so they are the channels of a common atom. If m is
    # a multiple of k, that is the channel of `a` itself. A last run that is not complete ties everything.
    if m % k == 0:
        _bind(b, a, m // k, cause)
    elif k % m == 0:
        _bind(a, b, k // m, cause)
    elif axis_size((x,)) % lcm(m, k) == 0:
        common = Atom(Symbol(axis_size((x,)) // lcm(m, k)))
        _bind(a, common, lcm(m, k) // m, cause)
        _bind(b, common, lcm(m, k) // k, cause)
    else:
        fix((x, y), f"{cause}: channels do not line up")


def _bind(atom: Atom, part: Atom, times: int, cause: str) -> None:
    """Each channel of `part`, repeated `times` times, is the channels of `atom`."""
    if atom is part:
        return
    u, v = atom.symbol, part.symbol
    if u is not v:
        u.parts = ((v, times),)
        # One of them cannot change, so neither can. The first reason stays; a constant that has none gets
        # one.
        if (u.fixed is None) != (v.fixed is None):
            v.fixed = v.fixed or u.fixed or f"{cause}: the other side has a constant length"
        v.fixed = v.fixed or u.fixed
        v.causes.update(u.causes)
        v.causes[cause] = None
    atom.parts = (Segment(part, times),)
    part.inexact = part.inexact or atom.inexact


# Shapes


def cut(axis: Axis, lengths: Sequence[int], cause: str) -> list[Axis]:
    """Cut an axis into pieces of the given original lengths."""
    axis = expand(axis)
    if len(axis) == 1 and axis[0].atom.inexact and is_free(axis):
        atom, inner = axis[0]
        size = atom.symbol.size
        # A half of interleaved channels has as many as each of the parts had, so the symbol is the same.
        # Which ones it has depends on all parts, so its atom is a new one: only the number is shared.
        if all(length % size == 0 for length in lengths) and inner > 1:
            # Halves of interleaved channels: each is as long as one of the interleaved parts was.
            return [(Segment(Atom(atom.symbol, atom.inexact), length // size),) for length in lengths]
    rest = list(axis)[::-1]
    return [_take(rest, length, cause) for length in lengths]


def _take(rest: list[Segment], missing: int, cause: str) -> Axis:
    """Take a piece of the given length from a reversed axis."""
    piece: list[Segment] = []
    while missing:
        segment = _next(rest)
        size = axis_size((segment,))
        if size > missing:
            reason = f"{cause}: a cut falls between channels that belong together"
            rest.extend(reversed(_divide(segment, missing, reason)))
        else:
            piece.append(segment)
            missing -= size
    return tuple(piece)


def merge(axes: Sequence[Axis], cause: str) -> Axis:
    """Several neighboring axes flattened into one, row-major."""
    # Row-major: an axis before the free one repeats the whole pattern, one behind it repeats each channel.
    sizes = [axis_size(axis) for axis in axes]
    free = [i for i, axis in enumerate(axes) if sizes[i] > 1 and is_free(axis)]
    if not free:
        reasons = (symbol.fixed for axis in axes for symbol in symbols_of(axis))
        return constant(prod(sizes), next(filter(None, reasons), ""))
    outer = prod(sizes[: free[0]])
    segments = repeat_each(axes[free[0]], prod(sizes[free[0] + 1 :]))
    if len(free) > 1 or outer * len(segments) > _MAX_SEGMENTS:
        reason = f"{cause}: two channel axes are flattened into one"
        for i in free:
            fix(axes[i], reason)
        return constant(prod(sizes), reason)
    return segments * outer


def unmerge(axis: Axis, dims: Sequence[int], cause: str) -> list[Axis]:
    """One axis seen as several, row-major: the reverse of `merge`.

    The lengths alone do not say which of the axes can change. It is taken to be the last one, unless each
    channel fills all axes but the first.
    """
    if len(dims) == 1:
        return [axis]
    if dims[0] == 1:
        return [constant(1), *unmerge(axis, dims[1:], cause)]
    axis = expand(axis)
    if not is_free(axis):
        reason = axis[0].atom.symbol.fixed or ""
        return [constant(dim, reason) for dim in dims]
    trailing = prod(dims[1:])
    # Each channel fills whole rows, as after flattening: the first axis holds the channels.
    if all(inner % trailing == 0 for _, inner in axis):
        first = tuple(Segment(atom, inner // trailing) for atom, inner in axis)
        return [first, *(constant(dim) for dim in dims[1:])]
    # Otherwise the first axis is constant (a number of groups or heads), and the rest is within a row.
    row = _row(axis, dims[0], trailing, cause)
    return [constant(dims[0]), *unmerge(row, dims[1:], cause)]


def _row(axis: Axis, rows: int, length: int, cause: str) -> Axis:
    """One row of an axis seen as a matrix. All rows keep the same length."""
    # The code sees `rows` rows of one length, so a cut must leave the same number in each.
    one_atom = len(axis) == 1
    pieces = [expand(piece) for piece in cut(axis, [length] * rows, cause)]
    if all(piece == pieces[0] for piece in pieces):
        return pieces[0]
    # Channels of one layer: place j of all rows is one channel of the row, kept or cut in all of them.
    if one_atom:
        for piece in pieces[1:]:
            unify(pieces[0], piece, cause)
        return expand(pieces[0])
    for piece in pieces[1:]:
        # Rows of different layers stay equally long but keep channels of their own: only numbers are tied.
        same_size(pieces[0], piece, cause)
    # No atom can say which channels are at place j then: the result has atoms of its own, marked inexact.
    reason = f"{cause} interleaves channels of different layers"
    for piece in pieces:
        mark_inexact(piece, reason)
    return tuple(Segment(Atom(atom.symbol, reason), inner) for atom, inner in expand(pieces[0]))

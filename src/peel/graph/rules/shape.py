"""Operators that only move elements: views, permutations, cuts, joins, padding, creation."""

from math import prod
from typing import Any

import torch
from torch.fx import Node

from ..axes import Axis, Value, axis_size, constant, expand, is_free, repeat_each, replace_axis, unknown
from ..call import Call, operator_of, places_of, rule
from .elementwise import broadcast

# Views and permutations


@rule("view reshape _unsafe_view flatten unflatten view_copy")
def _reshape(call: Call, value: Value, *rest: Any, **options: Any) -> Value:
    """Match the shortest runs of axes with equal products, and merge or unmerge within each run."""
    sizes, target = [axis_size(axis) for axis in value], list(call.shape)
    result: list[Axis] = []
    i = j = 0
    while i < len(sizes) or j < len(target):
        if sizes[i : i + 1] == target[j : j + 1]:
            result.append(value[i])
            i, j = i + 1, j + 1
        elif sizes[i : i + 1] == [1]:
            call.fix(value[i], "a single channel")
            i += 1
        elif target[j : j + 1] == [1]:
            result.append(constant(1))
            j += 1
        else:
            # Row-major order: any view is made of views of the shortest runs with equal products. A longer
            # run would flatten axes that the view keeps apart, and flattening two channel axes fixes both.
            end_i, end_j = i + 1, j + 1
            while (before := prod(sizes[i:end_i])) != (after := prod(target[j:end_j])):
                if before < after:
                    end_i += 1
                else:
                    end_j += 1
            result.extend(call.unmerge(call.merge(value[i:end_i]), target[j:end_j]))
            i, j = end_i, end_j
    if "flatten" not in str(call.node.target) or "unflatten" in str(call.node.target):
        call.has_lengths(target, tuple(result))
    return tuple(result)


@rule("reshape_as view_as")
def _reshape_as(call: Call, value: Value, other: Value) -> Value:
    return broadcast(call, _reshape(call, value), other)


@rule("permute transpose t mT swapaxes movedim unsqueeze unsqueeze_")
def _move_axes(call: Call, value: Value, *args: Any) -> Value:
    """Operators that reorder axes or add axes of length 1. torch shows the order on distinct lengths."""
    operator: Any = call.node.target
    # The length of each axis says where it came from: 2, 3, 4 and so on; new axes have length 1.
    moved = operator(torch.empty(tuple(range(2, len(value) + 2)), device="meta"), *args)
    return tuple(value[size - 2] if size > 1 else constant(1) for size in moved.shape)


@rule("squeeze squeeze_")
def _squeeze(call: Call, value: Value, dims: Any = None) -> Value:
    places = places_of(dims, value)
    return tuple(axis for i, axis in enumerate(value) if i not in places or axis_size(axis) != 1)


def _with_rank(value: Value, rank: int) -> Value:
    return (*(constant(1) for _ in range(rank - len(value))), *value)


@rule("expand broadcast_to")
def _expand(call: Call, value: Value, *rest: Any, **options: Any) -> Value:
    """Axes of length 1 are broadcast to a length that is not yet known to be tied to anything."""
    pairs = zip(_with_rank(value, len(call.shape)), call.shape, strict=True)
    result = tuple(axis if axis_size(axis) == size else unknown(size) for axis, size in pairs)
    call.has_lengths(call.shape, result)
    return result


@rule("expand_as")
def _expand_as(call: Call, value: Value, other: Value) -> Value:
    pairs = zip(_with_rank(value, len(other)), other, strict=True)
    return tuple(own if axis_size(own) == axis_size(target) else target for own, target in pairs)


@rule("repeat tile")
def _repeat(call: Call, value: Value, times: list[int]) -> Value:
    return tuple(expand(axis) * n for axis, n in zip(_with_rank(value, len(times)), times, strict=True))


@rule("repeat_interleave")
def _repeat_interleave(call: Call, value: Value, times: Any, dim: Any = None, **options: Any) -> Any:
    if not isinstance(times, int) or dim is None:
        return call.refuse(f"{call}: the rule covers one number of repeats along one axis")
    return replace_axis(value, dim, repeat_each(value[dim], times))


# Cuts


def _pieces(call: Call, value: Value, dim: int, lengths: list[int]) -> tuple[Value, ...]:
    """Pieces of the same length stay equal: code that splits into `(c, c)` has one number for both."""
    pieces = call.cut(value[dim], lengths)
    for length in dict.fromkeys(lengths):
        call.same_size([piece for piece, own in zip(pieces, lengths, strict=True) if own == length])
    call.has_lengths(lengths, tuple(pieces))
    return tuple(replace_axis(value, dim, piece) for piece in pieces)


@rule("split split_with_sizes")
def _split(call: Call, value: Value, size: Any, dim: int = 0) -> tuple[Value, ...]:
    if isinstance(size, list | tuple):
        return _pieces(call, value, dim, list(size))
    total = axis_size(value[dim])
    lengths = [min(size, total - start) for start in range(0, total, size)]
    if lengths[-1] != lengths[0]:
        call.fix(value[dim], f"{call} leaves a last piece of another size")
    return _pieces(call, value, dim, lengths)


@rule("chunk")
def _chunk(call: Call, value: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    return _split(call, value, -(-axis_size(value[dim]) // chunks), dim)


@rule("tensor_split")
def _tensor_split(call: Call, value: Value, parts: Any, dim: int = 0) -> Any:
    """Into a number of equal parts; parts of other lengths depend on the width in a way of their own."""
    if not isinstance(parts, int) or axis_size(value[dim]) % parts:
        return call.refuse(f"{call}: parts of different lengths")
    return _chunk(call, value, parts, dim)


def _is_written(view: Node) -> bool:
    """Whether an operator, or one on a slice of this slice, changes the tensor that it is a view of."""
    users = [user for user in view.users if user.args[:1] == (view,)]
    return any(
        operator_of(user).endswith("_") or (operator_of(user) == "aten::slice" and _is_written(user))
        for user in users
    )


@rule("slice")
def _slice(
    call: Call, value: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    total = axis_size(value[dim])
    start = 0 if start is None else max(0, start + total if start < 0 else start)
    end = total if end is None else min(total, end + total if end < 0 else end)
    if (start, end, step) == (0, total, 1):
        call.has_lengths([total], (value[dim],))
        return value
    if not is_free(value[dim]) or step != 1 or end <= start:
        taken = "takes none of the channels" if end <= start else f"takes one of {step} channels"
        call.fix(value[dim], f"{call} {taken}")
        return replace_axis(value, dim, constant(call.shape[dim]))
    if _is_written(call.node):
        # `x[:, :4] = y`: whether the code writes 4 or computes it, no shape at other widths shows.
        call.fix(value[dim], f"{call} is written in place")
    length = end - start
    lengths = [n for n in (start, length, total - end) if n]
    pieces = call.cut(value[dim], lengths)
    if 2 * length == total and start % length == 0:
        # Code that takes a half usually says `[:, : channels // 2]` rather than a number.
        call.same_size(pieces)
    before: Axis = pieces[0] if start else ()
    piece = pieces[1] if start else pieces[0]
    call.has_lengths([length, start, end], (piece, before, (*before, *piece)))
    return replace_axis(value, dim, piece)


@rule("narrow")
def _narrow(call: Call, value: Value, dim: int, start: int, length: int) -> Value:
    return _slice(call, value, dim, start, start + length)


@rule("select")
def _select(call: Call, value: Value, dim: int, index: int) -> Value:
    dim %= len(value)
    call.fix(value[dim], f"{call} picks one of the channels")
    return (*value[:dim], *value[dim + 1 :])


@rule("unbind")
def _unbind(call: Call, value: Value, dim: int = 0) -> tuple[Value, ...]:
    return (_select(call, value, dim, 0),) * axis_size(value[dim])


# Joins


@rule("cat concat concatenate")
def _cat(call: Call, values: list[Value], dim: int = 0) -> Value:
    rank = max(len(value) for value in values)
    values = [value for value in values if len(value) == rank]  # torch allows an empty tensor with one axis
    dim %= rank
    for value in values[1:]:
        for place in range(rank):
            if place != dim:
                call.unify(values[0][place], value[place])
    return replace_axis(values[0], dim, tuple(segment for value in values for segment in value[dim]))


@rule("stack")
def _stack(call: Call, values: list[Value], dim: int = 0) -> Value:
    value = broadcast(call, *values)
    place = dim % (len(value) + 1)
    return (*value[:place], constant(len(values)), *value[place:])


@rule("pad constant_pad_nd reflection_pad2d replication_pad2d")
def _pad(
    call: Call, value: Value, padding: list[int], mode: Any = "constant", *rest: Any, **options: Any
) -> Value:
    axes = list(value)
    operator = str(call.node.target)
    fills = "constant_pad" in operator or (mode == "constant" and "aten.pad." in operator)
    for i in range(0, len(padding), 2):
        before, after = padding[i], padding[i + 1]
        place = len(axes) - 1 - i // 2
        if before < 0 or after < 0 or (not fills and (before or after)):
            call.fix(axes[place], f"{call} crops or repeats the channels")
            axes[place] = constant(call.shape[place])
            continue
        reason = f"constant channels that {call} puts in"
        ends = [constant(n, reason) if n else () for n in (before, after)]
        axes[place] = (*ends[0], *axes[place], *ends[1])
    return tuple(axes)


# Moves within an axis, creation, look-up


@rule("roll")
def _roll(call: Call, value: Value, amount: Any, dims: Any = None) -> Value:
    for place in places_of(dims, value):
        call.fix(value[place], f"{call} moves channels along their axis")
    return value


@rule("flip")
def _flip(call: Call, value: Value, dims: list[int]) -> Value:
    return _roll(call, value, None, dims)


@rule("pixel_shuffle")
def _pixel_shuffle(call: Call, value: Value, factor: int) -> Value:
    """Runs of factor x factor channels become pixels: each run is kept or cut as a whole."""
    channels = unknown(axis_size(value[-3]) // factor**2)
    call.unify(value[-3], repeat_each(channels, factor**2))
    return (*value[:-3], channels, *(constant(size) for size in call.shape[-2:]))


@rule("pixel_unshuffle")
def _pixel_unshuffle(call: Call, value: Value, factor: int) -> Value:
    channels = repeat_each(value[-3], factor**2)
    return (*value[:-3], channels, *(constant(size) for size in call.shape[-2:]))


@rule("channel_shuffle")
def _channel_shuffle(call: Call, value: Value, groups: int) -> Value:
    # A shuffle is a view as groups x channels, transposed and flattened.
    rows, row = call.unmerge(value[1], [groups, axis_size(value[1]) // groups])
    return replace_axis(value, 1, call.merge([row, rows]))


@rule("im2col")
def _im2col(call: Call, value: Value, kernel: list[int], *rest: Any) -> Value:
    """Patches as columns: each channel becomes as many rows as the kernel has places."""
    rows = repeat_each(value[-3], prod(kernel))
    return (*value[:-3], rows, constant(call.shape[-1]))


@rule("col2im")
def _col2im(call: Call, value: Value, size: list[int], kernel: list[int], *rest: Any) -> Value:
    channels = unknown(axis_size(value[-2]) // prod(kernel))
    call.unify(value[-2], repeat_each(channels, prod(kernel)))
    return (*value[:-2], channels, *(constant(length) for length in call.shape[-2:]))


@rule("unfold")
def _unfold(call: Call, value: Value, dim: int, size: int, step: int) -> Value:
    """Windows along an axis, which become a new last axis."""
    call.fix(value[dim], f"{call} slides over the channels")
    return (*replace_axis(value, dim, constant(call.shape[dim])), constant(size))


@rule("zeros ones full empty rand randn new_zeros new_ones new_full new_empty arange")
def _create(call: Call, *args: Any, **options: Any) -> Value:
    """A new tensor. Its axes take whatever length the code computes; the probe checks that."""
    result = tuple(unknown(size) if size > 1 else constant(1) for size in call.shape)
    if not any(word in str(call.node.target) for word in ("zeros", "ones", "full")):
        for axis in result:
            call.mark_inexact(axis, f"{call} makes channels that differ by their place")
    call.has_lengths(call.shape, result)
    return result


@rule("embedding")
def _embedding(call: Call, weight: Value, indices: Value, *rest: Any) -> Value:
    call.fix(weight[0], "number of embeddings")
    call.has_attributes(embedding_dim=weight[1])
    call.produces(weight[1], -1, call.node.args[0])
    return (*indices, weight[1])


@rule("index_put index_put_")
def _index_put(
    call: Call, value: Value, indices: list[Value | None], source: Value, *rest: Any, **options: Any
) -> Any:
    """Writes to places along the first axes. The axes after them hold the same channels on both sides."""
    places = list(range(len(indices)))
    if any(indices[place] is None for place in places):
        return call.refuse(f"{call}: the rule covers indices of the first axes only")
    for place in places:
        call.fix(value[place], f"{call} writes to channels by computed indices")
    # Broadcast from the last axis, as torch does: the source may lack the first ones.
    tail = value[len(indices) :]
    for own, other in zip(tail[::-1], source[::-1], strict=False):
        if axis_size(other) > 1:
            call.unify(own, other)
    return value


@rule("index")
def _index(call: Call, value: Value, indices: list[Value | None], *rest: Any) -> Value:
    """Axes before the first and after the last indexed one pass, unless the indexed axes are apart."""
    # As in numpy: the indexed axes are replaced by those of the index, in place if they are neighbors, else
    # at the front.
    indexed = [place for place, index in enumerate(indices) if index is not None]
    reason = f"{call} looks channels up by computed indices"
    first, last = indexed[0], indexed[-1]
    if indexed != list(range(first, last + 1)):
        first, last = 0, len(value) - 1
    for axis in value[first : last + 1]:
        call.fix(axis, reason)
    tail = value[last + 1 :]
    middle = [constant(size, reason) for size in call.shape[first : len(call.shape) - len(tail)]]
    return (*value[:first], *middle, *tail)

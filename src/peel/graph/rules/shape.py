"""Operators that move elements without computing on them: views, permutations, cuts, joins, padding, creation."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..axes import Axis, Segment, axis_size, constant, expand, is_free, unknown
from ..interpreter import Interpreter, Rule, Value


def _size(value: Value) -> list[int]:
    return [axis_size(axis) for axis in value]


def _reshape(interpreter: Interpreter, node: Node, value: Value, *rest: Any, **options: Any) -> Value:
    """Match the shortest runs of axes with equal products, and merge or unmerge within each run."""
    cause = interpreter.describe(node)
    sizes, target = _size(value), list(interpreter.shape(node))
    result: list[Axis] = []
    i = j = 0
    while i < len(sizes) or j < len(target):
        if i < len(sizes) and j < len(target) and sizes[i] == target[j]:
            result.append(value[i])
            i, j = i + 1, j + 1
        elif i < len(sizes) and sizes[i] == 1:
            interpreter.solver.fix(value[i], "a single channel")
            i += 1
        elif j < len(target) and target[j] == 1:
            result.append(constant(1))
            j += 1
        else:
            first_i, first_j, before, after = i, j, sizes[i], target[j]
            i, j = i + 1, j + 1
            while before != after:
                if before < after:
                    before, i = before * sizes[i], i + 1
                else:
                    after, j = after * target[j], j + 1
            merged = interpreter.solver.merge(value[first_i:i], cause)
            result.extend(interpreter.solver.unmerge(merged, target[first_j:j], cause))
    if "flatten" not in str(node.target) or "unflatten" in str(node.target):
        interpreter.literals(node, target, tuple(result))
    return tuple(result)


def _permute(interpreter: Interpreter, node: Node, value: Value, dims: list[int]) -> Value:
    return tuple(value[dim] for dim in dims)


def _transpose(interpreter: Interpreter, node: Node, value: Value, first: int = 0, second: int = 1) -> Value:
    axes = list(value)
    if len(axes) > 1:
        axes[first], axes[second] = axes[second], axes[first]
    return tuple(axes)


def _movedim(interpreter: Interpreter, node: Node, value: Value, source: Any, target: Any) -> Value:
    sources = [s % len(value) for s in (source if isinstance(source, list) else [source])]
    targets = [t % len(value) for t in (target if isinstance(target, list) else [target])]
    rest = iter(axis for i, axis in enumerate(value) if i not in sources)
    at = dict(zip(targets, sources, strict=True))
    return tuple(value[at[i]] if i in at else next(rest) for i in range(len(value)))


def _squeeze(interpreter: Interpreter, node: Node, value: Value, dims: Any = None) -> Value:
    if dims is None:
        places = set(range(len(value)))
    else:
        places = {dim % len(value) for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    return tuple(axis for i, axis in enumerate(value) if i not in places or axis_size(axis) != 1)


def _unsqueeze(interpreter: Interpreter, node: Node, value: Value, dim: int) -> Value:
    place = dim % (len(value) + 1)
    return (*value[:place], constant(1), *value[place:])


def _expand(interpreter: Interpreter, node: Node, value: Value, *rest: Any, **options: Any) -> Value:
    """Axes of length 1 are stretched to a length that is not known to be tied to anything yet."""
    shape = interpreter.shape(node)
    aligned: list[Axis] = [constant(1)] * (len(shape) - len(value)) + list(value)
    result = tuple(
        axis if axis_size(axis) == size else unknown(size) for axis, size in zip(aligned, shape, strict=True)
    )
    interpreter.literals(node, shape, result)
    return result


def _expand_as(interpreter: Interpreter, node: Node, value: Value, other: Value) -> Value:
    aligned: list[Axis] = [constant(1)] * (len(other) - len(value)) + list(value)
    return tuple(
        own if axis_size(own) == axis_size(target) else target
        for own, target in zip(aligned, other, strict=True)
    )


def _reshape_as(interpreter: Interpreter, node: Node, value: Value, other: Value) -> Value:
    result = _reshape(interpreter, node, value)
    for own, target in zip(result, other, strict=True):
        interpreter.solver.unify(own, target, interpreter.describe(node))
    return result


def _repeat(interpreter: Interpreter, node: Node, value: Value, times: list[int]) -> Value:
    aligned: list[Axis] = [constant(1)] * (len(times) - len(value)) + list(value)
    return tuple(expand(axis) * n for axis, n in zip(aligned, times, strict=True))


def _repeat_interleave(
    interpreter: Interpreter, node: Node, value: Value, times: Any, dim: Any = None, **options: Any
) -> Value:
    if not isinstance(times, int) or dim is None:
        raise NotImplementedError("repeats that are not one number")
    axes = list(value)
    axes[dim] = tuple(Segment(atom, inner * times) for atom, inner in expand(axes[dim]))
    return tuple(axes)


# Cuts


def _replace(value: Value, dim: int, axis: Axis) -> Value:
    axes = list(value)
    axes[dim] = axis
    return tuple(axes)


def _pieces(
    interpreter: Interpreter, node: Node, value: Value, dim: int, lengths: list[int]
) -> tuple[Value, ...]:
    """Pieces of the same length stay equal: code that splits into `(c, c)` has one number for both."""
    cause = interpreter.describe(node)
    pieces = interpreter.solver.cut(value[dim], lengths, cause)
    first: dict[int, Axis] = {}
    for piece, length in zip(pieces, lengths, strict=True):
        if first.setdefault(length, piece) is not piece:
            interpreter.solver.same_size(first[length], piece, cause)
    interpreter.literals(node, lengths, tuple(pieces))
    return tuple(_replace(value, dim, piece) for piece in pieces)


def _split(interpreter: Interpreter, node: Node, value: Value, size: Any, dim: int = 0) -> tuple[Value, ...]:
    if isinstance(size, list | tuple):
        return _pieces(interpreter, node, value, dim, list(size))
    total = axis_size(value[dim])
    lengths = [min(size, total - start) for start in range(0, total, size)]
    if lengths[-1] != lengths[0]:
        interpreter.solver.fix(
            value[dim], f"{interpreter.describe(node)} leaves a last piece of another size"
        )
    return _pieces(interpreter, node, value, dim, lengths)


def _chunk(
    interpreter: Interpreter, node: Node, value: Value, chunks: int, dim: int = 0
) -> tuple[Value, ...]:
    return _split(interpreter, node, value, -(-axis_size(value[dim]) // chunks), dim)


def _slice(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    total = axis_size(value[dim])
    start = 0 if start is None else max(0, start + total if start < 0 else start)
    end = total if end is None else min(total, end + total if end < 0 else end)
    if (start, end, step) == (0, total, 1):
        interpreter.literal(node, total, value[dim])
        return value
    if not is_free(value[dim]):
        return _replace(value, dim, constant(interpreter.shape(node)[dim]))
    cause = interpreter.describe(node)
    if step != 1 or end <= start:
        interpreter.solver.fix(value[dim], f"{cause} takes every {step}th channel")
        return _replace(value, dim, constant(interpreter.shape(node)[dim]))
    length = end - start
    half = 2 * length == total and start % length == 0
    lengths = [n for n in (start, length, total - end) if n]
    pieces = interpreter.solver.cut(value[dim], lengths, cause)
    if half:
        # Code that takes the first half says `[:, : channels // 2]` more often than it names a number.
        interpreter.solver.same_size(pieces[0], pieces[1], cause)
    at = int(start > 0)
    before = tuple(segment for piece in pieces[:at] for segment in piece)
    interpreter.literal(node, length, pieces[at])
    interpreter.literal(node, start, before)
    interpreter.literal(node, end, (*before, *pieces[at]))
    return _replace(value, dim, pieces[at])


def _narrow(interpreter: Interpreter, node: Node, value: Value, dim: int, start: int, length: int) -> Value:
    return _slice(interpreter, node, value, dim, start, start + length)


def _select(interpreter: Interpreter, node: Node, value: Value, dim: int, index: int) -> Value:
    dim %= len(value)
    interpreter.solver.fix(value[dim], f"{interpreter.describe(node)} picks one of the channels")
    return tuple(axis for i, axis in enumerate(value) if i != dim)


def _unbind(interpreter: Interpreter, node: Node, value: Value, dim: int = 0) -> tuple[Value, ...]:
    count = axis_size(value[dim])
    return (_select(interpreter, node, value, dim, 0),) * count


# Joins


def _cat(interpreter: Interpreter, node: Node, values: list[Value], dim: int = 0) -> Value:
    rank = max(len(value) for value in values)
    values = [value for value in values if len(value) == rank]  # torch lets an empty one-axis tensor through
    dim %= rank
    cause = interpreter.describe(node)
    for value in values[1:]:
        for place in range(rank):
            if place != dim:
                interpreter.solver.unify(values[0][place], value[place], cause)
    return _replace(values[0], dim, tuple(segment for value in values for segment in value[dim]))


def _stack(interpreter: Interpreter, node: Node, values: list[Value], dim: int = 0) -> Value:
    for value in values[1:]:
        for first, axis in zip(values[0], value, strict=True):
            interpreter.solver.unify(first, axis, interpreter.describe(node))
    place = dim % (len(values[0]) + 1)
    return (*values[0][:place], constant(len(values)), *values[0][place:])


def _pad(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    padding: list[int],
    mode: Any = "constant",
    *rest: Any,
    **options: Any,
) -> Value:
    axes = list(value)
    fills = (
        mode == "constant" and "reflection" not in str(node.target) and "replication" not in str(node.target)
    )
    for i in range(0, len(padding), 2):
        before, after = padding[i], padding[i + 1]
        place = len(axes) - 1 - i // 2
        if before < 0 or after < 0 or (not fills and (before or after)):
            interpreter.solver.fix(axes[place], f"{interpreter.describe(node)} crops or repeats the channels")
            axes[place] = constant(interpreter.shape(node)[place])
            continue
        reason = f"constant channels that {interpreter.describe(node)} puts in"
        ends = [constant(n, reason) if n else () for n in (before, after)]
        axes[place] = (*ends[0], *axes[place], *ends[1])
    return tuple(axes)


# Moves within an axis, and creation


def _shift(interpreter: Interpreter, node: Node, value: Value, amount: Any, dims: Any = None) -> Value:
    places = (
        [dim % len(value) for dim in (dims if isinstance(dims, list) else [dims])]
        if dims
        else range(len(value))
    )
    for place in places:
        interpreter.solver.fix(value[place], f"{interpreter.describe(node)} moves channels along their axis")
    return value


def _flip(interpreter: Interpreter, node: Node, value: Value, dims: list[int]) -> Value:
    return _shift(interpreter, node, value, None, dims)


def _pixel_shuffle(interpreter: Interpreter, node: Node, value: Value, factor: int) -> Value:
    """Channels in runs of factor x factor become pixels: each run is kept or cut as a whole."""
    channels = interpreter.solver.grouped(value[-3], factor * factor, interpreter.describe(node))
    shape = interpreter.shape(node)
    return (*value[:-3], channels, constant(shape[-2]), constant(shape[-1]))


def _pixel_unshuffle(interpreter: Interpreter, node: Node, value: Value, factor: int) -> Value:
    channels = tuple(Segment(atom, inner * factor * factor) for atom, inner in expand(value[-3]))
    shape = interpreter.shape(node)
    return (*value[:-3], channels, constant(shape[-2]), constant(shape[-1]))


def _channel_shuffle(interpreter: Interpreter, node: Node, value: Value, groups: int) -> Value:
    size = axis_size(value[1])
    rows, row = interpreter.solver.unmerge(value[1], [groups, size // groups], interpreter.describe(node))
    return _replace(value, 1, interpreter.solver.merge([row, rows], interpreter.describe(node)))


def _create(interpreter: Interpreter, node: Node, *args: Any, **options: Any) -> Value:
    """A new tensor: its axes take whatever length the code computes, which the probe after the analysis checks."""
    result = tuple(unknown(size) if size > 1 else constant(1) for size in interpreter.shape(node))
    if not any(word in str(node.target) for word in ("zeros", "ones", "full")):
        for axis in result:
            interpreter.solver.mark_inexact(
                axis, f"{interpreter.describe(node)} makes channels that differ by their place"
            )
    interpreter.literals(node, interpreter.shape(node), result)
    return result


def _embedding(interpreter: Interpreter, node: Node, weight: Value, indices: Value, *rest: Any) -> Value:
    interpreter.solver.fix(weight[0], "number of embeddings")
    interpreter.mirror(node, embedding_dim=weight[1])
    return (*indices, weight[1])


RULES: dict[str, Rule] = {
    **{
        f"aten::{name}": _reshape
        for name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_copy")
    },
    "aten::reshape_as": _reshape_as,
    "aten::view_as": _reshape_as,
    "aten::permute": _permute,
    **{f"aten::{name}": _transpose for name in ("transpose", "t", "swapaxes")},
    "aten::movedim": _movedim,
    **{f"aten::{name}": _squeeze for name in ("squeeze", "squeeze_")},
    **{f"aten::{name}": _unsqueeze for name in ("unsqueeze", "unsqueeze_")},
    **{f"aten::{name}": _expand for name in ("expand", "broadcast_to")},
    "aten::expand_as": _expand_as,
    **{f"aten::{name}": _repeat for name in ("repeat", "tile")},
    "aten::repeat_interleave": _repeat_interleave,
    **{f"aten::{name}": _split for name in ("split", "split_with_sizes")},
    "aten::chunk": _chunk,
    "aten::slice": _slice,
    "aten::narrow": _narrow,
    "aten::select": _select,
    "aten::unbind": _unbind,
    **{f"aten::{name}": _cat for name in ("cat", "concat", "concatenate")},
    "aten::stack": _stack,
    **{f"aten::{name}": _pad for name in ("pad", "constant_pad_nd", "reflection_pad2d", "replication_pad2d")},
    "aten::roll": _shift,
    "aten::flip": _flip,
    "aten::pixel_shuffle": _pixel_shuffle,
    "aten::pixel_unshuffle": _pixel_unshuffle,
    "aten::channel_shuffle": _channel_shuffle,
    **{
        f"aten::{name}": _create
        for name in (
            "zeros",
            "ones",
            "full",
            "empty",
            "rand",
            "randn",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
            "arange",
        )
    },
    "aten::embedding": _embedding,
}

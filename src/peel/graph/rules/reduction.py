"""Reductions, softmax and pooling: the axes they work over end or become constants; the others pass."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..axes import Axis, axis_size, constant, is_free
from ..interpreter import Interpreter, Rule, Value
from .elementwise import stretch


def _places(dims: Any, rank: int) -> list[int]:
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])]


def _reduce(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    dims: Any = None,
    keepdim: bool = False,
    **options: Any,
) -> Value:
    if isinstance(dims, bool):
        dims, keepdim = None, dims
    places = _places(dims, len(value))
    for place in places:
        interpreter.solver.mark_inexact(
            value[place], f"{interpreter.describe(node)} reduces over the channels"
        )
    if keepdim:
        return tuple(constant(1) if i in places else axis for i, axis in enumerate(value))
    return tuple(axis for i, axis in enumerate(value) if i not in places)


def _reduce_pair(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    dims: Any = None,
    keepdim: bool = False,
    **options: Any,
) -> tuple[Value, Value]:
    result = _reduce(interpreter, node, value, dims, options.get("keepdim", keepdim))
    return result, result


def _max(interpreter: Interpreter, node: Node, value: Value, *rest: Any) -> Any:
    """Over one axis, with indices; over everything; or of two tensors."""
    if interpreter.has_many_results(node):
        return _reduce_pair(interpreter, node, value, *rest)
    if rest:
        return stretch(interpreter, node, [value, *rest])
    return _reduce(interpreter, node, value)


def _vector_norm(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    order: Any = 2,
    dims: Any = None,
    keepdim: bool = False,
    **options: Any,
) -> Value:
    return _reduce(interpreter, node, value, dims, keepdim)


def _softmax(
    interpreter: Interpreter, node: Node, value: Value, dim: int, *rest: Any, **options: Any
) -> Value:
    interpreter.solver.mark_inexact(value[dim], f"{interpreter.describe(node)} runs over the channels")
    return value


def _resample(rank: int) -> Any:
    """Pooling and interpolation over the last `rank` axes."""

    def rule(interpreter: Interpreter, node: Node, value: Value, *rest: Any, **options: Any) -> Any:
        shape = interpreter.shape(node)
        spatial: list[Axis] = []
        for place in range(-rank, 0):
            if is_free(value[place]) and axis_size(value[place]) == 1:
                interpreter.solver.fix(value[place], "a single channel")
            elif is_free(value[place]):
                interpreter.solver.fix(value[place], f"{interpreter.describe(node)} pools over the channels")
            spatial.append(constant(shape[place]))
        result = (*value[:-rank], *spatial)
        return (result, result) if interpreter.has_many_results(node) else result

    return rule


_POOLS = ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool")

RULES: dict[str, Rule] = {
    **{
        f"aten::{name}": _reduce
        for name in ("mean", "sum", "amax", "amin", "prod", "logsumexp", "all", "any", "std", "var", "argmax")
    },
    **{f"aten::{name}": _reduce_pair for name in ("var_mean", "std_mean")},
    "aten::max": _max,
    "aten::linalg_vector_norm": _vector_norm,
    "aten::norm": _vector_norm,
    "aten::softmax": _softmax,
    "aten::log_softmax": _softmax,
    **{f"aten::{pool}{n}d": _resample(n) for pool in _POOLS for n in (1, 2, 3)},
    **{f"aten::max_pool{n}d_with_indices": _resample(n) for n in (1, 2, 3)},
    **{
        f"aten::upsample_{kind}": _resample(rank)
        for kind, rank in {
            "nearest1d": 1,
            "nearest2d": 2,
            "nearest3d": 3,
            "linear1d": 1,
            "bilinear2d": 2,
            "bicubic2d": 2,
            "trilinear3d": 3,
        }.items()
    },
    "aten::_upsample_nearest_exact2d": _resample(2),
    "aten::_upsample_bilinear2d_aa": _resample(2),
    "aten::_upsample_bicubic2d_aa": _resample(2),
    "aten::grid_sampler_2d": _resample(2),
    "aten::grid_sampler": _resample(2),
}

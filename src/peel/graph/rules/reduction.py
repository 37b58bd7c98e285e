"""Reductions, softmax and pooling: the axes they work over end or become constants, the others pass."""

from typing import Any

from ..axes import Value, axis_size, constant, is_free
from ..call import Call, Rule, rule
from .elementwise import broadcast


@rule("mean sum amax amin prod logsumexp all any std var argmax")
def _reduce(call: Call, value: Value, dims: Any = None, keepdim: bool = False, **options: Any) -> Value:
    if isinstance(dims, bool):
        dims, keepdim = None, dims
    if dims is None or dims == []:
        dims = range(len(value))
    places = {dim % len(value) for dim in ([dims] if isinstance(dims, int) else dims)}
    for place in places:
        call.mark_inexact(value[place], f"{call} reduces over the channels")
    if keepdim:
        return tuple(constant(1) if i in places else axis for i, axis in enumerate(value))
    return tuple(axis for i, axis in enumerate(value) if i not in places)


@rule("var_mean std_mean")
def _reduce_pair(
    call: Call, value: Value, dims: Any = None, keepdim: bool = False, **options: Any
) -> tuple[Value, Value]:
    result = _reduce(call, value, dims, keepdim)
    return result, result


@rule("max")
def _max(call: Call, value: Value, *rest: Any) -> Any:
    """Over one axis, with indices; over everything; or of two tensors."""
    if call.has_many_results:
        return _reduce_pair(call, value, *rest)
    return broadcast(call, value, *rest) if rest else _reduce(call, value)


@rule("linalg_vector_norm norm")
def _vector_norm(
    call: Call, value: Value, order: Any = 2, dims: Any = None, keepdim: bool = False, **options: Any
) -> Value:
    return _reduce(call, value, dims, keepdim)


@rule("softmax log_softmax")
def _softmax(call: Call, value: Value, dim: int, *rest: Any, **options: Any) -> Value:
    call.mark_inexact(value[dim], f"{call} runs over the channels")
    return value


def _resample(rank: int) -> Rule:
    """Pooling and interpolation over the last `rank` axes."""

    def resample(call: Call, value: Value, *rest: Any, **options: Any) -> Any:
        for axis in value[-rank:]:
            if is_free(axis):
                call.fix(
                    axis, f"{call} pools over the channels" if axis_size(axis) > 1 else "a single channel"
                )
        result = (*value[:-rank], *(constant(size) for size in call.shape[-rank:]))
        return (result, result) if call.has_many_results else result

    return resample


for _rank, _names in {
    1: "upsample_nearest1d upsample_linear1d",
    2: "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler",
    3: "upsample_nearest3d upsample_trilinear3d",
}.items():
    _pools = "avg_pool{0}d max_pool{0}d adaptive_avg_pool{0}d adaptive_max_pool{0}d max_pool{0}d_with_indices"
    rule(f"{_names} {_pools.format(_rank)}")(_resample(_rank))

"""Reductions, softmax and pooling: the axes they work over end or become constants, the others pass."""

from typing import Any

from ..axes import Value, axis_size, constant
from ..call import Call, Rule, places_of, rule
from .elementwise import broadcast


@rule("mean sum amax amin prod logsumexp all any std var argmax var_mean std_mean")
def _reduce(call: Call, value: Value, dims: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if isinstance(dims, bool):
        dims, keepdim = None, dims
    places = places_of(dims, value)
    for place in places:
        call.mark_inexact(value[place], f"{call} reduces over the channels")
    if keepdim:
        return call.result(tuple(constant(1) if i in places else axis for i, axis in enumerate(value)))
    return call.result(tuple(axis for i, axis in enumerate(value) if i not in places))


@rule("max")
def _max(call: Call, value: Value, *rest: Any) -> Any:
    """Over one axis, with indices; over everything; or of two tensors."""
    if rest and isinstance(rest[0], tuple):
        return broadcast(call, value, *rest)
    return _reduce(call, value, *rest)


@rule("linalg_vector_norm norm")
def _vector_norm(
    call: Call, value: Value, order: Any = 2, dims: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    return _reduce(call, value, dims, keepdim)


@rule("softmax log_softmax")
def _softmax(call: Call, value: Value, dim: int, *rest: Any, **options: Any) -> Value:
    call.mark_inexact(value[dim], f"{call} runs over the channels")
    return value


def _resample(rank: int) -> Rule:
    """Pooling and interpolation over the last `rank` axes."""

    def resample(call: Call, value: Value, *rest: Any, **options: Any) -> Any:
        for axis in value[-rank:]:
            call.fix(axis, f"{call} pools over the channels" if axis_size(axis) > 1 else "a single channel")
        return call.result((*value[:-rank], *(constant(size) for size in call.shape[-rank:])))

    return resample


_POOLS = "avg_pool{0}d max_pool{0}d adaptive_avg_pool{0}d adaptive_max_pool{0}d max_pool{0}d_with_indices"

rule(_POOLS.format(1) + " upsample_nearest1d upsample_linear1d")(_resample(1))
rule(_POOLS.format(2) + " upsample_nearest2d upsample_bilinear2d upsample_bicubic2d")(_resample(2))
rule("_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa")(_resample(2))
rule("grid_sampler_2d grid_sampler")(_resample(2))
rule(_POOLS.format(3) + " upsample_nearest3d upsample_trilinear3d")(_resample(3))

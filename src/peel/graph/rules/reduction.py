"""Reductions, softmax and pooling: the axes they work over end or become constants, the others pass."""

from typing import Any

from ..axes import Axis, Value, axis_size, constant, expand, is_free
from ..call import Call, Rule, places_of, rule
from .elementwise import broadcast

_REDUCTIONS = """
    mean sum amax amin prod logsumexp all any std var var_mean std_mean linalg_vector_norm norm
"""


@rule(_REDUCTIONS)
def _reduce(call: Call, value: Value, *rest: Any, **options: Any) -> Any:
    """Forms of one operator differ in the order of their arguments (`unbiased` of `var`), not in names."""
    keepdim = call.named("keepdim", False)
    places = places_of(call.named("dim"), value)
    for place in places:
        call.mark_inexact(value[place], f"{call} reduces over the channels")
    if keepdim:
        return call.result(tuple(constant(1) if i in places else axis for i, axis in enumerate(value)))
    return call.result(tuple(axis for i, axis in enumerate(value) if i not in places))


@rule("argmax argmin")
def _index_of(call: Call, value: Value, *rest: Any, **options: Any) -> Any:
    """The result is the number of a channel, and other code may look something up with it."""
    for place in places_of(call.named("dim"), value):
        call.fix(value[place], f"{call} returns numbers of channels")
    return _reduce(call, value, *rest, **options)


@rule("max min")
def _max(call: Call, value: Value, *rest: Any, **options: Any) -> Any:
    """Over one axis, with indices; over everything; or of two tensors."""
    if rest and isinstance(rest[0], tuple):
        return broadcast(call, value, *rest)
    uses_indices = any(user.args[1:] == (1,) for user in call.node.users)
    return (_index_of if uses_indices else _reduce)(call, value, *rest)


@rule("softmax log_softmax")
def _softmax(call: Call, value: Value, dim: int, *rest: Any, **options: Any) -> Value:
    call.mark_inexact(value[dim], f"{call} runs over the channels")
    return value


def _resample(rank: int) -> Rule:
    """Pooling and interpolation over the last `rank` axes."""

    def resample(call: Call, value: Value, *rest: Any, **options: Any) -> Any:
        return call.result((*value[:-rank], *(_window(call, value[-i], -i) for i in range(rank, 0, -1))))

    return resample


def _window(call: Call, axis: Axis, place: int) -> Axis:
    """The axis over which a window slides. Channels pass if as many come out, padding around them aside."""
    stride, kernel = call.named("stride"), call.named("kernel_size")
    # torch's default for a stride is the kernel; 0 stands for an adaptive pool.
    strides = stride or kernel or [0]
    if is_free(axis) and strides[max(place, -len(strides))] == 1:
        # Zero padding around the channels (ECA) takes part in the window, and is left out of the result.
        segments = expand(axis)
        free = [i for i, segment in enumerate(segments) if segment.atom.symbol.fixed is None]
        channels = segments[free[0] : free[-1] + 1]
        if axis_size(channels) == call.shape[place]:
            call.mark_inexact(channels, f"{call} mixes neighboring channels")
            return channels
    call.fix(axis, f"{call} pools over the channels" if axis_size(axis) > 1 else "a single channel")
    return constant(call.shape[place])


_POOLS = "avg_pool{0}d max_pool{0}d adaptive_avg_pool{0}d adaptive_max_pool{0}d max_pool{0}d_with_indices"

rule(_POOLS.format(1) + " upsample_nearest1d upsample_linear1d")(_resample(1))
rule(_POOLS.format(2) + " upsample_nearest2d upsample_bilinear2d upsample_bicubic2d")(_resample(2))
rule("_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa")(_resample(2))
rule("grid_sampler_2d grid_sampler")(_resample(2))
rule(_POOLS.format(3) + " upsample_nearest3d upsample_trilinear3d")(_resample(3))


@rule("torchvision::roi_align")
def _roi_align(call: Call, value: Value, regions: Value, *rest: Any) -> Value:
    """Regions cut out of feature maps. The channels pass."""
    return (regions[0], value[1], *(constant(size) for size in call.shape[2:]))

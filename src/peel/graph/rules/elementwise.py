"""Operators that work on each element: axes at the same place are unified, axes of length 1 are broadcast."""

from typing import Any

from ..axes import Axis, Value, axis_size, constant, replace_axis
from ..call import Call, rule

_UNARY = """
    abs alias alpha_dropout alpha_dropout_ atan bernoulli bernoulli_ bitwise_not ceil celu celu_ clamp
    clamp_ clamp_max clamp_min clone contiguous cos cosh detach detach_ dropout dropout_ elu elu_ empty_like
    erf erfinv exp exp2 exp_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_
    fill_ floor floor_ full_like gelu hardshrink hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh
    hardtanh_ isnan leaky_relu leaky_relu_ lift_fresh_copy log log1p log2 log_sigmoid logical_not logit mish
    mish_ nan_to_num neg neg_ ones_like rand_like randn_like reciprocal relu relu6 relu6_ relu_ round round_
    rrelu rsqrt rsqrt_ selu selu_ sigmoid sigmoid_ sign silu silu_ sin sinh softplus softshrink sqrt sqrt_
    square tan tanh tanh_ threshold threshold_ to _to_copy type_as zero_ zeros_like
"""

_BROADCASTING = """
    add add_ addcdiv addcdiv_ addcmul addcmul_ atan2 bitwise_and bitwise_or bitwise_xor copy copy_ div
    div_ eq floor_divide floor_divide_ fmod ge gt le lerp lerp_ logaddexp logical_and logical_or
    logical_xor lt masked_fill masked_fill_ maximum minimum mul mul_ ne pow pow_ remainder remainder_ rsub
    sub sub_
"""


@rule(_BROADCASTING)
def broadcast(call: Call, *args: Any, **options: Any) -> Value:
    """Unify axes counted from the last one. An axis of length 1 takes the length of the others."""
    values: list[Value] = [arg for arg in (*args, *options.values()) if isinstance(arg, tuple)]
    result: list[Axis] = []
    for place in range(-max(len(value) for value in values), 0):
        axes = [value[place] for value in values if len(value) >= -place]
        # Axes of length 1 are broadcast. They are not tied: a bias of one number fits any width.
        wide = [axis for axis in axes if axis_size(axis) != 1]
        for axis in wide[1:]:
            call.unify(wide[0], axis)
        if wide:
            result.append(wide[0])
        else:
            result.append(axes[0] if len(axes) == 1 else constant(1))
    return tuple(result)


@rule("where nonzero nonzero_numpy")
def _where(call: Call, *args: Any) -> Any:
    """A choice between two tensors, or the places where one tensor is not zero."""
    return broadcast(call, *args) if len(args) > 1 else call.refuse(f"{call} finds places by their values")


@rule(_UNARY)
def _same(call: Call, value: Any, *rest: Any, **options: Any) -> Any:
    return value


@rule("prelu")
def _prelu(call: Call, value: Value, weight: Value) -> Value:
    if axis_size(weight[0]) > 1:
        call.unify(value[1], weight[0])
        call.has_attributes(num_parameters=weight[0])
    return value


@rule("glu")
def _glu(call: Call, value: Value, dim: int = -1) -> Value:
    first, second = call.cut_evenly(value[dim], 2)
    call.unify(first, second)
    return replace_axis(value, dim, first)

"""Operators that work on each element: axes of the same place are unified, axes of length 1 are stretched."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..axes import Axis, axis_size, constant
from ..interpreter import Interpreter, Rule, Value

_UNARY = [
    "abs",
    "alias",
    "bernoulli",
    "bernoulli_",
    "ceil",
    "celu",
    "celu_",
    "clamp",
    "clamp_",
    "clamp_max",
    "clamp_min",
    "clone",
    "contiguous",
    "cos",
    "detach",
    "detach_",
    "dropout",
    "dropout_",
    "elu",
    "elu_",
    "erf",
    "exp",
    "exp_",
    "feature_dropout",
    "floor",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardsigmoid_",
    "hardswish",
    "hardswish_",
    "hardtanh",
    "hardtanh_",
    "isnan",
    "leaky_relu",
    "leaky_relu_",
    "lift_fresh_copy",
    "log",
    "log1p",
    "log_sigmoid",
    "logical_not",
    "mish",
    "mish_",
    "nan_to_num",
    "neg",
    "ones_like",
    "rand_like",
    "randn_like",
    "reciprocal",
    "relu",
    "relu6",
    "relu6_",
    "relu_",
    "round",
    "rrelu",
    "rsqrt",
    "selu",
    "selu_",
    "sigmoid",
    "sigmoid_",
    "sign",
    "silu",
    "silu_",
    "sin",
    "softplus",
    "softshrink",
    "sqrt",
    "square",
    "tanh",
    "tanh_",
    "threshold",
    "threshold_",
    "to",
    "type_as",
    "zero_",
    "zeros_like",
    "_to_copy",
    "empty_like",
    "full_like",
    "fill_",
    "alpha_dropout",
    "feature_alpha_dropout",
    "logit",
    "bitwise_not",
    "floor_",
    "round_",
    "neg_",
    "exp2",
    "erfinv",
    "hardswish_",
    "rsqrt_",
    "sqrt_",
    "tan",
    "atan",
    "sinh",
    "cosh",
]

_NARY = [
    "add",
    "add_",
    "addcdiv",
    "addcdiv_",
    "addcmul",
    "addcmul_",
    "atan2",
    "bitwise_and",
    "bitwise_or",
    "copy_",
    "div",
    "div_",
    "eq",
    "floor_divide",
    "fmod",
    "ge",
    "gt",
    "le",
    "lerp",
    "lerp_",
    "logical_and",
    "logical_or",
    "lt",
    "masked_fill",
    "masked_fill_",
    "maximum",
    "minimum",
    "mul",
    "mul_",
    "ne",
    "pow",
    "pow_",
    "remainder",
    "rsub",
    "sub",
    "sub_",
    "where",
    "copy",
    "bitwise_xor",
    "logical_xor",
    "floor_divide_",
    "remainder_",
    "logaddexp",
]


def stretch(interpreter: Interpreter, node: Node, values: list[Value]) -> Value:
    """Unify axes counted from the last one; an axis of length 1 takes the length of the others."""
    rank = max(len(value) for value in values)
    cause = interpreter.describe(node)
    result: list[Axis] = []
    for place in range(-rank, 0):
        axes = [value[place] for value in values if len(value) >= -place]
        wide = [axis for axis in axes if axis_size(axis) != 1]
        if not wide:
            result.append(axes[0] if len(axes) == 1 else constant(1))
            continue
        for axis in wide[1:]:
            interpreter.solver.unify(wide[0], axis, cause)
        result.append(wide[0])
    return tuple(result)


def _same(interpreter: Interpreter, node: Node, value: Any, *rest: Any, **options: Any) -> Any:
    return value


def _elementwise(interpreter: Interpreter, node: Node, *args: Any, **options: Any) -> Value:
    values = [arg for arg in (*args, *options.values()) if isinstance(arg, tuple) and _is_value(arg)]
    return stretch(interpreter, node, values)


def _is_value(arg: tuple[Any, ...]) -> bool:
    return all(isinstance(axis, tuple) for axis in arg)


def _prelu(interpreter: Interpreter, node: Node, value: Value, weight: Value) -> Value:
    if axis_size(weight[0]) > 1:
        interpreter.solver.unify(value[1], weight[0], interpreter.describe(node))
        interpreter.mirror(node, num_parameters=weight[0])
    return value


def _glu(interpreter: Interpreter, node: Node, value: Value, dim: int = -1) -> Value:
    axis = value[dim]
    half = axis_size(axis) // 2
    first, second = interpreter.solver.cut(axis, [half, half], interpreter.describe(node))
    interpreter.solver.unify(first, second, interpreter.describe(node))
    result = list(value)
    result[dim] = first
    return tuple(result)


RULES: dict[str, Rule] = {
    **{f"aten::{name}": _same for name in _UNARY},
    **{f"aten::{name}": _elementwise for name in _NARY},
    "aten::prelu": _prelu,
    "aten::glu": _glu,
}

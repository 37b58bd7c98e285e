"""Operators that sum over an axis against weights: convolutions, linear layers, matrix products. They are also where the cost is.

The cost of each is a product of axes (`Interpreter.charge`): one multiply-add for each element of it.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..axes import Axis, Segment, axis_size, constant, expand, is_free
from ..interpreter import Interpreter, Rule, Value


def _spatial(interpreter: Interpreter, node: Node, value: Value, rank: int) -> tuple[Axis, ...]:
    """The spatial axes of a result. Channels that were moved there (ECA) survive only where the length does not change."""
    shape = interpreter.shape(node)
    result: list[Axis] = []
    for place in range(-rank, 0):
        axis = value[place]
        if is_free(axis):
            cause = interpreter.describe(node)
            if axis_size(axis) == shape[place]:
                interpreter.solver.mark_inexact(axis, f"{cause} mixes neighbouring channels")
                result.append(axis)
                continue
            interpreter.solver.fix(axis, f"{cause} slides over the channels")
        result.append(constant(shape[place]))
    return tuple(result)


def _rows(interpreter: Interpreter, axis: Axis, groups: int, cause: str) -> list[Axis]:
    return interpreter.solver.cut(axis, [axis_size(axis) // groups] * groups, cause)


def _conv(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = None,
    padding: Any = None,
    dilation: Any = None,
    groups: int = 1,
) -> Value:
    solver, cause = interpreter.solver, interpreter.describe(node)
    rank = len(weight) - 2
    channels, outputs = value[-rank - 1], weight[0]
    for kernel_axis in weight[2:]:
        solver.fix(kernel_axis, "kernel size")
    if groups == 1:
        solver.unify(channels, weight[1], cause)
        interpreter.contract(node, weight, 1)
    elif groups == axis_size(channels):
        times = axis_size(outputs) // groups
        solver.fix(weight[1], "one input channel per filter")
        solver.unify(
            outputs,
            tuple(Segment(atom, inner * times) for atom, inner in expand(channels)),
            f"depthwise {cause}",
        )
    else:
        for row in _rows(interpreter, channels, groups, cause):
            solver.unify(row, weight[1], f"grouped {cause}")
        interpreter.contract(node, weight, 1)
        rows = _rows(interpreter, outputs, groups, cause)
        for row in rows[1:]:
            solver.same_size(rows[0], row, f"grouped {cause}")
    if bias is not None:
        solver.unify(bias[0], outputs, cause)
    result = (*value[: -rank - 1], outputs, *_spatial(interpreter, node, value, rank))
    interpreter.produce(node, outputs)
    interpreter.mirror(node, in_channels=channels, out_channels=outputs)
    if 1 < groups == axis_size(channels):
        interpreter.mirror(node, groups=channels)
    interpreter.charge(node, (*weight, *result[: -rank - 1], *result[-rank:]))
    return result


def _conv_transpose(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = None,
    padding: Any = None,
    output_padding: Any = None,
    groups: int = 1,
    dilation: Any = None,
) -> Value:
    solver, cause = interpreter.solver, interpreter.describe(node)
    rank = len(weight) - 2
    for kernel_axis in weight[2:]:
        solver.fix(kernel_axis, "kernel size")
    solver.unify(value[-rank - 1], weight[0], cause)
    if groups < axis_size(weight[0]):
        interpreter.contract(node, weight, 0)
    if groups > 1 and groups == axis_size(weight[0]):
        outputs = tuple(Segment(atom, inner * axis_size(weight[1])) for atom, inner in expand(weight[0]))
        solver.fix(weight[1], "outputs per input channel")
    else:
        rows = _rows(interpreter, weight[0], groups, cause)
        for row in rows[1:]:
            solver.same_size(rows[0], row, f"grouped {cause}")
        outputs = expand(weight[1]) * groups
    if bias is not None:
        solver.unify(bias[0], outputs, cause)
    interpreter.produce(node, outputs)
    interpreter.mirror(node, in_channels=weight[0], out_channels=outputs)
    if 1 < groups == axis_size(weight[0]):
        interpreter.mirror(node, groups=weight[0])
    interpreter.charge(node, (*weight, *value[: -rank - 1], *value[-rank:]))
    return (*value[: -rank - 1], outputs, *_spatial(interpreter, node, value, rank))


def _linear(
    interpreter: Interpreter, node: Node, value: Value, weight: Value, bias: Value | None = None
) -> Value:
    cause = interpreter.describe(node)
    interpreter.solver.unify(value[-1], weight[1], cause)
    interpreter.contract(node, weight, 1)
    if bias is not None:
        interpreter.solver.unify(bias[0], weight[0], cause)
    interpreter.produce(node, weight[0])
    interpreter.mirror(node, in_features=value[-1], out_features=weight[0])
    interpreter.charge(node, (*weight, *value[:-1]))
    return (*value[:-1], weight[0])


def _matmul(interpreter: Interpreter, node: Node, first: Value, second: Value) -> Value:
    """A product of two computed tensors, as in attention: what is summed over is fixed, the outer axes pass."""
    cause = interpreter.describe(node)
    inner = second[-2] if len(second) > 1 else second[0]
    interpreter.solver.unify(first[-1], inner, cause)
    interpreter.solver.fix(first[-1], f"{cause} sums over it between two computed tensors")
    outer_first, outer_second = first[:-2], second[:-2]
    batch = list(outer_first if len(outer_first) >= len(outer_second) else outer_second)
    for place in range(-min(len(outer_first), len(outer_second)), 0):
        a, b = outer_first[place], outer_second[place]
        if axis_size(a) > 1 and axis_size(b) > 1:
            interpreter.solver.unify(a, b, cause)
        batch[place] = a if axis_size(a) > 1 else b
    rows = first[-2:-1] if len(first) > 1 else ()
    columns = second[-1:] if len(second) > 1 else ()
    if rows and columns:  # torch does not count products with vectors, and so they are not counted here
        interpreter.charge(node, (*batch, *rows, first[-1], *columns))
    return (*batch, *rows, *columns)


def _addmm(
    interpreter: Interpreter, node: Node, bias: Value, first: Value, second: Value, **options: Any
) -> Value:
    result = _matmul(interpreter, node, first, second)
    for place in range(-len(bias), 0):
        if axis_size(bias[place]) > 1:
            interpreter.solver.unify(bias[place], result[place], interpreter.describe(node))
    return result


def _einsum(
    interpreter: Interpreter, node: Node, equation: str, values: list[Value], **options: Any
) -> Value:
    """Axes of one letter are one axis; a letter that is summed over is fixed."""
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    cause = interpreter.describe(node)
    if (
        "." in equation
        or len(terms) > 2
        or any(len(term) != len(value) for term, value in zip(terms, values, strict=True))
    ):
        raise NotImplementedError(equation)
    axis_of: dict[str, Axis] = {}
    for term, value in zip(terms, values, strict=True):
        for letter, axis in zip(term, value, strict=True):
            if letter in axis_of and axis_size(axis) != axis_size(axis_of[letter]):
                raise NotImplementedError(equation)
            if letter in axis_of:
                interpreter.solver.unify(axis_of[letter], axis, cause)
            axis_of.setdefault(letter, axis)
    for letter, axis in axis_of.items():
        if letter not in right:
            interpreter.solver.fix(axis, f"{cause} sums over it between two computed tensors")
    if len(terms) == 2:
        interpreter.charge(node, tuple(axis_of.values()))
    return tuple(axis_of[letter] for letter in right)


RULES: dict[str, Rule] = {
    **{f"aten::conv{n}d": _conv for n in (1, 2, 3)},
    **{f"aten::conv_transpose{n}d": _conv_transpose for n in (1, 2, 3)},
    "aten::linear": _linear,
    "aten::matmul": _matmul,
    "aten::mm": _matmul,
    "aten::bmm": _matmul,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::einsum": _einsum,
}

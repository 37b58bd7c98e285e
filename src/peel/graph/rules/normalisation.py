"""Norm layers. Those that take statistics over channels keep their freedom, but slicing them is not the same as masking them."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..axes import Axis, axis_size
from ..interpreter import Interpreter, Rule, Value


def _per_channel(interpreter: Interpreter, node: Node, channels: Axis, *vectors: Value | None) -> None:
    for vector in vectors:
        if vector is not None:
            interpreter.solver.unify(channels, vector[0], interpreter.describe(node))


def _batch_norm(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool = False,
    *rest: Any,
) -> Value:
    _per_channel(interpreter, node, value[1], weight, bias, mean, variance)
    interpreter.mirror(node, num_features=value[1])
    interpreter.scale(node, 1)
    if training:
        # Weight standardisation: batch norm over the inputs of each filter.
        for axis in (value[0], *value[2:]):
            interpreter.solver.mark_inexact(axis, f"{interpreter.describe(node)} takes statistics over it")
    return value


def _instance_norm(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    *rest: Any,
) -> Value:
    _per_channel(interpreter, node, value[1], weight, bias, mean, variance)
    interpreter.mirror(node, num_features=value[1])
    interpreter.scale(node, 1)
    for axis in value[2:]:
        interpreter.solver.mark_inexact(axis, f"{interpreter.describe(node)} takes statistics over it")
    return value


def _layer_norm(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    shape: list[int],
    weight: Value | None = None,
    bias: Value | None = None,
    *rest: Any,
) -> Value:
    cause = interpreter.describe(node)
    for vector in (weight, bias):
        if vector is not None:
            for axis, own in zip(value[-len(shape) :], vector, strict=True):
                interpreter.solver.unify(axis, own, cause)
    interpreter.scale(node, 2)
    interpreter.literals(node, shape, value[-len(shape) :])
    for axis in value[-len(shape) :]:
        interpreter.solver.mark_inexact(axis, f"{cause} takes statistics over the channels")
    return value


def _group_norm(
    interpreter: Interpreter,
    node: Node,
    value: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    *rest: Any,
) -> Value:
    cause = interpreter.describe(node)
    _per_channel(interpreter, node, value[1], weight, bias)
    interpreter.mirror(node, num_channels=value[1])
    interpreter.scale(node, 2)
    if groups > 1:
        rows = interpreter.solver.cut(value[1], [axis_size(value[1]) // groups] * groups, cause)
        for row in rows[1:]:
            interpreter.solver.same_size(rows[0], row, f"groups of {cause}")
    for axis in value[2:]:
        interpreter.solver.mark_inexact(axis, f"{cause} takes statistics over it")
    if groups < axis_size(value[1]):
        interpreter.solver.mark_inexact(value[1], f"{cause} takes statistics over the channels")
    return value


def _weight_norm(
    interpreter: Interpreter, node: Node, direction: Value, magnitude: Value, dim: int = 0
) -> Value:
    """A weight as direction times magnitude: the norm runs over every axis but one."""
    for place, (axis, own) in enumerate(zip(direction, magnitude, strict=True)):
        if axis_size(own) > 1:
            interpreter.solver.unify(axis, own, interpreter.describe(node))
        if place != dim % len(direction):
            interpreter.solver.mark_inexact(axis, f"{interpreter.describe(node)} takes a norm over it")
    return direction


RULES: dict[str, Rule] = {
    "aten::_weight_norm": _weight_norm,
    "aten::batch_norm": _batch_norm,
    "aten::instance_norm": _instance_norm,
    "aten::layer_norm": _layer_norm,
    "aten::rms_norm": _layer_norm,
    "aten::group_norm": _group_norm,
}

"""Attention and look-ups by computed indices: what they work over is fixed, the rest passes."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..axes import constant
from ..interpreter import Interpreter, Rule, Value


def _attention(
    interpreter: Interpreter, node: Node, query: Value, key: Value, value: Value, *rest: Any, **options: Any
) -> Value:
    reason = f"{interpreter.describe(node)}: channels of attention heads"
    for tensor in (query, key, value):
        for axis in tensor:
            interpreter.solver.fix(axis, reason)
    shape = interpreter.shape(node)
    tokens = key[-2]
    interpreter.charge(node, (*query, tokens))
    interpreter.charge(node, (*query[:-1], tokens, value[-1]))
    return tuple(constant(size, reason) for size in shape)


def _index(
    interpreter: Interpreter, node: Node, value: Value, indices: list[Value | None], *rest: Any
) -> Value:
    """Leading axes that are not indexed pass; once a tensor indexes an axis, that one and those it moves are fixed."""
    shape = interpreter.shape(node)
    indexed = [place for place, index in enumerate(indices) if index is not None]
    reason = f"{interpreter.describe(node)} looks channels up by computed indices"
    for place in indexed:
        interpreter.solver.fix(value[place], reason)
    contiguous = indexed == list(range(indexed[0], indexed[-1] + 1))
    if not contiguous:
        for axis in value:
            interpreter.solver.fix(axis, reason)
        return tuple(constant(size, reason) for size in shape)
    tail = value[indexed[-1] + 1 :]
    middle = [constant(size, reason) for size in shape[indexed[0] : len(shape) - len(tail)]]
    return (*value[: indexed[0]], *middle, *tail)


RULES: dict[str, Rule] = {
    "aten::scaled_dot_product_attention": _attention,
    "aten::index": _index,
}

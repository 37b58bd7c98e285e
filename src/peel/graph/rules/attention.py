"""Attention and indexing by tensors: the axes they work over are fixed, the others pass."""

from __future__ import annotations

from typing import Any

from ..axes import Value, constant
from ..call import Call, Rule


def _attention(call: Call, query: Value, key: Value, value: Value, *rest: Any, **options: Any) -> Value:
    call.costs((*query, key[-2]))
    call.costs((*query[:-1], key[-2], value[-1]))
    result: Value = call.refuse(f"{call}: channels of attention heads")
    return result


def _index(call: Call, value: Value, indices: list[Value | None], *rest: Any) -> Value:
    """Axes before the first and after the last indexed one pass, unless the indexed axes are apart."""
    indexed = [place for place, index in enumerate(indices) if index is not None]
    reason = f"{call} looks channels up by computed indices"
    first, last = indexed[0], indexed[-1]
    if indexed != list(range(first, last + 1)):
        first, last = 0, len(value) - 1
    for axis in value[first : last + 1]:
        call.fix(axis, reason)
    tail = value[last + 1 :]
    middle = [constant(size, reason) for size in call.shape[first : len(call.shape) - len(tail)]]
    return (*value[:first], *middle, *tail)


RULES: dict[str, Rule] = {
    "aten::scaled_dot_product_attention": _attention,
    "aten::index": _index,
}

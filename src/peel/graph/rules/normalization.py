"""Norm layers. Statistics over channels leave their number free, but slicing is then not the same as masking."""

from __future__ import annotations

from typing import Any

from ..axes import Value, axis_size
from ..call import Call, Rule


def _per_channel(call: Call, value: Value, *vectors: Value | None) -> None:
    for vector in vectors:
        if vector is not None:
            call.unify(value[1], vector[0])


def _batch_norm(
    call: Call,
    value: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool = False,
    *rest: Any,
) -> Value:
    _per_channel(call, value, weight, bias, mean, variance)
    call.has_attributes(num_features=value[1])
    call.scales(1)
    if training:
        # Weight standardization: batch norm over the inputs of each filter.
        for axis in (value[0], *value[2:]):
            call.mark_inexact(axis, f"{call} takes statistics over it")
    return value


def _instance_norm(call: Call, value: Value, *args: Any) -> Value:
    _per_channel(call, value, *args[:4])  # weight, bias, running mean, running variance
    call.has_attributes(num_features=value[1])
    call.scales(1)
    for axis in value[2:]:
        call.mark_inexact(axis, f"{call} takes statistics over it")
    return value


def _layer_norm(
    call: Call,
    value: Value,
    shape: list[int],
    weight: Value | None = None,
    bias: Value | None = None,
    *rest: Any,
) -> Value:
    normalized = value[-len(shape) :]
    for vector in (weight, bias):
        if vector is not None:
            for axis, own in zip(normalized, vector, strict=True):
                call.unify(axis, own)
    call.scales(2)
    call.has_lengths(shape, normalized)
    for axis in normalized:
        call.mark_inexact(axis, f"{call} takes statistics over the channels")
    return value


def _group_norm(
    call: Call,
    value: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    *rest: Any,
) -> Value:
    _per_channel(call, value, weight, bias)
    call.has_attributes(num_channels=value[1])
    call.scales(2)
    call.same_size(call.cut_evenly(value[1], groups), "groups of")
    for axis in value[2:]:
        call.mark_inexact(axis, f"{call} takes statistics over it")
    if groups < axis_size(value[1]):
        call.mark_inexact(value[1], f"{call} takes statistics over the channels")
    return value


def _weight_norm(call: Call, direction: Value, magnitude: Value, dim: int = 0) -> Value:
    """A weight as direction times magnitude. The norm runs over every axis but one."""
    for place, (axis, own) in enumerate(zip(direction, magnitude, strict=True)):
        if axis_size(own) > 1:
            call.unify(axis, own)
        if place != dim % len(direction):
            call.mark_inexact(axis, f"{call} takes a norm over it")
    return direction


RULES: dict[str, Rule] = {
    "aten::_weight_norm": _weight_norm,
    "aten::batch_norm": _batch_norm,
    "aten::instance_norm": _instance_norm,
    "aten::layer_norm": _layer_norm,
    "aten::rms_norm": _layer_norm,
    "aten::group_norm": _group_norm,
}

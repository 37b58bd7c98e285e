"""Norm layers. Where they take statistics over channels, cutting is not exactly zeroing."""

from typing import Any

from ..axes import Value, axis_size
from ..call import Call, operator_of, rule


def _unify_vectors(call: Call, axes: Value, args: tuple[Any, ...]) -> None:
    """Unify the tensors among the arguments (weight, bias, running statistics) with their axes."""
    for arg in args:
        if isinstance(arg, tuple):
            for axis, own in zip(axes, arg, strict=True):
                call.unify(axis, own)


def _takes_statistics(call: Call, axes: Value, what: str = "it") -> None:
    for axis in axes:
        call.mark_inexact(axis, f"{call} takes statistics over {what}")


@rule("batch_norm instance_norm")
def _batch_norm(call: Call, value: Value, *args: Any) -> Value:
    _unify_vectors(call, value[1:2], args)
    call.has_attributes(num_features=value[1])
    call.scales(1)
    training = args[4]
    if training:
        # Weight standardization: batch norm over the inputs of each filter.
        batch = value[:1] if operator_of(call.node) == "aten::batch_norm" else ()
        _takes_statistics(call, (*batch, *value[2:]))
    return value


@rule("layer_norm rms_norm")
def _layer_norm(call: Call, value: Value, shape: list[int], *args: Any) -> Value:
    normalized = value[-len(shape) :]
    _unify_vectors(call, normalized, args)
    call.scales(2)
    call.has_lengths(shape, normalized)
    _takes_statistics(call, normalized, "the channels")
    return value


@rule("group_norm")
def _group_norm(call: Call, value: Value, groups: int, *args: Any) -> Value:
    _unify_vectors(call, value[1:2], args)
    call.has_attributes(num_channels=value[1])
    call.scales(2)
    # The number of groups stays, so all groups must have as many channels.
    call.same_size(call.cut_evenly(value[1], groups), "groups of")
    _takes_statistics(call, value[2:])
    if groups < axis_size(value[1]):
        _takes_statistics(call, value[1:2], "the channels")
    return value


@rule("_weight_norm")
def _weight_norm(call: Call, direction: Value, magnitude: Value, dim: int = 0) -> Value:
    """A weight as direction times magnitude. The norm runs over every axis but one."""
    for place, (axis, own) in enumerate(zip(direction, magnitude, strict=True)):
        if axis_size(own) > 1:
            call.unify(axis, own)
        if place != dim % len(direction):
            call.mark_inexact(axis, f"{call} takes a norm over it")
    return direction

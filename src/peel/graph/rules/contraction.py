"""Operators that sum over an axis: convolutions, linear layers, matrix products, attention.

They are also where the cost is: one multiply-add for each element of a product of axes (`Call.costs`).
"""

from typing import Any

from ..axes import Axis, Value, axis_size, constant, expand, is_free, repeat_each
from ..call import Call, rule
from .elementwise import broadcast


def _spatial(call: Call, value: Value, rank: int) -> list[Axis]:
    """The spatial axes of a result. Channels that were moved there (ECA) pass only at the same length."""
    result: list[Axis] = []
    for place in range(-rank, 0):
        axis, size = value[place], call.shape[place]
        if is_free(axis) and axis_size(axis) == size:
            call.mark_inexact(axis, f"{call} mixes neighboring channels")
            result.append(axis)
        else:
            call.fix(axis, f"{call} slides over the channels")
            result.append(constant(size))
    return result


@rule("conv1d conv2d conv3d linear")
def _conv(call: Call, value: Value, weight: Value, bias: Value | None = None, *options: Any) -> Value:
    """A linear layer is a convolution without spatial axes."""
    groups = options[3] if len(options) > 3 else 1  # after stride, padding and dilation
    channels, outputs = value[1 - len(weight)], weight[0]
    if groups == 1:
        call.unify(channels, weight[1])
        call.sums_over(weight, 1)
    elif groups == axis_size(channels):
        call.fix(weight[1], "one input channel per filter")
        call.unify(outputs, repeat_each(channels, axis_size(outputs) // groups), "depthwise")
    else:
        for row in call.cut_evenly(channels, groups):
            call.unify(row, weight[1], "grouped")
        call.sums_over(weight, 1)
        call.same_size(call.cut_evenly(outputs, groups), "grouped")
    return _layer(call, value, weight, bias, outputs, groups)


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def _conv_transpose(
    call: Call, value: Value, weight: Value, bias: Value | None = None, *options: Any
) -> Value:
    groups = options[3] if len(options) > 3 else 1  # after stride, padding and output padding
    channels = weight[0]
    call.unify(value[1 - len(weight)], channels)
    if groups < axis_size(channels):
        call.sums_over(weight, 0)
    if 1 < groups == axis_size(channels):
        outputs = repeat_each(channels, axis_size(weight[1]))
        call.fix(weight[1], "outputs per input channel")
    else:
        call.same_size(call.cut_evenly(channels, groups), "grouped")
        outputs = expand(weight[1]) * groups
    return _layer(call, value, weight, bias, outputs, groups)


def _layer(call: Call, value: Value, weight: Value, bias: Value | None, outputs: Axis, groups: int) -> Value:
    """What all layers with weights have in common. Returns the result."""
    place = len(value) + 1 - len(weight)
    channels, inputs = value[place], value[place + 1 :]
    for axis in weight[2:]:
        call.fix(axis, "kernel size")
    if bias is not None:
        call.unify(bias[0], outputs)
    call.produces(outputs)
    call.has_attributes(in_channels=channels, out_channels=outputs)
    call.has_attributes(in_features=channels, out_features=outputs)
    if 1 < groups == axis_size(channels):
        call.has_attributes(groups=channels)
    spatial = _spatial(call, value, len(inputs))
    # The kernel is applied at each position of the result or, if transposed, of the input.
    positions = inputs if "transpose" in str(call.node.target) else spatial
    call.costs((*weight, *value[:place], *positions), outputs)
    return (*value[:place], outputs, *spatial)


@rule("matmul mm bmm")
def _matmul(call: Call, first: Value, second: Value) -> Value:
    """A product of two computed tensors, as in attention: the inner axis is fixed, the outer axes pass."""
    call.unify(first[-1], second[-2] if len(second) > 1 else second[0])
    call.fix(first[-1], f"{call} sums over it between two computed tensors")
    batch = broadcast(call, first[:-2], second[:-2])
    rows = first[-2:-1] if len(first) > 1 else ()
    columns = second[-1:] if len(second) > 1 else ()
    if rows and columns:  # torch does not count products with vectors either
        call.costs((*batch, *rows, first[-1], *columns))
    return (*batch, *rows, *columns)


@rule("addmm baddbmm")
def _addmm(call: Call, bias: Value, first: Value, second: Value, **options: Any) -> Value:
    return broadcast(call, bias, _matmul(call, first, second))


@rule("einsum")
def _einsum(call: Call, equation: str, values: list[Value], **options: Any) -> Any:
    """Axes with the same letter are one axis. A letter that is summed over is fixed."""
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    not_covered = f"{call}: the rule does not cover the equation {equation}"
    if "." in equation or len(terms) > 2:
        return call.refuse(not_covered)
    axis_of: dict[str, Axis] = {}
    for term, value in zip(terms, values, strict=True):
        for letter, axis in zip(term, value, strict=True):
            if axis_size(axis_of.setdefault(letter, axis)) != axis_size(axis):
                return call.refuse(not_covered)
            call.unify(axis_of[letter], axis)
    for letter, axis in axis_of.items():
        if letter not in right:
            call.fix(axis, f"{call} sums over it between two computed tensors")
    if len(terms) == 2:
        call.costs(tuple(axis_of.values()))
    return tuple(axis_of[letter] for letter in right)


@rule("scaled_dot_product_attention")
def _attention(call: Call, query: Value, key: Value, value: Value, *rest: Any, **options: Any) -> Any:
    call.costs((*query, key[-2]))
    call.costs((*query[:-1], key[-2], value[-1]))
    return call.refuse(f"{call}: channels of attention heads")

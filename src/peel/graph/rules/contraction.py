"""Operators that sum over an axis: convolutions, linear layers, matrix products, attention.

They are also where the cost is: one multiply-add for each element of a product of axes (`Call.costs`).
"""

from collections.abc import Sequence
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
    # Depthwise: the weight has no axis for its input, the output repeats the channels.
    elif groups == axis_size(channels):
        call.fix(weight[1], "one input channel per filter")
        call.unify(outputs, repeat_each(channels, axis_size(outputs) // groups), "depthwise")
    else:
        # Grouped: all groups read through one axis of the weight, so they keep the same places.
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
        # Depthwise: each input channel makes as many outputs as axis 1 of the weight has.
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
    call.produces(outputs, place)
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
    first_letters, second_letters = "yz"[-len(first) :], "zx"[: len(second)]
    equation = f"...{first_letters},...{second_letters}->...{'y' * (len(first) > 1)}{'x' * (len(second) > 1)}"
    is_counted = len(first) > 1 and len(second) > 1  # torch does not count products with vectors
    return _product(call, equation, [first, second], call.node.args, is_counted)


@rule("addmm baddbmm")
def _addmm(call: Call, bias: Value, first: Value, second: Value, **options: Any) -> Value:
    equation = "yz,zx->yx" if len(first) == 2 else "byz,bzx->byx"
    return broadcast(call, bias, _product(call, equation, [first, second], call.node.args[1:]))


@rule("einsum")
def _einsum(call: Call, equation: str, values: list[Value], *rest: Any, **options: Any) -> Any:
    sources: Any = call.node.args[1]
    try:
        return _product(call, equation.replace(" ", ""), values, sources)
    except NotImplementedError:
        return call.refuse(f"{call}: the rule does not cover the equation {equation}")


def _product(
    call: Call, equation: str, values: list[Value], sources: Sequence[Any], is_counted: bool = True
) -> Value:
    """A product as an equation: axes with the same letter are one axis.

    With a weight on one side it is a linear layer: it sums over the channels that both sides have, and the
    weight makes the channels that only it has. Between two computed tensors, as in attention, no weight reads
    the channels that are summed over, so cutting them is not zeroing them.
    """
    terms, right = _letters(equation, values)
    axis_of: dict[str, Axis] = {}
    for term, value in zip(terms, values, strict=True):
        for letter, axis in zip(term, value, strict=True):
            other = axis_of.setdefault(letter, axis)
            if axis_size(other) == axis_size(axis):
                call.unify(other, axis)
            # Behind an ellipsis, axes of length 1 are broadcast.
            elif "." in equation and 1 in (axis_size(other), axis_size(axis)):
                axis_of[letter] = max(other, axis, key=axis_size)
            else:
                raise NotImplementedError
    # Exactly one operand of two is a weight: then it is a layer, whatever function was called.
    is_weight = [source in call.weights for source in sources]
    weight = is_weight.index(True) if is_weight.count(True) == 1 and len(terms) == 2 else None
    source = None if weight is None else sources[weight]
    summed = [letter for letter in axis_of if letter not in right and all(letter in term for term in terms)]
    for letter in (letter for letter in axis_of if letter not in right):
        # A sum over an axis of one operand only: a removed channel is missing from it.
        if letter not in summed or len(terms) == 1:
            call.mark_inexact(axis_of[letter], f"{call} sums over the channels")
        elif weight is None:
            call.mark_inexact(axis_of[letter], f"{call} sums over it between two computed tensors")
        else:
            call.sums_over(values[weight], terms[weight].index(letter), source)
    made = [letter for letter in right if weight is not None and letter not in terms[1 - weight]]
    for letter in made:
        call.produces(axis_of[letter], right.index(letter), source)
    if summed and len(terms) == 2 and is_counted:
        output = axis_of[made[0]] if made else ()
        call.costs(
            tuple(axis_of[letter] for letter in axis_of if letter in right + "".join(summed)), output, source
        )
    return tuple(axis_of[letter] for letter in right)


def _letters(equation: str, values: list[Value]) -> tuple[list[str], str]:
    """The letters of each operand and of the result. An ellipsis becomes capital letters of Greek."""
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) > 2 or any(term.count(letter) > 1 for term in terms for letter in term if letter != "."):
        raise NotImplementedError
    rank = max(len(value) - len(term.replace("...", "")) for term, value in zip(terms, values, strict=True))
    rest = "".join(chr(ord("\u0391") + i) for i in range(rank))
    if not arrow:
        letters = sorted(set(left) - set(",."))
        right = "..." * ("..." in left) + "".join(letter for letter in letters if left.count(letter) == 1)
    spelled = []
    for term, value in zip(terms, values, strict=True):
        missing = len(value) - len(term.replace("...", ""))
        spelled.append(term.replace("...", rest[rank - missing :]))
    return spelled, right.replace("...", rest)


@rule("scaled_dot_product_attention")
def _attention(call: Call, query: Value, key: Value, value: Value, *rest: Any, **options: Any) -> Any:
    """The number of heads stays. Queries and keys keep the same channels; those of values pass."""
    if options.get("enable_gqa"):
        return call.refuse(f"{call}: heads in groups")
    scores = _product(call, "...ye,...xe->...yx", [query, key], [None, None])
    mask = rest[0] if rest else options.get("attn_mask")
    scores = scores if mask is None else broadcast(call, scores, mask)
    call.mark_inexact(scores[-1], f"{call} runs over the channels")
    return _product(call, "...yx,...xv->...yv", [scores, value], [None, None])

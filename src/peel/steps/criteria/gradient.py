"""First-order effects of channels on the loss (Taylor), by gradients.

Let a channel be z * (gamma * x + beta), with z = 1. Then dL/dz = gamma * dL/dgamma + beta * dL/dbeta. For a
channel without a norm layer, filter and bias take the place of gamma and beta. Removing the channel (z = 0)
changes the loss by about -dL/dz, and removing a group of channels by the sum of these, with their signs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...graph.parameters import ChannelAxis, filter_axes, scale_axes
from ..importance import CriterionInput, LayerScores, layer_scores


@dataclass(frozen=True)
class Gradient:
    """The effect of scaling a channel's gamma, |gamma dL/dgamma|: a mean over mini-batches.

    For channels without a norm layer, the effect of scaling the filter. Layers are not normalized, or all
    would be alike. The sum over a group is an upper bound of the effect of scaling the whole group, in which
    effects of opposite signs cancel.
    """

    batches: int = 20
    batch_size: int = 128

    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        effects = mean_effects(inputs, self.batches, self.batch_size, torch.abs, with_shift=False)
        return _scores(inputs, effects)


@dataclass(frozen=True)
class Taylor:
    """The squared effect of removing a channel, (gamma dL/dgamma + beta dL/dbeta)^2: a mean over batches.

    Published by Molchanov et al. (2019). Without a norm layer, filter and bias take the place of gamma, beta.
    """

    batches: int = 20
    batch_size: int = 128

    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        effects = mean_effects(inputs, self.batches, self.batch_size, torch.square, with_shift=True)
        return _scores(inputs, effects)


def mean_effects(
    inputs: CriterionInput,
    batches: int,
    batch_size: int,
    size_of: Callable[[Tensor], Tensor],
    *,
    with_shift: bool,
) -> list[tuple[ChannelAxis, Tensor]]:
    """For axes of parameters, the mean over mini-batches of the sizes of the effects of each channel."""
    places = _places(inputs)
    shifts = [_shift_of(place, inputs) if with_shift else None for place in places]
    wanted = [place.tensor for place in places] + [shift for shift in shifts if shift is not None]
    sums = [torch.zeros(place.tensor.shape[place.axis], device=place.tensor.device) for place in places]
    count = 0
    for batch in inputs.batches(batches * batch_size, batch_size):
        loss = inputs.objective(inputs.model, batch).total
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        products = {
            tensor: tensor.detach() * gradient
            for tensor, gradient in zip(wanted, gradients, strict=True)
            if gradient is not None
        }
        for total, place, shift in zip(sums, places, shifts, strict=True):
            if place.tensor in products:
                # The derivative of the loss for scaling a whole filter is the sum over its weights of w
                # dL/dw.
                effect = place.reduce(products[place.tensor], torch.sum)
                if shift is not None and shift in products:
                    effect = effect + _like(products[shift], place)
                total += size_of(effect)
        count += 1
    return [(place, total / max(1, count)) for place, total in zip(places, sums, strict=True)]


def _scores(inputs: CriterionInput, effects: list[tuple[ChannelAxis, Tensor]]) -> list[LayerScores]:
    return [item for place, values in effects for item in layer_scores(inputs.graph, place, values)]


def _places(inputs: CriterionInput) -> list[ChannelAxis]:
    """The scales of norm layers and, for ties without one, the filters: a norm layer undoes their size."""
    scales = scale_axes(inputs.model, inputs.graph)
    scaled = {tie for place in scales for tie in place.ties(inputs.graph)}
    filters = filter_axes(inputs.model, inputs.graph)
    return scales + [place for place in filters if not scaled & place.ties(inputs.graph)]


def _shift_of(place: ChannelAxis, inputs: CriterionInput) -> nn.Parameter | None:
    """The bias beside a scale or a filter, if it has the same channels."""
    name = f"{place.layer}.bias"
    shift = dict(inputs.model.named_parameters()).get(name)
    if shift is None:
        return None
    axis = place.axis if shift.shape == place.tensor.shape else 0
    is_same = ChannelAxis(name, axis, shift).ties(inputs.graph) == place.ties(inputs.graph)
    return shift if is_same else None


def _like(shift: Tensor, place: ChannelAxis) -> Tensor:
    """The values of a bias along the axis: summed over maps, or over the groups of a transposed layer."""
    if shift.shape == place.tensor.shape:
        return place.reduce(shift, torch.sum)
    return shift.reshape(-1, place.tensor.shape[place.axis]).sum(0)

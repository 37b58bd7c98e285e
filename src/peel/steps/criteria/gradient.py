"""The first-order effect of each channel on the loss (Taylor): |gamma * dL/dgamma|."""

from dataclasses import dataclass

import torch

from ...graph.parameters import filter_axes, scale_axes
from ..importance import CriterionInput, LayerScores, layer_scores


@dataclass(frozen=True)
class Gradient:
    """The first-order effect of each channel on the loss, a mean of absolute values over mini-batches.

    It is taken at the scales of norm layers and, for ties without norm layers, at the filters. The sum over a
    group is the effect of scaling the whole group. Layers are not normalized, or all would be alike.
    """

    batches: int = 20
    batch_size: int = 128

    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        places = scale_axes(inputs.model, inputs.graph)
        scaled = {tie for place in places for tie in place.ties(inputs.graph)}
        # A norm layer removes the effect of a filter's size, so only filters without one count.
        filters = filter_axes(inputs.model, inputs.graph)
        places += [place for place in filters if not scaled & place.ties(inputs.graph)]
        effects = [
            torch.zeros(place.tensor.shape[place.axis], device=place.tensor.device) for place in places
        ]
        count = 0
        for batch in inputs.batches(self.batches * self.batch_size, self.batch_size):
            loss = inputs.objective(inputs.model, batch).total
            gradients = torch.autograd.grad(loss, [place.tensor for place in places], allow_unused=True)
            for effect, gradient, place in zip(effects, gradients, places, strict=True):
                if gradient is not None:
                    effect += place.reduce(gradient * place.tensor.detach(), torch.sum).abs()
            count += 1
        found = []
        for place, effect in zip(places, effects, strict=True):
            found += layer_scores(inputs.graph, place, effect / max(1, count))
        return found

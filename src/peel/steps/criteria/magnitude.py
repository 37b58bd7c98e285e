"""Magnitudes of parameters: the scales of norm layers, and the weights of filters."""

from dataclasses import dataclass

import torch

from ...errors import ConfigError
from ...graph.parameters import ChannelAxis, filter_axes, scale_axes
from ..importance import CriterionInput, LayerScores, layer_scores


@dataclass(frozen=True)
class NormScale:
    """The absolute scale (gamma) of all norm layers, the paper's choice."""

    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        scales = scale_axes(inputs.model, inputs.graph)
        if not scales:
            raise ConfigError(
                'the network has no norm layers with scales: choose criterion="weight" or another.'
            )
        return _mean_magnitudes(inputs, scales)


@dataclass(frozen=True)
class WeightMagnitude:
    """The mean absolute weight of each filter."""

    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        return _mean_magnitudes(inputs, filter_axes(inputs.model, inputs.graph))


def _mean_magnitudes(inputs: CriterionInput, places: list[ChannelAxis]) -> list[LayerScores]:
    found = []
    for place in places:
        found += layer_scores(inputs.graph, place, place.reduce(place.tensor.detach().abs(), torch.mean))
    return found

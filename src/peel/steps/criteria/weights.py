"""The size of weights: their mean absolute value in each filter, and the filters themselves for criteria built on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ...graph import ChannelGraph
from ..importance import CriterionInput, LayerScores, values_by_tie

__all__ = ["WeightMagnitude", "filters"]


def filters(model: nn.Module, graph: ChannelGraph) -> Iterator[tuple[str, str, int, Tensor]]:
    """Layer, name, producing axis and weight of each layer that writes channels of a free tie."""
    norms = {name.rpartition(".")[0] for name in graph.scales}
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or name.rpartition(".")[0] in norms:
            continue
        # The weight of a transposed convolution sums over its first axis and writes its second.
        axis = 1 if graph.consumers.get(name) == (0,) else 0
        if any(run.tie >= 0 for run in graph.layouts[name][axis]):
            yield name.rpartition(".")[0], name, axis, weight


@dataclass(frozen=True)
class WeightMagnitude:
    def measure(self, subject: CriterionInput) -> list[LayerScores]:
        found = []
        for layer, name, axis, weight in filters(subject.model, subject.graph):
            values = weight.detach().abs().mean(dim=[other for other in range(weight.ndim) if other != axis])
            found += [
                LayerScores(tie, layer, part)
                for tie, part in values_by_tie(subject.graph, name, axis, values).items()
            ]
        return found

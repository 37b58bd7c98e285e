"""Filter norms that can be compared across layers (LeGR): each layer's norms pass through an affine transformation learned by evolution.

A candidate gives every layer a factor and an offset. Its worth: prune the trained backbone by one ranking over all layers, to a part of its
MACs, and take the loss on held-out images, without any fine-tuning.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError
from ...graph import ChannelGraph
from ...surgery import slim
from ...train.loop import evaluate
from ..importance import CriterionInput, LayerScores, values_by_tie
from .weights import filters

__all__ = ["Legr"]

#: Every tie keeps at least this part of its channels.
KEEP = 0.1

Genes = tuple[tuple[float, ...], tuple[float, ...]]
"""A factor and an offset per layer."""


@dataclass(frozen=True)
class Legr:
    evaluations: int = 400
    population: int = 64
    tournament: int = 16
    target: float = 0.5
    """The part of the backbone's MACs that candidates are pruned to."""
    mutated: float = 0.1
    """The part of the layers that a mutation changes."""
    images: int = 2000
    """Held-out images that candidates are judged by."""

    def __post_init__(self) -> None:
        if self.evaluations < 1 or self.population < 2 or self.tournament < 1 or not 0 < self.target < 1:
            raise ConfigError(
                f"legr needs evaluations and a tournament of at least 1, a population of 2, a target between 0 and 1: {self}."
            )

    def measure(self, subject: CriterionInput) -> list[LayerScores]:
        layers = [
            (layer, tie, part)
            for layer, name, axis, weight in filters(subject.model, subject.graph)
            for tie, part in values_by_tie(
                subject.graph,
                name,
                axis,
                weight.detach().square().sum([other for other in range(weight.ndim) if other != axis]).cpu(),
            ).items()
        ]
        factors, offsets = self._evolve(subject, layers)
        scores = [
            factor * part + offset
            for factor, offset, (_, _, part) in zip(factors, offsets, layers, strict=True)
        ]
        # Offsets can make scores negative, shares cannot be.
        lowest = min(float(score.min()) for score in scores)
        return [
            LayerScores(tie, layer, score - lowest)
            for (layer, tie, _), score in zip(layers, scores, strict=True)
        ]

    def _evolve(self, subject: CriterionInput, layers: list[tuple[str, str, Tensor]]) -> Genes:
        chance = random.Random(subject.seed)
        spreads = [float(part.std()) if len(part) > 1 else 0.0 for _, _, part in layers]
        judged = subject.held_out.subset(torch.arange(min(self.images, subject.held_out.size)))
        identity: Genes = ((1.0,) * len(layers), (0.0,) * len(layers))

        def worth(genes: Genes) -> float:
            widths, scores = _ranked(subject.graph, layers, genes, self.target)
            small = slim(subject.model, widths, graph=subject.graph, weights="inherit", scores=scores).eval()
            loss = evaluate(small, judged, subject.engine).loss
            return loss if math.isfinite(loss) else math.inf

        living: list[tuple[float, Genes]] = []
        best: tuple[float, Genes] | None = None
        for i in range(self.evaluations):
            if i == 0:
                genes = identity
            elif i < self.population:
                genes = (
                    tuple(math.exp(chance.gauss(0, 1)) for _ in layers),
                    tuple(chance.gauss(0, spread) for spread in spreads),
                )
            else:
                parent = min(chance.sample(living, min(self.tournament, len(living))))[1]
                genes = self._mutated(parent, spreads, 1 - i / (1.25 * self.evaluations), chance)
            candidate = (worth(genes), genes)
            living = [*living, candidate][-self.population :]
            best = candidate if best is None or candidate[0] < best[0] else best
        assert best is not None
        return best[1]

    def _mutated(self, parent: Genes, spreads: list[float], step: float, chance: random.Random) -> Genes:
        factors, offsets = list(parent[0]), list(parent[1])
        for i in chance.sample(range(len(factors)), max(1, round(self.mutated * len(factors)))):
            factors[i] *= math.exp(chance.gauss(0, step))
            offsets[i] += chance.gauss(0, spreads[i])
        return tuple(factors), tuple(offsets)


def _ranked(
    graph: ChannelGraph, layers: list[tuple[str, str, Tensor]], genes: Genes, target: float
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """One ranking over all channels, the lowest pruned until the MACs are down to the target: widths, and scores that choose channels."""
    scores = {tie: torch.zeros(width) for tie, width in graph.widths.items()}
    for factor, offset, (_, tie, part) in zip(*genes, layers, strict=True):
        # Layers that write the same channels add up. One that writes a tie more than once counts by its mean.
        values = factor * part + offset
        scores[tie] = scores[tie] + (values if len(values) == len(scores[tie]) else values.mean())
    least = {tie: max(graph.steps[tie], math.ceil(KEEP * width)) for tie, width in graph.widths.items()}
    ranking = sorted(
        (float(score), tie)
        for tie, values in scores.items()
        for score in values.sort(descending=True).values[least[tie] :]
    )
    wanted = target * graph.macs()

    def widths(count: int) -> dict[str, int]:
        left = dict(graph.widths)
        for _, tie in ranking[:count]:
            left[tie] -= 1
        return {
            tie: max(graph.steps[tie], width // graph.steps[tie] * graph.steps[tie])
            for tie, width in left.items()
        }

    low, high = 0, len(ranking)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if graph.macs(widths(middle)) <= wanted else (middle + 1, high)
    return widths(low), scores

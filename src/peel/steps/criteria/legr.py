"""Filter norms that can be compared across layers (LeGR).

The norms of each layer get a factor and an offset, learned by evolution. A candidate prunes the backbone by
one ranking over all layers, without fine-tuning, and is judged by the loss on held-out images.
"""

import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...data.datasets import balanced_order
from ...graph import ChannelGraph
from ...graph.parameters import filter_axes
from ...surgery import slim
from ...train.loop import evaluate
from ..importance import CriterionInput, LayerScores, layer_scores

#: Every tie keeps at least this fraction of its channels.
MIN_KEPT = 0.1

Genes = tuple[tuple[float, ...], tuple[float, ...]]
"""A factor and an offset per layer."""


@dataclass(frozen=True)
class Legr:
    """The filter norm with a factor and an offset per layer, learned by evolution on held-out images."""

    each_epoch: ClassVar[bool] = False
    needs_held_out: ClassVar[bool] = True

    evaluations: int = 400
    population: int = 64
    tournament: int = 16
    target: float = 0.5
    """The fraction of the backbone's MACs that candidates are pruned to."""
    mutated: float = 0.1
    """The fraction of the layers that a mutation changes."""
    images: int = 2000
    """Held-out images that judge a candidate, equally many of each class where classes are known."""

    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        norms = []
        for place in filter_axes(inputs.model, inputs.graph):
            squares = place.reduce(place.tensor.detach().square(), torch.sum)
            norms += layer_scores(inputs.graph, place, squares.cpu())
        scores = _transformed(norms, self._evolve(inputs, norms))
        # Offsets can make scores negative; shares cannot be.
        lowest = min(float(score.values.min()) for score in scores)
        return [LayerScores(score.tie, score.layer, score.values - lowest) for score in scores]

    def _evolve(self, inputs: CriterionInput, norms: list[LayerScores]) -> Genes:
        """The best genes found. The first candidate is the plain norms."""
        rng = random.Random(inputs.seed)
        spreads = [float(norm.values.std()) if len(norm.values) > 1 else 0.0 for norm in norms]
        images = inputs.held_out.subset(balanced_order(inputs.held_out, inputs.seed)[: self.images])

        def loss_of(genes: Genes) -> float:
            widths, scores = _prune(inputs.graph, _transformed(norms, genes), self.target)
            small = slim(inputs.model, widths, graph=inputs.graph, weights="inherit", scores=scores).eval()
            loss = evaluate(small, images, inputs.engine, task=inputs.task).loss
            return loss if loss is not None and math.isfinite(loss) else math.inf

        genes: Genes = ((1.0,) * len(norms), (0.0,) * len(norms))
        best = (loss_of(genes), genes)
        living = [best]
        for i in range(1, self.evaluations):
            if i < self.population:
                factors = tuple(math.exp(rng.gauss(0, 1)) for _ in norms)
                genes = (factors, tuple(rng.gauss(0, spread) for spread in spreads))
            else:
                # The steps of mutations shrink to .2 over the search: 1.25 keeps the last ones from zero.
                parent = min(rng.sample(living, min(self.tournament, len(living))))[1]
                genes = self._mutate(parent, spreads, 1 - i / (1.25 * self.evaluations), rng)
            candidate = (loss_of(genes), genes)
            # Regularized evolution: the oldest candidate dies, not the worst, so that luck does not stay.
            living = [*living, candidate][-self.population :]
            best = candidate if candidate[0] < best[0] else best
        return best[1]

    def _mutate(self, parent: Genes, spreads: list[float], step: float, rng: random.Random) -> Genes:
        factors, offsets = list(parent[0]), list(parent[1])
        for i in rng.sample(range(len(factors)), max(1, round(self.mutated * len(factors)))):
            factors[i] *= math.exp(rng.gauss(0, step))
            offsets[i] += rng.gauss(0, spreads[i])
        return tuple(factors), tuple(offsets)


def _transformed(norms: list[LayerScores], genes: Genes) -> list[LayerScores]:
    return [
        LayerScores(norm.tie, norm.layer, factor * norm.values + offset)
        for factor, offset, norm in zip(*genes, norms, strict=True)
    ]


def _prune(
    graph: ChannelGraph, layers: list[LayerScores], target: float
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Prune the lowest channels of all layers down to a fraction of the MACs: widths, and scores per tie.

    Ties without scores (those inside of gates) keep their width.
    """
    scores: dict[str, Tensor] = {}
    for layer in layers:
        tie, values = layer.tie, layer.values
        # Layers that write the same channels add up; several values per channel count by their mean.
        before = scores.get(tie, torch.zeros(graph.widths[tie]))
        scores[tie] = before + (values if len(values) == len(before) else values.mean())
    ranking = []
    for tie, values in scores.items():
        kept = max(graph.steps[tie], math.ceil(MIN_KEPT * graph.widths[tie]))
        ranking += [(float(score), tie) for score in values.sort(descending=True).values[kept:]]
    ranking.sort()

    def pruned(count: int) -> dict[str, int]:
        left = dict(graph.widths)
        for _, tie in ranking[:count]:
            left[tie] -= 1
        return {tie: max(step, left[tie] // step * step) for tie, step in graph.steps.items()}

    allowed = target * graph.macs()
    # The MACs fall with every channel that is pruned, so the number of them is bisected.
    count = bisect_left(range(len(ranking)), True, key=lambda count: graph.macs(pruned(count)) <= allowed)
    return pruned(count), scores

"""Scores for cutting a trained network that is repaired afterwards: the channels that explain the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..graph.channel_graph import ChannelGraph
from ..graph.parameters import spans
from ..utils.rng import derive_seed
from .calibration import BATCH, Images, evaluating, make_batches, run_model
from .layer_calls import CallWatcher, LayerCall, Visitor

#: Places of each image at which the channels are compared.
PLACES = 16


def explain_scores(model: nn.Module, graph: ChannelGraph, images: Images) -> dict[str, Tensor]:
    """Tie -> one score per channel: the channels that best explain all others come first.

    Greedy: next is the channel from which, with those before it, regression explains the most of the input of
    the layers that read the tie. A channel counts as much as the weights that read it. The first channels of
    the order are good for every width, so one order serves all cuts. A tie whose readers are all depthwise,
    or not seen, has no scores.

    >>> scores = explain_scores(model, graph, images)
    >>> small = peel.slim(model, widths, graph=graph, weights="inherit", scores=scores)
    """
    collector = _Collector(graph)
    with evaluating(model):
        for number, batch in enumerate(make_batches(images, BATCH)):
            collector.batch = number
            with CallWatcher(model, collector):
                run_model(model, batch)
    names = list(graph.widths)
    return {names[tie]: greedy_order(matrix) for tie, matrix in sorted(collector.covariances().items())}


class _Collector(Visitor):
    """Sums of products of the channels of each tie, over the layers that read it."""

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph, self.batch = graph, 0
        self.widths, self.steps = list(graph.widths.values()), list(graph.steps.values())
        self.products: dict[tuple[int, str], Tensor] = {}
        self.sums: dict[tuple[int, str], Tensor] = {}
        self.counts: dict[tuple[int, str], int] = {}

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[[], Tensor]) -> Tensor:
        axis = 0 if call.is_transposed else 1
        if call.groups == 1 and axis in self.graph.consumers.get(name, ()):
            rows = self._rows(name, index, call)
            others = [other for other in range(call.weight.ndim) if other != axis]
            rows = rows.double() * torch.linalg.vector_norm(call.weight.double(), dim=others)
            for part, span in spans(self.graph.layouts[name][axis]):
                if part.tie >= 0 and part.size * self.steps[part.tie] == self.widths[part.tie]:
                    self._add((part.tie, name), rows[:, span].unflatten(1, (self.widths[part.tie], -1)))
        return run()

    def _rows(self, name: str, index: int, call: LayerCall) -> Tensor:
        """The input at sampled places: places x channels."""
        inputs = call.inputs.movedim(1, -1) if call.kernel else call.inputs
        count, images = inputs[..., 0].numel(), len(inputs)
        if count <= PLACES * images:
            return inputs.reshape(-1, inputs.shape[-1])
        rng = torch.Generator().manual_seed(derive_seed("places", name, index, self.batch))
        places = torch.randint(count, (PLACES * images,), generator=rng).to(inputs.device)
        return inputs[torch.unravel_index(places, inputs.shape[:-1])]

    def _add(self, key: tuple[int, str], rows: Tensor) -> None:
        """Rows: places x channels x positions of a channel in the axis."""
        flat = rows.movedim(2, 1).flatten(0, 1)
        self.products[key] = self.products.get(key, 0) + flat.T @ flat
        self.sums[key] = self.sums.get(key, 0) + flat.sum(0)
        self.counts[key] = self.counts.get(key, 0) + len(flat)

    def covariances(self) -> dict[int, Tensor]:
        """Tie -> covariance of its channels; each reader counts equally."""
        found: dict[int, Tensor] = {}
        for (tie, name), products in self.products.items():
            count, sums = self.counts[tie, name], self.sums[tie, name]
            covariance = products / count - sums[:, None] * sums / count**2
            total = covariance.diagonal().sum()
            if torch.isfinite(total) and total > 0:
                found[tie] = found.get(tie, 0) + covariance / total
        return found


def greedy_order(covariance: Tensor) -> Tensor:
    """Scores from a covariance. The channel that is chosen first has the highest."""
    left = covariance.clone()
    count = len(left)
    scores = torch.zeros(count)
    floor = 1e-9 * left.diagonal().max()
    is_taken = torch.zeros(count, dtype=torch.bool, device=left.device)
    for place in range(count):
        gains = left.square().sum(0) / left.diagonal().clamp_min(floor)
        best = int(gains.masked_fill(is_taken, -1.0).argmax())
        is_taken[best] = True
        scores[best] = count - place
        left -= left[:, best : best + 1] * left[best : best + 1] / left[best, best].clamp_min(floor)
    return scores

"""Scores for cutting a trained network that is repaired afterwards: the channels that explain the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.channel_graph import ChannelGraph, Run
from ..graph.parameters import spans
from ..graph.rebuild import check_graph
from ..surgery.selection import per_channel
from ..utils.rng import derive_seed
from .calibration import Images, evaluating, images_in_memory, make_batches, run_model
from .layer_calls import CallWatcher, LayerCall, Use, Visitor
from .regression import TINY

#: Places of each image at which the channels are compared.
PLACES = 16

#: Of channels that explain equally much, the one that varies most is taken: others follow from it best.
TIE_BREAK = 1e-9

#: Into how many blocks the channels of a greedy order are divided: each ends with smaller matrices.
BLOCKS = 16

#: Images that run together, where memory allows it.
BATCH = 512


@dataclass
class Reading:
    """The channels of an atom, as a layer reads them at sampled places."""

    atom: int
    use: Use
    span: slice
    """Where they are in the input of the layer."""
    weight: Tensor
    """Outputs x channels x taps of the layer."""
    count: int = 0
    sums: Tensor | float = 0.0
    products: Tensor | float = 0.0

    def add(self, rows: Tensor) -> None:
        self.count += len(rows)
        self.sums = self.sums + rows.sum(0)
        self.products = self.products + rows.T @ rows

    def mean(self) -> Tensor:
        return torch.as_tensor(self.sums) / self.count

    def covariance(self) -> Tensor:
        mean = self.mean()
        return torch.as_tensor(self.products) / self.count - mean[:, None] * mean


@dataclass
class ReadingCollector(Visitor):
    """Sees which layers read which atoms. Depthwise and grouped layers do not count."""

    graph: ChannelGraph
    batch: int = 0
    readings: dict[tuple[Use, int], Reading] = field(default_factory=dict)
    """Use of a layer and first position in its input -> what it reads there."""

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[..., Tensor]) -> Tensor:
        axis = call.input_axis
        if call.groups == 1 and axis in self.graph.consumers.get(name, ()):
            rows = self._rows(name, index, call).double()
            weight = call.weight.detach().double().movedim(axis, 1)
            for part, span in spans(self.graph.layouts[name][axis]):
                if part.tie >= 0:
                    self._add(part, (name, axis), span, rows[:, span], weight[:, span])
        return run()

    def _add(self, run: Run, use: Use, span: slice, rows: Tensor, weight: Tensor) -> None:
        if (use, span.start) not in self.readings:
            # A channel that fills several positions of the axis has that many times the taps.
            own = weight.reshape(len(weight), run.size, -1)
            self.readings[use, span.start] = Reading(run.atom, use, span, own)
        # Each position of the channel is a row of its own.
        channels = rows.reshape(len(rows), run.size, -1)
        self.readings[use, span.start].add(channels.movedim(2, 1).flatten(0, 1))

    def _rows(self, name: str, index: int, call: LayerCall) -> Tensor:
        """The input at sampled places: places x channels."""
        inputs = call.inputs.movedim(1, -1) if call.kernel else call.inputs
        count, images = inputs[..., 0].numel(), len(inputs)
        # Few positions, as in a linear layer: all of them.
        if count <= PLACES * images:
            return inputs.reshape(-1, inputs.shape[-1])
        rng = torch.Generator().manual_seed(derive_seed("places", name, index, self.batch))
        places = torch.randint(count, (PLACES * images,), generator=rng).to(inputs.device)
        return inputs[torch.unravel_index(places, inputs.shape[:-1])]


def collect_readings(
    model: nn.Module, graph: ChannelGraph, batches: Sequence[Any]
) -> dict[int, list[Reading]]:
    """Atom -> what each layer reads of it. Channels that do not vary, or are not finite, do not count."""
    collector = ReadingCollector(graph)
    check_graph(model, graph)
    with evaluating(model):
        for number, batch in enumerate(batches):
            collector.batch = number
            with CallWatcher(model, collector):
                run_model(model, batch)
    found: dict[int, list[Reading]] = {}
    for reading in sorted(collector.readings.values(), key=lambda reading: reading.atom):
        total = reading.covariance().diagonal().sum()
        if torch.isfinite(total) and total > 0:
            found.setdefault(reading.atom, []).append(reading)
    return found


def explain_scores(model: nn.Module, graph: ChannelGraph, images: Images) -> dict[str, Tensor]:
    """Tie -> one score per channel: the channels that best explain all others come first.

    Greedy: next is the channel from which, with those before it, regression explains the most of the input of
    the layers that read the tie. A channel counts as much as the weights that read it. The first channels of
    the order are good for every width, so one order serves all cuts. A tie whose readers are all depthwise,
    or not seen, has no scores.

    >>> scores = explain_scores(model, graph, images)
    >>> small = peel.slim(model, widths, graph=graph, weights="inherit", scores=scores)
    """
    by_atom = {}
    batches = make_batches(images, images_in_memory(graph, BATCH))
    for atom, readings in collect_readings(model, graph, batches).items():
        covariance = torch.stack([_weighted_covariance(one) for one in readings]).sum(0)
        by_atom[atom], _ = greedy_order([covariance], rank=sum(one.count - 1 for one in readings))
    return per_channel(graph, by_atom)


def _weighted_covariance(reading: Reading) -> Tensor:
    """Covariance of the channels, each scaled by the weights that read it; every reader counts equally."""
    scale: Tensor = torch.linalg.vector_norm(reading.weight, dim=(0, 2))
    covariance = scale[:, None] * reading.covariance() * scale
    # By its total: a layer with large weights would decide alone otherwise.
    return covariance / covariance.diagonal().sum().clamp_min(TINY)


def greedy_order(
    covariances: Sequence[Tensor], values: Sequence[Tensor] | None = None, rank: int | None = None
) -> tuple[Tensor, Tensor]:
    """Scores, the highest first, and what is left after 0, 1, ... channels. Waits for a GPU once.

    Takes, one after the other, the channel that leaves the least of the covariances. `values` say what a
    change of the channels is worth; by default each counts the same. `rank`: at most so many channels explain
    all others, as of fewer samples than channels. The rest follow by their variance.

    With R, what the taken channels leave of a covariance, V, what a change is worth, and G = R V R:
    regression on b takes r r' / R_bb from R, where r is its column b. That is worth r' V r / R_bb, which is
    G_bb / R_bb; with V = 1 it is |r|^2 / R_bb, the variance of all channels that b explains. Channels are
    taken in blocks: within one, only columns are updated, by those taken before; at its end, R and G are, by
    matrix products, and lose the rows of taken channels. That reads each matrix once per block.
    """
    left = torch.stack(list(covariances))
    count, spread = left.shape[1], left.diagonal(dim1=1, dim2=2)
    value = None if values is None else torch.stack(list(values))
    gained = left @ left if value is None else left @ value @ left
    total = spread.sum() if value is None else (left * value).sum((1, 2)).sum()
    floor = 1e-9 * spread.amax(1, keepdim=True).clamp_min(TINY)
    channels = torch.arange(count, device=left.device)
    order, worths = [], []
    tie_break = TIE_BREAK if values is None else 0.0
    most, size = min(count if rank is None else rank, count), max(8, -(-count // BLOCKS))
    for start in range(0, most, size):
        steps = min(size, most - start)
        variance, gains = (matrix.diagonal(dim1=1, dim2=2).clone() for matrix in (left, gained))
        is_taken = torch.zeros(len(channels), dtype=torch.bool, device=left.device)
        # R loses X X' and G loses X Y' + Y X', with columns x = r / sqrt(R_bb) and
        # y = (g - r G_bb / 2 R_bb) / sqrt(R_bb), where g is column b of G. For R V r = g and r' V r = G_bb,
        # so (R - x x') V (R - x x') = G - (x g' + g x') / sqrt(R_bb) + x x' G_bb / R_bb.
        x = left.new_zeros(*left.shape[:2], steps)
        y = torch.zeros_like(x)
        for step in range(steps):
            scale = variance.clamp_min(floor)
            gain = (gains / scale + tie_break * variance).sum(0)
            best = gain.masked_fill(is_taken, -1.0).argmax(keepdim=True)
            is_taken.index_fill_(0, best, True)
            order.append(channels[best])
            before_x, before_y = x[:, :, :step], y[:, :, :step]
            at_x, at_y = (before.index_select(1, best).mT for before in (before_x, before_y))
            column = left.index_select(2, best) - before_x @ at_x
            pulled = gained.index_select(2, best) - before_x @ at_y - before_y @ at_x
            own, worth = scale.index_select(1, best)[:, :, None], pulled.index_select(1, best)
            worths.append((worth / own).sum())
            x[:, :, step] = (column / own.sqrt()).squeeze(2)
            y[:, :, step] = ((pulled - column * worth / (2 * own)) / own.sqrt()).squeeze(2)
            variance -= x[:, :, step].square()
            gains -= 2 * x[:, :, step] * y[:, :, step]
        cross = x @ y.mT
        rest = untaken(is_taken, len(channels) - steps)
        left, gained = (m[:, rest][:, :, rest] for m in (left - x @ x.mT, gained - cross - cross.mT))
        channels = channels[rest]
    rest = channels[spread.sum(0)[channels].argsort(descending=True)]
    scores = torch.zeros(count)
    scores[torch.cat([*order, rest]).cpu()] = torch.arange(count, 0, -1.0)
    gone = torch.stack([torch.zeros_like(total), *worths]).cumsum(0)
    return scores, (total - gone).clamp_min(0.0).cpu()


def untaken(is_taken: Tensor, count: int) -> Tensor:
    """Where it is false, which is `count` times. `nonzero` would wait for a GPU."""
    return is_taken.to(torch.uint8).argsort(stable=True)[:count]

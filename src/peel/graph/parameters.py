"""Where the channels of ties are in the parameters of a model."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .channel_graph import ChannelGraph, Run


def spans(runs: Sequence[Run]) -> Iterator[tuple[Run, slice]]:
    """Each run of an axis, with the positions that it occupies."""
    offset = 0
    for run in runs:
        yield run, slice(offset, offset + run.length)
        offset += run.length


def values_by_tie(graph: ChannelGraph, name: str, axis: int, values: Tensor) -> dict[str, Tensor]:
    """Values along an axis of a tensor, split into the values of each free tie."""
    names = list(graph.widths)
    found: dict[str, list[Tensor]] = {}
    for run, span in spans(graph.layouts[name][axis]):
        if run.tie >= 0:
            found.setdefault(names[run.tie], []).append(values[span])
    return {tie: torch.cat(parts) for tie, parts in found.items()}


class ChannelAxis(NamedTuple):
    """An axis of a parameter that holds channels of free ties."""

    name: str
    axis: int
    tensor: nn.Parameter

    @property
    def layer(self) -> str:
        return self.name.rpartition(".")[0]

    def runs(self, graph: ChannelGraph) -> tuple[Run, ...]:
        return graph.layouts[self.name][self.axis]

    def ties(self, graph: ChannelGraph) -> set[str]:
        names = list(graph.widths)
        return {names[run.tie] for run in self.runs(graph) if run.tie >= 0}

    def reduce(self, tensor: Tensor, reduction: Callable[..., Tensor]) -> Tensor:
        """Reduce all other axes of a tensor that has the shape of the parameter."""
        others = [other for other in range(tensor.ndim) if other != self.axis]
        return reduction(tensor, dim=others) if others else tensor


def norm_layers(graph: ChannelGraph) -> set[str]:
    """The names of norm layers with scales."""
    return {name.rpartition(".")[0] for name in graph.scales}


def norm_scales(model: nn.Module, graph: ChannelGraph) -> dict[str, nn.Parameter]:
    """The scales of norm layers (gamma), by name."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in graph.scales if name in parameters}


def scale_axes(model: nn.Module, graph: ChannelGraph, *, gates: bool = False) -> list[ChannelAxis]:
    """The scales of norm layers, along each axis that holds channels; those of gates only on request."""
    scales = norm_scales(model, graph).items()
    axes = [ChannelAxis(name, axis, scale) for name, scale in scales for axis in range(scale.ndim)]
    return [place for place in axes if place.ties(graph) and (gates or place.name not in graph.gates)]


def filter_axes(model: nn.Module, graph: ChannelGraph, *, gates: bool = False) -> list[ChannelAxis]:
    """The weights of layers that write channels, along their output channels; of gates only on request."""
    norms = norm_layers(graph)
    axes = []
    for name, weight in model.named_parameters():
        # The weight of a transposed convolution sums over its first axis and writes its second.
        axis = 1 if graph.consumers.get(name) == (0,) else 0
        place = ChannelAxis(name, axis, weight)
        is_filter = weight.ndim >= 2 and place.layer not in norms and (gates or name not in graph.gates)
        if is_filter and place.ties(graph):
            axes.append(place)
    return axes


def residual_ties(graph: ChannelGraph) -> tuple[str, ...]:
    """Ties that several layers write, such as the residual stream of a stage. Gates do not count."""
    writers: Counter[int] = Counter()
    for _, written in _reads_and_writes(graph):
        writers.update(written)
    return tuple(name for tie, name in enumerate(graph.widths) if writers[tie] > 1)


def hidden_ties(graph: ChannelGraph) -> tuple[str, ...]:
    """Ties inside blocks: a layer takes a residual stream to them, or them to a residual stream.

    Others, such as the stem and the channels between blocks without a shortcut, are not hidden. Where the
    network has no residual stream, all ties are.
    """
    names = list(graph.widths)
    streams = {names.index(tie) for tie in residual_ties(graph)}
    if not streams:
        return tuple(names)
    # Ties one layer away from a stream, on either side.
    beside: set[int] = set()
    for read, written in _reads_and_writes(graph):
        beside |= (written if read & streams else set()) | (read if written & streams else set())
    return tuple(name for tie, name in enumerate(names) if tie in beside - streams)


def _reads_and_writes(graph: ChannelGraph) -> Iterator[tuple[set[int], set[int]]]:
    """The free ties that each layer reads and writes. Gates are left out."""
    for name, axes in graph.consumers.items():
        if name not in graph.gates and axes in ((0,), (1,)):
            ends = (graph.layouts[name][axis] for axis in (axes[0], 1 - axes[0]))
            read, written = ({run.tie for run in runs if run.tie >= 0} for runs in ends)
            yield read, written

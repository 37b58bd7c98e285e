"""Channel selection: which channels of each atom are kept, and where they are in each tensor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ..errors import WidthsError, did_you_mean
from ..graph.channel_graph import ChannelGraph, Layout, Run
from ..graph.parameters import ChannelAxis, filter_axes, scale_axes, spans


@dataclass(frozen=True)
class KeptChannels:
    """Atom -> the original channels that are kept, in order; -1 is a new channel."""

    channels: Mapping[int, Tensor]
    known: dict[tuple[Run, ...], Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Positions of axes that were asked for: many tensors have the same axes."""
    indices: dict[tuple[tuple[Run, ...], torch.device], Tensor | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The same for `index`."""

    def positions(self, runs: tuple[Run, ...]) -> Tensor:
        """For each position of the new axis, the position of the original axis it comes from, or -1."""
        if runs not in self.known:
            self.known[runs] = self._positions(runs)
        return self.known[runs]

    @cached_property
    def grown(self) -> set[int]:
        """Atoms with new channels."""
        return {atom for atom, channels in self.channels.items() if (channels < 0).any()}

    def has_new(self, layout: Layout) -> bool:
        """Whether a tensor of this layout gets new channels."""
        return bool(self.grown) and any(run.atom in self.grown for runs in layout for run in runs)

    def index(self, runs: tuple[Run, ...], device: torch.device) -> Tensor | None:
        """The positions on a device; None where an axis keeps all channels, and gets no new ones."""
        key = runs, device
        if key not in self.indices:
            positions, size = self.positions(runs), sum(run.length for run in runs)
            is_whole = torch.equal(positions, torch.arange(size))
            self.indices[key] = None if is_whole else positions.to(device)
        return self.indices[key]

    def axes(self, graph: ChannelGraph) -> dict[str, list[list[int] | None]]:
        """The same in plain values, by tensor: for each axis its positions, or None where it keeps all.

        Axes that keep the same share one list.
        """
        plain: dict[tuple[Run, ...], list[int] | None] = {}
        for runs in {runs for layout in graph.layouts.values() for runs in layout}:
            is_whole = self.index(runs, torch.device("cpu")) is None
            plain[runs] = None if is_whole else self.positions(runs).tolist()
        axes = {name: [plain[runs] for runs in layout] for name, layout in graph.layouts.items()}
        return {name: found for name, found in axes.items() if any(axis is not None for axis in found)}

    @classmethod
    def from_axes(
        cls, graph: ChannelGraph, units: Sequence[int], axes: Mapping[str, Sequence[Sequence[int] | None]]
    ) -> "KeptChannels":
        """Read back what `axes` gave; a ValueError where it does not fit the graph."""
        channels: dict[int, Tensor] = {}
        for name, layout in graph.layouts.items():
            for runs, given in zip(layout, axes.get(name, [None] * len(layout)), strict=True):
                places = range(sum(run.length for run in runs)) if given is None else given
                channels = _channels_at(runs, units, places) | channels
        kept = cls(channels)
        # A file may say anything: what was read must give back the same positions everywhere.
        if kept.axes(graph) != {name: list(found) for name, found in axes.items()}:
            raise ValueError("layers that share channels keep different ones")
        return kept

    def _positions(self, runs: tuple[Run, ...]) -> Tensor:
        pieces = [torch.zeros(0, dtype=torch.long)]
        for run, span in spans(runs):
            if run.tie < 0:
                pieces.append(torch.arange(span.start, span.stop))
            else:
                # A channel that is repeated `inner` times in place takes its positions with it.
                chosen = self.channels[run.atom][:, None]
                places = span.start + chosen * run.inner + torch.arange(run.inner)
                pieces.append(torch.where(chosen >= 0, places, -1).flatten())
        return torch.cat(pieces)


def _channels_at(runs: tuple[Run, ...], units: Sequence[int], places: Sequence[int]) -> dict[int, Tensor]:
    """Atom -> the channels that an axis keeps of it, from the positions that the axis keeps."""
    channels, start = {}, 0
    for run, span in spans(runs):
        stop = start + (run.size if run.tie < 0 else units[run.tie]) * run.inner
        if run.tie >= 0 and run.atom not in channels:
            # One position of each channel says which channel it is.
            kept = torch.tensor(places[start : stop : run.inner], dtype=torch.long)
            if (kept >= span.stop).any():
                raise ValueError(f"an axis of {span.stop} channels has no channel {int(kept.max())}")
            channels[run.atom] = torch.where(kept < 0, -1, (kept - span.start) // run.inner)
        start = stop
    return channels


@dataclass(frozen=True)
class ChannelScores:
    """Atom -> one score per channel. The channels with the highest scores are kept."""

    by_atom: Mapping[int, Tensor]

    @classmethod
    def from_axes(cls, graph: ChannelGraph, values: Iterable[tuple[ChannelAxis, Tensor]]) -> "ChannelScores":
        """Sums of values along axes of parameters, one value per position of the axis."""
        scores: dict[int, Tensor] = {}
        for place, along in values:
            _add(scores, place.runs(graph), along.detach().float().cpu())
        return cls(scores)

    def by_tie(self, graph: ChannelGraph) -> dict[str, Tensor]:
        """Tie -> scores in descending order: how much its best, second best, ... channel is worth.

        Of a tie with several atoms, the means over them: one more unit keeps a channel of each.
        """
        ties: dict[str, list[Tensor]] = {name: [] for name in graph.widths}
        names = list(graph.widths)
        for atom, run in _atoms(graph).items():
            if atom in self.by_atom:
                ties[names[run.tie]].append(self.by_atom[atom].sort(descending=True).values)
        return {name: torch.stack(values).mean(0) for name, values in ties.items() if values}


def select_channels(
    graph: ChannelGraph, units: Sequence[int], scores: Mapping[int, Tensor] | None = None
) -> KeptChannels:
    """Keep the `units` channels of each atom with the highest scores (without scores, the first ones).

    The kept channels stay in their order. New channels follow where the atom has fewer than `units`.
    """
    channels = {}
    for atom, run in _atoms(graph).items():
        wanted = units[run.tie]
        count = min(wanted, run.size)
        if scores is None:
            best = torch.arange(count)
        else:
            # In their order, not by score: the network is the original with some of its channels left out.
            best = torch.topk(scores[atom][: run.size].float(), count).indices.sort().values.cpu()
        channels[atom] = torch.cat([best, torch.full((wanted - count,), -1)])
    return KeptChannels(channels)


def select_best(
    model: nn.Module,
    graph: ChannelGraph,
    units: Sequence[int],
    scores: Mapping[str, Tensor] | ChannelScores | None,
) -> KeptChannels:
    """Keep the channels with the highest scores (tie -> one per channel); of ties without, by the default."""
    by_atom = dict(scores.by_atom) if isinstance(scores, ChannelScores) else {}
    if not isinstance(scores, ChannelScores):
        for name, given in (scores or {}).items():
            by_atom |= _scores_of_tie(graph, name, given)
    if not by_atom.keys() >= _atoms(graph).keys():
        by_atom = _default_scores(model, graph) | by_atom
    return select_channels(graph, units, by_atom)


def _atoms(graph: ChannelGraph) -> dict[int, Run]:
    """Atom -> one of its runs, which holds its tie and size."""
    layouts = graph.layouts.values()
    return {run.atom: run for layout in layouts for runs in layout for run in runs if run.tie >= 0}


def _default_scores(model: nn.Module, graph: ChannelGraph) -> dict[int, Tensor]:
    """Atom -> scores: the scales of its norm layers where it has any, else the norms of its filters."""
    scores = {atom: torch.zeros(run.size) for atom, run in _atoms(graph).items()}
    for place in filter_axes(model, graph, gates=True):
        norms = place.reduce(place.tensor.detach().float(), torch.linalg.vector_norm)
        _add(scores, place.runs(graph), norms.cpu())
    scales: dict[int, Tensor] = {}
    for place in scale_axes(model, graph, gates=True):
        scale = place.tensor.detach().abs().float().cpu()
        _add(scales, place.runs(graph), place.reduce(scale, torch.mean))
    # Where a norm layer scales a channel, the size of its filter means nothing.
    return scores | scales


def _add(scores: dict[int, Tensor], runs: Sequence[Run], values: Tensor) -> None:
    """Add values along an axis to the scores of the channels there."""
    for run, span in spans(runs):
        if run.tie >= 0:
            # A channel that fills several positions counts by their mean.
            mean = values[span].view(run.size, run.inner).mean(1)
            scores[run.atom] = scores[run.atom] + mean if run.atom in scores else mean


def per_channel(graph: ChannelGraph, by_atom: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Tie -> one score per channel, from those of its atoms. A tie without scores for all is left out."""
    found = {}
    for index, name in enumerate(graph.widths):
        runs = _runs_of_tie(graph, index, name)
        if all(run.atom in by_atom for run in runs):
            found[name] = torch.cat([by_atom[run.atom].repeat_interleave(run.inner) for run in runs])
    return found


def _runs_of_tie(graph: ChannelGraph, index: int, name: str) -> list[Run]:
    """The runs of a tie where it has its whole width."""
    member = next(member for member in graph.ties[name].members if member.multiplicity == "1")
    return [run for run in graph.layouts[member.tensor][member.axis] if run.tie == index]


def _scores_of_tie(graph: ChannelGraph, name: str, given: Tensor) -> dict[int, Tensor]:
    """Scores of a tie that the caller gives, by atom."""
    tie = graph.ties.get(name)
    if tie is None or tie.fixed is not None:
        raise WidthsError(f"scores: no free tie is called {name!r}.{did_you_mean(name, graph.widths)}")
    given = torch.as_tensor(given).detach().float().cpu()
    if given.shape != (tie.width,):
        raise WidthsError(f"scores of {name}: give {tie.width} numbers, not a shape of {tuple(given.shape)}.")
    if not torch.isfinite(given).all():
        raise WidthsError(f"scores of {name}: not all of them are finite.")
    scores: dict[int, Tensor] = {}
    _add(scores, _runs_of_tie(graph, list(graph.widths).index(name), name), given)
    return scores

"""Which channels stay: the best of each atom by score, and where they lie in each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import WidthsError, did_you_mean
from ..graph.channel_graph import ChannelGraph, Run

__all__ = ["Kept", "channel_scores", "keep", "keep_best"]


@dataclass(frozen=True)
class Kept:
    """For each atom, the original channels that stay, in order; -1 stands for a new channel."""

    channels: tuple[Tensor, ...]

    def positions(self, runs: tuple[Run, ...]) -> Tensor:
        """For each place of a new axis, the place in the original axis it comes from, or -1."""
        pieces = []
        offset = 0
        for run in runs:
            if run.tie < 0:
                pieces.append(torch.arange(offset, offset + run.length))
            else:
                chosen = self.channels[run.atom]
                places = offset + chosen[:, None] * run.inner + torch.arange(run.inner)
                pieces.append(torch.where(chosen[:, None] >= 0, places, -1).flatten())
            offset += run.length
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)


def _atoms(graph: ChannelGraph) -> dict[int, Run]:
    """Atom -> one run of it, for its tie and size."""
    return {
        run.atom: run for layout in graph.layouts.values() for runs in layout for run in runs if run.tie >= 0
    }


def keep(graph: ChannelGraph, units: Sequence[int], scores: Sequence[Tensor]) -> Kept:
    """The `units` channels with the highest score of each atom, in their original order, then new ones where there are too few."""
    channels = [torch.zeros(0, dtype=torch.long)] * graph.num_atoms
    for atom, run in _atoms(graph).items():
        wanted = units[run.tie]
        best = torch.topk(scores[atom][: run.size].float(), min(wanted, run.size)).indices.sort().values.cpu()
        channels[atom] = torch.cat([best, torch.full((max(0, wanted - run.size),), -1)])
    return Kept(tuple(channels))


def keep_best(
    model: nn.Module, graph: ChannelGraph, units: Sequence[int], scores: Mapping[str, Tensor] | None
) -> Kept:
    per_atom = channel_scores(model, graph)
    for name, given in (scores or {}).items():
        _overwrite(graph, per_atom, name, given)
    return keep(graph, units, per_atom)


def channel_scores(model: nn.Module, graph: ChannelGraph) -> list[Tensor]:
    """The default score of each channel of each atom: the scale of its norm layers where it has any, else the norm of its filters."""
    tensors = dict(model.named_parameters())
    scales = [torch.zeros(0)] * graph.num_atoms
    norms = [torch.zeros(0)] * graph.num_atoms
    has_scale = [False] * graph.num_atoms
    for atom, run in _atoms(graph).items():
        scales[atom], norms[atom] = torch.zeros(run.size), torch.zeros(run.size)
    for name in graph.scales:
        if name not in tensors:
            continue
        scale = tensors[name].detach().abs().float().cpu()
        for axis, runs in enumerate(graph.layouts[name]):
            others = [other for other in range(scale.ndim) if other != axis]
            for atom in _add(scales, runs, scale.mean(dim=others) if others else scale):
                has_scale[atom] = True
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            continue
        producing = 1 if graph.consumers.get(name) == (0,) else 0
        others = [axis for axis in range(tensor.ndim) if axis != producing]
        _add(
            norms,
            graph.layouts[name][producing],
            torch.linalg.vector_norm(tensor.detach().float(), dim=others).cpu(),
        )
    return [scale if has else norm for scale, norm, has in zip(scales, norms, has_scale, strict=True)]


def _add(scores: list[Tensor], runs: tuple[Run, ...], values: Tensor) -> list[int]:
    """Add one value per place of an axis to the scores of the channels that lie there."""
    touched = []
    offset = 0
    for run in runs:
        if run.tie >= 0:
            scores[run.atom] = scores[run.atom] + values[offset : offset + run.length].view(
                run.size, run.inner
            ).mean(1)
            touched.append(run.atom)
        offset += run.length
    return touched


def _overwrite(graph: ChannelGraph, per_atom: list[Tensor], name: str, given: Tensor) -> None:
    tie = graph.ties.get(name)
    if tie is None or tie.fixed is not None:
        raise WidthsError(f"scores: no free tie is called {name!r}.{did_you_mean(name, graph.widths)}")
    given = torch.as_tensor(given).detach().float().cpu()
    if given.shape != (tie.width,):
        raise WidthsError(
            f"scores of {name}: {tie.width} numbers are needed, one per channel, not shape {tuple(given.shape)}."
        )
    if not torch.isfinite(given).all():
        raise WidthsError(f"scores of {name}: not all of them are finite numbers.")
    index = list(graph.widths).index(name)
    member = next(member for member in tie.members if member.multiplicity == "1")
    position = 0
    sums: dict[int, Tensor] = {}
    for run in graph.layouts[member.tensor][member.axis]:
        if run.tie == index:
            values = given[position : position + run.length].view(run.size, run.inner).mean(1)
            sums[run.atom] = sums.get(run.atom, torch.zeros(run.size)) + values
            position += run.length
    for atom, values in sums.items():
        per_atom[atom] = values

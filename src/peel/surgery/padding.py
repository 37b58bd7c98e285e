"""Widths padded with zero channels to what a GPU likes, without changing what the network computes or how it learns.

A channel whose weights are all zero, in the layer that writes it and in the layers that read it, puts out zero, passes back a gradient of
zero, and so stays zero for as long as training goes: the padded network is the same function of the same weights, only faster where odd
widths are slow. That holds while whatever lies between maps zero to zero and treats channels apart (batch norm, ReLU, SiLU, squeeze-excite
gates), and fails for layer norm or a sigmoid in the stream. So it is tried on every network before it is relied on: on a copy whose weights
lie where training may take them, because a branch that starts at zero hides all that is in it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..cost.widths import Widths
from ..graph.channel_graph import ChannelGraph
from ..graph.rebuild import empty_as, rebuild
from .selection import Kept
from .slim import copy_weights, slim

__all__ = ["Padded", "pad"]

log = logging.getLogger("peel")


class Padded:
    """A network with zero channels, and the way back."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, original: ChannelGraph) -> None:
        self.model, self.graph, self.original = model, graph, original

    def unpadded(self, model: nn.Module | None = None) -> nn.Module:
        """The network without its zero channels."""
        first = {name: -torch.arange(float(width)) for name, width in self.graph.widths.items()}
        small = slim(
            model or self.model, self.original.widths, graph=self.graph, weights="inherit", scores=first
        )
        return small.train(self.model.training)


def pad(model: nn.Module, graph: ChannelGraph, raised: Widths) -> Padded | None:
    """The network with its widths raised to these; None where nothing is to be raised, or it would not be the same network.

    `graph` is the network's own (`graph.at(widths)` for a slimmed one).
    """
    if raised == graph.widths:
        return None
    trial = _trial(model, graph)
    return _with_zeros(model, graph, raised) if _is_same(trial, _with_zeros(trial, graph, raised)) else None


def _with_zeros(model: nn.Module, graph: ChannelGraph, raised: Widths) -> Padded:
    units = graph.units(raised)
    padded = rebuild(model, graph, units, _zeros_as)
    # Nothing counts as drawn but what stays zero: every place beyond the original comes from nowhere.
    drawn = {id(tensor) for tensor in [*padded.parameters(), *padded.buffers()]}
    copy_weights(model, padded, graph, _first_channels(graph, units), drawn)
    return Padded(padded, graph.at(raised), graph)


def _zeros_as(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    new = empty_as(tensor, shape)
    with torch.no_grad():
        new.zero_()
    return new


def _first_channels(graph: ChannelGraph, units: list[int]) -> Kept:
    channels = [torch.zeros(0, dtype=torch.long)] * graph.num_atoms
    for layout in graph.layouts.values():
        for runs in layout:
            for run in runs:
                if run.tie >= 0:
                    places = torch.arange(units[run.tie])
                    channels[run.atom] = torch.where(places < run.size, places, -1)
    return Kept(tuple(channels))


def _trial(model: nn.Module, graph: ChannelGraph) -> nn.Module:
    """A copy in double precision whose parameters that are all one number (scales of zero or one, biases of zero) are no more.

    They move up, by no little: what is positive stays so, and what was zero counts. In double precision what one channel among hundreds
    does to a mean is not mistaken for two orders of the same sum.
    """
    chance = torch.Generator().manual_seed(0)

    def copied(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        new = tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)
        if not isinstance(tensor, nn.Parameter):
            return new
        if new.is_floating_point() and new.numel() and bool((new == new.flatten()[0]).all()):
            new += (0.25 + 0.5 * torch.rand(shape, generator=chance)).to(new)
        return nn.Parameter(new, requires_grad=tensor.requires_grad)

    return rebuild(model, graph, graph.units(), copied)


class _Pass(NamedTuple):
    """What a network makes of some inputs in training mode."""

    scores: Tensor
    gradients: dict[str, Tensor]


def _is_same(model: nn.Module, padded: Padded) -> bool:
    """Whether the two give the same outputs and learn the same, and the zero channels get gradients of exactly zero."""
    plain, wide = _try(model, padded.original), _try(padded.model, padded.graph)
    if plain is None or wide is None or wide.scores.shape != plain.scores.shape:
        return False
    beyond = {name: _beyond(padded, name, gradient) for name, gradient in wide.gradients.items()}
    if any(bool(gradient[beyond[name]].any()) for name, gradient in wide.gradients.items()):
        return False
    real = [gradient[~beyond[name]] for name, gradient in wide.gradients.items()]
    return _are_close([wide.scores], [plain.scores]) and _are_close(real, list(plain.gradients.values()))


def _are_close(given: list[Tensor], wanted: list[Tensor]) -> bool:
    """Measured by the largest number of all: a bias before a batch norm has no gradient but rounding errors, whose size says nothing."""
    mine, theirs = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (given, wanted))
    # Not "not greater": what is no number is not close.
    return bool((mine - theirs).abs().max() <= 1e-6 * theirs.abs().max())


def _try(network: nn.Module, graph: ChannelGraph) -> _Pass | None:
    """One pass there and back, by which the network itself is changed; None where there are no scores to compare."""
    chance = torch.Generator().manual_seed(0)
    examples = [
        torch.randn(4, *shape[1:], generator=chance).to(next(network.parameters()))
        for shape in graph.input_shapes
    ]
    network.train()
    for module in network.modules():
        if isinstance(module, _DropoutNd):
            # It would draw as many numbers as there are channels: alike in kind, but not number by number.
            module.eval()
    named = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    with _own_chance(examples[0].device), torch.enable_grad():
        try:
            scores = _scores(network(*examples))
        except RuntimeError as error:
            # It insists on a precision or a size of its own.
            log.info(
                "zero channels could not be tried on the network: %s", " ".join(str(error).split())[:200]
            )
            return None
        if scores is None:
            return None
        # A mix that no network is made for: the squares of scores that are normalised, say, have no gradient.
        mixed = (scores * torch.randn(scores.shape, generator=chance).to(scores)).mean()
        gradients = torch.autograd.grad(
            mixed, list(named.values()), allow_unused=True, materialize_grads=True
        )
    return _Pass(scores.detach(), dict(zip(named, gradients, strict=True)))


@contextlib.contextmanager
def _own_chance(device: torch.device) -> Iterator[None]:
    """The same random numbers each time; those of everyone else go on as if none had been drawn."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _scores(output: object) -> Tensor | None:
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, Tensor) else None


def _beyond(padded: Padded, name: str, tensor: Tensor) -> Tensor:
    """Where a tensor of the padded network has no counterpart in the original: a mask."""
    inside = torch.ones((), dtype=torch.bool, device=tensor.device)
    for axis, (old, new) in enumerate(
        zip(padded.original.layouts[name], padded.graph.layouts[name], strict=True)
    ):
        places = torch.cat(
            [
                torch.arange(after.length, device=tensor.device) < before.length
                for before, after in zip(old, new, strict=True)
            ]
        )
        inside = inside & places.view([-1 if other == axis else 1 for other in range(tensor.ndim)])
    return ~inside.expand(tensor.shape)

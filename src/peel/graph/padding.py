"""Widths padded with zero channels to what a GPU likes, without changing what the network computes or how it learns.

A channel whose weights are all zero, in the layer that writes it and in the layers that read it, puts out zero, passes back a gradient of
zero, and so stays zero for as long as training goes: the padded network is the same function of the same weights, only faster where odd
widths are slow. That holds while whatever lies between maps zero to zero and treats channels apart (batch norm, ReLU, SiLU, squeeze-excite
gates), and fails for layer norm or a sigmoid in the stream. So it is tried on every network before it is relied on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..widths import Widths
from .channel_graph import ChannelGraph
from .selection import Kept
from .surgery import copy_weights, empty_as, rebuild, slim

__all__ = ["Padded", "pad"]


class Padded:
    """A network with zero channels, and the way back."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, original: ChannelGraph) -> None:
        self.model, self.graph, self.original = model, graph, original

    def unpadded(self, model: nn.Module | None = None) -> nn.Module:
        """The network without its zero channels."""
        first = {name: -torch.arange(float(width)) for name, width in self.graph.widths.items()}
        small = slim(model or self.model, self.original.widths, graph=self.graph, weights="inherit", scores=first)
        return small.train(self.model.training)


def pad(model: nn.Module, graph: ChannelGraph, raised: Widths) -> Padded | None:
    """The network with its widths raised to these; None where nothing is to be raised, or it would not be the same network.

    `graph` is the network's own (`graph.at(widths)` for a slimmed one).
    """
    if raised == graph.widths:
        return None
    units = graph.units(raised)
    kept = _first_channels(graph, units)
    padded = rebuild(model, graph, units, _zeros_as)
    # Nothing counts as drawn but what stays zero: every place beyond the original comes from nowhere.
    copy_weights(model, padded, graph, kept, {id(tensor) for tensor in [*padded.parameters(), *padded.buffers()]})
    result = Padded(padded, graph.at(raised), graph)
    return result if _is_same(model, result) else None


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


def _is_same(model: nn.Module, padded: Padded) -> bool:
    """Whether the two give the same outputs in training mode, and the zero channels get gradients of exactly zero."""
    chance = torch.Generator().manual_seed(0)
    examples = [torch.randn(4, *shape[1:], generator=chance).to(next(model.parameters())) for shape in padded.graph.input_shapes]
    with _undisturbed(model), torch.no_grad():
        wanted = _scores(model(*examples))
    with _undisturbed(padded.model), torch.enable_grad():
        given = _scores(padded.model(*examples))
        if wanted is None or given is None or given.shape != wanted.shape:
            return False
        if (given - wanted).detach().abs().max() > 1e-3 * wanted.abs().max().clamp_min(1e-6):
            return False
        named = {name: parameter for name, parameter in padded.model.named_parameters() if parameter.requires_grad}
        gradients = torch.autograd.grad(given.square().mean(), list(named.values()), allow_unused=True)
    pairs = zip(named, gradients, strict=True)
    return not any(gradient is not None and bool(gradient[_beyond(padded, name, gradient)].any()) for name, gradient in pairs)


@contextlib.contextmanager
def _undisturbed(network: nn.Module) -> Iterator[None]:
    """Training mode and full precision for a while; mode, buffers and random numbers are as before afterwards."""
    was_training = network.training
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    matmul = torch.backends.cuda.matmul
    was_short, matmul.allow_tf32 = matmul.allow_tf32, False
    # The shortened numbers of tensor cores would make two orders of the same sum look like two networks.
    with torch.random.fork_rng(devices=[]), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.manual_seed(0)
        network.train()
        for module in network.modules():
            if isinstance(module, _DropoutNd):
                # It would draw as many numbers as there are channels: alike in kind, but not number by number.
                module.eval()
        try:
            yield
        finally:
            matmul.allow_tf32 = was_short
            network.train(was_training)
            for name, buffer in network.named_buffers():
                buffer.copy_(buffers[name])


def _scores(output: object) -> Tensor | None:
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, Tensor) else None


def _beyond(padded: Padded, name: str, tensor: Tensor) -> Tensor:
    """Where a tensor of the padded network has no counterpart in the original: a mask."""
    inside = torch.ones((), dtype=torch.bool, device=tensor.device)
    for axis, (old, new) in enumerate(zip(padded.original.layouts[name], padded.graph.layouts[name], strict=True)):
        places = torch.cat(
            [torch.arange(after.length, device=tensor.device) < before.length for before, after in zip(old, new, strict=True)]
        )
        inside = inside & places.view([-1 if other == axis else 1 for other in range(tensor.ndim)])
    return ~inside.expand(tensor.shape)

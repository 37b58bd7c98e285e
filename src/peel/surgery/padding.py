"""Zero channels that raise widths to those a GPU trains fastest, without changing what a network computes.

A channel whose weights are all zero, where it is written and where it is read, outputs zero and gets a
gradient of zero, so it stays zero during training. This holds for batch norm, ReLU and squeeze-excite. It
fails for layer norm or a sigmoid in the stream, so `pad` tries it on a copy first.
"""

import logging
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor, nn

from ..cost.widths import Widths
from ..graph.capture import untouched
from ..graph.channel_graph import ChannelGraph
from ..graph.copying import deep_copy
from ..graph.layers import DROPOUTS
from ..graph.rebuild import empty_as, rebuild
from .selection import select_channels
from .slim import copy_channels, copy_weights, slim

#: Tensor cores want multiples of this.
MULTIPLE = 8

log = logging.getLogger("peel")


def fast_widths(model: nn.Module, graph: ChannelGraph) -> Widths:
    """The nearest widths, none of them smaller, that train fastest. `graph` is the model's own.

    Kernels of convolutions over several pixels work on tiles of channels. Between the tiles a narrower layer
    is no faster, sometimes half as fast (48 channels against 64).
    """
    tiled = _tiled_ties(model, graph)
    raised = {}
    for name, width in graph.widths.items():
        step = lcm(_tile(width) if name in tiled else MULTIPLE, graph.steps[name])
        raised[name] = -(-width // step) * step
    return Widths(raised)


def _tile(width: int) -> int:
    # The best of sixteen rules that were timed on an H200 (docs/training.md).
    if width <= 32:
        return MULTIPLE
    return 32 if 64 < width <= 128 else 64


def _tiled_ties(model: nn.Module, graph: ChannelGraph) -> set[str]:
    """Ties read or written by an ungrouped convolution over several pixels whose two sides are both free."""
    names = list(graph.widths)
    found: set[str] = set()
    for name, module in model.named_modules():
        is_convolution = isinstance(module, nn.Conv2d | nn.ConvTranspose2d)
        if is_convolution and module.groups == 1 and max(module.kernel_size) > 1:
            layout = graph.layouts.get(f"{name}.weight", ((), ()))
            sides = [{names[run.tie] for run in runs if run.tie >= 0} for runs in layout[:2]]
            if all(sides):
                found.update(*sides)
    return found


@dataclass(frozen=True)
class Padded:
    """A network with zero channels, its graph, and the graph of the network without them."""

    model: nn.Module
    graph: ChannelGraph
    original: ChannelGraph

    def unpadded(self, model: nn.Module | None = None) -> nn.Module:
        """The network without its zero channels."""
        first = {name: -torch.arange(float(width)) for name, width in self.graph.widths.items()}
        model = model or self.model
        small = slim(model, self.original.widths, graph=self.graph, weights="inherit", scores=first)
        return small.train(self.model.training)


def pad(model: nn.Module, graph: ChannelGraph, raised: Widths) -> Padded | None:
    """The network at the raised widths; None where nothing is raised or padding would change the network.

    `graph` is the network's own (`graph.at(widths)` for a slim one).
    """
    if raised == graph.widths:
        return None
    trial = _trial_copy(model)
    return _with_zeros(model, graph, raised) if _is_same(trial, _with_zeros(trial, graph, raised)) else None


@torch.no_grad()
def _with_zeros(model: nn.Module, graph: ChannelGraph, raised: Widths) -> Padded:
    units = graph.units(raised)
    padded = rebuild(model, graph, units, lambda tensor, shape: empty_as(tensor, shape).zero_())
    keep_zeros = {id(tensor) for tensor in [*padded.parameters(), *padded.buffers()]}
    copy_weights(model, padded, graph, select_channels(graph, units), keep_zeros)
    return Padded(padded, graph.at(raised), graph)


def _trial_copy(model: nn.Module) -> nn.Module:
    """A copy in double precision whose constant parameters (scales of zero or one, zero biases) are changed.

    A branch scaled by zero would hide an error. In double precision the effect of one channel among hundreds
    is larger than rounding errors.
    """
    trial = deep_copy(model).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in trial.parameters():
        values = parameter.data
        if values.is_floating_point() and values.numel() and bool((values == values.flatten()[0]).all()):
            values += (0.25 + 0.5 * torch.rand(values.shape, generator=generator)).to(values)
    return trial


def _is_same(model: nn.Module, padded: Padded) -> bool:
    """Whether outputs and gradients are the same, with gradients of exactly zero for the zero channels."""
    plain, wide = _try(model, padded.original), _try(padded.model, padded.graph)
    if plain is None or wide is None or wide[0].shape != plain[0].shape:
        return False
    kept = select_channels(padded.original, padded.original.units(padded.graph.widths))
    real = []
    for name, gradient in wide[1].items():
        is_real = torch.zeros_like(gradient)
        positions = [kept.positions(runs) for runs in padded.original.layouts[name]]
        copy_channels(torch.ones_like(plain[1][name]), is_real, positions)
        # A zero channel that gets a gradient would not stay zero.
        if gradient[is_real == 0].any():
            return False
        real.append(gradient[is_real == 1])
    return _are_close([wide[0]], [plain[0]]) and _are_close(real, list(plain[1].values()))


def _are_close(given: list[Tensor], wanted: list[Tensor]) -> bool:
    """Relative to the largest number: some gradients are only rounding errors (a bias before batch norm)."""
    mine, theirs = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (given, wanted))
    return bool((mine - theirs).abs().max() <= 1e-6 * theirs.abs().max())  # False for NaN


def _try(network: nn.Module, graph: ChannelGraph) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Logits and gradients of one pass in training mode, which changes the network; None where it fails."""
    generator = torch.Generator().manual_seed(0)
    like = next(network.parameters())
    examples = [torch.randn(4, *shape[1:], generator=generator).to(like) for shape in graph.input_shapes]
    network.train()
    for module in network.modules():
        if isinstance(module, DROPOUTS):
            module.eval()  # it draws one number per channel
    named = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    with untouched(), torch.enable_grad():
        torch.manual_seed(0)
        try:
            output = network(*examples)
        except RuntimeError as error:
            # The network needs another precision or input size.
            log.info("padding could not be tried on the network: %s", str(error)[:200])
            return None
        logits = output[0] if isinstance(output, tuple) else output
        if not isinstance(logits, Tensor):
            return None
        # Random weights: a sum or a sum of squares may have no gradient (normalized logits).
        mixed = (logits * torch.randn(logits.shape, generator=generator).to(logits)).mean()
        found = torch.autograd.grad(mixed, list(named.values()), allow_unused=True, materialize_grads=True)
    return logits.detach(), dict(zip(named, found, strict=True))

"""The widths at which a GPU trains a network fastest, none of them smaller than it is.

Tensor cores want multiples of eight. A convolution that looks at more than one pixel and sums over all channels wants more: its kernels are
made for tiles of channels, and between the tiles a smaller layer is no faster than a larger one, sometimes half as fast (48 channels
against 64; benchmarks/train.py --parts layers).
"""

from __future__ import annotations

from math import lcm

from torch import nn

from ..cost.widths import Widths
from ..graph.channel_graph import ChannelGraph

__all__ = ["fast_widths"]

MULTIPLE = 8


def fast_widths(model: nn.Module, graph: ChannelGraph) -> Widths:
    """`graph` is the network's own (`graph.at(widths)` for a slimmed one)."""
    between = _between_wide_convolutions(model, graph)
    raised = {}
    for name, width in graph.widths.items():
        step = lcm(_tile(width) if name in between else MULTIPLE, graph.steps[name])
        raised[name] = -(-width // step) * step
    return Widths(raised)


def _tile(width: int) -> int:
    """What a width that is written and read by such convolutions should be a multiple of."""
    if width <= 32:
        return MULTIPLE
    if 64 < width <= 128:
        return 32
    return 64


def _between_wide_convolutions(model: nn.Module, graph: ChannelGraph) -> set[str]:
    """Ties on a side of a convolution of several pixels whose inputs and outputs are both free: not the first layer, which reads colours,
    and none with groups.
    """
    names = list(graph.widths)
    found: set[str] = set()
    for module_name, module in model.named_modules():
        if (
            isinstance(module, nn.Conv2d | nn.ConvTranspose2d)
            and module.groups == 1
            and max(module.kernel_size) > 1
        ):
            layout = graph.layouts.get(f"{module_name}.weight", ((), ()))
            sides = [{names[run.tie] for run in runs if run.tie >= 0} for runs in layout[:2]]
            if all(sides):
                found.update(*sides)
    return found

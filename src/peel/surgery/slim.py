"""`slim`: a new model at other widths, made from the user's own class and code. The given one is not changed.

The new model is a deep copy whose parameters and buffers have new shapes; attributes that mirror widths are
set afterwards. Only the initialization of fresh weights knows about kinds of layers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..cost.widths import Widths
from ..errors import WidthsError, check_choice
from ..graph.channel_graph import ChannelGraph
from ..graph.layers import CONVOLUTIONS, NORMS, refuse_meta_tensors
from ..graph.probe import check_network
from ..graph.rebuild import check_graph, empty_as, evaluate, rebuild, tensors_of
from .info import SlimInfo, attach_info, changed_sizes, info_of, weights_fingerprint
from .selection import ChannelScores, KeptChannels, select_best


def slim(
    model: nn.Module,
    widths: Mapping[str, int],
    *,
    graph: ChannelGraph,
    weights: Literal["fresh", "inherit"] = "fresh",
    scores: Mapping[str, Tensor] | ChannelScores | None = None,
) -> nn.Module:
    """A new model at the given widths, smaller or larger.

    `weights="fresh"` initializes as training recipes from scratch do. `weights="inherit"` keeps, per tie, the
    channels with the highest scores (by default the scales of their norm layers, else the norms of their
    filters) and initializes channels beyond the original width. `scores` maps tie names to one score per
    channel, in the order of the tie's first layer.

    The code of the new model runs once, without data: it must do what the graph predicts for these widths.

    >>> graph = peel.trace(model, torch.randn(1, 3, 224, 224))
    >>> small = peel.slim(model, peel.uniform(graph, "50%"), graph=graph)
    """
    check_choice("weights", weights, ("fresh", "inherit"), WidthsError)
    if scores is not None and weights == "fresh":
        raise WidthsError('scores select the channels to keep. Use them with weights="inherit".')
    if not isinstance(graph, ChannelGraph):
        raise WidthsError(f"graph is a ChannelGraph from peel.trace, not a {type(graph).__name__}.")
    small = build_slim(model, widths, graph, is_fresh=weights == "fresh", scores=scores)
    if graph.units(widths) != graph.units():
        with torch.inference_mode(False):
            check_network(small, graph, widths, model)
    return small


def build_slim(
    model: nn.Module,
    widths: Mapping[str, int],
    graph: ChannelGraph,
    *,
    is_fresh: bool = False,
    scores: Mapping[str, Tensor] | ChannelScores | None = None,
) -> nn.Module:
    """`slim` without running the code of the new model: for networks that are only compared."""
    check_graph(model, graph)
    if not is_fresh:
        refuse_meta_tensors(model)
    units = graph.units(widths)
    with torch.inference_mode(False):
        kept = None if is_fresh else select_best(model, graph, units, scores)
        small = rebuild(model, graph, units, empty_as)
        grows = any(new > old for new, old in zip(units, graph.units(), strict=True))
        drawn = initialize(small) if is_fresh or grows else set()
        copy_weights(model, small, graph, kept, drawn)
    info = _info(graph, graph.check(widths), model, small, kept).after(info_of(model))
    original = "" if kept is None else weights_fingerprint(model)
    attach_info(small, replace(info, original=original))
    return small


def _info(
    graph: ChannelGraph, widths: Widths, model: nn.Module, small: nn.Module, kept: KeptChannels | None
) -> SlimInfo:
    macs, params = graph.macs(widths), graph.params(widths)
    costs: dict[str, Any] = {"macs": macs, "params": params, "input_shapes": graph.input_shapes}
    if graph.modules:
        costs["modules"] = graph.modules
    return SlimInfo(
        source={},
        widths=dict(widths),
        modules=evaluate(graph.attributes, graph.units(widths)),
        costs=costs,
        original_shapes=changed_sizes(tensors_of(model), tensors_of(small)),
        kept=None if kept is None else kept.axes(graph),
    )


def initialize(model: nn.Module) -> set[int]:
    """Draw weights as training recipes do. Returns the ids of the tensors that were drawn."""
    drawn: set[int] = set()
    for module in model.modules():
        tensors = dict([*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)])
        for name, draw in _initializers(module).items():
            if name in tensors:
                draw(tensors[name])
                drawn.add(id(tensors[name]))
    return drawn


def _initializers(module: nn.Module) -> dict[str, Callable[[Tensor], Any]]:
    """He (fan-out) for convolutions, torch's default for linear layers, 1 and 0 for norm layers."""
    if isinstance(module, CONVOLUTIONS):
        # As torch and published recipes have it, which ignore groups. By the connections of an output, a
        # depthwise layer would start with weights as large as the square root of its number of channels.
        fan_out = math.prod(module.kernel_size) * module.out_channels
        normal = partial(nn.init.normal_, mean=0.0, std=math.sqrt(2.0 / fan_out))
        return {"weight": normal, "bias": nn.init.zeros_}
    if isinstance(module, nn.Linear):
        bound = 1 / math.sqrt(max(1, module.in_features))
        uniform = partial(nn.init.uniform_, a=-bound, b=bound)
        return {"weight": uniform, "bias": uniform}
    has_statistics = {"running_mean", "running_var"} <= dict(module.named_buffers(recurse=False)).keys()
    if isinstance(module, NORMS) or has_statistics:  # a frozen batch norm is a class of its own
        ones = dict.fromkeys(("weight", "running_var"), nn.init.ones_)
        return {**ones, **dict.fromkeys(("bias", "running_mean", "num_batches_tracked"), nn.init.zeros_)}
    return {}


@torch.no_grad()
def copy_weights(
    model: nn.Module, small: nn.Module, graph: ChannelGraph, kept: KeptChannels | None, drawn: set[int]
) -> None:
    """Copy the kept channels (none with fresh weights), and fill every tensor that was not drawn."""
    targets = tensors_of(small)
    for name, source in tensors_of(model).items():
        target, layout = targets[name], graph.layouts[name]
        if kept is not None and not kept.has_new(layout):
            indices = [kept.index(runs, source.device) for runs in layout]
            target.copy_(_select(source, indices))
            continue
        if id(target) not in drawn:
            # How to draw this tensor is unknown (a layer scale, a position embedding): repeat its channels.
            sizes = zip(target.shape, source.shape, strict=True)
            copy_channels(source, target, [torch.arange(new) % max(1, old) for new, old in sizes])
        if kept is not None:
            copy_channels(source, target, [kept.positions(runs) for runs in layout])


def copy_channels(source: Tensor, target: Tensor, index: list[Tensor]) -> None:
    """Fill the target from the positions of the source in `index`, one tensor per axis; -1 leaves a place."""
    source = _select(source, [places[places >= 0].to(source.device) for places in index])
    if source.shape == target.shape:
        target.copy_(source)
        return
    filled = [torch.nonzero(places >= 0).flatten().to(target.device) for places in index]
    target[torch.meshgrid(*filled, indexing="ij")] = source.to(target)


def _select(source: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Select along each axis; None takes all of it."""
    for axis, index in enumerate(indices):
        source = source if index is None else source.index_select(axis, index)
    return source

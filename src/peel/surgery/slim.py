"""`slim`: a new model at other widths, made of the user's own class and code. The given model is never edited.

The new model is a deep copy in which every parameter and buffer was replaced beforehand by one of the new shape; then attributes that
mirror widths are set. Nothing here knows about kinds of layers, except how fresh weights are initialised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ..errors import WidthsError
from ..graph.attributes import evaluate
from ..graph.channel_graph import ChannelGraph
from ..graph.rebuild import empty_as, rebuild, tensors_of
from .selection import Kept, keep_best

__all__ = ["slim"]


def slim(
    model: nn.Module,
    widths: Mapping[str, int],
    *,
    graph: ChannelGraph,
    weights: Literal["fresh", "inherit"] = "fresh",
    scores: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """A new model at the given widths, smaller or larger.

    `weights="fresh"` initialises as training recipes from scratch do. `weights="inherit"` keeps, per tie, the channels with the
    highest score (by default the scale of their norm layers, else the norm of their filters) and initialises channels beyond the
    original width afresh. `scores` maps tie names to one score per channel, in the order of the tie's first layer.

    >>> graph = peel.trace(model, torch.randn(1, 3, 224, 224))
    >>> small = peel.slim(model, peel.uniform(graph, "50%"), graph=graph)
    """
    if weights not in ("fresh", "inherit"):
        raise WidthsError(f'weights is "fresh" or "inherit", not {weights!r}.')
    if scores is not None and weights == "fresh":
        raise WidthsError(
            'scores choose which channels to keep; fresh weights keep none. Use weights="inherit".'
        )
    if not isinstance(graph, ChannelGraph):
        raise WidthsError(f"graph is a ChannelGraph from peel.trace, not a {type(graph).__name__}.")
    check_fits(model, graph)
    units = graph.units(widths)
    with torch.inference_mode(False):
        return _slim(model, graph, units, weights == "fresh", scores)


def _slim(
    model: nn.Module, graph: ChannelGraph, units: list[int], fresh: bool, scores: Mapping[str, Tensor] | None
) -> nn.Module:
    kept = keep_best(model, graph, units, scores) if not fresh else None
    small = rebuild(model, graph, units, empty_as)
    drawn = (
        initialise(small)
        if fresh or any(new > old for new, old in zip(units, graph.units(), strict=True))
        else set()
    )
    copy_weights(model, small, graph, kept, drawn)
    _remember(small, graph, units)
    return small


def _remember(small: nn.Module, graph: ChannelGraph, units: list[int]) -> None:
    """Note on the model what `peel.save` writes beside its weights; what an earlier slimming noted is kept beneath."""
    before: dict[str, Any] = getattr(small, "peel_record", {})
    modules = {**before.get("modules", {})}
    for name, attributes in evaluate(graph.attributes, units).items():
        modules[name] = {**modules.get(name, {}), **attributes}
    widths = {name: unit * step for unit, (name, step) in zip(units, graph.steps.items(), strict=True)}
    small.peel_record = {  # type: ignore[assignment]
        "widths": {**before.get("widths", {}), **widths},
        "modules": modules,
        "costs": {
            "macs": graph.mac_cost.total(units),
            "params": graph.param_cost.total(units),
            "input_shapes": graph.input_shapes,
        },
    }


def check_fits(model: nn.Module, graph: ChannelGraph) -> None:
    """The graph must be one of this model: same tensors, same shapes."""
    for name, tensor in tensors_of(model).items():
        layout = graph.layouts.get(name)
        shape = tuple(sum(run.length for run in runs) for runs in layout) if layout is not None else None
        if shape != tuple(tensor.shape):
            found = (
                "is not in it" if shape is None else f"has shape {shape} there and {tuple(tensor.shape)} here"
            )
            raise WidthsError(
                f"the graph was not traced from this model: {name} {found}. Trace this model and use its own graph."
            )


def initialise(model: nn.Module) -> set[int]:
    """Weights as recipes from scratch draw them: He (fan-out) for convolutions, torch's own for linear layers, 1 and 0 for norms."""
    drawn: set[int] = set()

    def fill(module: nn.Module, name: str, draw: Callable[[Tensor], Any]) -> None:
        tensor = {**module._buffers, **module._parameters}.get(name)
        if tensor is not None:
            with torch.no_grad():
                draw(tensor)
            drawn.add(id(tensor))

    for module in model.modules():
        if isinstance(module, _ConvNd):
            fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
            fill(module, "weight", partial(nn.init.normal_, mean=0.0, std=math.sqrt(2.0 / fan_out)))
            fill(module, "bias", nn.init.zeros_)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(max(1, module.in_features))
            for name in ("weight", "bias"):
                fill(module, name, partial(nn.init.uniform_, a=-bound, b=bound))
        elif isinstance(module, _NormBase | nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
            for name, value in {
                "weight": 1,
                "bias": 0,
                "running_mean": 0,
                "running_var": 1,
                "num_batches_tracked": 0,
            }.items():
                fill(module, name, partial(nn.init.constant_, val=value))
    return drawn


def copy_weights(
    model: nn.Module, small: nn.Module, graph: ChannelGraph, kept: Kept | None, drawn: set[int]
) -> None:
    """Fill the tensors of the small model from the original: the channels that are kept; or, where none are (fresh weights), whatever
    was not drawn."""
    targets = tensors_of(small)
    for name, source in tensors_of(model).items():
        target = targets[name]
        is_drawn = id(target) in drawn
        with torch.no_grad():
            if not is_drawn:
                # Nothing is known of how this tensor is drawn (a layer scale, a position embedding): its first channels, over again.
                _fill_from(
                    source,
                    target,
                    [
                        torch.arange(new) % max(1, old)
                        for new, old in zip(target.shape, source.shape, strict=True)
                    ],
                )
            if kept is not None:
                _fill_from(source, target, [kept.positions(runs) for runs in graph.layouts[name]])


def _fill_from(source: Tensor, target: Tensor, index: list[Tensor]) -> None:
    """Each place of the target from the place of the source that `index` gives for each axis; places at -1 are left as they are."""
    index = [places.to(source.device) for places in index]
    if all(bool((places >= 0).all()) for places in index):
        for axis, places in enumerate(index):
            if len(places) != source.shape[axis] or not torch.equal(
                places, torch.arange(len(places), device=places.device)
            ):
                source = source.index_select(axis, places)
        target.copy_(source)
        return
    for axis, places in enumerate(index):
        source = source.index_select(axis, places[places >= 0])
    target[torch.meshgrid(*(torch.nonzero(places >= 0).flatten() for places in index), indexing="ij")] = (
        source
    )

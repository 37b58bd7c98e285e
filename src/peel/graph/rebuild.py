"""A model rebuilt at other widths: the same classes and code, with tensors of other shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..cost.polynomial import Form
from ..errors import WidthsError
from .channel_graph import ChannelGraph
from .copying import deep_copy


def new_shapes(graph: ChannelGraph, units: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Parameter or buffer name -> its shape at the given units."""
    return {
        name: tuple(
            sum((run.size if run.tie < 0 else units[run.tie]) * run.inner for run in runs) for runs in layout
        )
        for name, layout in graph.layouts.items()
    }


def check_graph(model: nn.Module, graph: ChannelGraph) -> None:
    """Refuse a graph that has other tensors or shapes than the model."""
    shapes = new_shapes(graph, graph.units())
    for name, tensor in tensors_of(model).items():
        if shapes.get(name) != tensor.shape:
            raise WidthsError(
                f"the graph was not traced from this model: {name} has shape {tuple(tensor.shape)}, not "
                f"{shapes.get(name)}. Trace this model and use its own graph."
            )


def rebuild(
    model: nn.Module,
    graph: ChannelGraph,
    units: list[int],
    make: Callable[[Tensor, tuple[int, ...]], Tensor],
) -> nn.Module:
    """A copy of the model whose tensors are made by `make(original, new shape)`, with attributes to match."""
    shapes = new_shapes(graph, units)
    replaced = {id(tensor): make(tensor, shapes[name]) for name, tensor in tensors_of(model).items()}
    twin = deep_copy(model, replaced)
    for name, attributes in evaluate(graph.attributes, units).items():
        set_attributes(twin.get_submodule(name), attributes)
    return twin


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def empty_as(tensor: Tensor, shape: tuple[int, ...], device: str | None = None) -> Tensor:
    """An uninitialized tensor of another shape, like the given one in everything else."""
    new = torch.empty(shape, dtype=tensor.dtype, device=device or tensor.device)
    # A tensor of 1x1 pixels is contiguous in both layouts; then the plain one is taken.
    is_channels_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if is_channels_last and not tensor.is_contiguous():
        new = new.to(memory_format=torch.channels_last)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def evaluate(attributes: Mapping[str, Mapping[str, Any]], units: list[int]) -> dict[str, dict[str, Any]]:
    """Module -> attribute -> number (or list of numbers) at the given units."""

    def number(form: Any) -> Any:
        return form.value(units) if isinstance(form, Form) else [item.value(units) for item in form]

    return {
        module: {name: number(form) for name, form in found.items()} for module, found in attributes.items()
    }


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Write numbers, keeping the type of sequence that the attribute had."""
    for name, value in attributes.items():
        old = getattr(module, name)
        setattr(module, name, type(old)(value) if isinstance(old, list | tuple) else value)

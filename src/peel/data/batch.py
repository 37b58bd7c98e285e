"""A batch: what a model is called with, and what its output is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    inputs: Any
    """A tuple holds positional arguments of the model, a dict keyword arguments; else its one argument.

    Images are normalized, in channels-last memory.
    """
    targets: Any
    """What the loss compares the output with: of images, class numbers."""
    teacher_logits: Tensor | None = None
    """Cached logits of the teacher for these variants of the images."""

    @property
    def size(self) -> int:
        return count_samples(self.inputs)

    def split(self, parts: int) -> list[Batch]:
        """Micro-batches of nearly equal size."""
        return [Batch(*part) for part in zip(*(_split(value, parts) for value in self), strict=True)]

    def clone(self) -> Batch:
        return Batch(*map_tensors(tuple(self), Tensor.clone))

    def fill(self, other: Batch) -> None:
        """Copy another batch of the same shapes into the memory of this one."""
        for mine, theirs in zip(tensors_in(tuple(self)), tensors_in(tuple(other)), strict=True):
            mine.copy_(theirs)


def call_model(model: nn.Module, inputs: Any, *more: Any) -> Any:
    """Call a model with the inputs of a batch, and with further positional arguments."""
    if isinstance(inputs, Mapping):
        return model(*more, **inputs)
    return model(*inputs, *more) if isinstance(inputs, tuple) else model(inputs, *more)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def count_samples(value: Any) -> int:
    """The number of samples in the inputs of a batch: the length of the first tensor or list."""
    if isinstance(value, Mapping | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(count_samples, items)), 0)
    is_empty = not isinstance(value, Tensor | list) or (isinstance(value, Tensor) and value.ndim == 0)
    return 0 if is_empty else len(value)


def _split(value: Any, parts: int) -> list[Any]:
    """A list has one item per sample, a tensor one row."""
    if isinstance(value, Tensor) and value.ndim:
        return list(value.tensor_split(parts))
    if isinstance(value, list):
        places = torch.arange(len(value)).tensor_split(parts)
        return [[value[i] for i in part.tolist()] for part in places]
    if isinstance(value, Mapping):
        split = [_split(item, parts) for item in value.values()]
        return [dict(zip(value, part, strict=True)) for part in zip(*split, strict=True)]
    if isinstance(value, tuple):
        return list(zip(*(_split(item, parts) for item in value), strict=True))
    return [value] * parts

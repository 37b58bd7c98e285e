"""Calls of convolutions and linear layers, seen where torch is called, and the windows of input they read.

A call counts if its weight is a parameter of the model. It does not matter which class calls it: a subclass
with its own padding is seen, and a layer that computes its weight from a parameter is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .original_shapes import ARGUMENTS as _CONV
from .original_shapes import Shapes, call_padded

_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")

#: Function -> the names of its arguments, in order.
LAYERS: Mapping[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _CONV),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _TRANSPOSED),
}

#: Functions that add two tensors.
ADDITIONS = frozenset((torch.add, Tensor.add, Tensor.add_))

Use = tuple[str, int]
"""A layer, and the axis of its weight that its inputs are along. A convolution and a transposed one that
share a weight are two uses of it.
"""


@dataclass(frozen=True)
class LayerCall:
    """One call of a convolution, transposed convolution or linear layer."""

    inputs: Tensor
    """With a batch axis; the channels of a convolution are axis 1, those of a linear layer the last."""
    weight: Tensor
    bias: Tensor | None
    groups: int
    is_transposed: bool
    stride: tuple[int, ...]
    """Stride, dilation and padding before the first pixel, one per spatial axis."""
    dilation: tuple[int, ...]
    padding: tuple[int, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.weight.shape[2:])

    @property
    def axes(self) -> int:
        """The number of spatial axes."""
        return len(self.kernel)

    @property
    def input_axis(self) -> int:
        """The axis of the weight that the inputs are along."""
        return 0 if self.is_transposed else 1

    @property
    def outputs(self) -> int:
        """The number of output channels."""
        return self.weight.shape[1] * self.groups if self.is_transposed else self.weight.shape[0]

    def matrix(self, weight: Tensor | None = None) -> Tensor:
        """The weight as groups x outputs x features, where a feature is an input channel at a tap."""
        weight = self.weight if weight is None else weight
        if not self.is_transposed:
            return weight.reshape(self.groups, len(weight) // self.groups, -1)
        # Transposed weights are inputs x outputs of a group x taps.
        parts = weight.reshape(self.groups, len(weight) // self.groups, weight.shape[1], -1)
        return parts.transpose(1, 2).flatten(2)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        if not self.is_transposed:
            return matrix.reshape(self.weight.shape)
        parts = matrix.reshape(self.groups, self.weight.shape[1], len(self.weight) // self.groups, -1)
        return parts.transpose(1, 2).reshape(self.weight.shape)

    def input_rows(self, shape: tuple[int, ...], places: Tensor) -> Tensor:
        """What the layer reads at some places of an output of this shape: groups x places x features."""
        if not self.kernel:
            return self.inputs.reshape(-1, self.inputs.shape[-1])[places][None]
        is_pointwise = max(self.kernel) == 1 and not any(self.padding)
        if is_pointwise and shape == places_shape(self.inputs, self.axes):
            rows = rows_at(self.inputs, self.axes, places)
        else:
            rows = self._windows(*unravel(places, shape))
        return rows.reshape(len(places), self.groups, -1).transpose(0, 1)

    def _windows(self, image: Tensor, *position: Tensor) -> Tensor:
        """The inputs under the kernel, places x channels x taps; zero where a tap is outside."""
        column = (-1,) + (1,) * self.axes
        inside = torch.ones_like(image, dtype=torch.bool).view(column)
        index: list[Any] = [image.view(column), slice(None)]
        for axis, (flat, size) in enumerate(zip(position, self.inputs.shape[2:], strict=True)):
            # Output p of a convolution reads input p * stride + tap * dilation - padding. A transposed one
            # writes there, so its output p reads input (p - offset) / stride, where that is whole.
            taps = torch.arange(self.kernel[axis], device=flat.device).view(column[: self.axes - axis])
            offset, place = taps * self.dilation[axis] - self.padding[axis], flat.view(column)
            if self.is_transposed:
                inside = inside & ((place - offset) % self.stride[axis] == 0)
                place = torch.div(place - offset, self.stride[axis], rounding_mode="floor")
            else:
                place = place * self.stride[axis] + offset
            inside = inside & (place >= 0) & (place < size)
            index.append(place.clamp(0, size - 1))
        # Places x taps x channels: an index around a slice puts the slice last.
        windows = torch.where(inside[..., None], self.inputs[tuple(index)], 0.0)
        return windows.flatten(1, -2).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class NormCall:
    """One call of a batch norm."""

    inputs: Tensor
    variance: Tensor
    weight: Tensor | None
    eps: float

    def scale(self) -> Tensor:
        """What the batch norm multiplies each channel by."""
        scale = (self.variance.double() + self.eps).rsqrt()
        return scale if self.weight is None else scale * self.weight


def places_shape(values: Tensor, axes: int) -> tuple[int, ...]:
    """Shape of the input or output of a layer with so many spatial axes, without the channels."""
    if not axes:
        return tuple(values.shape[:-1])
    values = _batched(values, axes)
    return (len(values), *values.shape[2:])


def rows_at(values: Tensor, axes: int, places: Tensor) -> Tensor:
    """The input or output of a layer with so many spatial axes at some places: places x channels."""
    if not axes:
        return values.reshape(-1, values.shape[-1])[places]
    image, *position = unravel(places, places_shape(values, axes))
    index: tuple[Any, ...] = (image, slice(None), *position)
    return _batched(values, axes)[index]


def unravel(places: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """The index along each axis. `torch.unravel_index` copies the shape to a GPU, and waits for it."""
    found: list[Tensor] = []
    for size in reversed(shape[1:]):
        found.insert(0, places % size)
        places = torch.div(places, size, rounding_mode="floor")
    return [places, *found]


def version_of(tensor: Tensor) -> int:
    """Grows with each change in place. An inference tensor has none."""
    return 0 if tensor.is_inference() else tensor._version


def parse_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LayerCall | None:
    """The call of a layer, or None for any other function."""
    names = LAYERS.get(function)
    if names is None:
        return None
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs, weight = given["input"], given["weight"]
    axes = weight.ndim - 2
    dilation = _numbers(given.get("dilation", 1), axes)
    return LayerCall(
        inputs=_batched(inputs, axes) if axes else inputs,
        weight=weight,
        bias=given.get("bias"),
        groups=given.get("groups", 1),
        is_transposed=names is _TRANSPOSED,
        stride=_numbers(given.get("stride", 1), axes),
        dilation=dilation,
        padding=_padding(given.get("padding", 0), tuple(weight.shape[2:]), dilation),
    )


def _numbers(value: Any, axes: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * axes
    return tuple(value) if len(value) == axes else tuple(value) * axes


def _padding(value: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    if value == "same":  # of an odd number of pixels, the last is added at the end
        return tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    return (0,) * len(kernel) if value == "valid" else _numbers(value, len(kernel))


def _batched(values: Tensor, axes: int) -> Tensor:
    return values[None] if values.ndim == axes + 1 else values


class Visitor:
    """What is done at the calls of a model. `run` makes the call."""

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[..., Tensor]) -> Tensor:
        """A layer, by the name of its weight; `index` counts the calls of this layer in a forward pass.

        `run(inputs)` makes the call with other inputs.
        """
        return run()

    def at_norm(self, name: str, index: int, call: NormCall, run: Callable[[], Tensor]) -> Tensor:
        """A batch norm, by the name of its running mean."""
        return run()

    def after(self, number: int, output: Tensor) -> None:
        """Any call that made or changed a tensor; `number` counts all calls of a forward pass."""

    def at_addition(self, first: Tensor, second: Tensor) -> None:
        """Before two tensors of the same shape are added."""


class CallWatcher(TorchFunctionMode):
    """Shows the calls in a forward pass of a model to a visitor.

    With `shapes`, convolutions run at these shapes (`original_shapes.py`). The visitor sees them as they are.
    """

    def __init__(self, model: nn.Module, visitor: Visitor, shapes: Shapes | None = None) -> None:
        super().__init__()
        self.shapes = shapes or {}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.names = {id(tensor): name for name, tensor in tensors}
        self.visitor = visitor
        self.counts: Counter[str] = Counter()
        self.number = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        number = self.number = self.number + 1
        given = [(value, version_of(value)) for value in args if isinstance(value, Tensor)]
        # `alpha=` scales one of them: then the sum is another one.
        if func in ADDITIONS and not kwargs and len(given) == 2 and given[0][0].shape == given[1][0].shape:
            self.visitor.at_addition(given[0][0], given[1][0])
        output = self._run(func, args, kwargs)
        if isinstance(output, Tensor):
            # A function that returns its argument as it was made nothing.
            is_given = any(output is value and version == version_of(value) for value, version in given)
            if not is_given:
                self.visitor.after(number, output)
        return output

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        def run(inputs: Tensor | None = None) -> Any:
            if inputs is None:
                return call_padded(self.shapes, func, args, kwargs)
            if args:
                return func(inputs.reshape(args[0].shape), *args[1:], **kwargs)
            return func(**{**kwargs, "input": inputs.reshape(kwargs["input"].shape)})

        call = parse_call(func, args, kwargs)
        if call is not None and (name := self.names.get(id(call.weight))):
            return self.visitor.at_layer(name, self._count(name), call, run)
        if func is F.batch_norm:
            given = {**dict(zip(_NORM, args, strict=False)), **kwargs}
            if name := self.names.get(id(given.get("running_mean"))):
                norm = NormCall(
                    given["input"], given["running_var"], given.get("weight"), given.get("eps", 1e-5)
                )
                return self.visitor.at_norm(name, self._count(name), norm, run)
        return run()

    def _count(self, name: str) -> int:
        self.counts[name] += 1
        return self.counts[name] - 1

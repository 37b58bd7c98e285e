"""Convolutions of a cut network with as many channels as in the original, the missing ones zero.

cuDNN prepares a convolution of a new shape for tens of milliseconds, far longer than it runs. A cut network
that is repaired or compared runs a few times only: its convolutions have the shapes of the original's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .calibration import device_of

Shapes = Mapping[int, tuple[int, ...]]
"""`id` of a parameter of a cut network -> its shape in the original."""

#: The arguments of a convolution, in order.
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def original_shapes(network: nn.Module, original: nn.Module) -> Shapes:
    """On a GPU. Elsewhere nothing is prepared, and nothing is padded."""
    if device_of(network).type != "cuda":
        return {}
    shapes = {name: tuple(parameter.shape) for name, parameter in original.named_parameters()}
    return {id(parameter): shapes[name] for name, parameter in network.named_parameters()}


class PadConvolutions(TorchFunctionMode):
    """In this context, convolutions have the shapes of the original's."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return call_padded(self.shapes, func, args, kwargs or {})


def call_padded(shapes: Shapes, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the function. A convolution whose weight was cut is padded to its original shape."""
    if func is torch.conv2d and shapes:
        given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        shape = shapes.get(id(given["weight"]))
        if shape is not None and _can_pad(given, shape):
            return _run_padded(given, shape)
    return func(*args, **kwargs)


def _is_depthwise(given: Mapping[str, Any]) -> bool:
    return bool(given.get("groups", 1) == given["input"].shape[-3] == len(given["weight"]))


def _can_pad(given: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    inputs, weight = given["input"], given["weight"]
    is_cut = weight.shape != shape and all(new <= old for new, old in zip(weight.shape, shape, strict=True))
    return is_cut and inputs.ndim == 4 and (given.get("groups", 1) == 1 or _is_depthwise(given))


def _run_padded(given: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    weight, bias = given["weight"], given.get("bias")
    more_outputs, more_inputs = shape[0] - len(weight), shape[1] - weight.shape[1]
    is_depthwise = _is_depthwise(given)
    padded = {
        **given,
        "input": F.pad(given["input"], (0, 0, 0, 0, 0, more_outputs if is_depthwise else more_inputs)),
        "weight": F.pad(weight, (0, 0, 0, 0, 0, more_inputs, 0, more_outputs)),
        "bias": None if bias is None else F.pad(bias, (0, more_outputs)),
        "groups": shape[0] if is_depthwise else 1,
    }
    # The copy is dense, as the output of a convolution is.
    return torch.conv2d(**padded)[:, : len(weight)].clone()

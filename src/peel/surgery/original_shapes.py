"""Convolutions of a cut network with as many channels as in the original, the missing ones zero.

cuDNN prepares a convolution of a new shape for tens of milliseconds, far longer than it runs. Where many cuts
of one network are compared, their convolutions all have the shapes of the original's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .calibration import device_of
from .layer_calls import LAYERS


def original_shapes(network: nn.Module, original: nn.Module) -> AbstractContextManager[Any]:
    """In this context, a network that was cut from the original runs convolutions of its shapes; on a GPU."""
    return OriginalShapes(network, original) if device_of(network).type == "cuda" else nullcontext()


class OriginalShapes(TorchFunctionMode):
    def __init__(self, network: nn.Module, original: nn.Module) -> None:
        super().__init__()
        shapes = {name: tuple(parameter.shape) for name, parameter in original.named_parameters()}
        self.shapes = {id(parameter): shapes[name] for name, parameter in network.named_parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.conv2d:
            given |= dict(zip(LAYERS[func], args, strict=False))
            shape = self.shapes.get(id(given["weight"]))
            if shape is not None and _can_pad(given, shape):
                return _run_padded(given, shape)
            args = ()
        return func(*args, **given)


def _is_depthwise(given: Mapping[str, Any]) -> bool:
    return bool(given.get("groups", 1) == given["input"].shape[-3] == len(given["weight"]))


def _can_pad(given: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    inputs, weight = given["input"], given["weight"]
    is_cut = weight.shape != shape and all(new <= old for new, old in zip(weight.shape, shape, strict=True))
    return is_cut and inputs.ndim == 4 and (given.get("groups", 1) == 1 or _is_depthwise(given))


def _run_padded(given: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    weight, outputs = given["weight"], len(given["weight"])
    is_depthwise = _is_depthwise(given)
    more_outputs, more_inputs = shape[0] - outputs, shape[1] - weight.shape[1]
    if is_depthwise:
        given = {**given, "groups": shape[0]}
    if given.get("bias") is not None:
        given = {**given, "bias": F.pad(given["bias"], (0, more_outputs))}
    inputs = F.pad(given["input"], (0, 0, 0, 0, 0, more_outputs if is_depthwise else more_inputs))
    padded = F.pad(weight, (0, 0, 0, 0, 0, more_inputs, 0, more_outputs))
    output = torch.conv2d(**{**given, "input": inputs, "weight": padded})
    # Dense, as the output of a convolution is.
    return output[:, :outputs].clone()

"""How a slim model was made. `slim` and `load` attach this to the model, `save` writes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .selection import KeptChannels


@dataclass(frozen=True)
class SlimInfo:
    """How a model was made. All but the kept channels are plain values that can be written as JSON."""

    source: Mapping[str, Any]
    """How to build the original: `{"zoo": name, "arguments": {...}}`, or `{"class": "module:Class"}`."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Tie -> channels. Empty for a model that was never slimmed."""
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Module -> attributes that differ from the original."""
    costs: Mapping[str, Any] = field(default_factory=dict)
    """MACs, parameters, the input shapes that they were counted for, and the modules if only these were."""
    input: Mapping[str, Any] | None = None
    """Of a trained model: its classes, and the shape and normalization of the images."""
    kept: KeptChannels | None = field(default=None, compare=False, repr=False)
    """Which channels were kept where weights were inherited. `save` does not write it."""


def info_of(model: nn.Module) -> SlimInfo:
    """How a model was made. A model that was never slimmed has only a source."""
    info = getattr(model, "peel_info", None)
    if isinstance(info, SlimInfo):
        return info
    named = getattr(model, "peel_source", None)  # zoo.create sets it
    return SlimInfo(named or {"class": f"{type(model).__module__}:{type(model).__qualname__}"})


def attach_info(model: nn.Module, info: SlimInfo) -> None:
    model.peel_info = info  # type: ignore[assignment]

"""The record of a slim model: how it was made. `slim` and `load` attach it, `save` writes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class SlimRecord:
    """How a model was made, as plain values that can be written as JSON."""

    source: Mapping[str, Any]
    """How to build the original: `{"zoo": name, "arguments": {...}}`, or `{"class": "module:Class"}`."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Tie -> channels. Empty for a model that was never slimmed."""
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Module -> attributes that differ from the original."""
    costs: Mapping[str, Any] = field(default_factory=dict)
    """MACs, parameters, and the input shapes that they were counted for."""
    input: Mapping[str, Any] | None = None
    """Of a trained model: its classes, and the shape and normalisation of the images."""


def record_of(model: nn.Module) -> SlimRecord:
    """The record of a model. A model that was never slimmed has only a source."""
    record = getattr(model, "peel_record", None)
    if isinstance(record, SlimRecord):
        return record
    named = getattr(model, "peel_source", None)  # zoo.create sets it
    return SlimRecord(named or {"class": f"{type(model).__module__}:{type(model).__qualname__}"})


def attach_record(model: nn.Module, record: SlimRecord) -> None:
    model.peel_record = record  # type: ignore[assignment]

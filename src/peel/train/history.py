"""The record of a training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EpochRecord", "Metrics"]


@dataclass(frozen=True)
class Metrics:
    """Accuracy (fractions) and cross entropy over a whole split."""

    loss: float
    top1: float
    top5: float


@dataclass(frozen=True)
class EpochRecord:
    """One line of the record of a training."""

    epoch: int
    epochs: int
    lr: float
    train: dict[str, float]
    test: dict[str, float] | None
    seconds: float
    images_per_second: float
    extra: dict[str, Any] = field(default_factory=dict)

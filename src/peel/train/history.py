"""Metrics and epoch records."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Metrics:
    """Cross entropy and accuracies (fractions) over a whole split."""

    loss: float
    top1: float
    top5: float | None
    """None with five classes or fewer, where it says nothing."""

    def to_dict(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class EpochRecord:
    """The result of one epoch. `train` holds means of the loss, its terms and top-1."""

    epoch: int
    epochs: int
    lr: float
    train: dict[str, float]
    test: dict[str, float] | None
    seconds: float
    """Training time, without the evaluation."""
    images_per_second: float
    extra: dict[str, Any] = field(default_factory=dict)

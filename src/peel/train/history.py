"""Metrics and epoch records."""

import math
from dataclasses import dataclass, field
from typing import Any

from ..utils.validation import Epoch, Seconds


@dataclass(frozen=True)
class Metrics:
    """Loss and accuracies (fractions) over a whole split. None: it has no meaning for the task."""

    loss: float | None
    top1: float | None
    top5: float | None
    """None with five classes or fewer, where it says nothing."""
    metric: float | None = None
    """The user's own metric, which takes the place of the accuracies."""

    @property
    def score(self) -> float | None:
        """What networks are judged by: the user's metric, else top-1. None where there is neither."""
        return self.top1 if self.metric is None else self.metric

    def to_dict(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


def standard_error(fraction: float, count: int) -> float:
    """Of an accuracy on `count` samples."""
    return math.sqrt(fraction * (1 - fraction) / count)


@dataclass(frozen=True)
class EpochRecord:
    """The result of one epoch. `train` holds means of the loss, its terms and top-1."""

    epoch: Epoch
    epochs: Epoch
    lr: float
    train: dict[str, float]
    test: dict[str, float] | None
    seconds: Seconds
    """Training time, without the evaluation."""
    images_per_second: float
    """Samples per second, where the data are not images."""
    extra: dict[str, Any] = field(default_factory=dict)

"""The record of a training, and who is told of it as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Epoch", "Metrics", "Watcher"]


@dataclass(frozen=True)
class Metrics:
    """Accuracy (fractions) and cross entropy over a whole split."""

    loss: float
    top1: float
    top5: float


@dataclass(frozen=True)
class Epoch:
    """One line of the record of a training."""

    epoch: int
    of: int
    lr: float
    train: dict[str, float]
    test: dict[str, float] | None
    seconds: float
    images_per_second: float
    extra: dict[str, Any] = field(default_factory=dict)


class Watcher(Protocol):
    """Is told how training goes."""

    def begin(self, history: list[Epoch]) -> None: ...
    def step(self, done: int, total: int, images: int) -> None: ...
    def epoch(self, epoch: Epoch) -> None: ...

"""Who is told how a run goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..train.history import Epoch

__all__ = ["Callback", "NoCallback"]


class Callback(Protocol):
    """Is told how a run goes."""

    def plan_stages(self, stages: Sequence[tuple[str, float]]) -> None: ...
    def stage(self, name: str, what: str) -> None: ...
    def begin(self, history: list[Epoch]) -> None: ...
    def step(self, done: int, total: int, images: int) -> None: ...
    def epoch(self, epoch: Epoch) -> None: ...
    def note(self, text: str) -> None: ...


class NoCallback:
    """Says nothing."""

    def plan_stages(self, stages: Sequence[tuple[str, float]]) -> None:
        pass

    def stage(self, name: str, what: str) -> None:
        pass

    def begin(self, history: list[Epoch]) -> None:
        pass

    def step(self, done: int, total: int, images: int) -> None:
        pass

    def epoch(self, epoch: Epoch) -> None:
        pass

    def note(self, text: str) -> None:
        pass

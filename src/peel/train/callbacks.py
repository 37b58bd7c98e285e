"""What happens beside training: progress, trackers, and whatever a user adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .history import EpochRecord

__all__ = ["Callback"]


class Callback:
    """Override what you need; every method does nothing by default."""

    def on_run_begin(self, stages: Sequence[tuple[str, float]]) -> None:
        """The stages of the run, each with its estimated work."""

    def on_stage_begin(self, name: str, description: str) -> None: ...

    def on_train_begin(self, history: list[EpochRecord]) -> None:
        """`history`: the epochs that are done already, after a resume."""

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        """`step` counts from 1 over the whole training."""

    def extra_metrics(self, model: nn.Module) -> dict[str, Any]:
        """Added to the record of the epoch."""
        return {}

    def on_epoch_end(self, record: EpochRecord) -> None: ...

    def on_note(self, text: str) -> None: ...

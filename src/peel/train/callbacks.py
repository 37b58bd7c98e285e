"""Callbacks: how progress bars, loggers and trackers follow a run."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from .history import EpochRecord


class Callback:
    """Base class of callbacks. All methods do nothing; override what you need."""

    def on_run_begin(self, stages: Sequence[tuple[str, float]]) -> None:
        """A run begins; `stages` holds the name and the estimated work of each stage."""

    def on_stage_begin(self, name: str, description: str) -> None:
        """A stage begins."""

    def on_train_begin(self, history: list[EpochRecord]) -> None:
        """Training begins; after a resume, `history` holds the epochs that are done."""

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        """A step ended; `step` counts from 1 over the whole training."""

    def extra_metrics(self, model: nn.Module) -> dict[str, Any]:
        """Called at the end of an epoch; the result is merged into the `extra` of its record."""
        return {}

    def on_epoch_end(self, record: EpochRecord) -> None:
        """An epoch ended and is saved."""

    def on_note(self, text: str) -> None:
        """The run has a remark for the user."""

    def on_run_end(self) -> None:
        """The run ended, also where an error ended it."""

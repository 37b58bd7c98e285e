"""Progress of a run on standard error: a live bar on a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..train.callbacks import Callback
from ..train.history import EpochRecord
from ..utils.terminal import make_console
from ..utils.text import format_duration


class ProgressBar(Callback):
    """Shows stages, epochs, speed, notes and the remaining time of the whole run.

    >>> peel.prune(model, (train, val), budget="50%", callbacks=[peel.ProgressBar()])
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or make_console(stderr=True)
        self.work: dict[str, float] = {}
        self.left: dict[str, float] = {}
        """The work of stages that have not ended."""
        self.name = ""
        self.fraction = self.first_fraction = 0.0
        self.rate = 0.0
        """Work in a second."""
        self.began = time.perf_counter()
        self.live: Progress | None = None
        self.task: Any = None

    def on_run_begin(self, stages: Sequence[tuple[str, float]]) -> None:
        self.work, self.left, self.name = dict(stages), dict(stages), ""

    def on_run_end(self) -> None:
        if self.live is not None:
            self.live.stop()
        self.live = self.task = None

    def on_stage_begin(self, name: str, description: str) -> None:
        # A stage begins several times where its network is evaluated before the training.
        if name != self.name:
            self.left.pop(self.name, None)
        self.name = name
        self.fraction = self.first_fraction = 0.0
        self.began = time.perf_counter()
        text = f"{self._stage_prefix()}{description}"
        self.console.print(text, markup=False)
        if self.console.is_terminal:
            self._show_bar(name)

    def _show_bar(self, name: str) -> None:
        if self.live is None:
            self.live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[detail]}"),
                console=self.console,
                transient=True,
            )
            self.live.start()
        if self.task is not None:
            self.live.remove_task(self.task)
        # It has a length from the first step on. A training function of the user's own tells no steps.
        self.task = self.live.add_task(name, total=None, detail="")

    def _stage_prefix(self) -> str:
        if self.name not in self.work:
            return ""
        return f"stage {list(self.work).index(self.name) + 1} of {len(self.work)}: "

    def on_train_begin(self, history: list[EpochRecord]) -> None:
        self.first_fraction = history[-1].epoch / history[-1].epochs if history else 0.0
        if history:
            self.console.print(
                f"  resuming after epoch {history[-1].epoch} of {history[-1].epochs}", markup=False
            )
        self.began = time.perf_counter()

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        self.fraction = step / total_steps
        spent = time.perf_counter() - self.began
        gained = self.fraction - self.first_fraction
        if self.name in self.work and spent > 0.2 and gained > 0:
            self.rate = self.work[self.name] * gained / spent
        if self.live is not None and self.task is not None:
            self.live.update(
                self.task,
                total=1.0,
                completed=self.fraction,
                detail=f"{gained * total_steps * batch_size / max(spent, 1e-9):,.0f} images/s{self._eta()}",
            )

    def _eta(self) -> str:
        if not self.rate:
            return ""
        parts = {name: 1 - self.fraction if name == self.name else 1.0 for name in self.left}
        seconds = sum(parts[name] * work for name, work in self.left.items()) / self.rate
        return f", about {format_duration(seconds)} left in all"

    def on_epoch_end(self, record: EpochRecord) -> None:
        if self.live is not None and record.epoch < record.epochs:
            return
        test = record.test or {}
        parts = [f"loss {record.train['loss']:.4f}"] if "loss" in record.train else []  # not with a train_fn
        if "metric" in test:
            parts.append(f"test {test['metric']:.4f}")
        elif "top1" in test:
            parts.append(f"test {test['top1']:.2%}")
        elif "loss" in test:
            parts.append(f"test loss {test['loss']:.4f}")
        parts.append(f"{record.images_per_second:,.0f} images/s{self._eta()}")
        self.console.print(f"  epoch {record.epoch}/{record.epochs}: {', '.join(parts)}", markup=False)

    def on_note(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False)

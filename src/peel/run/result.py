"""What a run returns, and what it stores of each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from ..methods.plan import Plan
from ..report.summary import draw_estimate, draw_rows
from ..train.history import EpochRecord, standard_error
from ..utils.tables import as_text


@dataclass(frozen=True)
class Row:
    """One network of the table: original, uniform or that of the method."""

    name: str
    macs: int
    params: int
    memory: int
    """Bytes of activations of one image, without gradients (an estimate)."""
    seconds: float
    """Of the training."""
    image_passes: int
    file: str
    predicted_latency: float | None = None
    """Nanoseconds of a batch, where a latency model is given."""
    latency: float | None = None
    """Measured, where this is the machine of the latency model."""
    speedup: float | None = None
    """How many times as fast as the original in torch eager. `Result.bench` has interval and conditions."""
    efficiency: float | None = None
    """The speed-up over the reduction of MACs: 1 where time falls as MACs do."""
    loss: float | None = None
    top1: float | None = None
    top5: float | None = None
    """None with five classes or fewer."""
    metric: float | None = None
    """The user's own metric, in the place of the accuracies."""
    before_training: dict[str, float] = field(default_factory=dict)
    """Top-1, or the metric, after each step of surgery (cut, recalibrated, repaired) on inherited weights."""
    fine_tuned: float | None = None
    """Top-1, or the metric, after fine-tuning, where the network from before it was better and is kept."""


@dataclass(frozen=True, repr=False)
class Result:
    """What `prune` returns. Printed, it is the table and the notes."""

    model: nn.Module | None
    """The trained slim network; None where the stages end before it."""
    plan: Plan | None
    history: Mapping[str, Sequence[EpochRecord]]
    """Stage -> its epochs."""
    rows: Sequence[Row]
    """The table: original, uniform, and the network of the method."""
    notes: Sequence[str]
    folder: Path | None
    estimate: Mapping[str, float] | None = None
    """Seconds per stage, of a dry run."""
    bench: Mapping[str, Any] | None = None
    """The times of the networks, as `peel bench --json` prints them; `error` where they cannot be timed."""
    search_seconds: float = 0.0
    """What the plan took: the training of backbones, or the comparison of networks."""

    def __repr__(self) -> str:
        return as_text(self._draw)

    def _draw(self, console: Console) -> None:
        if self.plan is not None and self.estimate is not None:
            draw_estimate(self.plan, self.estimate, console)
        elif self.rows:
            draw_rows([vars(row) for row in self.rows], self.bench or {}, console, self.search_seconds)
        else:
            console.print("no network was trained to its end")
        for note in self.notes:
            console.print(f"note: {note}", markup=False)
        if self.folder is not None:
            console.print(f"files in {self.folder}", markup=False)


def lost_by_training(rows: Sequence[Row], test_images: int) -> list[str]:
    """A note for each network that training made worse than it was after the repair, beyond chance."""
    notes = []
    for row in rows:
        repaired, trained = row.before_training.get("repaired"), row.top1
        if repaired is None or trained is None or row.fine_tuned is not None:
            continue
        lost = repaired - trained
        if lost > max(0.005, standard_error(trained, test_images)):
            notes.append(
                f"Fine-tuning lost {100 * lost:.1f} points of top-1: right after the repair, {row.name} had "
                f"{repaired:.2%}. Try a lower rate (--train.lr) or more epochs (--train.epochs)."
            )
    return notes


def kept_note(name: str, record: Record) -> str:
    """Which network is kept: the one from before fine-tuning, or the one from after it."""
    assert record.held_out_losses is not None
    before, after = record.held_out_losses
    losses = f"the loss on the held-out images was {before:.3g} before and {after:.3g} after it"
    if record.kept_metrics is None:
        return f"{name}: the fine-tuned network is kept; {losses}."
    return (
        f"{name}: the network from before fine-tuning is kept; {losses}. Try a lower rate (--train.lr), more "
        "epochs (--train.epochs) or more images."
    )


@dataclass(frozen=True)
class Record:
    """How a job came to its end."""

    history: list[EpochRecord]
    image_passes: int
    key: str = ""
    """Of the job."""
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] | None = None
    """On the test images, of a network that was not trained here."""
    before_training: dict[str, float] = field(default_factory=dict)
    """Top-1, or the metric, after each step of surgery."""
    held_out_loss: float | None = None
    """Before fine-tuning, on training images that were left out of it."""
    held_out_losses: tuple[float, float] | None = None
    """Before and after fine-tuning."""
    kept_metrics: dict[str, float] | None = None
    """On the test images, of the network from before fine-tuning, where that was better and is kept."""
    trainings: list[str] = field(default_factory=list)
    """The names of the networks that a method has trained."""
    weights: str = ""
    """The hash of the original's weights."""

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds for epoch in self.history)

"""Trainings with a teacher: the trained original, whose logits are computed once for all trainings.

All trainings with a teacher see the same augmented images: those of a fixed sequence of epochs. The logits of
the teacher for this sequence are one table. The initial weights and the order of the images differ by seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peel.data.augmentation import View
from peel.data.batch import Batch
from peel.data.in_memory import InMemoryImages
from peel.train.engine import Engine
from peel.train.loop import evaluate
from peel.train.objective import get_logits
from peel.utils.rng import derive_seed

#: Augmented copies of the held-out images. The mean score over them has less noise than one score.
COPIES = 8


class Teaching(NamedTuple):
    """How the trainings of a run are taught."""

    folder: Path
    """The tables of logits."""
    weight: float
    temperature: float


def view_of(purpose: str, number: int) -> View:
    return View.of_epoch("crop-flip", derive_seed(purpose), number)


class FixedView:
    """A split that is always seen in one view."""

    def __init__(self, split: InMemoryImages, view: View) -> None:
        self.split, self.view = split, view
        self.size, self.labels, self.shape = split.size, split.labels, split.shape
        self.mean, self.std = split.mean, split.std

    def to(self, device: torch.device) -> FixedView:
        return FixedView(self.split.to(device), self.view)

    def subset(self, index: Tensor) -> FixedView:
        return FixedView(self.split.subset(index), self.view)

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        return self.split.batches(order, batch_size, self.view, device)


class Taught:
    """A split whose passes are those of the table, one after the other, with the teacher's logits."""

    def __init__(self, split: InMemoryImages, table: Tensor) -> None:
        """`table`: logits of the teacher, epochs x images x classes."""
        self.split, self.table = split, table
        self.size, self.labels, self.shape = split.size, split.labels, split.shape
        self.mean, self.std = split.mean, split.std
        self.passes = 0

    def to(self, device: torch.device) -> Taught:
        return Taught(self.split.to(device), self.table.to(device))

    def subset(self, index: Tensor) -> InMemoryImages:
        return self.split.subset(index)

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        logits, number = self.table[self.passes], self.passes
        self.passes += 1
        batches = self.split.batches(order, batch_size, view_of("taught", number), device)
        for batch, index in zip(batches, torch.split(order.to(logits.device), batch_size), strict=True):
            yield batch._replace(teacher_logits=logits[index].float())


def table_path(folder: Path, name: str) -> Path:
    return folder / f"{name}-logits.pt"


@torch.inference_mode()
def make_table(teacher: nn.Module, split: InMemoryImages, epochs: int, engine: Engine) -> Tensor:
    """The logits of the teacher for every image in the view of every epoch."""
    teacher, order, rows = teacher.eval(), torch.arange(split.size), []
    for number in range(epochs):
        parts = []
        for batch in split.batches(order, 4096, view_of("taught", number), engine.device):
            with engine.autocast():
                parts.append(get_logits(teacher(batch.inputs)).half())
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@cache
def load_table(folder: Path, name: str, device: torch.device) -> Tensor:
    table: Tensor = torch.load(table_path(folder, name), map_location=device)
    return table


def mean_over_copies(model: nn.Module, held_out: InMemoryImages, engine: Engine) -> dict[str, float]:
    """Loss and top-1 of augmented copies of the held-out images."""
    copies = [FixedView(held_out, view_of("copy", number)) for number in range(COPIES)]
    scores = [evaluate(model, copy, engine) for copy in copies]
    return {
        "copies_loss": sum(score.loss for score in scores) / COPIES,
        "copies_top1": sum(score.top1 for score in scores) / COPIES,
    }

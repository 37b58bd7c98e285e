"""A batch of images and labels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    images: Tensor
    """Normalized, in channels-last memory."""
    labels: Tensor
    teacher_logits: Tensor | None = None
    """Cached logits of the teacher for these variants of the images."""

    def split(self, parts: int) -> list[Batch]:
        """Micro-batches of nearly equal size."""
        images, labels = self.images.tensor_split(parts), self.labels.tensor_split(parts)
        logits = [None] * parts if self.teacher_logits is None else self.teacher_logits.tensor_split(parts)
        return [Batch(*part) for part in zip(images, labels, logits, strict=True)]

    def clone(self) -> Batch:
        logits = self.teacher_logits
        return Batch(self.images.clone(), self.labels.clone(), None if logits is None else logits.clone())

    def fill(self, other: Batch) -> None:
        """Copy another batch of the same shapes into the memory of this one."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

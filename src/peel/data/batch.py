"""A batch as training sees it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Batch"]


class Batch(NamedTuple):
    images: Tensor
    """Normalised, in channels-last memory."""
    labels: Tensor
    teacher_logits: Tensor | None = None
    """The class scores that a teacher gave for just these views of the images, where they are known already."""

    def split(self, parts: int) -> list[Batch]:
        """The batch in parts of nearly equal size."""
        teacher_logits = (
            [None] * parts if self.teacher_logits is None else self.teacher_logits.tensor_split(parts)
        )
        return [
            Batch(*part)
            for part in zip(
                self.images.tensor_split(parts), self.labels.tensor_split(parts), teacher_logits, strict=True
            )
        ]

    def clone(self) -> Batch:
        return Batch(*(None if tensor is None else tensor.clone() for tensor in self))  # type: ignore[arg-type]

    def fill(self, other: Batch) -> None:
        """Take over the content of another batch of the same shapes."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

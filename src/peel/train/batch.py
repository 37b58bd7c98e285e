"""A batch as training sees it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Batch", "at_a_time"]

#: Images that only go forward at a time: so many, or as many as have so many pixels.
FORWARD_IMAGES, FORWARD_PIXELS = 1000, 16_000_000


def at_a_time(shape: tuple[int, int, int]) -> int:
    """How many images of this shape go through a network at once where nothing is learnt."""
    return min(FORWARD_IMAGES, max(1, FORWARD_PIXELS // (shape[1] * shape[2])))


class Batch(NamedTuple):
    images: Tensor
    """Normalised, in channels-last memory."""
    labels: Tensor
    answers: Tensor | None = None
    """The class scores that a teacher gave for just these views of the images, where they are known already."""

    def split(self, parts: int) -> list[Batch]:
        """The batch in parts of nearly equal size."""
        answers = [None] * parts if self.answers is None else self.answers.tensor_split(parts)
        return [Batch(*part) for part in zip(self.images.tensor_split(parts), self.labels.tensor_split(parts), answers, strict=True)]

    def clone(self) -> Batch:
        return Batch(*(None if tensor is None else tensor.clone() for tensor in self))  # type: ignore[arg-type]

    def fill(self, other: Batch) -> None:
        """Take over the content of another batch of the same shapes."""
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

"""What a teacher says about every view of every image, asked once.

Pad-and-crop with flips has 162 views of an image at 32 pixels: the teacher's scores for all of them fit on a GPU, and every student of that
teacher, whatever its widths, budget or seed, reads them from there. They are asked for an epoch at a time, as far as they are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..data.augmentation import View, count_windows, draw_windows, padding_of
from ..data.batch import Batch
from ..data.datasets import Split
from ..data.in_memory import InMemoryImages
from ..utils.files import write_bytes
from ..utils.fingerprint import fingerprint
from .checkpoint import non_persistent_buffers
from .engine import Engine
from .memory import eval_batch_size, is_out_of_memory, retry_on_oom
from .objective import get_logits

__all__ = ["CachedTeacher", "LogitCache", "make_logit_cache"]

log = logging.getLogger("peel")

#: A table larger than this is not made.
TABLE_BYTES = 2 * 2**30


class LogitCache:
    """The table: a row of class scores for each image and view, and whether it is known yet."""

    def __init__(self, teacher: nn.Module, images: int, views: int, classes: int, engine: Engine) -> None:
        self.teacher, self.views, self.engine = teacher, views, engine
        # The scores of a network that runs in bfloat16 are not worth more than 16 bits.
        kind = torch.float16 if engine.bf16 else torch.float32
        self.scores = torch.zeros(images * views, classes, dtype=kind, device=engine.device)
        self.known = torch.zeros(images * views, dtype=torch.bool, device=engine.device)
        self.asked = 0
        self.path: Path | None = None

    def ask(self, split: Split, order: Tensor, rows: Tensor, view: View) -> None:
        """Let the teacher answer what is not known yet about these images, seen in this view."""
        retry_on_oom(
            lambda size: self._ask(split, order, rows, view, size),
            eval_batch_size(split.shape),
            self.engine.device,
        )

    @torch.inference_mode()
    def _ask(self, split: Split, order: Tensor, rows: Tensor, view: View, size: int) -> None:
        missing = (~self.known[rows]).nonzero()[:, 0]
        unseen = split.batches(order[missing.cpu()], size, view, self.engine.device, self.engine.workers)
        for row, batch in zip(torch.split(rows[missing], size), unseen, strict=False):
            with self.engine.autocast():
                given = get_logits(self.teacher(batch.images))
            self.scores[row] = given.to(self.scores.dtype)
            self.known[row] = True
            self.asked += len(row)

    def keep_in(self, path: Path) -> None:
        """Keep the answers there, for other runs with this teacher, and take over what they kept. It never fails a run."""
        self.path = path
        if not path.exists():
            return
        try:
            kept = safetensors.torch.load_file(path, device=str(self.scores.device))
            known = kept["known"] & ~self.known
            self.scores[known] = kept["scores"][known].to(self.scores.dtype)
            self.known |= known
        except (
            OSError,
            KeyError,
            RuntimeError,
            ValueError,
            IndexError,
            safetensors.SafetensorError,
        ) as error:
            log.warning(
                "the answers of the teacher in %s cannot be read (%s); it is asked again.", path, error
            )

    def save(self) -> None:
        """Write them down, together with what others kept meanwhile, where they are to be kept."""
        if self.path is None:
            return
        self.keep_in(self.path)
        try:
            write_bytes(self.path, safetensors.torch.save({"scores": self.scores, "known": self.known}))
        except OSError as error:
            log.warning(
                "the answers of the teacher could not be kept in %s: %s", self.path.parent, error.strerror
            )

    @staticmethod
    def name_of(
        teacher: nn.Module, split: InMemoryImages, augment: str, engine: Engine, code: str = ""
    ) -> str:
        """A file name that tells teachers, images and views apart. `code` is what the teacher computes with its weights."""
        tensors = (*teacher.state_dict().values(), *non_persistent_buffers(teacher).values())
        settings = f"{augment} {split.shape} {split.mean} {split.std} {engine.bf16} {code}"
        return f"answers-{fingerprint([settings, *tensors, split.pixels, split.labels])}.safetensors"


@dataclass(frozen=True)
class CachedTeacher:
    """A split whose batches carry the answers of a teacher."""

    split: Split
    answers: LogitCache

    @property
    def size(self) -> int:
        return self.split.size

    @property
    def labels(self) -> Tensor:
        return self.split.labels

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.split.shape

    @property
    def mean(self) -> tuple[float, ...]:
        return self.split.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.split.std

    def to(self, device: torch.device) -> CachedTeacher:
        return replace(self, split=self.split.to(device))

    def subset(self, index: Tensor) -> Split:
        return self.split.subset(index)

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        if len(order) == 0:
            return
        places = order.to(self.answers.scores.device)
        height = self.shape[1]
        numbers = (
            draw_windows(places, view, height).numbers(padding_of(height))
            if self.answers.views > 1
            else torch.zeros_like(places)
        )
        rows = places * self.answers.views + numbers
        self.answers.ask(self.split, order, rows, view)
        for batch, row in zip(
            self.split.batches(order, batch_size, view, device, workers),
            torch.split(rows, batch_size),
            strict=True,
        ):
            yield batch._replace(teacher_logits=self.answers.scores[row].float())


def make_logit_cache(
    teacher: nn.Module,
    split: Split,
    augment: str,
    classes: int,
    engine: Engine,
    folder: Path | None = None,
    code: str = "",
) -> LogitCache | None:
    """A table for this teacher and these images; None where views cannot be counted, or it is too large.

    With a folder, it is kept there for other runs whose teacher has the same weights and `code`.
    """
    views = count_windows(augment, split.shape[1])
    width = 2 if engine.bf16 else 4
    if views is None or split.size * views * classes * width > TABLE_BYTES:
        return None
    try:
        answers = LogitCache(teacher, split.size, views, classes, engine)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.info("there is no memory for what the teacher says: it is asked at every step.")
        return None
    # Images on disk are known by their names only: what is said about them is not kept.
    if folder is not None and isinstance(split, InMemoryImages):
        answers.keep_in(folder / LogitCache.name_of(teacher, split, augment, engine, code))
    return answers

"""The teacher cache: its logits for every augmented variant of every image, computed once.

A random crop with flips has 162 variants of an image of 32 pixels. The logits of all of them fit on a GPU and
serve every student of the teacher. Each epoch computes those that are missing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..data.augmentation import View, count_windows, draw_windows, padding_of
from ..data.batch import Batch
from ..data.datasets import Split
from .engine import Engine, eval_batch_size, retry_on_oom
from .objective import get_logits

#: The largest table that is made; on a GPU also a quarter of the free memory.
MAX_BYTES = 2 * 2**30


class LogitCache:
    """A table with a row of logits for each image and variant, and a flag whether the row is known."""

    def __init__(self, teacher: nn.Module, images: int, variants: int, classes: int, engine: Engine) -> None:
        self.teacher, self.variants, self.engine = teacher, variants, engine
        dtype = torch.float16 if engine.bf16 else torch.float32
        self.logits = torch.zeros(images * variants, classes, dtype=dtype, device=engine.device)
        self.known = torch.zeros(images * variants, dtype=torch.bool, device=engine.device)
        self.computed = 0

    def fill(self, split: Split, indices: Tensor, rows: Tensor, view: View) -> None:
        """Compute the rows that are missing for these images in this view."""
        retry_on_oom(
            lambda size: self._fill(split, indices, rows, view, size),
            eval_batch_size(split),
            self.engine.device,
        )

    @torch.inference_mode()
    def _fill(self, split: Split, indices: Tensor, rows: Tensor, view: View, batch_size: int) -> None:
        missing = (~self.known[rows]).nonzero()[:, 0]
        engine = self.engine
        count, size = len(missing), min(batch_size, len(rows))
        if engine.device.type == "cuda":
            # cuDNN prepares a convolution for each new size of a batch, which takes longer than a full batch.
            missing = torch.cat([missing, missing[-1:].expand(-count % size)])
        batches = split.batches(indices[missing.cpu()], size, view, engine.device, engine.workers)
        for row, batch in zip(torch.split(rows[missing[:count]], size), batches, strict=False):
            with engine.autocast():
                logits = get_logits(self.teacher(batch.inputs))
            self.logits[row] = logits[: len(row)].to(self.logits.dtype)
            self.known[row] = True
            self.computed += len(row)


class CachedTeacher:
    """A split whose batches carry the teacher's logits."""

    def __init__(self, split: Split, cache: LogitCache) -> None:
        self.split, self.cache = split, cache
        self.size, self.labels, self.shape = split.size, split.labels, split.shape
        self.mean, self.std = split.mean, split.std

    def to(self, device: torch.device) -> CachedTeacher:
        return CachedTeacher(self.split.to(device), self.cache)

    def subset(self, index: Tensor) -> Split:
        return self.split.subset(index)

    def fill(self, order: Tensor, view: View) -> Tensor:
        """The rows of these images in this view. Those that are missing are computed."""
        indices, height = order.to(self.cache.logits.device), self.shape[1]
        rows = indices * self.cache.variants
        if self.cache.variants > 1:
            rows = rows + draw_windows(indices, view, height).numbers(padding_of(height))
        self.cache.fill(self.split, order, rows, view)
        return rows

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        if len(order) == 0:
            return
        rows = self.fill(order, view)
        batches = self.split.batches(order, batch_size, view, device, workers)
        for batch, row in zip(batches, torch.split(rows, batch_size), strict=True):
            yield batch._replace(teacher_logits=self.cache.logits[row].float())


def make_logit_cache(
    teacher: nn.Module, split: Split, augment: str, classes: int, engine: Engine
) -> LogitCache | None:
    """A cache for this teacher and split; None where the augmentation has too many variants for a table."""
    variants = count_windows(augment, split.shape[1])
    bytes_per_logit = 2 if engine.bf16 else 4
    limit = MAX_BYTES
    if engine.device.type == "cuda":
        limit = min(limit, torch.cuda.mem_get_info(engine.device)[0] // 4)
    if variants is None or split.size * variants * classes * bytes_per_logit > limit:
        return None
    return LogitCache(teacher, split.size, variants, classes, engine)

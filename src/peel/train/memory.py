"""Out-of-memory errors, and how many images go forward at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from ..errors import OutOfMemoryError

__all__ = ["eval_batch_size", "is_out_of_memory", "retry_on_oom"]

T = TypeVar("T")

log = logging.getLogger("peel")

#: Images that only go forward at a time: so many, or as many as have so many pixels.
FORWARD_IMAGES, FORWARD_PIXELS = 1000, 16_000_000


def eval_batch_size(shape: tuple[int, int, int]) -> int:
    """How many images of this shape go through a network at once where nothing is learnt."""
    return min(FORWARD_IMAGES, max(1, FORWARD_PIXELS // (shape[1] * shape[2])))


def is_out_of_memory(error: Exception) -> bool:
    """Whether it says that there is no memory left: what a GPU lacks has an error of its own, what a CPU lacks only its words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "CPUAllocator" in str(error)
    )


def retry_on_oom(work: Callable[[int], T], size: int, device: torch.device) -> T:
    """Do the work with so many images at a time, or with fewer where memory is short."""
    while True:
        try:
            return work(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise OutOfMemoryError(f"not one image fits into the memory of {device}.") from None
            size = -(-size // 2)
            torch.cuda.empty_cache()
            log.info("memory is short: forward passes go on with %d images at a time.", size)

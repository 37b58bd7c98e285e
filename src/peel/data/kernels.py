"""Whether the Triton kernels (`crop_kernel`, `color_kernel`) can be used."""

import logging
from functools import cache

import torch

from .augmentation import EVAL

log = logging.getLogger("peel")


@cache
def has_triton() -> bool:
    """Whether Triton can compile and run a kernel on this GPU; it also needs a C compiler."""
    try:
        from .crop_kernel import fused_crop

        pixels = torch.zeros(1, 4, 4, 1, dtype=torch.uint8, device="cuda")
        index, one = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.ones(1, device="cuda")
        fused_crop(pixels, index, EVAL, one, one, one)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        log.warning("Triton does not work here, so augmentation is slower: %s", reason)
        return False
    return True

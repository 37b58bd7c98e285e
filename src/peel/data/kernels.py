"""Kernels that do the work of many, where there is a GPU, Triton, and all that Triton needs to build them; None elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .transforms import ColorJitter
from .view import EVAL

__all__ = ["fused_color_jitter", "fused_crop"]

log = logging.getLogger("peel")


@cache
def fused_crop() -> Callable[..., Tensor] | None:
    """Cropping, mirroring and normalising small images."""

    def tried() -> Callable[..., Tensor]:
        from .crop_kernel import fused_crop as kernel

        pixels, one = torch.zeros(1, 4, 4, 1, dtype=torch.uint8, device="cuda"), torch.ones(1, device="cuda")
        kernel(pixels, torch.zeros(1, dtype=torch.int64, device="cuda"), EVAL, one, one)
        return kernel

    return _working(tried)


@cache
def fused_color_jitter() -> Callable[..., Tensor] | None:
    """Changing the colours of large images, mirroring and normalising them."""

    def tried() -> Callable[..., Tensor]:
        from .colour_kernel import fused_color_jitter as kernel

        pixels, one = torch.zeros(1, 4, 4, 3, dtype=torch.uint8, device="cuda"), torch.ones(3, device="cuda")
        order = torch.arange(4, device="cuda")[None]
        kernel(
            pixels,
            ColorJitter(
                torch.ones(1, 4, device="cuda"), order, torch.ones(1, dtype=torch.bool, device="cuda")
            ),
            one,
            one,
        )
        return kernel

    return _working(tried)


def _working(tried: Callable[[], Callable[..., Tensor]]) -> Callable[..., Tensor] | None:
    try:
        return tried()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, no compiler for it, or a GPU that it does not know
        log.warning(
            "images are prepared by ordinary operations, which takes longer: %s: %s",
            type(error).__name__,
            str(error)[:200],
        )
        return None

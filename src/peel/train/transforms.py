"""The paper's augmentation and the centre crop, image by image (torchvision transforms v2)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .chance import derive

__all__ = ["centre_view", "imagenet_view"]

#: Brightness, contrast, saturation, hue.
JITTER = (0.2, 0.2, 0.2, 0.1)
#: The short side is resized to this multiple of the crop: 256 for 224.
RESIZE = 256 / 224


@cache
def _training(size: tuple[int, int], channels: int) -> Any:
    from torchvision.transforms import v2

    steps: list[Any] = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    if channels == 3:
        steps.append(v2.ColorJitter(*JITTER))
    return v2.Compose(steps)


@cache
def _centre(size: tuple[int, int]) -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(round(min(size) * RESIZE), antialias=True), v2.CenterCrop(size)])


def imagenet_view(image: Tensor, size: tuple[int, int], seed: int, index: int) -> Tensor:
    """A random part of a uint8 image (channels x height x width), drawn by (seed, index) alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive("view", seed, index))
        return _training(tuple(size), image.shape[0])(image)  # type: ignore[no-any-return]


def centre_view(image: Tensor, size: tuple[int, int]) -> Tensor:
    return _centre(tuple(size))(image)  # type: ignore[no-any-return]

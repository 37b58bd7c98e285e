"""Pad-and-crop with flips: a window at random over an image with zeros around it. There are only so many windows, so each has a number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.rng import uniform
from .view import View

__all__ = ["Windows", "count_windows", "crop_windows", "draw_windows", "padding_of"]

#: Random numbers drawn per image: rows, columns, mirrored or not.
DRAWS = 3


@dataclass(frozen=True)
class Windows:
    """One window per image."""

    top: Tensor
    """Rows that the window is lower than the image; negative where it is higher."""
    left: Tensor
    flipped: Tensor

    def numbers(self, pad: int) -> Tensor:
        """The number of each window, from 0 to `count_windows`."""
        side = 2 * pad + 1
        return ((self.top + pad) * side + self.left + pad) * 2 + self.flipped.long()


def padding_of(height: int) -> int:
    """Zeros around an image: an eighth of its height, as 4 for 32 pixels."""
    return max(1, height // 8)


def count_windows(augment: str, height: int) -> int | None:
    """How many different views of an image there are; None where they cannot be counted."""
    if augment == "none":
        return 1
    return 2 * (2 * padding_of(height) + 1) ** 2 if augment in ("crop", "crop-flip") else None


def draw_windows(index: Tensor, view: View, height: int) -> Windows:
    """The windows through which a view sees the images at these places."""
    if view.augment == "none":
        nothing = torch.zeros_like(index)
        return Windows(nothing, nothing, nothing.bool())
    pad = padding_of(height)
    drawn = uniform(index, view.seed, DRAWS)
    top = (drawn[:, 0] * (2 * pad + 1)).long() - pad
    left = (drawn[:, 1] * (2 * pad + 1)).long() - pad
    flipped = drawn[:, 2] >= 0.5
    return Windows(top, left, flipped if view.augment == "crop-flip" else torch.zeros_like(flipped))


def crop_windows(windows: Windows, images: Tensor) -> Tensor:
    """The images (height x width x channels) as the windows show them."""
    _, height, width, _ = images.shape
    rows = windows.top[:, None] + torch.arange(height, device=images.device)
    columns = windows.left[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(windows.flipped[:, None], columns.flip(1), columns)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    which = torch.arange(len(images), device=images.device)[:, None, None]
    windowed = images[which, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return windowed * inside[..., None]

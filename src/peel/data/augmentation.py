"""Augmentation. Every random choice depends only on the seed, the epoch and the index of the image.

`crop` and `crop-flip` shift small images inside a border: of zeros (digits on black), and of the mean color.
`imagenet` is the augmentation of the paper: a random resized crop, color jitter and a flip.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..utils.rng import derive_seed, hashed_uniform

#: Random numbers per image of `crop` and `crop-flip`: row, column, flip.
DRAWS = 3
#: Random resized crop: range of the area, as a fraction of the image, and of the aspect ratio.
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
#: Color jitter: largest change of the first three, and largest rotation of the hue (1 is a full turn).
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.2, 0.2, 0.2, 0.1
#: Center crop: the short side is resized to this multiple of the crop, as 256 for 224.
RESIZE = 256 / 224


@dataclass(frozen=True)
class View:
    """The augmentation of one pass over the data: none, crop, crop-flip or imagenet, and its seed."""

    augment: str = "none"
    seed: int = 0

    @staticmethod
    def of_epoch(augment: str, seed: int, epoch: int) -> View:
        return View(augment, derive_seed("augment", seed, epoch))


#: No augmentation; of large images, the center crop.
EVAL = View()


def augment_image(
    image: Tensor,
    index: int,
    view: View,
    size: Sequence[int],
    border: Tensor,
    *,
    jitter: bool,
    resize: int | None = None,
) -> Tensor:
    """Crop and augment one image (uint8, channels x height x width); returns height x width x channels.

    `border` is its color. `jitter=False` leaves out the color jitter and the flip of `imagenet`, for a kernel
    on the GPU.
    """
    place = torch.tensor([index])
    if view.augment == "imagenet":
        image = random_resized_crop(image, size, view.seed, index)
        if jitter:
            image = color_jitter_and_flip(image[None], place, view.seed)[0].to(torch.uint8)
        return image.permute(1, 2, 0)
    image = center_crop(image, size, resize).permute(1, 2, 0)
    if view.augment == "none":
        return image
    return crop_windows(draw_windows(place, view, size[0]), image[None], border)[0]


# Pad and crop


@dataclass(frozen=True)
class Windows:
    """One crop window per image."""

    top: Tensor
    """Offset of the window in rows; negative above the image."""
    left: Tensor
    flipped: Tensor

    def numbers(self, pad: int) -> Tensor:
        """The number of each window, from 0 to `count_windows` - 1."""
        side = 2 * pad + 1
        return ((self.top + pad) * side + self.left + pad) * 2 + self.flipped.long()


def padding_of(height: int) -> int:
    """Width of the border: an eighth of the height, as 4 for 32 pixels."""
    return max(1, height // 8)


def count_windows(augment: str, height: int) -> int | None:
    """Number of different variants of an image; None where there is no fixed set of them."""
    if augment == "none":
        return 1
    return 2 * (2 * padding_of(height) + 1) ** 2 if augment in ("crop", "crop-flip") else None


def draw_windows(index: Tensor, view: View, height: int) -> Windows:
    """The windows of the images at these indices."""
    if view.augment == "none":
        zeros = torch.zeros_like(index)
        return Windows(zeros, zeros, zeros.bool())
    pad = padding_of(height)
    drawn = hashed_uniform(index, view.seed, DRAWS)
    top = (drawn[:, 0] * (2 * pad + 1)).long() - pad
    left = (drawn[:, 1] * (2 * pad + 1)).long() - pad
    flipped = drawn[:, 2] >= 0.5
    return Windows(top, left, flipped if view.augment == "crop-flip" else torch.zeros_like(flipped))


def border_color(view: View, mean: Tensor) -> Tensor:
    """What surrounds an image, one value per channel from 0 to 255.

    The mean color is zero once images are normalized. Fine-tuning ended 0.27 ± 0.13 points above black
    borders (20 pairs, experiments/recipes.py).
    """
    return mean.round() if view.augment == "crop-flip" else torch.zeros_like(mean)


def crop_windows(windows: Windows, images: Tensor, border: Tensor) -> Tensor:
    """Crop images (images x height x width x channels) to their windows, with a border of this color."""
    _, height, width, _ = images.shape
    rows = windows.top[:, None] + torch.arange(height, device=images.device)
    columns = windows.left[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(windows.flipped[:, None], columns.flip(1), columns)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    which = torch.arange(len(images), device=images.device)[:, None, None]
    cropped = images[which, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return torch.where(inside[..., None], cropped, border.to(cropped.dtype))


# Resized crops


def random_resized_crop(image: Tensor, size: Sequence[int], seed: int, index: int) -> Tensor:
    """A random part of a uint8 image (channels x height x width) on the CPU, resized to `size`."""
    top, left, height, width = draw_crop(image.shape[1], image.shape[2], seed, index)
    part = image[None, :, top : top + height, left : left + width]
    part = part.contiguous(memory_format=torch.channels_last)
    return nn.functional.interpolate(part, list(size), mode="bilinear", antialias=True)[0]


def draw_crop(height: int, width: int, seed: int, index: int) -> tuple[int, int, int, int]:
    """Top, left, height and width, distributed as in torchvision's RandomResizedCrop but 5 times faster."""
    generator = random.Random(derive_seed("view", seed, index))
    for _ in range(10):
        area = height * width * generator.uniform(*AREA)
        ratio = math.exp(generator.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < tall <= height and 0 < wide <= width:
            return generator.randrange(height - tall + 1), generator.randrange(width - wide + 1), tall, wide
    # The image is too narrow for these aspect ratios: take the largest allowed part from its center.
    tall, wide = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def center_crop(image: Tensor, size: Sequence[int], resize: int | None = None) -> Tensor:
    """Resize the short side of an image (channels x height x width), then crop its center."""
    from torchvision.transforms.v2 import functional

    resized = functional.resize(image, [resize or round(min(size) * RESIZE)], antialias=True)
    return functional.center_crop(resized, list(size))  # type: ignore[no-any-return]


# Color jitter and flip


class ColorJitter(NamedTuple):
    """The changes to each image of a batch."""

    strengths: Tensor
    """Images x 4: factors of brightness, contrast and saturation, and the rotation of the hue."""
    order: Tensor
    """Images x 4: a permutation of 0 to 3, the order of the four changes."""
    flipped: Tensor


def draw_color_jitter(index: Tensor, seed: int) -> ColorJitter:
    """The changes to the images at these indices, on the device of `index`."""
    drawn = hashed_uniform(index, seed, 9)
    signed = 2 * drawn[:, :4] - 1
    factors = [1 + BRIGHTNESS * signed[:, 0], 1 + CONTRAST * signed[:, 1], 1 + SATURATION * signed[:, 2]]
    strengths = torch.stack([*factors, HUE * signed[:, 3]], 1)
    return ColorJitter(strengths, drawn[:, 4:8].argsort(dim=1, stable=True), drawn[:, 8] >= 0.5)


def color_jitter_and_flip(images: Tensor, index: Tensor, seed: int) -> Tensor:
    """Color jitter (RGB only) and flip of uint8 images (images x channels x height x width), as float32."""
    from torchvision.transforms.v2 import functional

    adjust = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    )
    changes = (part.tolist() for part in draw_color_jitter(index, seed))
    changed = []
    for image, strengths, order, is_flipped in zip(images.float() / 255, *changes, strict=True):
        for kind in order if len(image) == 3 else ():
            image = adjust[kind](image, strengths[kind])
        changed.append(image.flip(2) if is_flipped else image)
    return (torch.stack(changed) * 255).round_()

"""The paper's augmentation and the centre crop of large images.

Cropping and resizing work image by image, where the image was decoded. Colours and mirroring are changed batch by batch on the device that
trains: what would keep a processor busy for milliseconds is nothing to a GPU.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..utils.rng import derive_seed, uniform

__all__ = [
    "LUMA",
    "ColorJitter",
    "center_crop",
    "color_jitter",
    "color_jitter_and_flip",
    "draw_color_jitter",
    "draw_crop",
    "random_resized_crop",
]

#: How far brightness, contrast and saturation are scaled up or down, and how far the hue is turned (of a whole turn).
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.2, 0.2, 0.2, 0.1
#: A random part of an image is so much of its area, and so much wider than high.
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
#: The short side is resized to this multiple of the crop: 256 for 224.
RESIZE = 256 / 224
#: Images whose colours are changed at a time: so many stay in the cache of a GPU from one operation to the next.
AT_A_TIME = 32

#: Red, green and blue in the brightness that the eye sees.
LUMA = (0.2989, 0.587, 0.114)


@cache
def _centre(size: tuple[int, int]) -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(round(min(size) * RESIZE), antialias=True), v2.CenterCrop(size)])


def random_resized_crop(image: Tensor, size: tuple[int, int], seed: int, index: int) -> Tensor:
    """A random part of a uint8 image (channels x height x width) at full size, drawn by (seed, index) alone."""
    top, left, height, width = draw_crop(image.shape[1], image.shape[2], seed, index)
    part = image[None, :, top : top + height, left : left + width].contiguous(
        memory_format=torch.channels_last
    )
    if image.device.type == "cpu":
        return nn.functional.interpolate(part, size=size, mode="bilinear", antialias=True)[0]
    # Elsewhere it does not work on bytes.
    return (
        nn.functional.interpolate(part.float(), size=size, mode="bilinear", antialias=True)[0]
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
    )


def draw_crop(height: int, width: int, seed: int, index: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a part, distributed as by torchvision's RandomResizedCrop, at a fifth of its time."""
    chance = random.Random(derive_seed("view", seed, index))
    for _ in range(10):
        area = height * width * chance.uniform(*AREA)
        ratio = math.exp(chance.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < tall <= height and 0 < wide <= width:
            return chance.randrange(height - tall + 1), chance.randrange(width - wide + 1), tall, wide
    # An image so narrow that no part of it has a usual shape: its middle, as much as has one.
    tall, wide = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def center_crop(image: Tensor, size: tuple[int, int]) -> Tensor:
    return _centre(tuple(size))(image)  # type: ignore[no-any-return]


class ColorJitter(NamedTuple):
    """What happens to each image of a batch."""

    strengths: Tensor
    """Of brightness, contrast and saturation, to multiply by; of the hue, to turn by. Images x 4."""
    order: Tensor
    """Which of the four comes first, second, third and last. Images x 4."""
    flipped: Tensor


def draw_color_jitter(index: Tensor, seed: int) -> ColorJitter:
    """By (seed, index) alone, on the device of the index."""
    drawn = uniform(index, seed, 9)
    strengths = [
        1 + BRIGHTNESS * _sign(drawn[:, 0]),
        1 + CONTRAST * _sign(drawn[:, 1]),
        1 + SATURATION * _sign(drawn[:, 2]),
    ]
    return ColorJitter(
        torch.stack([*strengths, HUE * _sign(drawn[:, 3])], 1),
        drawn[:, 4:8].argsort(dim=1, stable=True),
        drawn[:, 8] >= 0.5,
    )


def color_jitter_and_flip(images: Tensor, index: Tensor, seed: int) -> Tensor:
    """Images (uint8, images x channels x height x width) with their colours changed and half of them mirrored, by (seed, index) alone."""
    changes = draw_color_jitter(index.to(images.device), seed)
    changed = []
    for some, *parts in zip(*(torch.split(tensor, AT_A_TIME) for tensor in (images, *changes)), strict=True):
        strengths, order, flipped = parts
        seen = some.float()
        if images.shape[1] == 3:
            seen = color_jitter(seen, strengths, order).round_()
        changed.append(torch.where(flipped[:, None, None, None], seen.flip(3), seen))
    return torch.cat(changed)


def _sign(numbers: Tensor) -> Tensor:
    """From [0, 1) to [-1, 1)."""
    return 2 * numbers - 1


def color_jitter(images: Tensor, strengths: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue (0 to 3) changed, each image with strengths and in an order of its own.

    The first three are blends with something grey and only differ in what; the hue is turned once, between those that come before it and
    those that come after.
    """
    hue_at = (order == 3).int().argmax(1, keepdim=True)
    images = _blends(images, strengths, order, hue_at, before=True)
    images = _turned(images, strengths[:, 3])
    return _blends(images, strengths, order, hue_at, before=False)


def _blends(images: Tensor, strengths: Tensor, order: Tensor, hue_at: Tensor, *, before: bool) -> Tensor:
    for slot in range(4):
        kind = order[:, slot]
        is_now = (kind != 3) & ((slot < hue_at[:, 0]) == before)
        strength = (1 + is_now * (strengths.gather(1, kind[:, None])[:, 0] - 1))[:, None, None, None]
        red, green, blue = torch.split(images, 1, 1)
        grey = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
        is_contrast, is_saturation = ((kind == number)[:, None, None, None] for number in (1, 2))
        # Row by row, or the order in which it is added up would depend on the number of threads.
        brightness = grey.mean(3, keepdim=True).mean(2, keepdim=True)
        other = is_saturation * grey + is_contrast * brightness
        images = (strength * images + (1 - strength) * other).clamp_(0, 255)
    return images


def _turned(images: Tensor, turn: Tensor) -> Tensor:
    """The hue turned by a part of the whole circle; the largest and the smallest of red, green and blue stay what they are."""
    red, green, blue = images.unbind(1)
    largest = images.amax(1)
    chroma = largest - images.amin(1)
    safe = chroma + (chroma == 0)
    sixth = torch.where(
        largest == red,
        (green - blue) / safe,
        torch.where(largest == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixth = sixth + 6 * turn[:, None, None]
    channels = []
    for start in (5, 3, 1):
        place = (start + sixth) % 6
        channels.append(largest - chroma * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(channels, 1)

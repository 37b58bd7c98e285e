"""The paper's augmentation and the centre crop of large images.

Cropping and resizing work image by image, where the image was decoded. Colours and mirroring are changed batch by batch on the device that
trains: what would keep a processor busy for milliseconds is nothing to a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .chance import derive, uniform

__all__ = ["centre_view", "imagenet_view", "jittered", "jittered_and_mirrored"]

#: How far brightness, contrast and saturation are scaled up or down, and how far the hue is turned (of a whole turn).
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.2, 0.2, 0.2, 0.1
#: The short side is resized to this multiple of the crop: 256 for 224.
RESIZE = 256 / 224
#: Images whose colours are changed at a time: so many stay in the cache of a GPU from one operation to the next.
AT_A_TIME = 32

#: Red, green and blue in the brightness that the eye sees.
_LUMA = (0.2989, 0.587, 0.114)


@cache
def _training(size: tuple[int, int]) -> Any:
    from torchvision.transforms import v2

    return v2.RandomResizedCrop(size, antialias=True)


@cache
def _centre(size: tuple[int, int]) -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(round(min(size) * RESIZE), antialias=True), v2.CenterCrop(size)])


def imagenet_view(image: Tensor, size: tuple[int, int], seed: int, index: int) -> Tensor:
    """A random part of a uint8 image (channels x height x width) at full size, drawn by (seed, index) alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive("view", seed, index))
        return _training(tuple(size))(image)  # type: ignore[no-any-return]


def centre_view(image: Tensor, size: tuple[int, int]) -> Tensor:
    return _centre(tuple(size))(image)  # type: ignore[no-any-return]


def jittered_and_mirrored(images: Tensor, index: Tensor, seed: int) -> Tensor:
    """Images (uint8, images x channels x height x width) with their colours changed and half of them mirrored, by (seed, index) alone."""
    drawn = uniform(index.to(images.device), seed, 9)
    changed = []
    for some, numbers in zip(torch.split(images, AT_A_TIME), torch.split(drawn, AT_A_TIME), strict=True):
        seen = some.float()
        if images.shape[1] == 3:
            strengths = torch.stack([1 + BRIGHTNESS * _sign(numbers[:, 0]), 1 + CONTRAST * _sign(numbers[:, 1])], 1)
            strengths = torch.cat([strengths, 1 + SATURATION * _sign(numbers[:, 2:3]), HUE * _sign(numbers[:, 3:4])], 1)
            seen = jittered(seen, strengths, numbers[:, 4:8].argsort(1)).round_()
        changed.append(torch.where((numbers[:, 8] < 0.5)[:, None, None, None], seen, seen.flip(3)))
    return torch.cat(changed)


def _sign(numbers: Tensor) -> Tensor:
    """From [0, 1) to [-1, 1)."""
    return 2 * numbers - 1


def jittered(images: Tensor, strengths: Tensor, order: Tensor) -> Tensor:
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
        grey = _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue
        is_contrast, is_saturation = ((kind == number)[:, None, None, None] for number in (1, 2))
        other = is_saturation * grey + is_contrast * grey.mean((2, 3), keepdim=True)
        images = (strength * images + (1 - strength) * other).clamp_(0, 255)
    return images


def _turned(images: Tensor, turn: Tensor) -> Tensor:
    """The hue turned by a part of the whole circle; the largest and the smallest of red, green and blue stay what they are."""
    red, green, blue = images.unbind(1)
    largest = images.amax(1)
    chroma = largest - images.amin(1)
    safe = chroma + (chroma == 0)
    sixth = torch.where(
        largest == red, (green - blue) / safe, torch.where(largest == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    sixth = sixth + 6 * turn[:, None, None]
    channels = []
    for start in (5, 3, 1):
        place = (start + sixth) % 6
        channels.append(largest - chroma * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(channels, 1)

"""Changing colours, mirroring and normalising a batch of large images in two kernels on a GPU: what `transforms` does in a thousand.

Imported only where there is a GPU and a compiler for it (Triton comes with torch).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .transforms import LUMA, ColorJitter

__all__ = ["fused_color_jitter"]

#: Pixels that one program works on.
BLOCK = 1024

_RED, _GREEN, _BLUE = (tl.constexpr(part) for part in LUMA)


def fused_color_jitter(images: Tensor, changes: ColorJitter, mean: Tensor, scale: Tensor) -> Tensor:
    """Images (uint8, images x height x width x 3) changed and normalised, as float32."""
    images = images.contiguous()
    count, height, width, _ = images.shape
    blocks = triton.cdiv(height * width, BLOCK)
    out = torch.empty(images.shape, device=images.device)
    # The brightness before contrast is changed, in one sum per block: added up in a fixed order, unlike with atomic additions.
    sums = torch.empty(count, blocks, device=images.device)
    strengths, order, flipped = (part.contiguous() for part in changes)
    grid = (count, blocks)
    _brightness[grid](images, strengths, order, sums, height * width, blocks, BLOCK)
    room = triton.next_power_of_2(blocks)
    _colours[grid](
        images, strengths, order, flipped, sums, mean, scale, out, height * width, width, blocks, room, BLOCK
    )
    return out


@triton.jit
def _load(images, number, pixel, pixels: tl.constexpr):
    start = images + (number * pixels + pixel) * 3
    is_real = pixel < pixels
    red = tl.load(start, mask=is_real, other=0).to(tl.float32)
    green = tl.load(start + 1, mask=is_real, other=0).to(tl.float32)
    blue = tl.load(start + 2, mask=is_real, other=0).to(tl.float32)
    return red, green, blue


@triton.jit
def _grey(red, green, blue):
    return _RED * red + _GREEN * green + _BLUE * blue


@triton.jit
def _blended(channel, other, strength):
    return tl.minimum(tl.maximum(strength * channel + (1 - strength) * other, 0.0), 255.0)


@triton.jit
def _turned(largest, chroma, sixth, start: tl.constexpr):
    place = start + sixth
    place -= 6 * tl.floor(place / 6)
    return largest - chroma * tl.minimum(tl.maximum(tl.minimum(place, 4 - place), 0.0), 1.0)


@triton.jit
def _changed(red, green, blue, kind, strength, brightness):
    """One of the four changes; the kind is the same for a whole image."""
    if kind == 3:
        largest = tl.maximum(tl.maximum(red, green), blue)
        chroma = largest - tl.minimum(tl.minimum(red, green), blue)
        safe = tl.where(chroma == 0, 1.0, chroma)
        of_green = tl.where(largest == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
        sixth = tl.where(largest == red, (green - blue) / safe, of_green) + 6 * strength
        red = _turned(largest, chroma, sixth, 5)
        green = _turned(largest, chroma, sixth, 3)
        blue = _turned(largest, chroma, sixth, 1)
    else:
        other = tl.where(kind == 2, _grey(red, green, blue), tl.where(kind == 1, brightness, 0.0))
        red = _blended(red, other, strength)
        green = _blended(green, other, strength)
        blue = _blended(blue, other, strength)
    return red, green, blue


@triton.jit
def _brightness(
    images, strengths, order, sums, pixels: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * block + tl.arange(0, block)
    red, green, blue = _load(images, number, pixel, pixels)
    is_before = 1
    for slot in tl.static_range(4):
        kind = tl.load(order + number * 4 + slot)
        is_before = tl.where(kind == 1, 0, is_before)
        if is_before == 1:
            red, green, blue = _changed(red, green, blue, kind, tl.load(strengths + number * 4 + kind), 0.0)
    grey = tl.where(pixel < pixels, _grey(red, green, blue), 0.0)
    tl.store(sums + number * blocks + tl.program_id(1), tl.sum(grey))


@triton.jit
def _colours(
    images,
    strengths,
    order,
    flipped,
    sums,
    mean,
    scale,
    out,
    pixels: tl.constexpr,
    width: tl.constexpr,
    blocks: tl.constexpr,
    room: tl.constexpr,
    block: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * block + tl.arange(0, block)
    of_blocks = tl.arange(0, room)
    brightness = (
        tl.sum(tl.load(sums + number * blocks + of_blocks, mask=of_blocks < blocks, other=0.0)) / pixels
    )
    red, green, blue = _load(images, number, pixel, pixels)
    for slot in tl.static_range(4):
        kind = tl.load(order + number * 4 + slot)
        red, green, blue = _changed(
            red, green, blue, kind, tl.load(strengths + number * 4 + kind), brightness
        )
    column = pixel % width
    target = pixel - column + tl.where(tl.load(flipped + number) != 0, width - 1 - column, column)
    start = out + (number * pixels + target) * 3
    is_real = pixel < pixels
    tl.store(start, (_rounded(red) - tl.load(mean)) * tl.load(scale), mask=is_real)
    tl.store(start + 1, (_rounded(green) - tl.load(mean + 1)) * tl.load(scale + 1), mask=is_real)
    tl.store(start + 2, (_rounded(blue) - tl.load(mean + 2)) * tl.load(scale + 2), mask=is_real)


@triton.jit
def _rounded(value):
    """To the nearest whole number, halves to the even one: beside so large a number there is no room for fractions."""
    return (value + 12582912.0) - 12582912.0

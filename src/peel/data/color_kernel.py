"""Color jitter, flip and normalization of large images in two GPU kernels instead of a thousand.

Decoding keeps up with the training of ResNet-50 at 224 pixels only with them (docs/training.md).

Import it only if `kernels.has_triton()`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .augmentation import ColorJitter

#: Pixels per program.
BLOCK = tl.constexpr(1024)
#: The gray value of a pixel.
_RED, _GREEN, _BLUE = tl.constexpr(0.2989), tl.constexpr(0.587), tl.constexpr(0.114)


def fused_color_jitter(images: Tensor, changes: ColorJitter, mean: Tensor, scale: Tensor) -> Tensor:
    """Images (uint8, images x height x width x 3) changed and normalized, as float32."""
    images = images.contiguous()
    count, height, width, _ = images.shape
    pixels, blocks = height * width, triton.cdiv(height * width, BLOCK.value)
    out = torch.empty(images.shape, device=images.device)
    # Contrast needs the mean gray value. One sum per block, without atomics, gives the same bits every time.
    sums = torch.empty(count, blocks, device=images.device)
    strengths, order, flipped = (part.contiguous() for part in changes)
    _sum_gray[(count, blocks)](images, strengths, order, sums, pixels, blocks)
    sizes = pixels, width, blocks, triton.next_power_of_2(blocks)
    _jitter[(count, blocks)](images, strengths, order, flipped, sums, mean, scale, out, *sizes)
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
def _gray(red, green, blue):
    return _RED * red + _GREEN * green + _BLUE * blue


@triton.jit
def _blend(channel, target, strength):
    return tl.minimum(tl.maximum(strength * channel + (1 - strength) * target, 0.0), 255.0)


@triton.jit
def _from_hue(largest, chroma, sixth, start: tl.constexpr):
    place = start + sixth
    place -= 6 * tl.floor(place / 6)
    return largest - chroma * tl.minimum(tl.maximum(tl.minimum(place, 4 - place), 0.0), 1.0)


@triton.jit
def _change(red, green, blue, kind, strength, mean_gray):
    """One of the four changes of `augmentation.color_jitter_and_flip`."""
    if kind == 3:
        largest = tl.maximum(tl.maximum(red, green), blue)
        chroma = largest - tl.minimum(tl.minimum(red, green), blue)
        safe = tl.where(chroma == 0, 1.0, chroma)
        not_red = tl.where(largest == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
        sixth = tl.where(largest == red, (green - blue) / safe, not_red) + 6 * strength
        red = _from_hue(largest, chroma, sixth, 5)
        green = _from_hue(largest, chroma, sixth, 3)
        blue = _from_hue(largest, chroma, sixth, 1)
    else:
        target = tl.where(kind == 2, _gray(red, green, blue), tl.where(kind == 1, mean_gray, 0.0))
        red = _blend(red, target, strength)
        green = _blend(green, target, strength)
        blue = _blend(blue, target, strength)
    return red, green, blue


@triton.jit
def _sum_gray(images, strengths, order, sums, pixels: tl.constexpr, blocks: tl.constexpr):
    """Sums of the gray values as they are before the change of contrast."""
    number = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    red, green, blue = _load(images, number, pixel, pixels)
    is_before = 1
    for slot in tl.static_range(4):
        kind = tl.load(order + number * 4 + slot)
        is_before = tl.where(kind == 1, 0, is_before)
        if is_before == 1:
            red, green, blue = _change(red, green, blue, kind, tl.load(strengths + number * 4 + kind), 0.0)
    gray = tl.where(pixel < pixels, _gray(red, green, blue), 0.0)
    tl.store(sums + number * blocks + tl.program_id(1), tl.sum(gray))


@triton.jit
def _jitter(
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
    padded_blocks: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.arange(0, padded_blocks)
    mean_gray = tl.sum(tl.load(sums + number * blocks + block, mask=block < blocks, other=0.0)) / pixels
    red, green, blue = _load(images, number, pixel, pixels)
    for slot in tl.static_range(4):
        kind = tl.load(order + number * 4 + slot)
        strength = tl.load(strengths + number * 4 + kind)
        red, green, blue = _change(red, green, blue, kind, strength, mean_gray)
    column = pixel % width
    target = pixel - column + tl.where(tl.load(flipped + number) != 0, width - 1 - column, column)
    start = out + (number * pixels + target) * 3
    is_real = pixel < pixels
    tl.store(start, (_round(red) - tl.load(mean)) * tl.load(scale), mask=is_real)
    tl.store(start + 1, (_round(green) - tl.load(mean + 1)) * tl.load(scale + 1), mask=is_real)
    tl.store(start + 2, (_round(blue) - tl.load(mean + 2)) * tl.load(scale + 2), mask=is_real)


@triton.jit
def _round(value):
    """To the nearest integer, ties to even: float32 has no fractions beside so large a number."""
    return (value + 12582912.0) - 12582912.0

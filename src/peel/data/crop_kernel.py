"""Crop, flip and normalization of small images in one GPU kernel, with the random numbers of `augmentation`.

Import it only if `kernels.has_triton()`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .augmentation import DRAWS, View, padding_of

#: Values per program.
BLOCK = tl.constexpr(1024)
_DRAWS = tl.constexpr(DRAWS)


def fused_crop(
    pixels: Tensor, index: Tensor, view: View, mean: Tensor, scale: Tensor, border: Tensor
) -> Tensor:
    """The images at these indices, augmented and normalized: float32, images x height x width x channels."""
    height, width, channels = pixels.shape[1:]
    out = torch.empty(len(index), height, width, channels, device=pixels.device)
    grid = (len(index), triton.cdiv(height * width * channels, BLOCK.value))
    sizes = height, width, channels, padding_of(height)
    _crop[grid](pixels, index, mean, scale, border, out, view.seed, *sizes, view.augment)
    return out


@triton.jit
def _uniform(place, number: tl.constexpr, seed):
    """One number of `rng.hashed_uniform`."""
    state = ((place * _DRAWS + (number + 1)).to(tl.uint64) * 0x9E3779B97F4A7C15) ^ seed
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["seed"])
def _crop(
    pixels,
    index,
    mean,
    scale,
    border,
    out,
    seed,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    pad: tl.constexpr,
    augment: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    place = tl.load(index + number)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = offset < height * width * channels
    channel = offset % channels
    column = (offset // channels) % width
    row = offset // (channels * width)
    if augment != "none":
        key = seed.to(tl.uint64)
        side = 2 * pad + 1
        row += (_uniform(place, 0, key) * side).to(tl.int32) - pad
        if augment == "crop-flip":
            column = tl.where(_uniform(place, 2, key) < 0.5, column, width - 1 - column)
        column += (_uniform(place, 1, key) * side).to(tl.int32) - pad
    is_inside = is_real & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = pixels + place * (height * width * channels) + (row * width + column) * channels + channel
    value = tl.load(source, mask=is_inside, other=0).to(tl.float32)
    value = tl.where(is_inside, value, tl.load(border + channel, mask=is_real))
    value = (value - tl.load(mean + channel, mask=is_real)) * tl.load(scale + channel, mask=is_real)
    tl.store(out + number * (height * width * channels) + offset, value, mask=is_real)

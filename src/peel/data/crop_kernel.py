"""Cropping, mirroring and normalising a batch in one kernel on a GPU: what `crops` and `chance` do, number by number.

Imported only where there is a GPU and a compiler for it (Triton comes with torch).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .crops import DRAWS, padding_of
from .view import View

__all__ = ["fused_crop"]

BLOCK = 1024


def fused_crop(pixels: Tensor, index: Tensor, view: View, mean: Tensor, scale: Tensor) -> Tensor:
    """The images at these places as a view sees them, normalised: images x height x width x channels, float32."""
    _, height, width, channels = pixels.shape
    out = torch.empty(len(index), height, width, channels, device=pixels.device)
    grid = (len(index), triton.cdiv(height * width * channels, BLOCK))
    is_moved, is_mirrored = view.augment != "none", view.augment == "crop-flip"
    pad = padding_of(height)
    _view[grid](
        pixels,
        index,
        mean,
        scale,
        out,
        view.seed,
        height,
        width,
        channels,
        pad,
        DRAWS,
        is_moved,
        is_mirrored,
        BLOCK,
    )
    return out


@triton.jit
def _draw(place, number: tl.constexpr, seed, draws: tl.constexpr):
    """One number of `chance.uniform`."""
    state = ((place * draws + (number + 1)).to(tl.uint64) * 0x9E3779B97F4A7C15) ^ seed
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["seed"])
def _view(
    pixels,
    index,
    mean,
    scale,
    out,
    seed,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    pad: tl.constexpr,
    draws: tl.constexpr,
    is_moved: tl.constexpr,
    is_mirrored: tl.constexpr,
    block: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    place = tl.load(index + number)
    offset = tl.program_id(1) * block + tl.arange(0, block)
    is_real = offset < height * width * channels
    channel = offset % channels
    column = (offset // channels) % width
    row = offset // (channels * width)
    if is_moved:
        key = seed.to(tl.uint64)
        side = 2 * pad + 1
        row += (_draw(place, 0, key, draws) * side).to(tl.int32) - pad
        if is_mirrored:
            column = tl.where(_draw(place, 2, key, draws) < 0.5, column, width - 1 - column)
        column += (_draw(place, 1, key, draws) * side).to(tl.int32) - pad
    is_inside = is_real & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = pixels + place * (height * width * channels) + (row * width + column) * channels + channel
    value = tl.load(source, mask=is_inside, other=0).to(tl.float32)
    value = (value - tl.load(mean + channel, mask=is_real)) * tl.load(scale + channel, mask=is_real)
    tl.store(out + number * (height * width * channels) + offset, value, mask=is_real)

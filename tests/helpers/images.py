"""Folders of small random images."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from peel.data.augmentation import View
from peel.data.datasets import Split

CPU_DEVICE = torch.device("cpu")


def noise(height: int, width: int, seed: int, channels: int = 3) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def write_folder(
    root: Path,
    *,
    size: tuple[int, int] = (12, 10),
    classes: tuple[str, ...] = ("cat", "dog"),
    count: int = 4,
    test: str = "val",
) -> Path:
    """`count` PNG files of noise per class and split."""
    seeds = itertools.count()
    for split, name in itertools.product(("train", test), classes):
        (root / split / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(noise(*size, next(seeds))).save(root / split / name / f"{i}.png")
    return root


def images_of(split: Split, order: Tensor, batch_size: int, view: View, workers: int = 0) -> Tensor:
    return torch.cat([batch.inputs for batch in split.batches(order, batch_size, view, CPU_DEVICE, workers)])

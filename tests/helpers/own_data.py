"""Datasets, losses and metrics of a user's own, small enough for runs of less than a second."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


def vectors(count: int, seed: int = 0) -> TensorDataset:
    """Images of 8 x 8 pixels. Target: whether each of three channels is bright."""
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    bright = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed + 1)) < 0.5
    return TensorDataset(images + bright[..., None, None], bright.float())


def numbered(count: int, seed: int = 0) -> TensorDataset:
    """The same images. Target: the number of the brightest channel."""
    images = vectors(count, seed).tensors[0]
    return TensorDataset(images, images.mean((2, 3)).argmax(1))


PAIR = vectors(96), vectors(48, seed=5)


class Restless(Dataset[Any]):
    """Draws from three generators for each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = [float(torch.rand(())), random.random(), np.random.rand()]
        return torch.tensor([index, *drawn]), torch.tensor(index)


class Stream(IterableDataset[Any]):
    """Yields `count` of the samples that its length promises."""

    def __init__(self, data: TensorDataset, count: int | None = None) -> None:
        self.data, self.count = data, len(data) if count is None else count

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(self.count))


def stream(data: TensorDataset, count: int | None = None, batch_size: int = 16) -> DataLoader[Any]:
    return DataLoader(Stream(data, count), batch_size)


def bce(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


def hits(output: Tensor, target: Tensor) -> Tensor:
    return ((output > 0) == (target > 0.5)).float().mean()


class Hits:
    """The same over all batches, as metrics of torchmetrics are."""

    def reset(self) -> None:
        self.right = self.count = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.right += int(((output > 0) == (target > 0.5)).sum())
        self.count += target.numel()

    def compute(self) -> Tensor:
        return torch.tensor(self.right / self.count)


class TwoInputs(nn.Module):
    """Takes two images, by position or by name, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, first: Tensor, second: Tensor, **others: Any) -> dict[str, Tensor]:
        x = self.norm1(self.conv1(first + second)).relu()
        return {"out": self.fc(self.norm2(self.conv2(x)).relu().mean((2, 3)))}

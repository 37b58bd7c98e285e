"""Images that fit in memory: decoded once, kept as one uint8 tensor on the device, augmented a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .chance import uniform
from .view import View

__all__ = ["Resident", "cropped"]


@dataclass(frozen=True)
class Resident:
    """One split. Pixels are kept height by width by channel, so that a batch of crops comes out in channels-last order at no cost."""

    pixels: Tensor
    """uint8, images x height x width x channels."""
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        _, height, width, channels = self.pixels.shape
        return channels, height, width

    def to(self, device: torch.device) -> Resident:
        return replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def subset(self, index: Tensor) -> Resident:
        index = index.to(self.pixels.device)
        return replace(self, pixels=self.pixels[index], labels=self.labels[index])

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of normalised images and their labels, in the given order; `workers` are not needed here."""
        home = self.pixels.device
        order = order.to(home)
        for index in torch.split(order, batch_size):
            images = self._seen(index, view)
            yield self._normalised(images.to(device)), self.labels[index].to(device)

    def _seen(self, index: Tensor, view: View) -> Tensor:
        if view.augment == "none":
            return self.pixels[index]
        if view.augment == "imagenet":
            from .transforms import imagenet_view

            drawn = torch.stack([imagenet_view(self.pixels[i].permute(2, 0, 1), self.shape[1:], view.seed, int(i)) for i in index])
            return drawn.permute(0, 2, 3, 1)
        return cropped(self.pixels[index], index, view)

    def _normalised(self, images: Tensor) -> Tensor:
        """Float32, zero mean and unit deviation; a view as channels x height x width over channels-last memory."""
        mean = torch.tensor(self.mean, device=images.device) * 255
        scale = 1 / (torch.tensor(self.std, device=images.device) * 255)
        return ((images - mean) * scale).permute(0, 3, 1, 2)


def cropped(images: Tensor, index: Tensor, view: View) -> Tensor:
    """Zeros around each image, a window of its size at random, mirrored half of the time where asked."""
    _, height, width, _ = images.shape
    pad = max(1, height // 8)
    drawn = uniform(index, view.seed, 3)
    top = (drawn[:, 0] * (2 * pad + 1)).long() - pad
    left = (drawn[:, 1] * (2 * pad + 1)).long() - pad
    rows = top[:, None] + torch.arange(height, device=index.device)
    columns = left[:, None] + torch.arange(width, device=index.device)
    if view.augment == "crop-flip":
        columns = torch.where(drawn[:, 2:3] < 0.5, columns, columns.flip(1))
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    which = torch.arange(len(images), device=index.device)[:, None, None]
    windows = images[which, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return windows * inside[..., None]

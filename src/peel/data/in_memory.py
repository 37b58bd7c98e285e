"""Images that fit in memory: decoded once, kept as one uint8 tensor on the device, augmented a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch import Batch
from .crops import crop_windows, draw_windows
from .kernels import fused_crop
from .transforms import color_jitter_and_flip, random_resized_crop
from .view import View

__all__ = ["InMemoryImages"]


@dataclass(frozen=True)
class InMemoryImages:
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

    def to(self, device: torch.device) -> InMemoryImages:
        return replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def subset(self, index: Tensor) -> InMemoryImages:
        index = index.to(self.pixels.device)
        return replace(self, pixels=self.pixels[index], labels=self.labels[index])

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        """Batches of normalised images and their labels, in the given order; `workers` are not needed here."""
        home = self.pixels.device
        order = order.to(home)
        mean = torch.tensor(self.mean, device=home) * 255
        scale = 1 / (torch.tensor(self.std, device=home) * 255)
        fused = fused_crop() if home.type == "cuda" and view.augment != "imagenet" else None
        for index in torch.split(order, batch_size) if len(order) else ():
            if fused is not None:
                images = fused(self.pixels, index, view, mean, scale)
            else:
                images = (self._seen(index, view) - mean) * scale
            yield Batch(images.permute(0, 3, 1, 2).to(device), self.labels[index].to(device))

    def _seen(self, index: Tensor, view: View) -> Tensor:
        if view.augment == "none":
            return self.pixels[index]
        if view.augment == "imagenet":
            parts = [
                random_resized_crop(self.pixels[i].permute(2, 0, 1), self.shape[1:], view.seed, int(i))
                for i in index
            ]
            return color_jitter_and_flip(torch.stack(parts), index, view.seed).permute(0, 2, 3, 1)
        return crop_windows(draw_windows(index, view, self.shape[1]), self.pixels[index])

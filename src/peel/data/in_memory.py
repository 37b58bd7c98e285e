"""Small images, decoded once and kept as one uint8 tensor on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .augmentation import View, augment_image, border_color, crop_windows, draw_windows
from .batch import Batch
from .kernels import has_triton


@dataclass(frozen=True)
class InMemoryImages:
    """A split of small images. `mean` and `std` normalize each channel, on a scale from 0 to 1."""

    pixels: Tensor
    """uint8, images x height x width x channels, so that batches are channels-last without a copy."""
    labels: Tensor
    """int64 class numbers, from 0."""
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
        """Batches of augmented and normalized images in the given order. `workers` is ignored."""
        home = self.pixels.device
        order = order.to(home)
        mean = torch.tensor(self.mean, device=home) * 255
        scale = 1 / (torch.tensor(self.std, device=home) * 255)
        border = border_color(view, mean)
        is_fused = home.type == "cuda" and view.augment != "imagenet" and has_triton()
        for index in torch.split(order, batch_size) if len(order) else ():
            if is_fused:
                from .crop_kernel import fused_crop

                images = fused_crop(self.pixels, index, view, mean, scale, border)
            else:
                images = (self._augment(index, view, border) - mean) * scale
            yield Batch(images.permute(0, 3, 1, 2).to(device), self.labels[index].to(device))

    def _augment(self, index: Tensor, view: View, border: Tensor) -> Tensor:
        images = self.pixels[index]
        if view.augment == "none":
            return images
        if view.augment != "imagenet":
            return crop_windows(draw_windows(index, view, self.shape[1]), images, border)
        # Rare for small images: one by one on the CPU.
        pairs, size = zip(images.cpu().permute(0, 3, 1, 2), index.tolist(), strict=True), self.shape[1:]
        augmented = [augment_image(image, i, view, size, border, jitter=True) for image, i in pairs]
        return torch.stack(augmented).to(index.device)

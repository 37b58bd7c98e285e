"""Segmentation: a class for every pixel, with a small U-Net.

Targets are class numbers per pixel, so the loss is cross entropy and needs no code. The metric is an object
with `update`, `compute` and `reset`, as those of torchmetrics are: the mean IoU is not a mean over batches.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import peel

CLASSES = 3  # background, disk, square


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    """Images with a disk and a square, and the class of each pixel."""

    def __init__(self, size: int, seed: int, side: int = 48) -> None:
        self.size, self.seed, self.side = size, seed, side

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        image = 0.3 * torch.randn(3, self.side, self.side, generator=rng)
        mask = torch.zeros(self.side, self.side, dtype=torch.int64)
        grid = torch.arange(self.side)
        for number in (1, 2):
            row, column = torch.randint(self.side, (2,), generator=rng).tolist()
            rows, columns = grid[:, None] - row, grid[None] - column
            inside = rows**2 + columns**2 < 64 if number == 1 else (rows.abs() < 8) & (columns.abs() < 8)
            mask = torch.where(inside, number, mask)
            image = torch.where(inside, torch.rand(3, 1, 1, generator=rng), image)
        return image, mask


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = block(3, width), block(width, 2 * width)
        self.middle = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        high = self.down1(image)
        low = self.down2(nn.functional.max_pool2d(high, 2))
        x = self.middle(nn.functional.max_pool2d(low, 2))
        x = self.up2(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), low], 1))
        x = self.up1(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), high], 1))
        return self.head(x)


class MeanIoU:
    """The intersection over the union of each class over all images, as a mean over the classes."""

    def reset(self) -> None:
        self.matrix = torch.zeros(CLASSES, CLASSES)

    def update(self, logits: Tensor, target: Tensor) -> None:
        pairs = target.flatten() * CLASSES + logits.argmax(1).flatten()
        self.matrix += pairs.bincount(minlength=CLASSES**2).reshape(CLASSES, CLASSES).cpu()

    def compute(self) -> float:
        both = self.matrix.diagonal()
        union = self.matrix.sum(0) + self.matrix.sum(1) - both
        return float((both / union.clamp_min(1)).mean())


def main(samples: int = 800, epochs: int = 10, output: str | None = None) -> peel.Result:
    return peel.prune(
        UNet(),
        (DataLoader(Scenes(samples, seed=0), 16, shuffle=True), DataLoader(Scenes(samples // 4, seed=1), 16)),
        weights="train",  # the model is not trained yet; leave this out for one that is
        budget="50%",
        metric=MeanIoU(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        train={"epochs": epochs},
        output=output,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output")
    for row in main(**vars(parser.parse_args())).rows:
        print(f"{row.name:10} mean IoU {row.metric:.3f}, {row.macs / 1e6:6.2f} M multiply-adds")

"""Multi-label classification: which of three shapes does an image show?

A loss and a metric of your own, on a torch `Dataset`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import peel

SHAPES = ("square", "disk", "cross")


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Images of 32 x 32 pixels with any of three shapes at random places, over noise."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        image = 0.3 * torch.randn(3, 32, 32, generator=rng)
        is_shown = torch.rand(len(SHAPES), generator=rng) < 0.5
        for shape in is_shown.nonzero().flatten().tolist():
            color = torch.rand(3, 1, 1, generator=rng) + 0.5
            row, column = torch.randint(6, 26, (2,), generator=rng).tolist()
            rows, columns = torch.arange(32)[:, None] - row, torch.arange(32)[None] - column
            inside = (rows.abs() < 6) & (columns.abs() < 6)
            if SHAPES[shape] == "disk":
                inside = rows**2 + columns**2 < 36
            elif SHAPES[shape] == "cross":
                inside &= (rows.abs() < 2) | (columns.abs() < 2)
            image = torch.where(inside, color, image)
        return image, is_shown.float()


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, target)


def labels_right(logits: Tensor, target: Tensor) -> Tensor:
    """The fraction of the labels that are right."""
    return ((logits > 0) == (target > 0.5)).float().mean()


def main(samples: int = 2000, epochs: int = 8, output: str | None = None) -> peel.Result:
    return peel.prune(
        peel.zoo.create("cifar_resnet20", num_classes=len(SHAPES)),
        (Shapes(samples, seed=0), Shapes(samples // 4, seed=1)),
        weights="train",  # the model is not trained yet; leave this out for one that is
        budget="50%",
        loss=loss,
        metric=labels_right,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        train={"epochs": epochs, "batch_size": 32},
        output=output,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output")
    for row in main(**vars(parser.parse_args())).rows:
        print(f"{row.name:10} {row.metric:7.2%} of the labels right, {row.macs / 1e6:6.2f} M multiply-adds")

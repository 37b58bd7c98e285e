"""Detection: SSDLite of torchvision finds colored rectangles.

A detector computes its losses itself: `loss="model"` calls `model(images, targets)` in training mode and adds
up what it returns. For the metric it is called as `model(images)` in evaluation mode.
"""

import argparse
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

import peel

CLASSES = 3  # background, red, blue


class Rectangles(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Images with one to three rectangles, and their boxes and classes."""

    def __init__(self, size: int, seed: int, side: int = 160) -> None:
        self.size, self.seed, self.side = size, seed, side

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        image = 0.4 + 0.1 * torch.randn(3, self.side, self.side, generator=rng)
        boxes, labels = [], []
        for _ in range(int(torch.randint(1, 4, (), generator=rng))):
            size = torch.randint(self.side // 5, self.side // 2, (2,), generator=rng)
            corner = (torch.rand(2, generator=rng) * (self.side - size)).long()
            (left, top), (right, bottom) = corner.tolist(), (corner + size).tolist()
            label = int(torch.randint(1, CLASSES, (), generator=rng))
            image[:, top:bottom, left:right] = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.1, 0.9]])[label - 1][
                :, None, None
            ]
            boxes.append([left, top, right, bottom])
            labels.append(label)
        return image.clamp(0, 1), {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}


def collate(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[list[Any], list[Any]]:
    """A list of images and a list of targets: detectors take lists, as images may differ in size."""
    return [image for image, _ in samples], [target for _, target in samples]


class Found:
    """The fraction of the rectangles that a detection of the right class overlaps by at least half.

    With torchmetrics installed, wrap `MeanAveragePrecision` instead and return `compute()["map"]`.
    """

    def reset(self) -> None:
        self.found = self.count = 0

    def update(self, detections: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> None:
        for detected, target in zip(detections, targets, strict=True):
            best = detected["scores"] > 0.3
            overlap = torchvision.ops.box_iou(target["boxes"], detected["boxes"][best])
            is_right = target["labels"][:, None] == detected["labels"][best][None]
            self.found += int(((overlap > 0.5) & is_right).any(1).sum())
            self.count += len(target["boxes"])

    def compute(self) -> float:
        return self.found / max(1, self.count)


def main(
    samples: int = 1000, epochs: int = 20, output: str | None = None, model: nn.Module | None = None
) -> peel.Result:
    if model is None:
        model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)
    train, val = Rectangles(samples, seed=0), Rectangles(samples // 4, seed=1)
    # Naming the submodules saves looking for them; see docs/detection.md.
    graph = peel.trace(model, [train[0][0]], modules=["backbone", "head"])
    return peel.prune(
        model,
        (DataLoader(train, 16, shuffle=True, collate_fn=collate), DataLoader(val, 16, collate_fn=collate)),
        weights="train",  # the model is not trained yet; leave this out for one that is
        budget="50%",
        loss="model",
        metric=Found(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        graph=graph,
        method="peel",
        methods={"peel": {"criterion": "gradient"}},
        train={"epochs": epochs},
        output=output,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output")
    for row in main(**vars(parser.parse_args())).rows:
        print(
            f"{row.name:10} {row.metric:7.2%} of the rectangles found, {row.macs / 1e6:6.0f} M multiply-adds"
        )

"""Detection networks: one of our own, and those of torchvision at a small size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IMAGES = [torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
TARGETS = [{"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])} for _ in IMAGES]


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.map = nn.Conv2d(8, 12, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.map(self.norm(self.stem(x)).relu())
        return {"0": x, "1": nn.functional.max_pool2d(x, 2)}


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Conv2d(12, 10, 3, padding=1)
        self.scores, self.boxes = nn.Conv2d(10, 1, 1), nn.Conv2d(10, 4, 1)

    def forward(self, features: list[Tensor]) -> dict[str, Tensor]:
        towers = [self.tower(feature).relu() for feature in features]
        return {
            "scores": torch.cat([self.scores(tower).flatten(1) for tower in towers], 1),
            "boxes": torch.cat([self.boxes(tower).flatten(2).transpose(1, 2) for tower in towers], 1),
        }


class DetectionNet(nn.Module):
    """Resizes a list of images, and chooses boxes by their scores: `torch.export` cannot capture that."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = _Backbone(), _Head()

    def features(self, x: Tensor) -> dict[str, Tensor]:
        return self.backbone(x)  # type: ignore[no-any-return]

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        x = torch.cat([nn.functional.interpolate(image[None], (16, 16)) for image in images])
        found = self.head(list(self.features(x).values()))
        if self.training:
            return {"scores": found["scores"].sigmoid().mean(), "boxes": found["boxes"].square().mean()}
        detections = []
        for scores, boxes in zip(found["scores"], found["boxes"], strict=True):
            best = scores > scores.mean()
            if int(best.sum()) > 5:
                best = scores > scores.median()
            detections.append({"boxes": boxes[best], "scores": scores[best]})
        return detections


def torchvision_detector(name: str) -> nn.Module:
    from torchvision.models import detection

    size: dict[str, Any] = {} if "ssd" in name else {"min_size": 64, "max_size": 96}
    if "rcnn" in name:
        size |= {"rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 10}
    torch.manual_seed(0)
    build = getattr(detection, name)
    return build(weights=None, weights_backbone=None, num_classes=5, **size).eval()  # type: ignore[no-any-return]

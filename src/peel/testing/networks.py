"""Five small networks: plain, residual, depthwise, with squeeze-excite, and concatenating."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Plain(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.second = _conv(3, 16), _conv(16, 24, stride=2)
        self.third, self.fc = _conv(24, 32, stride=2), nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x).relu()).relu()).relu()
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class Residual(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem, self.down = _conv(3, 16), _conv(16, 32, stride=2)
        self.up1, self.back1 = _conv(16, 24), _conv(24, 16)
        self.up2, self.back2 = _conv(32, 24), _conv(24, 32)
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.back1(self.up1(x).relu())).relu()
        x = self.down(x).relu()
        x = (x + self.back2(self.up2(x).relu())).relu()
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class Depthwise(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem, self.expand = _conv(3, 16, stride=2), _conv(16, 48, 1)
        self.depthwise, self.project = _conv(48, 48, groups=48), _conv(48, 16, 1)
        self.head, self.fc = _conv(16, 32, 1), nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.stem(x))
        x = x + self.project(F.relu6(self.depthwise(F.relu6(self.expand(x)))))
        logits: Tensor = self.fc(F.relu6(self.head(x)).mean((2, 3)))
        return logits


class SqueezeExcite(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.second = _conv(3, 16), _conv(16, 32, stride=2)
        self.reduce, self.expand = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.third, self.fc = _conv(32, 32, stride=2), nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        x = x * self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        logits: Tensor = self.fc(self.third(x).relu().mean((2, 3)))
        return logits


class Concatenating(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem, self.left, self.right = _conv(3, 16), _conv(16, 16, 1), _conv(16, 24)
        self.join, self.fc = _conv(40, 32, stride=2), nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = torch.cat([self.left(x).relu(), self.right(x).relu()], 1)
        logits: Tensor = self.fc(self.join(x).relu().mean((2, 3)))
        return logits

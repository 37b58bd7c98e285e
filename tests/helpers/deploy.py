"""Small networks to time and export, and a run of a class of the user's own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import peel
from helpers.small import WIDTHS, Small, fresh
from peel.surgery.info import attach_info, info_of

#: A model file of the user's own.
OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10, wide=8):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.conv2, self.norm2 = nn.Conv2d(wide, 2 * wide, 3, padding=1, bias=False), nn.BatchNorm2d(2 * wide)
        self.conv3, self.conv4 = (nn.Conv2d(2 * wide, 2 * wide, 1, bias=False) for _ in range(2))
        self.conv4.weight = self.conv3.weight
        self.fc = nn.Linear(2 * wide, num_classes)

    def forward(self, x):
        x = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())).relu()
        return self.fc(self.conv4(self.conv3(x).relu()).mean((2, 3)))
"""


class Branching(Small):
    """Runs, but cannot be captured: it branches on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)


class OnlyTwo(Small):
    """Runs with every batch, but is captured for the batch of the example only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if len(x) == 2 else 1.0)


def slim_small(kind: type[Small] = Small) -> nn.Module:
    """A slim network that says how it is fed."""
    model = fresh() if kind is Small else kind()
    graph = peel.trace(model, torch.zeros(1, 3, 8, 8))
    small = peel.slim(model, WIDTHS, graph=graph, weights="inherit").eval()
    spec = {"classes": list("0123456789"), "shape": [3, 8, 8], "mean": [0.3] * 3, "std": [0.4] * 3}
    attach_info(small, replace(info_of(small), input=spec))
    return small

"""The three networks. One is in no library: residual blocks with squeeze-excite, for images of 32 pixels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peel
from peel import zoo
from peel.graph import ChannelGraph
from peel.graph.parameters import residual_ties


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.expand = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


class Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.gate = SqueezeExcite(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels:
            shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.gate(self.norm2(self.conv2(y))) + self.shortcut(x))


def se_resnet(num_classes: int = 10) -> nn.Module:
    """Three stages of three blocks with 32, 64 and 128 channels: 162M MACs, 1.1M parameters."""
    blocks, channels_in = [], 32
    for stage, channels in enumerate((32, 64, 128)):
        for place in range(3):
            blocks.append(Block(channels_in, channels, 2 if stage and not place else 1))
            channels_in = channels
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, num_classes))
    return nn.Sequential(stem, *blocks, head)


#: Name -> function that builds the network with random weights.
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cifar_resnet56": partial(zoo.create, "cifar_resnet56", num_classes=10),
    "cifar_mobilenet_v2": partial(zoo.create, "cifar_mobilenet_v2", num_classes=10),
    "se_resnet": se_resnet,
}


#: Where the results are.
FOLDER = Path(__file__).parents[1] / "results" / "trained"


def latency_path(name: str) -> Path:
    return FOLDER / f"latency-{name}.json"


@cache
def latency_model(name: str) -> peel.LatencyModel:
    return peel.LatencyModel.load(latency_path(name))


def original_path(folder: Path, name: str, seed: int) -> Path:
    """Where a trained original is saved. A seed without one of its own uses that of seed 0."""
    return folder / f"{name}-{seed}" / "original.safetensors"


def original_seed(folder: Path, name: str, seed: int) -> int:
    return seed if original_path(folder, name, seed).exists() else 0


def load_original(folder: Path, name: str, seed: int) -> nn.Module:
    return peel.load(original_path(folder, name, seed), model=NETWORKS[name]())


@cache
def graph_of(name: str) -> ChannelGraph:
    return peel.trace(NETWORKS[name](), torch.zeros(1, 3, 32, 32))


def frozen_ties(name: str, *, streams: bool = False) -> tuple[str, ...]:
    """The ties that keep their width, as in `peel run`; with `streams`, the residual streams as well."""
    frozen = zoo.FROZEN.get(f"cifar:{name}", ())
    return tuple(dict.fromkeys((*frozen, *(residual_ties(graph_of(name)) if streams else ()))))

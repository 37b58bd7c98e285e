"""Inputs for criteria, and their scores in a form that is easy to compare."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from helpers.nets import Net
from peel.data.in_memory import InMemoryImages
from peel.steps.criteria import find_criterion, measure_layers
from peel.steps.importance import Criterion, CriterionInput, Importance, LayerScores, summarize
from peel.train.engine import Engine
from peel.train.objective import CrossEntropy

CPU = Engine(torch.device("cpu"))


def images(count: int, shape: tuple[int, ...] = (3, 8, 8), seed: int = 0, classes: int = 5) -> InMemoryImages:
    rng = torch.Generator().manual_seed(seed)
    channels, height, width = shape
    pixels = torch.randint(256, (count, height, width, channels), generator=rng, dtype=torch.uint8)
    return InMemoryImages(
        pixels, torch.randint(classes, (count,), generator=rng), (0.5,) * channels, (0.3,) * channels
    )


def normalized(split: InMemoryImages) -> tuple[Tensor, Tensor]:
    """All images of a split, normalized, and their labels."""
    return (split.pixels.permute(0, 3, 1, 2) / 255 - 0.5) / 0.3, split.labels


def make_inputs(
    net: nn.Module,
    groups: dict[str, list[str]] | None = None,
    train: InMemoryImages | None = None,
    held_out: InMemoryImages | None = None,
    seed: int = 0,
    shape: tuple[int, ...] = (3, 8, 8),
) -> CriterionInput:
    graph = peel.trace(net, torch.randn(1, *shape))
    train = images(16, shape) if train is None else train
    return CriterionInput(
        net,
        graph if groups is None else graph.regroup(groups),
        train,
        held_out or train,
        CrossEntropy(),
        CPU,
        seed,
    )


def importance(criterion: str | Criterion, inputs: CriterionInput, reduce: str = "mean") -> Importance:
    return summarize(measure_layers(find_criterion(criterion), inputs), inputs.graph, reduce)


def by_tie(found: list[LayerScores]) -> dict[tuple[str, str], list[float]]:
    return {(item.tie, item.layer): item.values.tolist() for item in found}


def filled(parameter: Tensor, values: list[float] | float) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(values).expand(parameter.shape))


class TwoBranches(Net):
    """Two parallel branches: one has large filters, the other small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small, self.fc = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Linear(16, 5)
        with torch.no_grad():
            self.large.weight.mul_(10)
            self.small.weight.mul_(0.5)
            self.fc.weight[:, :8] *= 0.3
            self.fc.weight[:, 8:] *= 20

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([F.relu(self.large(x)), F.relu(self.small(x))], 1))

    def predictions(self, x: Tensor, branch: str) -> Tensor:
        """The classes that the network predicts with one branch only."""
        twin = copy.deepcopy(self)
        twin.fc.weight.data[:, slice(8, 16) if branch == "large" else slice(0, 8)] = 0
        return twin(x).argmax(1)

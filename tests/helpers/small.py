"""Networks and data so small that a whole run takes less than a second, and a network with faults."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from peel.data.augmentation import EVAL
from peel.data.datasets import Data, load_data
from peel.methods.peel import Peel
from peel.run.prune import prune
from peel.run.result import Result
from peel.train.callbacks import Callback, EpochRecord
from peel.train.engine import Engine
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe

CPU = Engine(torch.device("cpu"))

#: PEEL with two epochs of three steps for every network, one for the backbone; networks are not timed.
SHORT: dict[str, Any] = {
    "method": "peel",
    "train": {"epochs": 2, "batch_size": 64},
    "backbone": {"epochs": 1},
    "bench_seconds": 0,
}


class Small(nn.Module):
    """Four ties in two groups of resolution."""

    def __init__(self, num_classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(16)
        self.conv4 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm4 = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu()
        x = self.norm3(self.conv3(x)).relu()
        x = self.norm4(self.conv4(x)).relu()
        return self.fc(self.dropout(x.mean((2, 3))))


#: Widths for it, all odd.
WIDTHS = {"conv1": 5, "conv2": 3, "conv3": 11, "conv4": 7}


class Dropping(Small):
    def __init__(self) -> None:
        super().__init__(dropout=0.5)


class Restless(Dropping):
    """Draws from Python's and numpy's random numbers too, and updates a non-persistent buffer in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("contrast", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.contrast.mul_(0.9).add_(0.1 * x.std())
            x = x * (0.8 + 0.2 * random.random() + 0.2 * np.random.random())
        return super().forward(x / (self.contrast + 0.5))


class Pooled(Small):
    """Its last norm layer sees one value per image and channel."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.last = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())).relu()
        x = self.norm4(self.conv4(self.norm3(self.conv3(x)).relu())).relu()
        return self.fc(self.last(x.mean((2, 3))))


class Slow(Small):
    """Each training step takes as many seconds as the variable PAUSE says."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(float(os.environ.get("PAUSE", "0")))
        return super().forward(x)


class Faulty(Small):
    """Fails in training as the variable FAULT says: STEP:KIND[:RANK].

    STEP counts the forward passes in training mode of this process, from 0. KIND is kill, hang, error, nan,
    oom, or the name of a signal (term, int, usr1). RANK: only in this process of several. Processes that
    torchrun restarts do not fail again.
    """

    passes = 0
    #: After `oom`: batches of this size do not fit, smaller ones do.
    too_large = float("inf")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._fail(x) if self.training else x)

    @staticmethod
    def _fail(x: Tensor) -> Tensor:
        step, kind, *rank = os.environ.get("FAULT", "-1:none").split(":")
        is_due = Faulty.passes == int(step) and rank in ([], [os.environ.get("RANK", "0")])
        Faulty.passes += 1
        if is_due and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            if kind == "hang":
                time.sleep(3600)
            elif kind == "error":
                raise RuntimeError("a fault on demand")
            elif kind == "nan":
                return x * torch.nan
            elif kind == "oom":
                Faulty.too_large = len(x)
            else:
                os.kill(os.getpid(), getattr(signal, f"SIG{kind.upper()}"))
        if len(x) >= Faulty.too_large:
            raise torch.OutOfMemoryError("out of memory on demand")
        return x


@functools.cache
def few_digits(train: int = 200, test: int = 90) -> Data:
    """The first of the embedded digits."""
    whole = load_data("digits")
    return replace(
        whole, train=whole.train.subset(torch.arange(train)), test=whole.test.subset(torch.arange(test))
    )


def small_run(model: nn.Module | str | None = None, data: Data | None = None, **settings: Any) -> Result:
    """A run of `Small` on a few digits, from scratch, unless others are given."""
    return prune(
        model if model is not None else Small(),
        data if data is not None else few_digits(),
        **with_methods({**SHORT, "weights": "train", "init": "scratch", **settings}),
    )


def with_methods(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which those of PEEL may stand beside those of the run."""
    names = {item.name for item in dataclasses.fields(Peel)}
    own = {name: settings[name] for name in settings if name in names}
    others = {name: value for name, value in settings.items() if name not in names}
    return {**others, "methods": {"peel": own}} if own else others


class Counting(Callback):
    """Counts the training steps of each stage."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.name = ""

    def on_stage_begin(self, name: str, description: str) -> None:
        self.name = name

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        self.steps[self.name] = self.steps.get(self.name, 0) + 1


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    """Whether two networks are bit-identical."""
    mine, theirs = first.state_dict(), second.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


#: Twelve plain training steps.
PLAIN = Recipe(epochs=3, batch_size=50, lr=0.05, augment="none", label_smoothing=0.0)


def fresh(seed: int = 0, **settings: Any) -> Small:
    torch.manual_seed(seed)
    return Small(**settings)


@torch.no_grad()
def taught(kind: Callable[..., Any] = Small, data: Data | None = None) -> Any:
    """A teacher, made without backward passes: the classifier is the one of least squares."""
    data = data or few_digits()
    train, classes = data.train, len(data.classes)
    torch.manual_seed(0)
    model = kind(num_classes=classes).eval()
    images, labels, _ = next(iter(train.batches(torch.arange(train.size), train.size, EVAL, CPU.device)))
    classifier, model.fc = model.fc, nn.Identity()
    features = torch.cat([model(images), torch.ones(len(images), 1)], 1)
    targets = 10 * nn.functional.one_hot(labels, classes).float() - 1
    solution = torch.linalg.lstsq(features, targets).solution
    classifier.weight.copy_(solution[:-1].T)
    classifier.bias.copy_(solution[-1])
    model.fc = classifier
    return model.train()


def trained(
    recipe: Recipe = PLAIN, seed: int = 0, model: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, list[EpochRecord]]:
    model = model if model is not None else fresh()
    history = fit(
        model,
        CrossEntropy(recipe.label_smoothing),
        few_digits().train,
        recipe,
        engine=CPU,
        seed=seed,
        **settings,
    )
    return model, history

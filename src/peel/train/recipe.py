"""Training recipes: named hyperparameters, each of which can be overridden."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, did_you_mean

__all__ = ["AUGMENTATIONS", "FIELDS", "RECIPES", "Recipe", "backbone_recipe", "named_recipe"]

AUGMENTATIONS: dict[str, str] = {
    "auto": "depends on the data: crop for digits, crop-flip for small photographs, imagenet for large ones",
    "none": "no augmentation",
    "crop": "random crop after padding by an eighth of the size",
    "crop-flip": "the same, and a random horizontal flip",
    "imagenet": "random resized crop, random horizontal flip and color jitter",
}

SCHEDULES = ("cosine", "steps")

#: What each field of a recipe means; `peel run --help` shows it.
FIELDS: dict[str, str] = {
    "epochs": "Number of epochs.",
    "batch_size": "Images per step, over all processes.",
    "lr": "Peak learning rate.",
    "momentum": "Momentum of SGD.",
    "nesterov": "Whether to use Nesterov momentum.",
    "weight_decay": "Weight decay of weights with more than one axis.",
    "decay_norms": "Whether norm layers and biases decay too.",
    "warmup_epochs": "Epochs of linear warm-up; may be a fraction.",
    "warmup_from": "Learning rate at which the warm-up starts.",
    "schedule": "cosine (to zero) or steps.",
    "milestones": "With steps: where the learning rate drops, as fractions of the training.",
    "gamma": "With steps: the factor of each drop.",
    "label_smoothing": "Label smoothing of the cross entropy.",
    "augment": "auto, none, crop, crop-flip or imagenet.",
    "retries": "How often a diverged training returns to its last checkpoint, with half the learning rate.",
}


@dataclass(frozen=True)
class Recipe:
    """SGD with Nesterov momentum and everything around it; `FIELDS` explains each field."""

    epochs: int = 100
    batch_size: int = 512
    lr: float = 0.2
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    decay_norms: bool = False
    warmup_epochs: float = 1.0
    warmup_from: float = 0.0
    schedule: str = "cosine"
    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)
    gamma: float = 0.2
    label_smoothing: float = 0.1
    augment: str = "auto"
    retries: int = 0

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_size", 1), ("retries", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be a whole number of at least {low}, not {value!r}.")
        for name in (
            "lr",
            "momentum",
            "weight_decay",
            "warmup_epochs",
            "warmup_from",
            "gamma",
            "label_smoothing",
        ):
            value = getattr(self, name)
            limit = 1.0 if name in ("momentum", "label_smoothing") else math.inf
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < limit:
                bounds = "from 0 to below 1" if limit == 1 else "of at least 0"
                raise ConfigError(f"{name} must be a number {bounds}, not {value!r}.")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov needs a momentum above 0.")
        for name, known in (("augment", AUGMENTATIONS), ("schedule", SCHEDULES)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, not {value!r}.{did_you_mean(value, known)}"
                )
        if any(not 0 < milestone < 1 for milestone in self.milestones):
            raise ConfigError(f"milestones must be fractions between 0 and 1, not {self.milestones!r}.")

    def lr_at(self, step: int, steps_per_epoch: int) -> float:
        """Learning rate of a step, counted from 0 over the whole training."""
        total = self.epochs * steps_per_epoch
        warmup = min(round(self.warmup_epochs * steps_per_epoch), total)
        if step < warmup:
            return self.warmup_from + (self.lr - self.warmup_from) * (step + 1) / warmup
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
        return self.lr * self.gamma ** sum(step >= milestone * total for milestone in self.milestones)

    def lr_sum(self, steps_per_epoch: int) -> float:
        """Sum of the learning rates of all steps."""
        return sum(self.lr_at(step, steps_per_epoch) for step in range(self.epochs * steps_per_epoch))

    def changed(self, **overrides: Any) -> Recipe:
        """The recipe with some fields changed; an unknown name is an error."""
        for name in overrides:
            if name not in FIELDS:
                raise ConfigError(f"a recipe has no field {name!r}.{did_you_mean(name, FIELDS)}")
        return replace(self, **overrides)


_CIFAR = Recipe(epochs=200, batch_size=128, lr=0.1, weight_decay=5e-4, label_smoothing=0.0)

RECIPES: Mapping[str, Recipe] = {
    # The paper's settings, with DMCP's weight decay.
    "imagenet-resnet": Recipe(epochs=100),
    "imagenet-mobilenet": Recipe(epochs=250, weight_decay=4e-5),
    # The paper has no CIFAR recipe. This is FPGM's, with a cosine.
    "cifar": _CIFAR,
    "cifar-steps": replace(_CIFAR, schedule="steps"),
    # Short, with large batches: seconds on a GPU.
    "cifar-fast": Recipe(epochs=30, lr=0.4, weight_decay=5e-4, warmup_epochs=3),
    # For the embedded digits: seconds on two CPU cores.
    "digits": Recipe(epochs=20, batch_size=64, lr=0.1, weight_decay=5e-4),
}

#: What the recipe of the backbone changes: the paper has 50 epochs.
_BACKBONE_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "imagenet-resnet": {"epochs": 50},
    "imagenet-mobilenet": {"epochs": 50},
    "cifar": {"epochs": 50},
    "cifar-steps": {"epochs": 50, "schedule": "cosine"},
    "cifar-fast": {"epochs": 10, "warmup_epochs": 1},
    "digits": {"epochs": 12},
}


def backbone_recipe(name: str) -> Recipe:
    """The recipe that trains the backbone of a run with a named recipe."""
    return named_recipe(name).changed(**_BACKBONE_CHANGES[name])


def named_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(
            f"unknown recipe {name!r}.{did_you_mean(name, RECIPES)} Known recipes: {', '.join(RECIPES)}."
        )
    return RECIPES[name]

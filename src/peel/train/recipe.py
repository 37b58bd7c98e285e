"""Recipes: how a network is trained, as named settings of which every field can be changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import ConfigError, did_you_mean

__all__ = ["AUGMENTATIONS", "FIELDS", "RECIPES", "Recipe", "backbone_recipe", "named_recipe"]

AUGMENTATIONS: dict[str, str] = {
    "auto": "what suits the data: crop for digits, crop-flip for small photographs, imagenet for large ones",
    "none": "the image as it is",
    "crop": "padded by an eighth of its size and cropped at random",
    "crop-flip": "the same, and mirrored half of the time",
    "imagenet": "a random part resized to the full size, mirrored half of the time, with jittered colours",
}

SCHEDULES: dict[str, str] = {
    "cosine": "a cosine from the full rate to zero, step by step",
    "steps": "the rate times `gamma` at each milestone (parts of the whole schedule)",
}


#: What each field of a recipe means; `peel run --help` shows it.
FIELDS: dict[str, str] = {
    "epochs": "How often the training images are seen.",
    "batch_size": "Images per step, of all processes together.",
    "lr": "The highest learning rate.",
    "momentum": "Of SGD.",
    "nesterov": "Nesterov's momentum.",
    "weight_decay": "Of weights with more than one axis.",
    "decay_norms": "Whether norm layers and biases decay too.",
    "warmup_epochs": "Epochs in which the rate rises in a line; parts of one too.",
    "warmup_from": "The rate that the warm-up starts from.",
    "schedule": "cosine (to zero) or steps.",
    "milestones": "With steps: where the rate falls, as parts of the schedule.",
    "gamma": "With steps: what the rate is multiplied by there.",
    "label_smoothing": "The part of a label that is spread over all classes.",
    "augment": "auto, none, crop, crop-flip or imagenet.",
    "retries": "How often a training whose loss is no number any more goes back to its last checkpoint and on with half the rate.",
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
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ConfigError(f"retries must be a whole number, 0 or more, not {self.retries!r}.")
        for name, low, high in (
            ("lr", 0.0, math.inf),
            ("momentum", 0.0, 1.0),
            ("weight_decay", 0.0, math.inf),
            ("warmup_epochs", 0.0, math.inf),
            ("warmup_from", 0.0, math.inf),
            ("gamma", 0.0, math.inf),
            ("label_smoothing", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
                raise ConfigError(
                    f"{name} must be a number from {low:g} to {'below 1' if high == 1 else 'any finite value'}, not {value!r}."
                )
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov needs a momentum above 0.")
        if self.augment not in AUGMENTATIONS:
            raise ConfigError(
                f"augment is one of {', '.join(AUGMENTATIONS)}, not {self.augment!r}.{did_you_mean(self.augment, AUGMENTATIONS)}"
            )
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"schedule is one of {', '.join(SCHEDULES)}, not {self.schedule!r}.{did_you_mean(self.schedule, SCHEDULES)}"
            )
        if any(not 0 < part < 1 for part in self.milestones):
            raise ConfigError(
                f"milestones are parts of the schedule between 0 and 1, not {self.milestones!r}."
            )

    def rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of a step, counted from 0 over the whole training."""
        total = self.epochs * steps_per_epoch
        warm = min(round(self.warmup_epochs * steps_per_epoch), total)
        if step < warm:
            return self.warmup_from + (self.lr - self.warmup_from) * (step + 1) / warm
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))
        passed = sum(step >= part * total for part in self.milestones)
        return self.lr * self.gamma**passed

    def rate_sum(self, steps_per_epoch: int) -> float:
        """The learning rates of all steps together: how far a constant gradient would move a weight, times (1 - momentum)."""
        return sum(self.rate(step, steps_per_epoch) for step in range(self.epochs * steps_per_epoch))

    def changed(self, **overrides: Any) -> Recipe:
        """The recipe with some fields changed; an unknown name is an error."""
        known = [field.name for field in fields(self)]
        for name in overrides:
            if name not in known:
                raise ConfigError(f"a recipe has no field {name!r}.{did_you_mean(name, known)}")
        return replace(self, **overrides)


_CIFAR = Recipe(epochs=200, batch_size=128, lr=0.1, weight_decay=5e-4, label_smoothing=0.0)

RECIPES: Mapping[str, Recipe] = {
    # The paper's: batch 512, lr 0.2 after one epoch of warm-up, cosine to zero, label smoothing 0.1; DMCP's weight decay.
    "imagenet-resnet": Recipe(epochs=100),
    "imagenet-mobilenet": Recipe(epochs=250, weight_decay=4e-5),
    "imagenet-backbone": Recipe(epochs=50),
    "imagenet-mobilenet-backbone": Recipe(epochs=50, weight_decay=4e-5),
    # CIFAR: the paper has none. The schedule of FPGM with a cosine; a quarter of it for the backbone.
    "cifar": _CIFAR,
    "cifar-backbone": replace(_CIFAR, epochs=50),
    "cifar-steps": replace(_CIFAR, schedule="steps"),
    # A short one for large batches: what a GPU does in seconds.
    "cifar-fast": Recipe(
        epochs=30, batch_size=512, lr=0.4, weight_decay=5e-4, warmup_epochs=3, label_smoothing=0.1
    ),
    "cifar-fast-backbone": Recipe(
        epochs=10, batch_size=512, lr=0.4, weight_decay=5e-4, warmup_epochs=1, label_smoothing=0.1
    ),
    # The embedded default: seconds on two cores. Digits must not be mirrored.
    "digits": Recipe(epochs=20, batch_size=64, lr=0.1, weight_decay=5e-4),
    "digits-backbone": Recipe(epochs=12, batch_size=64, lr=0.1, weight_decay=5e-4),
}


#: Recipe -> the one that its backbone is trained with.
_BACKBONES = {
    "imagenet-resnet": "imagenet-backbone",
    "imagenet-mobilenet": "imagenet-mobilenet-backbone",
    "cifar-steps": "cifar-backbone",
}


def backbone_recipe(name: str) -> Recipe:
    """The recipe of the backbone that belongs to a named recipe: the paper's 50 epochs, or a quarter of the schedule."""
    known = _BACKBONES.get(name, f"{name}-backbone")
    if known in RECIPES:
        return RECIPES[known]
    recipe = named_recipe(name)
    return replace(recipe, epochs=max(1, recipe.epochs // 4))


def named_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(
            f"no recipe is called {name!r}.{did_you_mean(name, RECIPES)} Known are {', '.join(RECIPES)}."
        )
    return RECIPES[name]

"""Training recipes: named hyperparameters, each of which can be overridden."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, get_type_hints

from msgspec import Meta

from ..errors import ConfigError, DataError, check_choice, did_you_mean
from ..utils.validation import check_value

#: `auto` depends on the data: crop for digits, crop-flip for small photographs, imagenet for large ones.
AUGMENTATIONS = ("auto", "none", "crop", "crop-flip", "imagenet")

SCHEDULES = ("cosine", "steps", "constant")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training with SGD. Their types and ranges are checked."""

    epochs: Annotated[int, Meta(ge=0, description="Number of epochs; 0: only repair what is cut.")] = 100
    batch_size: Annotated[int, Meta(ge=1, description="Images per step, over all processes.")] = 512
    lr: Annotated[float, Meta(ge=0, description="Peak learning rate.")] = 0.2
    momentum: Annotated[float, Meta(ge=0, lt=1, description="Momentum of SGD.")] = 0.9
    nesterov: Annotated[bool, Meta(description="Whether to use Nesterov momentum.")] = True
    weight_decay: Annotated[
        float, Meta(ge=0, description="Weight decay of everything but norm layers and biases.")
    ] = 1e-4
    decay_norms: Annotated[bool, Meta(description="Whether norm layers and biases decay too.")] = False
    warmup_epochs: Annotated[float, Meta(ge=0, description="Epochs of linear warm-up.")] = 1.0
    warmup_from: Annotated[float, Meta(ge=0, description="Learning rate that warm-up starts at.")] = 0.0
    schedule: Annotated[str, Meta(description="cosine (to zero), steps or constant.")] = "cosine"
    milestones: Annotated[
        tuple[Annotated[float, Meta(gt=0, lt=1)], ...],
        Meta(description="With steps: where the learning rate drops, as fractions of the training."),
    ] = (0.3, 0.6, 0.8)
    gamma: Annotated[float, Meta(ge=0, description="With steps: the factor of each drop.")] = 0.2
    label_smoothing: Annotated[float, Meta(ge=0, lt=1, description="Smoothing of the labels.")] = 0.1
    augment: Annotated[str, Meta(description="auto, none, crop, crop-flip or imagenet.")] = "auto"

    def __post_init__(self) -> None:
        for name, kind in _types().items():
            object.__setattr__(self, name, check_value(name, getattr(self, name), kind))
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov needs a momentum above 0.")
        for name, known in (("augment", AUGMENTATIONS), ("schedule", SCHEDULES)):
            check_choice(name, getattr(self, name), known)

    def steps_per_epoch(self, images: int) -> int:
        """Whole batches in an epoch; an error if there is none."""
        if images < self.batch_size:
            raise DataError(
                f"a batch of {self.batch_size} images exceeds the training set of {images} images. "
                f"Choose a batch size of at most {images}."
            )
        return images // self.batch_size

    def lr_at(self, step: int, steps_per_epoch: int) -> float:
        """Learning rate of a step, counted from 0 over the whole training."""
        total = self.epochs * steps_per_epoch
        warmup = min(round(self.warmup_epochs * steps_per_epoch), total)
        if step < warmup:
            return self.warmup_from + (self.lr - self.warmup_from) * (step + 1) / warmup
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
        if self.schedule == "constant":
            return self.lr
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


@cache
def _types() -> Mapping[str, Any]:
    return get_type_hints(Recipe, include_extras=True)


#: The description of each field of a recipe; `peel run --help` shows it.
FIELDS: Mapping[str, str] = {name: kind.__metadata__[-1].description for name, kind in _types().items()}

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
    # For a network that is cut from a trained one and repaired: small images, and large ones. Of the first,
    # rate, batch, decay, warm-up and the objective (`distillation.FINE_TUNING`) were chosen among 26 recipes
    # on two networks and confirmed on three: experiments/recipes.py.
    "finetune": Recipe(epochs=10, batch_size=128, lr=0.02, weight_decay=5e-4, label_smoothing=0.0),
    "finetune-imagenet": Recipe(epochs=10, batch_size=256, lr=0.01),
    # For data of the user's own: a rate that most networks bear, no smoothing of targets.
    "generic": Recipe(epochs=30, batch_size=32, lr=0.01, label_smoothing=0.0, augment="none"),
    # For the embedded digits: seconds on two CPU cores.
    "digits": Recipe(epochs=20, batch_size=64, lr=0.1, weight_decay=5e-4),
}

#: What the recipe of the backbone changes: the paper has 50 epochs. Default: a quarter of the epochs.
_BACKBONE_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "imagenet-resnet": {"epochs": 50},
    "imagenet-mobilenet": {"epochs": 50},
    "cifar-steps": {"epochs": 50, "schedule": "cosine"},
    "cifar-fast": {"epochs": 10, "warmup_epochs": 1},
    "digits": {"epochs": 12},
    "finetune": {"epochs": 2, "warmup_epochs": 0.2},
    "finetune-imagenet": {"epochs": 2, "warmup_epochs": 0.2},
}


def backbone_recipe(name: str) -> Recipe:
    """The recipe that trains the backbone of a run with a named recipe."""
    recipe = named_recipe(name)
    return recipe.changed(**_BACKBONE_CHANGES.get(name, {"epochs": max(1, recipe.epochs // 4)}))


def named_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(
            f"unknown recipe {name!r}.{did_you_mean(name, RECIPES)} Known recipes: {', '.join(RECIPES)}."
        )
    return RECIPES[name]

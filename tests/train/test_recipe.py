"""Recipes: learning rates, published settings, wrong values."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.small import PLAIN, trained
from peel.errors import ConfigError
from peel.run.config import make_config
from peel.train.recipe import FIELDS, RECIPES, Recipe, backbone_recipe, named_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


# Learning rates


def rates(recipe: Recipe, steps: int) -> list[float]:
    return [recipe.lr_at(step, steps) for step in range(recipe.epochs * steps)]


def test_linear_warm_up_and_cosine_decay_to_zero() -> None:
    found = rates(Recipe(epochs=5, lr=0.2, warmup_epochs=1), 10)
    assert found[:10] == pytest.approx([0.02 * i for i in range(1, 11)])
    assert found[10] == pytest.approx(0.2)
    assert found[30] == pytest.approx(0.1)
    assert found[10:] == sorted(found[10:], reverse=True)
    assert 0 < found[-1] < 0.2 * 0.002
    # A cosine is symmetric about its middle.
    assert [0.2 - rate for rate in found[11:]] == pytest.approx(found[:10:-1])


def test_warm_up_starts_from_any_value_or_is_left_out() -> None:
    warm = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=1, warmup_from=0.2), 4)
    assert warm[:4] == pytest.approx([0.25, 0.3, 0.35, 0.4])
    cold = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=0), 4)
    assert cold[0] == pytest.approx(0.4)
    fraction = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=0.5), 4)
    assert fraction[:3] == pytest.approx([0.2, 0.4, 0.4])


def test_a_warm_up_longer_than_the_training_never_exceeds_the_peak() -> None:
    assert max(rates(Recipe(epochs=2, lr=0.4, warmup_epochs=5), 3)) == pytest.approx(0.4)


def test_the_learning_rate_drops_at_the_milestones() -> None:
    found = rates(
        Recipe(epochs=10, lr=1.0, warmup_epochs=0, schedule="steps", milestones=(0.3, 0.6, 0.8), gamma=0.2),
        10,
    )
    expected = [1.0] * 30 + [0.2] * 30 + [0.04] * 20 + [0.008] * 20
    assert found == pytest.approx(expected)


def test_the_sum_of_learning_rates_is_the_distance_under_a_constant_gradient() -> None:
    recipe = Recipe(epochs=4, lr=0.3, momentum=0.9, nesterov=False, weight_decay=0.0)
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.0, momentum=0.9)
    for step in range(4 * 500):
        optimizer.param_groups[0]["lr"] = recipe.lr_at(step, 500)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert -float(weight.detach()) == pytest.approx(recipe.lr_sum(500) / 0.1, rel=1e-2)


def test_training_uses_the_learning_rate_of_the_recipe() -> None:
    _, history = trained(replace(PLAIN, epochs=3))
    assert [record.lr for record in history] == pytest.approx([PLAIN.lr_at(step, 4) for step in (3, 7, 11)])


# Named recipes

PAPER = {
    "batch_size": 512,
    "lr": 0.2,
    "warmup_epochs": 1,
    "schedule": "cosine",
    "momentum": 0.9,
    "nesterov": True,
    "decay_norms": False,
    "label_smoothing": 0.1,
}
FPGM = {"batch_size": 128, "lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("imagenet-resnet", {**PAPER, "epochs": 100, "weight_decay": 1e-4}),
        ("imagenet-mobilenet", {**PAPER, "epochs": 250, "weight_decay": 4e-5}),
        ("cifar", {**FPGM, "epochs": 200, "schedule": "cosine"}),
        (
            "cifar-steps",
            {
                **FPGM,
                "epochs": 200,
                "schedule": "steps",
                "milestones": (60 / 200, 120 / 200, 160 / 200),
                "gamma": 0.2,
            },
        ),
    ],
)
def test_named_recipes_have_the_published_settings(name: str, expected: dict[str, Any]) -> None:
    recipe = named_recipe(name)
    assert {field: getattr(recipe, field) for field in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
def test_the_backbone_trains_shorter_with_the_same_settings(name: str) -> None:
    backbone = backbone_recipe(name)
    assert backbone.epochs < named_recipe(name).epochs
    assert (backbone.batch_size, backbone.lr, backbone.weight_decay) == (
        named_recipe(name).batch_size,
        named_recipe(name).lr,
        named_recipe(name).weight_decay,
    )


@pytest.mark.parametrize("name", ["imagenet-resnet", "imagenet-mobilenet", "cifar", "cifar-steps"])
def test_the_backbone_of_the_paper_trains_for_50_epochs(name: str) -> None:
    assert backbone_recipe(name).epochs == 50


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", -1, "train.epochs: expected int >= 0, not -1"),
        ("epochs", 2.5, "train.epochs: expected int, not 2.5"),
        ("batch_size", True, "train.batch_size: expected int, not True"),
        ("lr", -0.1, "train.lr: expected float >= 0.0, not -0.1"),
        ("lr", math.nan, "train.lr: expected float >= 0.0, not nan"),
        ("lr", "fast", "train.lr: expected float, not 'fast'"),
        ("momentum", 1.0, "train.momentum: expected float < 1.0"),
        ("label_smoothing", 1.0, "train.label_smoothing: expected float < 1.0"),
        ("milestones", (0.5, 1.5), r"train.milestones: expected float < 1.0, not \(0.5, 1.5\)"),
    ],
)
def test_the_config_of_a_run_checks_types_and_ranges(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"train": {field: value}})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schedule", "cosin", "'cosin'.* Did you mean cosine"),
        ("augment", "crop-flop", "'crop-flop'.* Did you mean crop-flip"),
        ("momentum", 0.0, "nesterov needs a momentum"),
        ("epoch", 3, "no field 'epoch'.* Did you mean epochs"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PLAIN.changed(**{field: value})


def test_every_field_has_a_description() -> None:
    assert [item.name for item in fields(Recipe)] == list(FIELDS)
    assert all(FIELDS.values())


def test_an_unknown_recipe_is_answered_with_similar_names() -> None:
    with pytest.raises(ConfigError, match=r"'imagenet-resnett'\. Did you mean imagenet-resnet"):
        named_recipe("imagenet-resnett")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"milestones": 0.5}, "milestones: expected a list, not 0.5"),
        ({"milestones": [0.5, 1.5]}, "milestones: expected float < 1.0"),
        ({"nesterov": "false"}, "nesterov: expected bool, not 'false'"),
        ({"epochs": -1}, "epochs: expected int >= 0, not -1"),
    ],
)
def test_a_recipe_checks_its_values(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Recipe(**change)
    with pytest.raises(ConfigError, match=words):
        PLAIN.changed(**change)
    with pytest.raises(ConfigError, match=words):
        make_config({"train": change})
    assert Recipe(milestones=[0.5]).milestones == (0.5,)  # type: ignore[arg-type]

"""Recipes: rates, published settings, wrong values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.small import PLAIN, trained
from peel.errors import ConfigError
from peel.train.recipe import RECIPES, Recipe, backbone_recipe, named_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


# The learning rate


def rates(recipe: Recipe, steps: int) -> list[float]:
    return [recipe.rate(step, steps) for step in range(recipe.epochs * steps)]


def test_the_rate_warms_up_in_a_line_and_falls_to_zero_in_a_cosine() -> None:
    found = rates(Recipe(epochs=5, lr=0.2, warmup_epochs=1), 10)
    assert found[:10] == pytest.approx([0.02 * i for i in range(1, 11)])
    assert found[10] == pytest.approx(0.2)
    assert found[30] == pytest.approx(0.1)
    assert found[10:] == sorted(found[10:], reverse=True)
    assert 0 < found[-1] < 0.2 * 0.002
    # A cosine is as far above its middle before it as below it after it.
    assert [0.2 - rate for rate in found[11:]] == pytest.approx(found[:10:-1])


def test_the_rate_can_start_from_any_value_or_without_a_warm_up() -> None:
    warm = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=1, warmup_from=0.2), 4)
    assert warm[:4] == pytest.approx([0.25, 0.3, 0.35, 0.4])
    cold = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=0), 4)
    assert cold[0] == pytest.approx(0.4)
    fraction = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=0.5), 4)
    assert fraction[:3] == pytest.approx([0.2, 0.4, 0.4])


def test_a_warm_up_longer_than_the_training_never_exceeds_the_rate() -> None:
    assert max(rates(Recipe(epochs=2, lr=0.4, warmup_epochs=5), 3)) == pytest.approx(0.4)


def test_the_rate_falls_in_steps_at_the_milestones() -> None:
    found = rates(
        Recipe(epochs=10, lr=1.0, warmup_epochs=0, schedule="steps", milestones=(0.3, 0.6, 0.8), gamma=0.2),
        10,
    )
    expected = [1.0] * 30 + [0.2] * 30 + [0.04] * 20 + [0.008] * 20
    assert found == pytest.approx(expected)


def test_the_sum_of_rates_is_the_distance_under_a_constant_gradient() -> None:
    recipe = Recipe(epochs=4, lr=0.3, momentum=0.9, nesterov=False, weight_decay=0.0)
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimiser = torch.optim.SGD([weight], lr=0.0, momentum=0.9)
    for step in range(4 * 500):
        optimiser.param_groups[0]["lr"] = recipe.rate(step, 500)
        weight.grad = torch.ones_like(weight)
        optimiser.step()
    assert -float(weight.detach()) == pytest.approx(recipe.rate_sum(500) / 0.1, rel=1e-2)


def test_the_rate_that_training_uses_is_the_recipes() -> None:
    _, history = trained(replace(PLAIN, epochs=3))
    assert [record.lr for record in history] == pytest.approx([PLAIN.rate(step, 4) for step in (3, 7, 11)])


# Named recipes, as published (methods.md, section 12)

PAPER = {
    "batch_size": 512, "lr": 0.2, "warmup_epochs": 1, "schedule": "cosine", "momentum": 0.9, "nesterov": True, "decay_norms": False,
    "label_smoothing": 0.1,
}  # fmt: skip
FPGM = {"batch_size": 128, "lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("imagenet-resnet", {**PAPER, "epochs": 100, "weight_decay": 1e-4}),
        ("imagenet-mobilenet", {**PAPER, "epochs": 250, "weight_decay": 4e-5}),
        ("imagenet-backbone", {**PAPER, "epochs": 50, "weight_decay": 1e-4}),
        ("imagenet-mobilenet-backbone", {**PAPER, "epochs": 50, "weight_decay": 4e-5}),
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
        ("cifar-backbone", {**FPGM, "epochs": 50}),
    ],
)
def test_named_recipes_are_the_published_ones(name: str, expected: dict[str, Any]) -> None:
    recipe = named_recipe(name)
    assert {field: getattr(recipe, field) for field in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_shorter_one_for_the_backbone(name: str) -> None:
    backbone = backbone_recipe(name)
    assert backbone.epochs < named_recipe(name).epochs
    assert (backbone.batch_size, backbone.lr, backbone.weight_decay) == (
        named_recipe(name).batch_size,
        named_recipe(name).lr,
        named_recipe(name).weight_decay,
    )


def test_the_papers_backbone_trains_for_50_epochs() -> None:
    assert {name: backbone_recipe(name).epochs for name in ("imagenet-resnet", "imagenet-mobilenet", "cifar", "cifar-steps")} == {
        "imagenet-resnet": 50, "imagenet-mobilenet": 50, "cifar": 50, "cifar-steps": 50,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "epochs must be a whole number of at least 1, not 0"),
        ("epochs", 2.5, "epochs must be a whole number"),
        ("batch_size", True, "batch_size must be a whole number"),
        ("lr", -0.1, "lr must be a number from 0"),
        ("lr", math.nan, "lr must be a number"),
        ("lr", "fast", "not 'fast'"),
        ("momentum", 1.0, "momentum must be a number from 0 to below 1"),
        ("label_smoothing", 1.0, "label_smoothing"),
        ("schedule", "cosin", "Did you mean cosine"),
        ("augment", "crop-flop", "Did you mean crop-flip"),
        ("milestones", (0.5, 1.5), r"milestones .* \(0.5, 1.5\)"),
        ("momentum", 0.0, "nesterov needs a momentum"),
        ("epoch", 3, "no field 'epoch'.* Did you mean epochs"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PLAIN.changed(**{field: value})


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'imagenet-resnett'\. Did you mean imagenet-resnet"):
        named_recipe("imagenet-resnett")

"""The method of a run that names none: a search from scratch, PEEL where it is not possible or asked for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import peel
from helpers.nets import Chain
from helpers.small import Small, few_digits, small_run
from peel.data.datasets import Data

pytestmark = pytest.mark.usefixtures("one_thread")


def ten_classes(model: nn.Module) -> nn.Module:
    model.fc = nn.Linear(model.fc.in_features, 10)
    return model


@pytest.mark.parametrize(
    ("model", "data", "settings", "method", "reason"),
    [
        (Small(), few_digits(), {}, "search", ""),
        (Small(), few_digits(), {"distill": "none"}, "search", ""),
        (Small(), few_digits(100), {}, "peel", "at least 160 training images, and here are 100"),
        (
            Small(),
            few_digits(),
            {"budget": "65%", "divisor": 4},
            "peel",
            "different networks have this budget",
        ),
        (Small(), few_digits(), {"criterion": "gradient"}, "peel", "because criterion is set"),
        # PEEL could not do more with one group.
        (ten_classes(Chain()), few_digits(), {"budget": "90%"}, "search", ""),
    ],
    ids=["possible", "no teacher", "few images", "few networks", "a setting of PEEL", "one group"],
)
def test_from_scratch_the_default_is_a_search_where_it_is_possible(
    model: nn.Module, data: Data, settings: dict[str, Any], method: str, reason: str
) -> None:
    result = small_run(model, data, backbone={}, dry_run=True, **settings)
    assert result.plan is not None
    assert result.plan.name == method
    told = [note for note in result.notes if "The method is peel" in note]
    assert len(told) == bool(reason)
    assert reason in " ".join(told)
    # A method that is named is taken, or refused.
    named = {"method": method, **settings}
    assert small_run(model, data, backbone={}, dry_run=True, **named).plan == result.plan


def test_the_default_of_a_search_that_is_not_possible_runs_and_resumes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"backbone": {}, "train": {"epochs": 1, "batch_size": 50}}
    straight = small_run(data=few_digits(100), output=tmp_path, stages=("original",), **settings)
    assert straight.rows[0].image_passes == 100  # no image is left out
    result = small_run(data=few_digits(100), output=tmp_path, **settings)
    assert [row.name for row in result.rows] == ["original", "uniform", "peel"]
    assert any("The method is peel instead of search" in note for note in result.notes)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["method"] == "auto"


def test_a_run_with_the_default_of_before_says_how_to_resume_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"backbone": {}, "output": tmp_path, "stages": ("original",)}
    small_run(method="peel", **settings)
    with pytest.raises(peel.PeelError, match=r"'peel' -> 'search'\n.*resume it \(--method peel\)"):
        small_run(**settings)


def test_settings_of_a_backbone_that_is_not_trained_are_named() -> None:
    told = "The method search trains no backbone: --backbone has no effect."
    notes = [small_run(dry_run=True, method=method).notes for method in ("search", "peel")]
    assert told in notes[0]
    assert told not in notes[1]


def test_an_original_that_learned_nothing_is_named() -> None:
    slow = {"epochs": 1, "batch_size": 64, "lr": 1e-9}
    notes = small_run(data=few_digits(200, 300), train=slow, stages=("original",)).notes
    assert any("The original has learned little" in note and "--train.lr" in note for note in notes)

"""The default method, `sensitivity`, where networks are trained from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peel
from helpers.nets import Chain
from helpers.small import SHORT, Counting, Small, few_digits, taught
from peel.run.prune import prune
from peel.run.result import Result

pytestmark = pytest.mark.usefixtures("one_thread")


class Blocks(nn.Module):
    """Two residual blocks of one size. What the first adds hardly counts."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.up1, self.down1 = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.up2, self.down2 = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.fc = nn.Linear(16, num_classes)
        with torch.no_grad():
            self.down1.weight *= 1e-3

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down1(self.up1(x).relu())
        x = x + self.down2(self.up2(x).relu())
        return self.fc(x.mean((2, 3)))


def default_run(model: Any = None, data: Any = None, **settings: Any) -> Result:
    """A short run of a method that nobody has named."""
    short = {name: value for name, value in SHORT.items() if name not in ("method", "backbone")}
    given = {**short, "weights": "train", "init": "scratch", **settings}
    return prune(Small() if model is None else model, data or few_digits(), **given)


def test_a_group_keeps_its_uniform_share_and_divides_it_among_its_hidden_layers() -> None:
    net = taught(Blocks)
    result = default_run(net, weights=net, divisor=1, train={"epochs": 1})
    plan = result.plan
    assert plan is not None
    assert plan.name == "sensitivity"
    assert [row.name for row in result.rows] == ["original", "uniform", "sensitivity"]
    assert plan.widths["up2"] > 2 * plan.widths["up1"]
    assert plan.widths["stem"] == plan.uniform.widths["stem"], "the stream is as in the uniform network"
    assert 0.97 * plan.budget <= plan.slim.macs <= plan.budget


def test_a_run_from_scratch_with_the_default_resumes_to_the_same_plan(tmp_path: Path) -> None:
    default_run(output=tmp_path, stages=("original", "plan"))
    plan = (tmp_path / "plan.json").read_bytes()
    result = default_run(output=tmp_path)
    assert (tmp_path / "plan.json").read_bytes() == plan
    assert [row.name for row in result.rows] == ["original", "uniform", "sensitivity"]


@pytest.mark.parametrize("init", ["inherit", "scratch"])
def test_with_nothing_to_go_by_the_plan_is_uniform_and_a_note_says_why(init: str) -> None:
    net = taught(Blocks)
    short = {"epochs": 1, "batch_size": 20}
    few = default_run(net, few_digits(40), weights=net, init=init, dry_run=True, train=short)
    chain = Chain()
    chain.fc = nn.Linear(chain.fc.in_features, 10)
    alone = default_run(chain, weights=chain, init=init, freeze=("conv1",), dry_run=True, budget="90%")
    for result, reason in ((few, "at least 64 training images, and here are"), (alone, "no two layers")):
        assert result.plan is not None
        assert result.plan.widths == result.plan.uniform.widths
        assert any("The plan is uniform" in note and reason in note for note in result.notes)


def test_settings_of_a_backbone_that_is_not_trained_are_named() -> None:
    told = "The method sensitivity trains no backbone: --backbone has no effect."
    notes = [
        default_run(dry_run=True, method=method, backbone={"epochs": 1}).notes
        for method in ("sensitivity", "peel")
    ]
    assert told in notes[0]
    assert told not in notes[1]


def test_a_plan_of_another_method_is_refused_and_its_original_is_used(tmp_path: Path) -> None:
    default_run(method="peel", output=tmp_path / "one", stages=("original", "plan"))
    with pytest.raises(peel.PeelError, match="method: 'peel' -> 'sensitivity'"):
        default_run(output=tmp_path / "one")
    default_run(method="peel", output=tmp_path / "two", stages=("original",))
    counting = Counting()
    default_run(output=tmp_path / "two", callbacks=[counting])
    assert "original" not in counting.steps
    assert "uniform" in counting.steps


def test_an_original_that_learned_nothing_is_named() -> None:
    slow = {"epochs": 1, "batch_size": 64, "lr": 1e-9}
    notes = default_run(data=few_digits(200, 300), train=slow, stages=("original",)).notes
    assert any("The original has learned little" in note and "--train.lr" in note for note in notes)

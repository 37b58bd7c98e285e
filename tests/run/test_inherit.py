"""Runs that start from a trained network: it is cut, repaired and fine-tuned."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import peel
from helpers.small import PLAIN, Counting, Small, few_digits, same_weights, small_run, taught, trained
from peel.errors import ConfigError, DataError
from peel.run.result import lost_by_training


def inherit(**settings: Any) -> peel.Result:
    """A run of a trained `Small` on digits, at 60 % of its MACs."""
    given = {"init": "auto", "weights": taught(), "budget": "60%", "data": few_digits(600, 300), **settings}
    return small_run(**given)


def test_the_table_has_the_accuracy_after_each_step_of_surgery(tmp_path: Path) -> None:
    result = inherit(output=tmp_path / "run")
    original, uniform, slim = result.rows
    assert not original.before_training
    for row in (uniform, slim):
        before = row.before_training
        assert list(before) == ["cut", "recalibrated", "repaired"]
        assert before["repaired"] > before["cut"], "half of the network is gone without repair"
    again = inherit(output=tmp_path / "run")
    assert [row.before_training for row in again.rows] == [row.before_training for row in result.rows]
    assert same_weights(again.model, result.model)


class Moving(Small):
    """The first `.to` makes new tensors, as from one device to another."""

    is_moved = False

    def _apply(self, fn: Any, recurse: bool = True) -> Moving:
        if self.is_moved:
            return super()._apply(fn, recurse)
        self.is_moved = True
        return super()._apply(lambda tensor: fn(tensor).clone(), recurse)


def test_a_network_that_is_moved_to_the_device_of_the_run_can_be_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    result = inherit(weights=taught(Moving), method="sensitivity")
    assert [row.name for row in result.rows] == ["original", "uniform", "sensitivity"]


def test_inherited_networks_start_far_above_those_from_scratch() -> None:
    data = few_digits(600, 300)
    short = {"method": "uniform", "distill": "none", "train": {"epochs": 1, "batch_size": 100}}
    inherited = inherit(**short, data=data).rows[-1]
    scratch = inherit(**short, data=data, init="scratch").rows[-1]
    assert inherited.before_training["repaired"] > scratch.top1 + 0.2
    assert inherited.macs == scratch.macs


@pytest.mark.parametrize("method", ["uniform", "magnitude", "taylor"])
def test_every_method_gives_a_row_of_its_name(method: str) -> None:
    counting = Counting()
    result = inherit(method=method, callbacks=[counting])
    assert [row.name for row in result.rows] == list(dict.fromkeys(["original", "uniform", method]))
    assert set(counting.steps) == {"uniform", method}, "no backbone is trained"
    assert result.plan is not None
    assert result.model is not None
    assert result.plan.name == method
    assert result.rows[-1].macs <= result.plan.budget


def test_a_trained_network_is_cut_by_sensitivity_unless_told_otherwise() -> None:
    given = {"budget": "60%", "train": {"epochs": 0}, "bench_seconds": 0}
    default, named = (
        peel.prune(taught(), few_digits(600, 300), **given, **method)
        for method in ({}, {"method": "sensitivity"})
    )
    assert [row.name for row in default.rows] == ["original", "uniform", "sensitivity"]
    assert default.plan is not None
    assert named.plan is not None
    assert default.plan.widths == named.plan.widths
    assert same_weights(default.model, named.model)


def test_a_given_module_counts_as_trained() -> None:
    result = peel.prune(
        taught(), few_digits(600, 300), budget="60%", train={"epochs": 1}, stages=["original"]
    )
    assert result.rows[0].top1 > 0.5
    with pytest.raises(DataError, match=r"weights are not trained.*--weights train"):
        peel.prune(Small(), few_digits(600, 300), budget="60%", train={"epochs": 1})


def test_weights_may_be_a_state_dict() -> None:
    result = small_run(Small(), few_digits(600, 300), weights=taught().state_dict(), stages=["original"])
    assert result.rows[0].top1 > 0.5
    with pytest.raises(peel.StoreError, match="the given state dict does not fit the model"):
        small_run(Small(), weights={"conv1.weight": torch.zeros(3)}, stages=["original"])


def test_weights_may_be_a_plain_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "trained.safetensors"
    save_file(taught().state_dict(), path)
    result = small_run(Small(), few_digits(600, 300), weights=str(path), stages=["original"])
    assert result.rows[0].top1 > 0.5


def test_without_epochs_networks_are_repaired_only(tmp_path: Path) -> None:
    counting, folder = Counting(), tmp_path / "run"
    settings = {"method": "magnitude", "train": {"epochs": 0}, "output": folder, "callbacks": [counting]}
    result = inherit(**settings)
    assert not counting.steps
    for row in result.rows[1:]:
        assert row.top1 == row.before_training["repaired"]
    assert (folder / "slim.safetensors").exists()
    assert same_weights(inherit(**settings).model, result.model)
    with pytest.raises(ConfigError, match="nothing is trained from scratch"):
        small_run(train={"epochs": 0})
    with pytest.raises(ConfigError, match="backbone needs at least one epoch"):
        inherit(backbone={"epochs": 0})


def test_of_the_repaired_and_the_fine_tuned_network_the_better_is_kept(tmp_path: Path) -> None:
    settings = {"method": "uniform", "train": {"epochs": 1, "batch_size": 100, "lr": 1.0}}
    lost = inherit(**settings, output=tmp_path / "run")
    row = lost.rows[-1]
    assert row.top1 == row.before_training["repaired"] > row.fine_tuned
    assert any("uniform: the network from before fine-tuning is kept" in note for note in lost.notes)
    repaired = inherit(method="uniform", train={"epochs": 0}).model
    assert same_weights(lost.model, repaired)
    assert same_weights(peel.load(tmp_path / "run" / "slim", model=Small()), repaired)
    assert inherit(**settings, output=tmp_path / "run").rows == lost.rows
    original, _ = trained(replace(PLAIN, epochs=10, lr=0.1))
    gained = inherit(method="uniform", weights=original, train={"epochs": 10, "batch_size": 20})
    assert gained.rows[-1].fine_tuned is None
    untuned = inherit(method="uniform", weights=original, train={"epochs": 0})
    assert not same_weights(gained.model, untuned.model)
    assert any("uniform: the fine-tuned network is kept" in note for note in gained.notes)


def test_images_that_choose_the_better_network_are_not_trained_on() -> None:
    seen: list[int] = []

    class Count(peel.Callback):
        def on_epoch_end(self, record: Any) -> None:
            seen.append(round(record.images_per_second * record.seconds))

    result = inherit(method="uniform", train={"epochs": 1, "batch_size": 10}, callbacks=[Count()])
    assert "60 of 600 training images are left out, to choose the better network by." in result.notes
    assert seen == [540]
    few = inherit(data=few_digits(100, 300), method="uniform", train={"epochs": 1, "batch_size": 10})
    assert any(note.startswith("No training images are left out") for note in few.notes)


def test_labels_are_not_used_in_fine_tuning_unless_asked_for() -> None:
    images = few_digits(150, 300)  # too few for held-out ones, whose choice depends on the labels
    wrong = replace(images.train, labels=images.train.labels.roll(1))
    settings = {"method": "uniform", "train": {"epochs": 1, "batch_size": 50}}

    def network(labels_of: Any, **more: Any) -> Any:
        return inherit(**settings, **more, data=replace(images, train=labels_of)).model

    assert same_weights(network(images.train), network(wrong))
    assert not same_weights(network(images.train, hard_weight=1.0), network(wrong, hard_weight=1.0))


def test_a_note_says_that_fine_tuning_lost_accuracy() -> None:
    row = inherit(method="uniform", train={"epochs": 0}).rows[-1]
    for top1, is_noted in ((0.80, False), (0.57, False), (0.50, True)):
        changed = replace(row, top1=top1, before_training={"cut": 0.3, "repaired": 0.58})
        assert bool(lost_by_training([changed], 300)) == is_noted


def test_the_recipe_is_that_of_fine_tuning_unless_trained_from_scratch() -> None:
    given = {"train": {}, "backbone": {}, "dry_run": True}
    plain, tuned = (
        peel.prune(taught(), few_digits(600, 300), budget="60%", init=init, **given)
        for init in ("scratch", "inherit")
    )
    assert plain.estimate is not None
    assert tuned.estimate is not None
    assert sum(tuned.estimate.values()) < sum(plain.estimate.values())


def test_without_repair_a_network_is_fine_tuned_as_it_was_cut(tmp_path: Path) -> None:
    result = inherit(init="cut", method="uniform", train={"epochs": 0}, output=tmp_path / "run")
    row = result.rows[-1]
    assert list(row.before_training) == ["cut", "recalibrated"]
    assert row.top1 == row.before_training["cut"]
    assert "Every network is cut from the trained original." in result.notes
    with pytest.raises(peel.RunError, match="repairs"):
        inherit(method="uniform", train={"epochs": 0}, output=tmp_path / "run")


def test_what_cannot_inherit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs trained weights.*--stages original"):
        small_run(init="inherit")
    with pytest.raises(peel.ConfigError, match='init="cut" needs trained weights'):
        small_run(init="cut")
    with pytest.raises(ConfigError, match="trains from scratch"):
        inherit(distill="in-place")
    with pytest.raises(ConfigError, match="the method taylor needs the trained original"):
        small_run(method="taylor", stages=["plan", "final"], distill="none")
    with pytest.raises(ConfigError, match="Did you mean taylor"):
        small_run(method="taylr")


def test_a_method_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import peel\n"
        "class Narrow(peel.Method):\n"
        "    def solve(self, problem, work):\n"
        "        return peel.Answer({**problem.constraint.uniform, 'conv1': 1})\n"
    )
    result = inherit(method=f"{file}:Narrow")
    assert [row.name for row in result.rows] == ["original", "uniform", "Narrow"]
    assert result.plan is not None
    assert result.plan.widths["conv1"] == 1


class GroupNormed(nn.Module):
    """Group norms renormalize what a cut leaves, which the sensitivity of their layers does not know."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        widths = (3, 24, 32, 48)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.GroupNorm(4, b), nn.ReLU())
                for a, b in pairwise(widths)
            )
        )
        self.fc = nn.Linear(48, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(x).mean((2, 3)))


def test_sensitivity_yields_to_uniform_where_that_is_better_after_the_repair(tmp_path: Path) -> None:
    torch.manual_seed(1)
    original, _ = trained(replace(PLAIN, epochs=25, lr=0.1, batch_size=32), seed=1, model=GroupNormed())
    settings = {"weights": original, "data": few_digits(900, 300), "budget": "30%", "train": {"epochs": 0}}

    def run(method: str, **more: Any) -> peel.Result:
        return small_run(GroupNormed(), init="auto", method=method, **settings, **more)

    result = run("sensitivity", output=tmp_path / "run")
    assert result.plan is not None
    losses = result.plan.values["repaired_losses"]
    assert losses["sensitivity"] > losses["uniform"], "one of the networks where sensitivity loses"
    uniform, slim = result.rows[1:]
    assert slim.name == "sensitivity"
    assert (slim.top1, slim.macs) == (uniform.top1, uniform.macs)
    assert any("The plan is the uniform network: after the repair its loss" in note for note in result.notes)
    assert same_weights(run("sensitivity", output=tmp_path / "run").model, result.model)
    alone = run("sensitivity", stages=["original", "plan", "final"])
    assert same_weights(alone.model, result.model)
    kept = run("magnitude")
    assert kept.plan is not None
    assert kept.plan.widths != result.plan.widths
    assert any("Uniform widths may be better" in note for note in kept.notes), "on this network"

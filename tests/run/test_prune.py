"""What a run does and writes: its folder, its table, its stages."""

from __future__ import annotations

import copy
import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peel
from helpers.folders import content, read
from helpers.small import CPU, WIDTHS, Counting, Small, few_digits, same_weights, small_run, taught
from peel.cost.count import count_macs
from peel.data.augmentation import EVAL
from peel.errors import ConfigError, WidthsError
from peel.methods import Problem, Work
from peel.methods.peel import rounds_of
from peel.methods.plan import Plan
from peel.run.result import Result

pytestmark = pytest.mark.usefixtures("one_thread")


# The folder


def test_the_run_folder_holds_the_documented_files(finished: tuple[Path, Result]) -> None:
    folder, _ = finished
    stages = {
        f"stages/{name}.{suffix}"
        for name in ("original", "backbone", "uniform", "peel")
        for suffix in ("safetensors", "record.json")
    }
    of_plan = {"stages/plan.record.json", "stages/plan.importance-1.json"}
    top = "config.toml state.json environment.json plan.json metrics.jsonl slim.safetensors"
    assert set(content(folder)) == stages | of_plan | {*top.split(), "result.json", "report.html", ".lock"}
    assert not list((folder / "checkpoints").iterdir()), "finished stages need no checkpoints"
    assert read(folder / "environment.json")["torch"] == torch.__version__


def test_settings_are_stored_as_given_and_as_resolved(finished: tuple[Path, Result]) -> None:
    config = tomllib.loads((finished[0] / "config.toml").read_text())
    assert (config["seed"], config["budget"], config["recipe"]) == (3, "50%", "auto")
    assert config["train"] == {"epochs": 2, "batch_size": 64}
    state = read(finished[0] / "state.json")
    assert (state["format"], state["version"]) == ("peel-run", 3)
    peel, plan = state["jobs"]["peel"], state["jobs"]["plan"]
    assert peel["seed"] == plan["seed"] == 3
    assert (peel["train"]["epochs"], peel["train"]["lr"]) == (2, 0.1)
    assert (plan["backbone"]["epochs"], plan["backbone"]["batch_size"]) == (1, 64)
    assert (peel["train"]["augment"], plan["peel.backbone_ratio"]) == ("crop", 0.8)
    assert len(state["subject"]["data"]["classes"]) == 10


def test_metrics_have_one_line_per_epoch_in_the_order_of_the_stages(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = {"original": 2, "backbone": 1, "uniform": 2, "peel": 2}
    assert [(line["stage"], line["epoch"], line["epochs"]) for line in lines] == [
        (stage, epoch, count) for stage, count in epochs.items() for epoch in range(1, count + 1)
    ]
    assert all(set(line["test"]) == {"loss", "top1", "top5"} and line["train"]["loss"] > 0 for line in lines)
    assert set(lines[2]["importance"]) == {"8x8", "4x4"}
    assert [line["test"] for line in lines if line["stage"] == "peel"] == [
        epoch.test for epoch in result.history["peel"]
    ]


# The table


def test_the_costs_in_the_table_are_those_of_the_saved_networks(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    assert [row.name for row in result.rows] == ["original", "uniform", "peel"]
    for row in result.rows:
        network = peel.load(folder / row.file, model=Small())
        assert row.params == sum(parameter.numel() for parameter in network.parameters())
        assert row.macs == count_macs(network, (torch.zeros(1, 3, 8, 8),), {})
    assert max(row.macs for row in result.rows[1:]) <= result.rows[0].macs / 2
    assert [vars(row) for row in result.rows] == read(folder / "result.json")["rows"]


def test_the_accuracies_in_the_table_are_those_of_the_saved_networks(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    images, labels, _ = next(iter(few_digits().test.batches(torch.arange(90), 90, EVAL, CPU.device)))
    for row in result.rows:
        network = peel.load(folder / row.file, model=Small()).eval()
        with torch.no_grad():
            logits = network(images)
        top5 = (logits.argsort(1, descending=True)[:, :5] == labels[:, None]).any(1)
        assert row.top1 == (logits.argmax(1) == labels).sum().item() / 90
        assert row.top5 == pytest.approx(top5.float().mean().item())
        assert row.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)


def test_the_result_is_the_same_with_and_without_a_folder(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    without = small_run(seed=3)
    assert result.model is not None
    assert without.model is not None
    assert same_weights(result.model, peel.load(folder / "slim", model=Small()))
    assert same_weights(result.model, without.model)
    assert not without.model.training
    assert without.plan == result.plan == Plan.from_json((folder / "plan.json").read_bytes())
    assert without.folder is None
    other = small_run(seed=4)
    assert other.model is not None
    assert not same_weights(result.model, other.model)


def test_the_models_of_the_caller_are_not_changed() -> None:
    torch.manual_seed(0)
    model, teacher = Small().train(), taught()
    before = copy.deepcopy([model, teacher])
    small_run(model, weights=teacher)
    for old, now in zip(before, (model, teacher)):
        assert same_weights(old, now)
        assert now.training
        assert all(parameter.requires_grad for parameter in now.parameters())
        assert now.conv2.weight.is_contiguous()


# Stages


@pytest.mark.parametrize(
    ("stages", "settings", "trained"),
    [
        (["original"], {}, {"original": 6}),
        (["plan"], {}, {"backbone": 3}),
        (["plan", "final"], {"distill": "none"}, {"backbone": 3, "peel": 6}),
        (["original", "plan", "uniform"], {}, {"original": 6, "backbone": 3, "uniform": 6}),
        (["final"], {"distill": "none", "plan": WIDTHS}, {"given": 6}),
    ],
)
def test_only_the_chosen_stages_are_run(
    stages: list[str], settings: dict[str, Any], trained: dict[str, int]
) -> None:
    counting = Counting()
    result = small_run(stages=stages, callbacks=[counting], **settings)
    assert counting.steps == trained
    assert [row.name for row in result.rows] == [name for name in trained if name != "backbone"]
    assert (result.model is not None) == ("final" in stages)
    assert (result.plan is not None) == ("plan" in stages or "plan" in settings)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["final"], "need a plan"),
        (["original", "uniform"], "need a plan"),
        (["uniform", "final"], "need a plan: add plan, or"),
        (["plan", "final"], "distillation needs the trained original"),
        (["origina"], "Did you mean original"),
    ],
)
def test_stages_that_cannot_work_are_refused_before_training(
    stages: list[str], message: str, tmp_path: Path
) -> None:
    counting = Counting()
    with pytest.raises(ConfigError, match=message):
        small_run(stages=stages, callbacks=[counting], output=tmp_path / "run")
    assert counting.steps == {}
    assert not (tmp_path / "run").exists()


def test_a_method_without_backbone_needs_no_stage_for_it() -> None:
    settings: dict[str, Any] = {"weights": "pretrained", "init": "inherit", "method": "sensitivity"}
    result = small_run(taught(), stages=["original", "plan", "final"], **settings)
    whole = small_run(taught(), **settings)
    assert [row.name for row in result.rows] == ["original", "sensitivity"]
    assert result.rows[-1].macs == whole.rows[-1].macs
    with pytest.raises(ConfigError, match="need a plan: add plan, or"):
        small_run(taught(), stages=["original", "final"], **settings)


def test_the_uniform_method_is_not_compared_with_itself() -> None:
    assert not any("uniform network" in note for note in small_run(method="uniform").notes)


def test_a_dry_run_trains_and_writes_nothing(tmp_path: Path) -> None:
    counting, model = Counting(), Small()
    before = copy.deepcopy(model)
    result = small_run(model, dry_run=True, output=tmp_path / "run", callbacks=[counting])
    assert counting.steps == {}
    assert same_weights(model, before)
    assert not list(tmp_path.iterdir())
    assert result.model is None
    assert result.rows == []
    assert result.plan is not None
    assert rounds_of(result.plan)[0].shares == {"8x8": 0.5, "4x4": 0.5}
    assert result.plan.slim.macs <= result.plan.budget
    assert result.estimate is not None
    assert list(result.estimate) == ["original", "backbone", "uniform", "peel"]
    assert all(seconds > 0 for seconds in result.estimate.values())


def test_given_groups_are_the_ones_that_grow() -> None:
    groups = {"outer": ("conv1", "conv4"), "inner": ("conv2", "conv3")}
    plan = small_run(groups=groups, stages=["plan"], policy="winner-take-all").plan
    assert plan is not None
    assert plan.others["backbone"] is not None
    assert plan.groups == groups
    found = rounds_of(plan)[0]
    assert found.shares is not None
    loser, winner = sorted(groups, key=found.shares.__getitem__)
    assert found.factors[loser] == 1.0 < found.factors[winner]
    backbone = plan.others["backbone"].widths
    grown = {tie for tie, width in found.ideal_widths.items() if width > backbone[tie] + 1e-9}
    assert grown == set(groups[winner])


# Models


class HeadFirst(Small):
    """Defines its last convolution first."""

    def __init__(self) -> None:
        super().__init__()
        layers = dict(self.named_children())
        for name in layers:
            delattr(self, name)
        self.head = nn.Conv2d(16, 16, 1)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm3(self.conv3(self.norm1(self.conv1(x)).relu())).relu()
        return self.fc(self.head(x).relu().mean((2, 3)))


class Narrow(Small):
    """Leaves out an activation where it has five channels."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        if x.shape[1] != 5:
            x = x.sigmoid()
        x = self.norm3(self.conv3(self.norm2(self.conv2(x)).relu())).relu()
        return self.fc(self.norm4(self.conv4(x)).relu().mean((2, 3)))


def test_a_network_whose_code_does_something_else_is_refused_before_training(tmp_path: Path) -> None:
    counting, plan = Counting(), {"conv1": 5, "conv2": 8, "conv3": 8, "conv4": 8}
    with pytest.raises(WidthsError, match=r"test_prune\.py:\d+ `x = self.norm3.*instead of.*x\.sigmoid"):
        small_run(Narrow(), plan=plan, callbacks=[counting], output=tmp_path / "run")
    assert counting.steps == {}
    assert not (tmp_path / "run").exists()
    assert small_run(Narrow(), plan={**plan, "conv1": 4}, stages=["final"], distill="none").model is not None


def test_images_get_the_channels_that_the_network_takes() -> None:
    network = HeadFirst()
    assert next(layer for layer in network.modules() if isinstance(layer, nn.Conv2d)) is network.head
    assert peel.prune(network, "digits", dry_run=True).plan is not None


def test_a_note_names_frozen_parameters_which_are_trained_too() -> None:
    network = Small()
    network.conv1.weight.requires_grad_(False)
    notes = small_run(network, stages=["original"]).notes
    assert any("Frozen parameters (conv1.weight)" in note for note in notes)
    notes = small_run(network.requires_grad_(False), stages=["original"]).notes
    assert not any("Frozen" in note for note in notes)


def test_a_plan_that_is_the_uniform_network_is_trained_once(tmp_path: Path) -> None:
    uniform = peel.uniform(peel.trace(Small(), torch.zeros(1, 3, 8, 8)), "50%")
    counting = Counting()
    options = {"plan": uniform, "budget": "50%", "distill": "none", "train": {"epochs": 2, "batch_size": 50}}
    result = small_run(**options, output=tmp_path, callbacks=[counting])
    assert "The plan is the uniform network." in result.notes
    assert counting.steps["uniform"] > 0
    assert "given" not in counting.steps
    rows = {row.name: row for row in result.rows}
    assert rows["given"].top1 == rows["uniform"].top1
    assert rows["given"].seconds == rows["given"].image_passes == 0  # its training is not counted twice
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["test"] for line in lines if line["stage"] == "given"] == [
        line["test"] for line in lines if line["stage"] == "uniform"
    ]
    again = small_run(**options, output=tmp_path)  # resumes: everything is finished
    assert [row.top1 for row in again.rows] == [row.top1 for row in result.rows]


@dataclass(frozen=True)
class FirstChannels(peel.Method):
    """The uniform network, with the first channels of each layer."""

    def solve(self, problem: Problem, work: Work) -> peel.Answer:
        widths = problem.graph.widths
        scores = {tie: -torch.arange(width, dtype=torch.float32) for tie, width in widths.items()}
        return peel.Answer(problem.constraint.uniform, scores)


def test_a_plan_with_the_widths_of_uniform_is_trained_where_it_keeps_other_channels() -> None:
    model, given = taught(), {"budget": "50%", "init": "inherit"}
    uniform = peel.uniform(peel.trace(model, torch.zeros(1, 3, 8, 8)), "50%")
    alike, other = Counting(), Counting()
    small_run(model, weights=model, plan=uniform, callbacks=[alike], **given)
    assert set(alike.steps) == {"uniform"}, "the same widths and channels"
    small_run(model, weights=model, method=FirstChannels(), callbacks=[other], **given)
    assert other.steps["uniform"] == other.steps["FirstChannels"]


def test_a_note_says_that_the_weights_of_a_given_model_are_not_used() -> None:
    model = taught()
    assert any("not used" in note for note in small_run(model, stages=["original"]).notes)
    assert not any("not used" in note for note in small_run(model, weights=model, stages=["original"]).notes)


def test_a_result_prints_its_table_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = small_run(output=tmp_path, method="uniform", distill="none")
    text = str(replace(result, notes=["A short note."]))
    lines = text.splitlines()
    assert len(lines) < 20
    assert max(map(len, lines)) <= 100
    for row in result.rows:
        assert f"{row.top1:.2%}" in text
    assert "note: A short note." in lines
    assert f"files in {tmp_path}" in " ".join(lines)
    assert repr(result) == str(result)


def test_the_result_of_a_dry_run_prints_its_plan() -> None:
    text = str(small_run(dry_run=True, method="uniform", distill="none"))
    assert "conv4" in text
    assert "nothing was trained" in text

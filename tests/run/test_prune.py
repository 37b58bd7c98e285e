"""What a run leaves and does: its folder, its table, its steps, and the command."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peel
from helpers.folders import content, read
from helpers.small import CPU, SHORT, WIDTHS, Counting, Small, few_digits, same_weights, small_run
from peel.cli.main import main
from peel.cost.count import count_macs
from peel.data.augmentation import EVAL
from peel.errors import ConfigError
from peel.run.result import Result

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_run_folder_holds_what_is_documented(finished: tuple[Path, Result]) -> None:
    folder, _ = finished
    stages = {
        f"stages/{name}.{end}"
        for name in ("original", "backbone", "uniform", "peel")
        for end in ("json", "safetensors", "record.json")
    }
    top = {
        "state.json",
        "environment.json",
        "plan.json",
        "metrics.jsonl",
        "slim.json",
        "slim.safetensors",
        "result.json",
        "report.html",
    }
    assert set(content(folder)) == stages | top | {".lock"}
    assert not list((folder / "checkpoints").iterdir()), "the checkpoints of finished stages are taken away"
    assert read(folder / "environment.json")["torch"] == torch.__version__


def test_settings_are_kept_as_given_and_as_they_were_resolved(finished: tuple[Path, Result]) -> None:
    settings = read(finished[0] / "state.json")
    assert settings["given"] == {
        "model": "Small", "data": "digits", "budget": "50%", "recipe": "auto", "train": SHORT["train"], "backbone": SHORT["search"],
    }  # fmt: skip
    resolved = settings["resolved"]
    assert resolved["seed"] == 3
    assert (resolved["train"]["epochs"], resolved["search"]["epochs"], resolved["search"]["batch_size"]) == (
        2,
        1,
        64,
    )
    assert (resolved["train"]["lr"], resolved["train"]["augment"]) == (0.1, "crop")
    assert (resolved["method"]["keep"], resolved["method"]["criterion"]) == (0.8, "bn")
    assert resolved["images"] == [200, 90]


def test_metrics_have_one_line_per_epoch_in_the_order_of_the_stages(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(line["stage"], line["epoch"], line["of"]) for line in lines]
    stages = {"original": 2, "backbone": 1, "uniform": 2, "peel": 2}
    assert found == [(stage, epoch, of) for stage, of in stages.items() for epoch in range(1, of + 1)]
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
    assert result.rows == read(folder / "result.json")["rows"]


def test_the_accuracy_in_the_table_is_that_of_the_saved_networks(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    images, labels, _ = next(iter(few_digits().test.batches(torch.arange(90), 90, EVAL, CPU.device)))
    for row in result.rows:
        network = peel.load(folder / row.file, model=Small()).eval()
        with torch.no_grad():
            scores = network(images)
        assert row.top1 == (scores.argmax(1) == labels).sum().item() / 90
        assert row.top5 == pytest.approx(
            (scores.argsort(1, descending=True)[:, :5] == labels[:, None]).any(1).float().mean().item()
        )
        assert row.loss == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-4)


def test_the_result_is_the_trained_slim_network_with_or_without_a_folder(
    finished: tuple[Path, Result],
) -> None:
    folder, result = finished
    without = small_run(seed=3)
    assert result.model is not None
    assert without.model is not None
    assert same_weights(result.model, peel.load(folder / "slim", model=Small()))
    assert same_weights(result.model, without.model)
    assert not without.model.training
    assert without.plan == result.plan == read(folder / "plan.json")
    assert without.folder is None
    other = small_run(seed=4)
    assert other.model is not None
    assert not same_weights(result.model, other.model)


def test_the_callers_networks_stay_as_they_were() -> None:
    torch.manual_seed(0)
    model, teacher = Small().train(), Small().train()
    before = copy.deepcopy([model, teacher])
    small_run(model, teacher=teacher)
    for kept, now in zip(before, (model, teacher)):
        assert same_weights(kept, now)
        assert now.training
        assert all(parameter.requires_grad for parameter in now.parameters())
        assert now.conv2.weight.is_contiguous()


# Parts of a run


@pytest.mark.parametrize(
    ("steps", "settings", "trained"),
    [
        (["original"], {}, {"original": 6}),
        (["backbone"], {}, {"backbone": 3}),
        (["plan", "backbone"], {}, {"backbone": 3}),
        (["backbone", "plan", "peel"], {"distill": "none"}, {"backbone": 3, "peel": 6}),
        (["original", "backbone", "plan", "uniform"], {}, {"original": 6, "backbone": 3, "uniform": 6}),
        (["peel"], {"distill": "none", "plan": WIDTHS}, {"peel": 6}),
    ],
)
def test_only_the_steps_that_were_asked_for_are_done(
    steps: list[str], settings: dict[str, Any], trained: dict[str, int]
) -> None:
    reporter = Counting()
    result = small_run(steps=steps, callbacks=[reporter], **settings)
    assert reporter.steps == trained
    assert [row.name for row in result.rows] == [name for name in trained if name != "backbone"]
    assert (result.model is not None) == ("peel" in steps)
    assert (result.plan is not None) == ("plan" in steps or "plan" in settings)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["peel"], "need a plan"),
        (["original", "uniform"], "need a plan"),
        (["plan"], "need a plan"),
        (["backbone", "plan", "peel"], "needs the teacher"),
        (["backbon"], "Did you mean backbone"),
    ],
)
def test_steps_that_cannot_work_are_refused_before_anything_is_trained(
    steps: list[str], message: str, tmp_path: Path
) -> None:
    reporter = Counting()
    with pytest.raises(ConfigError, match=message):
        small_run(steps=steps, callbacks=[reporter], output=tmp_path / "run")
    assert reporter.steps == {}
    assert not (tmp_path / "run").exists()


def test_a_dry_run_trains_and_writes_nothing(tmp_path: Path) -> None:
    reporter = Counting()
    model = Small()
    before = copy.deepcopy(model)
    result = small_run(model, dry_run=True, output=tmp_path / "run", callbacks=[reporter])
    assert reporter.steps == {}
    assert same_weights(model, before)
    assert not list(tmp_path.iterdir())
    assert result.model is None
    assert result.rows == []
    assert result.plan is not None
    assert result.plan.rounds[0]["shares"] == {"8x8": 0.5, "4x4": 0.5}
    assert result.plan["macs"] <= result.plan["budget"]
    assert result.estimate is not None
    assert list(result.estimate) == ["original", "backbone", "uniform", "peel"]
    assert all(seconds > 0 for seconds in result.estimate.values())


def test_groups_of_ones_own_are_the_ones_that_grow() -> None:
    groups = {"outer": ["conv1", "conv4"], "inner": ["conv2", "conv3"]}
    result = small_run(groups=groups, stages=["backbone", "plan"], policy="winner-take-all")
    assert result.plan is not None
    assert result.plan["groups"] == groups
    found = result.plan.rounds[0]
    winner = max(found["shares"], key=lambda group: found["shares"][group])
    loser = "inner" if winner == "outer" else "outer"
    assert found["factors"][loser] == 1.0 < found["factors"][winner]
    backbone = result.plan["backbone"]["widths"]
    grown = {tie for tie, width in found["rounding"]["ideal_widths"].items() if width > backbone[tie] + 1e-9}
    assert grown == set(groups[winner])


# The command


MODEL = """
import torch
from torch import nn

def model(num_classes=10):
    layers, inputs = [], 3
    for outputs, stride in ((8, 1), (8, 1), (16, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
"""


COMMAND = [
    "run",
    "own.py:model",
    "--train.epochs",
    "1",
    "--train.batch-size",
    "256",
    "--backbone.epochs",
    "1",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_runs_from_nothing_to_a_table_and_finds_its_folder_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(COMMAND) == 0
    first = capsys.readouterr()
    folder = next((place / "runs").iterdir())
    for expected in (
        "original",
        "uniform, same budget",
        "PEEL",
        "top-1",
        "(49%)",
        "report.html",
        f'peel.load("runs/{folder.name}/slim", model=...)',
    ):
        assert expected in first.out
    assert "stage 2 of 4: training the over-pruned backbone" in first.err
    assert "epoch 1/1: loss" in first.err
    assert read(folder / "state.json")["command"] == " ".join(["peel", *COMMAND])
    assert main(COMMAND) == 0
    second = capsys.readouterr()
    assert "finished before" in second.err
    assert "epoch 1/1" not in second.err
    assert second.out == first.out
    assert main([*COMMAND, "--seed", "1", "--stages", "original"]) == 0
    assert len(list((place / "runs").iterdir())) == 2


def test_the_command_finds_its_folder_again_with_what_may_change(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--stages", "original"]) == 0
    more = [*COMMAND, "--stages", "original,backbone", "--train.retries", "1", "--backbone.retries", "2"]
    assert main(more) == 0
    assert "the original: finished before" in capsys.readouterr().err
    (folder,) = (place / "runs").iterdir()
    settings = read(folder / "state.json")
    assert settings["command"] == " ".join(["peel", *more]), "that of the last start"
    resolved = settings["resolved"]
    assert (resolved["steps"], resolved["train"]["retries"], resolved["search"]["retries"]) == (
        ["original", "backbone"],
        1,
        2,
    )


def test_the_command_as_json_and_quiet_prints_the_result_and_nothing_else(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "groups.json").write_text(json.dumps({"first": ["0"], "rest": ["3", "6"]}))
    options = [
        "--json",
        "--quiet",
        "--output",
        "out",
        "--groups",
        "groups.json",
        "--budget",
        "40%",
        "--distill",
        "none",
    ]
    assert main([*COMMAND, *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out)
    assert document["rows"] == read(place / "out" / "result.json")["rows"]
    assert document["plan"]["groups"] == {"first": ["0"], "rest": ["3", "6"]}
    assert document["plan"]["macs"] <= 0.4 * document["plan"]["original"]["macs"]
    assert document["folder"] == "out"
    settings = read(place / "out" / "state.json")["resolved"]
    assert (settings["train"]["epochs"], settings["train"]["batch_size"], settings["method"]["distill"]) == (
        1,
        256,
        "none",
    )


def test_every_field_of_a_recipe_can_be_given_on_the_command_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {
        "epochs": "1", "batch-size": "300", "lr": "0.03", "momentum": "0.8", "weight-decay": "0.002", "warmup-epochs": "0.5",
        "warmup-from": "0.01", "schedule": "steps", "milestones": "0.4", "gamma": "0.3", "label-smoothing": "0.2", "augment": "none",
    }  # fmt: skip
    options = [part for name, value in fields.items() for part in (f"--train.{name}", value)]
    options += ["--train.no-nesterov", "--train.decay-norms", "--backbone.lr", "0.07"]
    assert main(["run", "own.py:model", "--stages", "original", "--output", "out", "--quiet", *options]) == 0
    resolved = read(place / "out" / "state.json")["resolved"]
    for name, value in {**fields, "nesterov": False, "decay-norms": True}.items():
        found = resolved["train"][name.replace("-", "_")]
        assert found == (
            [0.4] if name == "milestones" else type(found)(value) if isinstance(found, int | float) else value
        ), name
    assert resolved["search"]["lr"] == 0.07
    assert resolved["search"]["momentum"] == 0.8


def test_a_dry_run_of_the_command_shows_the_plan_and_the_time_and_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "nothing was trained" in output
    assert "neutral plan" in output
    assert "about " in output
    assert not (place / "runs").exists()


@pytest.mark.slow
def test_output_of_a_run_into_a_pipe_has_no_escape_codes(place: Path) -> None:
    command = [sys.executable, "-m", "peel", *COMMAND, "--stages", "original"]
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "\x1b" not in found.stdout + found.stderr
    assert "original" in found.stdout


# Models of one's own


class HeadFirst(Small):
    """Its first convolution, as it was written down, is the last to run."""

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


def test_images_have_the_channels_that_the_network_takes_whatever_it_names_first() -> None:
    net = HeadFirst()
    assert next(layer for layer in net.modules() if isinstance(layer, nn.Conv2d)) is net.head
    assert peel.prune(net, "digits", dry_run=True).plan is not None


def test_parameters_that_were_frozen_are_said_to_be_trained() -> None:
    net = Small()
    net.conv1.weight.requires_grad_(False)
    assert any(
        "Frozen parameters (conv1.weight)" in note for note in small_run(net, stages=["original"]).notes
    )
    assert not any(
        "Frozen" in note for note in small_run(net.requires_grad_(False), stages=["original"]).notes
    )


def test_names_in_brackets_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps({"[/early]": ["conv1", "conv2"], "[bold]": ["conv3", "conv4"]}))
    folder = tmp_path / "[bold]run[/]"
    options = [
        "--train.epochs",
        "1",
        "--backbone.epochs",
        "1",
        "--device",
        "cpu",
        "--groups",
        str(groups),
        "--output",
        str(folder),
    ]
    assert main(["run", "helpers.small:Small", *options]) == 0
    said = capsys.readouterr()
    assert f'peel.load("{folder / "slim"}"' in " ".join((said.out + said.err).split())
    assert main(["inspect", "helpers.small:Small", "--input", "3,8,8"]) == 0

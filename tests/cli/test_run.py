"""`peel run` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.folders import read
from peel.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")

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
    "--data",
    "digits",
    "--train.epochs",
    "1",
    "--train.batch-size",
    "256",
    "--method",
    "peel",
    "--backbone.epochs",
    "1",
    "--bench-seconds",
    "0",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("drawn_charts", "hasty")
def test_the_command_ends_with_a_table_and_finds_its_folder_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND[:-1], "0.05"]
    assert main(command) == 0
    first = capsys.readouterr()
    folder = next((place / "runs").iterdir())
    load = f'peel.load("runs/{folder.name}/slim", model=...)'
    for text in (
        "original",
        "uniform, same budget",
        "PEEL",
        "top-1",
        "memory, 1 image",
        "speed-up",
        "over MACs",
        load,
    ):
        assert text in first.out
    assert "stage 2 of 4: training the over-pruned backbone" in first.err
    assert "epoch 1/1: loss" in first.err
    assert "timing the networks" in first.err
    assert "report.html" in first.out
    assert read(folder / "state.json")["command"] == " ".join(["peel", *command])
    assert main(COMMAND) == 0
    second = capsys.readouterr()
    assert "already finished" in second.err
    assert "timing" not in second.err
    assert "epoch 1/1" not in second.err
    assert second.out == first.out
    assert main([*COMMAND, "--seed", "1", "--stages", "original"]) == 0
    assert len(list((place / "runs").iterdir())) == 2


def test_settings_that_may_change_lead_to_the_same_folder(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--stages", "original"]) == 0
    more = [*COMMAND, "--stages", "original,plan", "--workers", "1"]
    assert main(more) == 0
    assert "the original: already finished" in capsys.readouterr().err
    (folder,) = (place / "runs").iterdir()
    state = read(folder / "state.json")
    assert state["command"] == " ".join(["peel", *more]), "that of the last start"


def test_json_and_quiet_print_the_result_and_nothing_else(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--quiet", "--output", "out", "--budget", "40%", "--distill", "none"]
    groups = ["--groups.first", "0", "--groups.rest", "3", "--groups.rest", "6"]
    assert main([*COMMAND, *options, *groups]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out)
    assert document["rows"] == read(place / "out" / "result.json")["rows"]
    assert document["plan"]["groups"] == {"first": ["0"], "rest": ["3", "6"]}
    assert document["plan"]["slim"]["macs"] <= 0.4 * document["plan"]["original"]["macs"]
    assert document["folder"] == "out"
    job = read(place / "out" / "state.json")["jobs"]["peel"]
    assert (job["train"]["epochs"], job["train"]["batch_size"]) == (1, 256)
    assert job["distill"] == "none"


def test_every_field_of_a_recipe_is_a_flag(place: Path) -> None:
    fields = {
        "epochs": "1", "batch-size": "300", "lr": "0.03", "momentum": "0.8", "weight-decay": "0.002",
        "warmup-epochs": "0.5", "warmup-from": "0.01", "schedule": "steps", "milestones": "0.4",
        "gamma": "0.3", "label-smoothing": "0.2", "augment": "none",
    }  # fmt: skip
    options = [part for name, value in fields.items() for part in (f"--train.{name}", value)]
    options += ["--train.no-nesterov", "--train.decay-norms", "--backbone.lr", "0.07"]
    options += ["--data", "digits", "--stages", "original,plan", "--method", "peel", "--output", "out"]
    assert main(["run", "own.py:model", *options, "--backbone.epochs", "1", "--quiet"]) == 0
    jobs = read(place / "out" / "state.json")["jobs"]
    for name, value in {**fields, "nesterov": False, "decay-norms": True}.items():
        found = jobs["original"]["train"][name.replace("-", "_")]
        expected = [0.4] if name == "milestones" else value
        assert found == (type(found)(value) if isinstance(found, int | float) else expected), name
    assert jobs["plan"]["backbone"]["lr"] == 0.07
    assert jobs["plan"]["backbone"]["momentum"] == 0.8


def test_a_dry_run_shows_the_plan_and_the_time_and_writes_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "nothing was trained" in output
    assert "equal shares" in output
    assert "about " in output
    assert not (place / "runs").exists()


def test_brackets_in_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = tmp_path / "config.toml", tmp_path / "[bold]run[/]"
    config.write_text('[groups]\n"[/early]" = ["conv1", "conv2"]\n"[bold]" = ["conv3", "conv4"]\n')
    options = ["--method", "peel", "--train.epochs", "1", "--backbone.epochs", "1", "--device", "cpu"]
    options += ["--config", str(config), "--data", "digits", "--bench-seconds", "0"]
    assert main(["run", "helpers.small:Small", *options, "--output", str(folder)]) == 0
    captured = capsys.readouterr()
    assert f'peel.load("{folder / "slim"}"' in " ".join((captured.out + captured.err).split())
    assert main(["inspect", "helpers.small:Small", "--input", "3,8,8"]) == 0

"""Runs that go on although something changed, because they were told to: what was done stays, and what changed is on record."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from killing import command, exit_code, run_until, start
from peel.errors import RunError
from peel.reporter import Silent
from peel.result import Result
from small import Small, few_digits, small_run

pytestmark = pytest.mark.usefixtures("one_thread")

#: Two epochs of three steps in every stage, with a checkpoint after each step.
BASE: dict[str, Any] = {"train": {"epochs": 2, "batch_size": 64}, "search": {"epochs": 2}, "checkpoint_seconds": 0.0}


class Steps(Silent):
    """Counts the steps of each stage that is trained."""

    def __init__(self) -> None:
        self.name, self.found = "", Counter[str]()

    def stage(self, name: str, what: str) -> None:
        self.name = name

    def step(self, done: int, total: int, images: int) -> None:
        self.found[self.name] += 1


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that was killed at the fourth of six steps of its last stage but one."""
    assert exit_code(start(run_until, tmp_path / "run", BASE, ("uniform", 4))) == -signal.SIGKILL
    return tmp_path / "run"


def go_on(folder: Path, model: Small | None = None, **changes: Any) -> tuple[Result, Counter[str]]:
    reporter = Steps()
    return small_run(model, output=folder, reporter=reporter, **{**BASE, **changes}), reporter.found


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    return found


def test_a_forced_run_goes_on_where_it_was_and_says_what_changed(killed: Path) -> None:
    finished = (killed / "stages" / "original.safetensors").read_bytes()
    slower = {"train": {**BASE["train"], "lr": 0.05}}
    with pytest.raises(RunError, match=r"train\.lr: 0\.1 -> 0\.05\n(.*\n)*With --force it goes on all the same"):
        go_on(killed, **slower)
    result, steps = go_on(killed, **slower, force=True)
    assert steps == {"uniform": 3, "peel": 6}, "what was done is not done again"
    assert (killed / "stages" / "original.safetensors").read_bytes() == finished
    said = [note for note in result.notes if "--force" in note]
    assert len(said) == 1
    assert "train.lr: 0.1 -> 0.05" in said[0]
    assert said[0] in (killed / "report.html").read_text().replace("&gt;", ">")
    found = settings_of(killed)
    assert found["resolved"]["train"]["lr"] == 0.05
    assert found["forced"] == [{"search.lr": [0.1, 0.05], "train.lr": [0.1, 0.05]}]


def test_what_was_forced_once_needs_no_force_again_and_is_not_forgotten(killed: Path, tmp_path: Path) -> None:
    slower = {**BASE, "train": {**BASE["train"], "lr": 0.05}}
    assert exit_code(start(run_until, killed, {**slower, "force": True}, ("peel", 2))) == -signal.SIGKILL
    result, steps = go_on(killed, **slower)
    assert steps == {"peel": 5}
    again, steps = go_on(killed, **slower, force=True)
    assert not steps
    assert again.notes == result.notes
    assert sum("--force" in note for note in again.notes) == 1
    with pytest.raises(RunError, match=r"train\.lr: 0\.05 -> 0\.1"):
        go_on(killed)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"budget": "40%"}, "method.budget"),
        ({"seed": 1}, "seed"),
        ({"train": {"epochs": 2, "batch_size": 32}}, "train.batch_size"),
        ({"keep": 0.5, "train": {**BASE["train"], "lr": 0.3}}, "method.keep"),
    ],
)
def test_what_would_not_fit_is_refused_with_force_too(changes: dict[str, Any], name: str, killed: Path) -> None:
    before = settings_of(killed)
    with pytest.raises(RunError) as caught:
        go_on(killed, **changes, force=True)
    said = str(caught.value)
    assert f"--force does not change {name}" in said
    assert f"--teacher {killed}" in said
    assert f"--plan {killed / 'plan.json'}" in said
    assert settings_of(killed) == before
    with pytest.raises(RunError) as caught:
        go_on(killed, **changes)
    assert "--force" not in str(caught.value)


def test_the_advice_of_a_refusal_works(killed: Path, tmp_path: Path) -> None:
    """What a run has done is used by another one with other settings."""
    result, steps = go_on(tmp_path / "other", keep=0.5, teacher=killed, plan=killed / "plan.json")
    assert steps == {"uniform": 6, "peel": 6}
    assert result.plan is not None
    assert result.plan["widths"] == json.loads((killed / "plan.json").read_text())["widths"]


class Gentle(Small):
    """The same layers, another forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


Gentle.__qualname__, Gentle.__module__ = Small.__qualname__, Small.__module__


def test_other_images_and_another_forward_pass_can_be_forced(killed: Path) -> None:
    with pytest.raises(RunError, match=r"What the network computes has changed"):
        go_on(killed, Gentle())
    result, steps = go_on(killed, Gentle(), data=few_digits(199), force=True)
    assert steps == {"uniform": 3, "peel": 6}
    assert any("images: [200, 90] -> [199, 90]" in note and "tanh 0 -> 1" in note for note in result.notes)


@pytest.mark.parametrize(("epochs", "steps"), [(4, {"uniform": 9, "peel": 12}), (1, {"peel": 3})])
def test_more_or_fewer_epochs_can_be_forced(epochs: int, steps: dict[str, int], killed: Path) -> None:
    result, found = go_on(killed, train={"epochs": epochs, "batch_size": 64}, force=True)
    assert found == steps
    assert [row["name"] for row in result.rows] == ["original", "uniform", "peel"]


def test_a_folder_of_another_version_can_be_forced(killed: Path) -> None:
    settings = settings_of(killed)
    settings["resolved"]["train"]["warmth"] = 3
    (killed / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(RunError, match="another version of peel"):
        go_on(killed)
    result, _ = go_on(killed, force=True)
    assert any("train.warmth: 3 -> None" in note for note in result.notes)


def test_the_command_takes_force(tmp_path: Path) -> None:
    line = ["run", "small:Small", "--steps", "original", "--train.epochs", "2", "--train.batch-size", "128", "--device", "cpu"]
    said = tmp_path / "said"
    line += ["--output", str(tmp_path / "run")]
    assert exit_code(command(line, said, PEEL_FAULT="15:kill")) == -signal.SIGKILL
    assert exit_code(command([*line, "--train.lr", "0.3"], said)) == 2
    assert exit_code(command([*line, "--train.lr", "0.3", "--force"], said)) == 0
    assert "goes on with other settings than it was started with, and its result will say so" in said.read_text()

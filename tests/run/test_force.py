"""Runs that go on although something changed, because they were told to: what was done stays, and what changed is on record."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.killing import Suicidal, command, exit_code, run_until, start
from helpers.small import Counting, Small, few_digits, small_run
from peel.errors import CorruptFileError, RunError
from peel.train.callbacks import Callback
from peel.run.result import Result

pytestmark = pytest.mark.usefixtures("one_thread")

#: Two epochs of three steps in every stage, with a checkpoint after each step.
BASE: dict[str, Any] = {
    "train": {"epochs": 2, "batch_size": 64},
    "backbone": {"epochs": 2},
    "checkpoint_seconds": 0.0,
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert exit_code(start(run_until, folder, BASE, ("uniform", 4))) == -signal.SIGKILL
    return folder


@pytest.fixture
def killed(stopped: Path, tmp_path: Path) -> Path:
    """A run that was killed at the fourth of six steps of its last stage but one."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def go_on(folder: Path, model: Small | None = None, **changes: Any) -> tuple[Result, dict[str, int]]:
    reporter = Counting()
    return small_run(model, output=folder, callbacks=[reporter], **{**BASE, **changes}), reporter.steps


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return found


def test_a_forced_run_goes_on_where_it_was_and_says_what_changed(killed: Path) -> None:
    finished = (killed / "stages" / "original.safetensors").read_bytes()
    slower = {"train": {**BASE["train"], "lr": 0.05}}
    with pytest.raises(
        RunError, match=r"train\.lr: 0\.1 -> 0\.05\n(.*\n)*With --force it goes on all the same"
    ):
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
    rates = {"train.lr": [0.1, 0.05], "search.lr": [0.1, 0.05]}
    assert found["forced"] == [{"changes": rates, "done": ["original", "backbone"], "begun": ["uniform"]}]
    assert "stages finished before: original, backbone; under way: uniform" in said[0]
    assert "may not have been trained alike" in (killed / "report.html").read_text()


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
        ({"train": {"epochs": 3, "batch_size": 64}}, "train.epochs"),
        ({"data": replace(few_digits(), classes=tuple(reversed(few_digits().classes)))}, "input.classes"),
        ({"backbone_ratio": 0.5, "train": {**BASE["train"], "lr": 0.3}}, "method.keep"),
    ],
)
def test_what_would_not_fit_is_refused_with_force_too(
    changes: dict[str, Any], name: str, killed: Path
) -> None:
    before = settings_of(killed)
    with pytest.raises(RunError) as caught:
        go_on(killed, **changes, force=True)
    assert f"--force does not change {name}" in str(caught.value)
    assert settings_of(killed) == before
    with pytest.raises(RunError) as caught:
        go_on(killed, **changes)
    assert "--force" not in str(caught.value)


def test_a_refusal_names_what_another_run_can_use_and_nothing_else(killed: Path, tmp_path: Path) -> None:
    teacher, plan = f"--teacher {killed}", f"--plan {killed / 'plan.json'}"
    with pytest.raises(RunError) as caught:
        go_on(killed, backbone_ratio=0.5, force=True)
    assert teacher in str(caught.value)
    assert plan in str(caught.value)
    with pytest.raises(RunError) as caught:
        go_on(killed, budget="40%", force=True)
    assert teacher in str(caught.value)
    assert plan not in str(caught.value), "it costs too much"
    assert exit_code(start(run_until, tmp_path / "early", BASE, ("original", 4))) == -signal.SIGKILL
    with pytest.raises(RunError) as caught:
        go_on(tmp_path / "early", backbone_ratio=0.5, force=True)
    assert "Another run can use" not in str(caught.value)


def test_the_advice_of_a_refusal_works(killed: Path, tmp_path: Path) -> None:
    """What a run has done is used by another one with other settings."""
    result, steps = go_on(tmp_path / "other", backbone_ratio=0.5, teacher=killed, plan=killed / "plan.json")
    assert steps == {"uniform": 6, "peel": 6}
    assert result.plan is not None
    assert result.plan.widths == json.loads((killed / "plan.json").read_text())["widths"]


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


def test_an_epoch_that_lost_many_images_begins_anew(tmp_path: Path) -> None:
    """Of ten steps nine were done; of three, none can be said to be."""
    assert exit_code(start(lose, tmp_path / "run", 640, ("uniform", 9))) == -signal.SIGKILL
    result, steps = go_on(tmp_path / "run", data=few_digits(200), force=True)
    assert steps["uniform"] == 6
    for epoch in result.history["uniform"]:
        assert 1.5 < epoch.train["loss"] < 4
        assert epoch.train["top1"] <= 1
    passes = {row.name: row.image_passes for row in result.rows}
    assert passes == {"original": 2 * 640, "uniform": 2 * 192, "peel": 2 * 192}, "those of whole epochs"


def test_an_epoch_that_began_anew_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    """Those of the epoch before it had more steps, and would be taken for newer."""
    run = tmp_path / "run"
    assert exit_code(start(lose, run, 640, ("uniform", 9))) == -signal.SIGKILL
    assert exit_code(start(lose, run, 320, ("uniform", 3), True)) == -signal.SIGKILL
    assert len(list(run.glob("checkpoints/*.pt"))) <= 2
    _, steps = go_on(run, data=few_digits(320), force=True)
    assert 7 <= steps["uniform"] <= 8, "of two epochs of five"


def lose(folder: Path, images: int, step: tuple[str, int], force: bool = False) -> None:
    """A run on so many images that is killed at a step of a stage."""
    torch.set_num_threads(1)
    small_run(data=few_digits(images), output=folder, callbacks=[Suicidal](*step), force=force, **BASE)


@pytest.mark.parametrize("decay_norms", [True, False])
def test_what_decays_can_be_forced_within_a_stage(decay_norms: bool, tmp_path: Path) -> None:
    """Parameters lie in another order in the optimiser then; each keeps its own momentum."""
    before = {**BASE, "train": {**BASE["train"], "decay_norms": not decay_norms}}
    assert exit_code(start(run_until, tmp_path / "run", before, ("original", 4))) == -signal.SIGKILL
    _, steps = go_on(tmp_path / "run", train={**BASE["train"], "decay_norms": decay_norms}, force=True)
    assert steps["original"] == 3


def test_a_finished_run_keeps_saying_what_its_network_was_trained_on(tmp_path: Path) -> None:
    go_on(tmp_path / "run")
    before = json.loads((tmp_path / "run" / "slim.json").read_text())["input"]
    lighter = few_digits()
    lighter = replace(lighter, train=replace(lighter.train, mean=(0.0, 0.0, 0.0)))
    result, steps = go_on(tmp_path / "run", data=lighter, force=True)
    assert not steps
    assert json.loads((tmp_path / "run" / "slim.json").read_text())["input"] == before
    assert any("input.mean" in note and "uniform, peel; under way: none" in note for note in result.notes)


def test_what_was_forced_on_a_teacher_is_said_by_every_run_that_uses_it(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shared = {"train": {**BASE["train"], "lr": 0.05}, "teacher": teacher}
    assert (
        exit_code(start(run_until, tmp_path / "first", {**BASE, "teacher": teacher}, ("original", 4)))
        == -signal.SIGKILL
    )
    with pytest.raises(RunError, match=r"train\.lr: 0\.1 -> 0\.05"):
        go_on(tmp_path / "second", **shared)
    for name, force in (("second", True), ("third", False)):
        result, _ = go_on(tmp_path / name, **shared, force=force)
        assert any(
            note.startswith("Of the teacher: ") and "train.lr: 0.1 -> 0.05" in note for note in result.notes
        )
    (teacher / "state.json").write_text("{")
    result, _ = go_on(tmp_path / "fourth", **shared)
    assert any("state.json is damaged" in note for note in result.notes), "not lost for that"


def test_the_page_of_a_forced_run_that_is_stopped_again_says_so(killed: Path) -> None:
    class Breaking(NoCallback):
        def step(self, done: int, total: int, images: int) -> None:
            raise RunError("no more")

    (killed / "result.json").write_text(
        json.dumps({"format": "peel-result", "version": 1, "rows": [], "notes": ["of an older result"]})
    )
    with pytest.raises(RunError, match="no more"):
        small_run(
            output=killed,
            callbacks=[Breaking](),
            **{**BASE, "train": {**BASE["train"], "lr": 0.05}},
            force=True,
        )
    assert "went on with other settings (--force;" in (killed / "report.html").read_text()


def test_force_on_an_empty_folder_says_that_there_is_nothing_to_go_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_run(output=tmp_path / "new", force=True)
    assert "holds no run that --force could go on with" in caplog.text


@pytest.mark.parametrize(
    "forced",
    [
        "abc",
        5,
        None,
        {"a": 1},
        [5],
        [{"train.lr": [1, 2]}],
        [{"changes": {"train.lr": [1]}, "done": [], "begun": []}],
    ],
)
def test_a_record_of_changes_that_is_none_is_damage(forced: object, killed: Path) -> None:
    (killed / "state.json").write_text(json.dumps({**settings_of(killed), "forced": forced}))
    with pytest.raises(CorruptFileError, match=r"settings\.json is damaged: its 'forced'"):
        go_on(killed)


@pytest.mark.parametrize("operators", [None, 5])
def test_a_folder_that_does_not_know_its_operators_is_another_version(
    operators: object, killed: Path
) -> None:
    settings = settings_of(killed)
    if operators is None:
        del settings["resolved"]["original"]["operators"]
    else:
        settings["resolved"]["original"]["operators"] = operators
    (killed / "state.json").write_text(json.dumps(settings))
    with pytest.raises(RunError, match="force"):
        go_on(killed)
    result, _ = go_on(killed, force=True)
    assert any(f"original.operators: {operators!r} -> 'conv" in note for note in result.notes)


def test_a_folder_of_another_version_can_be_forced(killed: Path) -> None:
    settings = settings_of(killed)
    settings["resolved"]["train"]["warmth"] = 3
    (killed / "state.json").write_text(json.dumps(settings))
    with pytest.raises(RunError, match="another version of peel"):
        go_on(killed)
    result, _ = go_on(killed, force=True)
    assert any("train.warmth: 3 -> None" in note for note in result.notes)


def test_a_folder_of_another_version_that_cannot_be_forced_names_what_can_be_used(killed: Path) -> None:
    settings = settings_of(killed)
    del settings["resolved"]["original"]["tensors"]
    (killed / "state.json").write_text(json.dumps(settings))
    for force in (False, True):
        with pytest.raises(RunError, match="another version of peel") as caught:
            go_on(killed, force=force)
        assert "With --force" not in str(caught.value)
        assert f"--teacher {killed}" in str(caught.value)
        assert "the code of" not in str(caught.value)


def test_a_teacher_in_training_is_not_shared_by_runs_with_other_classes(tmp_path: Path) -> None:
    shared = {**BASE, "teacher": tmp_path / "teacher"}
    assert exit_code(start(run_until, tmp_path / "first", shared, ("original", 4))) == -signal.SIGKILL
    reversed_classes = replace(few_digits(), classes=tuple(reversed(few_digits().classes)))
    for force in (False, True):
        with pytest.raises(RunError, match=r"input\.classes"):
            go_on(tmp_path / "second", data=reversed_classes, teacher=tmp_path / "teacher", force=force)


def test_the_command_takes_force(tmp_path: Path) -> None:
    line = [
        "run",
        "helpers.small:Small",
        "--stages",
        "original",
        "--train.epochs",
        "2",
        "--train.batch-size",
        "128",
        "--device",
        "cpu",
    ]
    said = tmp_path / "said"
    line += ["--output", str(tmp_path / "run")]
    assert exit_code(command(line, said, PEEL_FAULT="15:kill")) == -signal.SIGKILL
    assert exit_code(command([*line, "--train.lr", "0.3"], said)) == 2
    assert exit_code(command([*line, "--train.lr", "0.3", "--force"], said)) == 0
    assert (
        "goes on with other settings than it was started with, and its result will say so" in said.read_text()
    )

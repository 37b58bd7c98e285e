"""`--force`: a run resumes although something changed, and its result names the changes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.commands import line
from helpers.folders import read
from helpers.killing import KILLED, KillAtStep, command, exit_code, run_until, start
from helpers.small import Counting, Small, few_digits, small_run
from peel.errors import CorruptFileError, RunError
from peel.run.result import Result
from peel.train.callbacks import Callback

pytestmark = pytest.mark.usefixtures("one_thread")

#: Two epochs of three steps in every stage, with a checkpoint after each step.
BASE: dict[str, Any] = {
    "train": {"epochs": 2, "batch_size": 64},
    "backbone": {"epochs": 2},
    "checkpoint_seconds": 0.0,
}

#: Another learning rate.
SLOWER: dict[str, Any] = {"train": {**BASE["train"], "lr": 0.05}}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert exit_code(start(run_until, folder, BASE, ("uniform", 4))) == KILLED
    return folder


@pytest.fixture
def killed(stopped: Path, tmp_path: Path) -> Path:
    """A run that was killed at step 4 of 6 of the stage uniform."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def resume(folder: Path, model: Small | None = None, **changes: Any) -> tuple[Result, dict[str, int]]:
    """The result, and the steps of each stage that were still to do."""
    counting = Counting()
    return small_run(model, output=folder, callbacks=[counting], **{**BASE, **changes}), counting.steps


def forced_notes(result: Result) -> list[str]:
    return [note for note in result.notes if "--force" in note]


def test_a_forced_run_resumes_where_it_was_and_names_the_changes(killed: Path) -> None:
    original = (killed / "stages" / "original.safetensors").read_bytes()
    with pytest.raises(RunError, match=r"train\.lr: 0\.1 -> 0\.05\n(.*\n)*.*With --force it resumes anyway"):
        resume(killed, **SLOWER)
    result, steps = resume(killed, **SLOWER, force=True)
    assert steps == {"uniform": 3, "peel": 6}, "only what was missing"
    assert (killed / "stages" / "original.safetensors").read_bytes() == original
    (note,) = forced_notes(result)
    assert "train.lr: 0.1 -> 0.05" in note
    assert note in (killed / "report.html").read_text().replace("&gt;", ">")
    state = read(killed / "state.json")
    assert state["identity"]["train"]["lr"] == 0.05
    assert state["forced"] == [note]


def test_a_forced_change_needs_no_force_again_and_is_not_forgotten(killed: Path) -> None:
    assert exit_code(start(run_until, killed, {**BASE, **SLOWER, "force": True}, ("peel", 2))) == KILLED
    result, steps = resume(killed, **SLOWER)
    assert steps == {"peel": 5}
    again, steps = resume(killed, **SLOWER, force=True)
    assert not steps
    assert again.notes == result.notes
    assert len(forced_notes(again)) == 1
    with pytest.raises(RunError, match=r"train\.lr: 0\.05 -> 0\.1"):
        resume(killed)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"budget": "40%"}, "method.budget"),
        ({"seed": 1}, "seed"),
        ({"train": {"epochs": 2, "batch_size": 32}}, "train.batch_size"),
        ({"train": {"epochs": 3, "batch_size": 64}}, "train.epochs"),
        ({"data": replace(few_digits(), classes=tuple(reversed(few_digits().classes)))}, "data.classes"),
        ({"backbone_ratio": 0.5, "train": {**BASE["train"], "lr": 0.3}}, "method.backbone_ratio"),
    ],
)
def test_force_cannot_change_what_finished_stages_depend_on(
    changes: dict[str, Any], name: str, killed: Path
) -> None:
    before = read(killed / "state.json")
    with pytest.raises(RunError, match=rf"--force cannot change .*{name}"):
        resume(killed, **changes, force=True)
    assert read(killed / "state.json") == before
    with pytest.raises(RunError) as caught:
        resume(killed, **changes)
    assert "--force" not in str(caught.value)


def test_another_run_can_use_the_teacher_and_the_plan_of_a_killed_one(killed: Path, tmp_path: Path) -> None:
    plan = killed / "plan.json"
    result, steps = resume(tmp_path / "other", backbone_ratio=0.5, teacher=killed, plan=plan)
    assert steps == {"uniform": 6, "peel": 6}
    assert result.plan is not None
    assert result.plan.widths == read(plan)["slim"]["widths"]


class OtherForward(Small):
    """The same layers, another forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


OtherForward.__qualname__, OtherForward.__module__ = Small.__qualname__, Small.__module__


def test_other_images_and_another_forward_pass_can_be_forced(killed: Path) -> None:
    with pytest.raises(RunError, match=r"model\.operators: "):
        resume(killed, OtherForward())
    result, steps = resume(killed, OtherForward(), data=few_digits(199), force=True)
    assert steps == {"uniform": 3, "peel": 6}
    (note,) = forced_notes(result)
    assert "data.images: " in note
    assert "model.operators: " in note


def kill_with_images(folder: Path, images: int, step: tuple[str, int], force: bool = False) -> None:
    """A run on this many images that is killed at a step of a stage."""
    torch.set_num_threads(1)
    small_run(data=few_digits(images), output=folder, callbacks=[KillAtStep(*step)], force=force, **BASE)


def test_an_epoch_restarts_when_its_number_of_steps_changed(tmp_path: Path) -> None:
    """9 of 10 steps were done; now an epoch has 3."""
    assert exit_code(start(kill_with_images, tmp_path / "run", 640, ("uniform", 9))) == KILLED
    result, steps = resume(tmp_path / "run", data=few_digits(200), force=True)
    assert steps["uniform"] == 6
    for epoch in result.history["uniform"]:
        assert 1.5 < epoch.train["loss"] < 4
        assert epoch.train["top1"] <= 1
    passes = {row.name: row.image_passes for row in result.rows}
    assert passes == {"original": 2 * 640, "uniform": 2 * 192, "peel": 2 * 192}


def test_a_restarted_epoch_resumes_from_its_own_checkpoints(tmp_path: Path) -> None:
    """The epoch before it had more steps; its checkpoints do not count as newer."""
    folder = tmp_path / "run"
    assert exit_code(start(kill_with_images, folder, 640, ("uniform", 9))) == KILLED
    assert exit_code(start(kill_with_images, folder, 320, ("uniform", 3), True)) == KILLED
    assert len(list(folder.glob("checkpoints/*.pt"))) <= 2
    _, steps = resume(folder, data=few_digits(320), force=True)
    assert 7 <= steps["uniform"] <= 8, "of two epochs of five steps"


@pytest.mark.parametrize("decay_norms", [True, False])
def test_weight_decay_can_be_forced_within_a_stage(decay_norms: bool, tmp_path: Path) -> None:
    before = {**BASE, "train": {**BASE["train"], "decay_norms": not decay_norms}}
    assert exit_code(start(run_until, tmp_path / "run", before, ("original", 4))) == KILLED
    _, steps = resume(tmp_path / "run", train={**BASE["train"], "decay_norms": decay_norms}, force=True)
    assert steps["original"] == 3


def test_a_finished_run_keeps_the_input_that_its_network_was_trained_with(tmp_path: Path) -> None:
    resume(tmp_path / "run")
    before = read(tmp_path / "run" / "slim.json")["input"]
    data = few_digits()
    data = replace(data, train=replace(data.train, mean=(0.0, 0.0, 0.0)))
    result, steps = resume(tmp_path / "run", data=data, force=True)
    assert not steps
    assert read(tmp_path / "run" / "slim.json")["input"] == before
    assert "data.mean" in forced_notes(result)[0]


def test_runs_tell_what_was_forced_on_their_teacher(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    settings = {**BASE, "teacher": teacher}
    assert exit_code(start(run_until, tmp_path / "first", settings, ("original", 4))) == KILLED
    with pytest.raises(RunError, match=r"train\.lr: 0\.1 -> 0\.05"):
        resume(tmp_path / "second", **SLOWER, teacher=teacher)
    for name, force in (("second", True), ("third", False)):
        result, _ = resume(tmp_path / name, **SLOWER, teacher=teacher, force=force)
        (note,) = forced_notes(result)
        assert note.startswith("The teacher: ")
        assert "train.lr: 0.1 -> 0.05" in note


def test_the_page_of_an_unfinished_forced_run_names_the_changes(killed: Path) -> None:
    class Broken(Callback):
        def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
            raise RunError("no more")

    with pytest.raises(RunError, match="no more"):
        small_run(output=killed, callbacks=[Broken()], **{**BASE, **SLOWER}, force=True)
    assert "resumed with other settings (--force)" in (killed / "report.html").read_text()


@pytest.mark.parametrize("forced", ["abc", None, {"a": 1}, [5]])
def test_a_damaged_list_of_forced_changes_is_named(forced: object, killed: Path) -> None:
    (killed / "state.json").write_text(json.dumps({**read(killed / "state.json"), "forced": forced}))
    with pytest.raises(CorruptFileError, match=r"state\.json is damaged: .*forced"):
        resume(killed)


def test_a_setting_of_another_version_can_be_forced(killed: Path) -> None:
    state = read(killed / "state.json")
    state["identity"]["train"]["warmth"] = 3
    (killed / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match=r"train\.warmth: 3 -> None"):
        resume(killed)
    result, _ = resume(killed, force=True)
    assert "train.warmth: 3 -> None" in forced_notes(result)[0]


def test_a_teacher_in_training_is_not_shared_by_runs_with_other_classes(tmp_path: Path) -> None:
    settings = {**BASE, "teacher": tmp_path / "teacher"}
    assert exit_code(start(run_until, tmp_path / "first", settings, ("original", 4))) == KILLED
    other = replace(few_digits(), classes=tuple(reversed(few_digits().classes)))
    for force in (False, True):
        with pytest.raises(RunError, match=r"data\.classes"):
            resume(tmp_path / "second", data=other, teacher=tmp_path / "teacher", force=force)


def test_the_command_takes_force(tmp_path: Path) -> None:
    arguments, log = line(tmp_path / "run"), tmp_path / "log"
    assert exit_code(command(arguments, log, FAULT="15:kill")) == KILLED
    assert exit_code(command([*arguments, "--train.lr", "0.3"], log)) == 2
    assert exit_code(command([*arguments, "--train.lr", "0.3", "--force"], log)) == 0
    assert "resumes with other settings; its result will say so" in log.read_text()

"""Given plans and teachers: used as they are, or refused before anything is written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peel
from helpers.folders import content, read
from helpers.killing import KILLED, exit_code, run_until, start
from helpers.small import CPU, WIDTHS, Counting, Small, few_digits, same_weights, small_run
from peel.errors import CorruptFileError, DataError, RunError, StoreError
from peel.run.result import Result
from peel.train.loop import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

#: Two epochs of three steps in every stage, with a checkpoint after each step.
SHORT: dict[str, Any] = {
    "train": {"epochs": 2, "batch_size": 64},
    "backbone": {"epochs": 2},
    "checkpoint_seconds": 0.0,
}


# Plans


@pytest.mark.parametrize("form", ["mapping", "widths", "file"])
def test_given_widths_are_trained_as_they_are(form: str, tmp_path: Path) -> None:
    path = tmp_path / "widths.json"
    path.write_text(json.dumps(WIDTHS))
    plan: Any = {"mapping": WIDTHS, "widths": peel.Widths(WIDTHS), "file": str(path)}[form]
    result = small_run(plan=plan, stages=["peel"], distill="none")
    assert isinstance(result.model, nn.Module)
    assert [result.model.get_submodule(name).out_channels for name in WIDTHS] == list(WIDTHS.values())
    assert list(result.history) == ["peel"]


def test_a_run_with_given_widths_stores_them_and_resumes(tmp_path: Path) -> None:
    result = small_run(plan=WIDTHS, output=tmp_path / "run")
    assert [row.name for row in result.rows] == ["original", "uniform", "peel"]
    assert "backbone" not in result.history
    assert read(tmp_path / "run" / "plan.json")["slim"]["widths"] == WIDTHS
    counting = Counting()
    small_run(plan=WIDTHS, output=tmp_path / "run", callbacks=[counting])
    assert counting.steps == {}


def test_ties_that_a_plan_does_not_name_keep_their_width() -> None:
    plan = small_run(plan={"conv3": 5}, dry_run=True, budget="100%").plan
    assert plan is not None
    assert plan.widths == {"conv1": 8, "conv2": 8, "conv3": 5, "conv4": 16}


def test_the_plan_of_one_run_can_be_trained_by_another(finished: tuple[Path, Result]) -> None:
    result = small_run(plan=finished[0] / "plan.json", seed=3)
    assert result.model is not None
    assert finished[1].model is not None
    assert same_weights(result.model, finished[1].model), "the same widths, seed and recipe"


# Teachers


def test_a_teacher_is_trained_once_and_shared_by_runs(tmp_path: Path) -> None:
    small_run(stages=["original"], output=tmp_path / "teacher")
    stored, counting = content(tmp_path / "teacher"), Counting()
    one = small_run(teacher=tmp_path / "teacher", output=tmp_path / "one", callbacks=[counting])
    two = small_run(teacher=str(tmp_path / "teacher"), seed=9, budget="40%", callbacks=[counting])
    assert "original" not in counting.steps
    assert content(tmp_path / "teacher") == stored
    assert two.rows[0].top1 == one.rows[0].top1
    straight = small_run()
    assert one.model is not None
    assert straight.model is not None
    assert same_weights(one.model, straight.model), "the place of the teacher does not matter"


def test_the_folder_of_a_run_can_be_given_as_teacher(finished: tuple[Path, Result]) -> None:
    counting = Counting()
    result = small_run(teacher=finished[0], stages=["original"], callbacks=[counting])
    assert counting.steps == {}
    assert result.rows[0].top1 == finished[1].rows[0].top1


@pytest.mark.parametrize(
    "form", ["plain", "state_dict", "model", "module prefix", "compiled prefix", "peel", "module"]
)
def test_a_teacher_is_loaded_from_a_state_dict_a_saved_model_or_a_module(
    form: str, tmp_path: Path, finished: tuple[Path, Result]
) -> None:
    trained = peel.load(finished[0] / "stages" / "original", model=Small())
    weights = trained.state_dict()
    path = tmp_path / "teacher.pt"
    teacher: Any = path
    if form == "peel":
        teacher = peel.save(trained, tmp_path / "teacher")
    elif form == "module":
        teacher = trained
    elif form.endswith("prefix"):
        prefix = "module." if form == "module prefix" else "_orig_mod."
        torch.save({f"{prefix}{name}": tensor for name, tensor in weights.items()}, path)
    else:
        torch.save(weights if form == "plain" else {form: weights, "epoch": 3}, path)
    counting = Counting()
    result = small_run(teacher=teacher, stages=["original"], callbacks=[counting])
    assert counting.steps == {}
    expected = evaluate(trained, few_digits().test, CPU)
    assert (result.rows[0].top1, result.rows[0].loss) == (expected.top1, expected.loss)


# Unusable teachers


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "code ran")


def write_teacher(kind: str, path: Path) -> None:
    weights: Any = Small(num_classes=7 if kind == "other classes" else 10).state_dict()
    if kind == "code":
        weights = {**weights, "fc.bias": Canary(path.with_name("canary"))}
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Canary(path.with_name("canary")), protocol=2))
        return
    elif kind == "other network":
        weights = nn.Conv2d(3, 8, 3).state_dict()
    elif kind == "numbers":
        weights = {"epoch": 3}
    elif kind == "text":
        path.write_text("not a checkpoint")
        return
    elif kind == "missing":
        return
    elif kind == "diverged":
        weights["conv3.weight"][2, 1, 0, 0] = float("nan")
    torch.save(weights, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "other classes",
            r"(?s)teacher.pt does not fit the model.*size mismatch for fc.weight",
        ),
        ("code", "teacher.pt cannot be loaded without running code"),
        ("pickle", "teacher.pt cannot be loaded without running code"),
        ("other network", "teacher.pt does not fit the model"),
        ("numbers", "teacher.pt holds no state dict"),
        ("text", "teacher.pt cannot be loaded"),
        ("missing", "there is no teacher at .*teacher.pt"),
        ("diverged", "the teacher's logits are not finite"),
    ],
)
def test_an_unusable_teacher_is_refused_before_anything_is_written(
    kind: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "teacher.pt"
    write_teacher(kind, path)
    with pytest.raises((StoreError, DataError), match=message):
        small_run(teacher=path, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "canary").exists()


def test_a_teacher_module_with_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the teacher has 7 classes, the data has 10"):
        small_run(teacher=Small(num_classes=7), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["{}", "{"])
def test_a_corrupt_record_of_a_teacher_is_named(content: str, own: Path, tmp_path: Path) -> None:
    (own / "stages" / "original.record.json").write_text(content)
    with pytest.raises(CorruptFileError, match=r"original.record.json is corrupt: .* Restore it from a copy"):
        small_run(teacher=own, output=tmp_path / "other")


@pytest.mark.parametrize("name", ["slim.json", "stages/uniform.json"])
def test_a_slim_network_is_refused_as_teacher(
    name: str, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"is not the original: .* channels there and \d+ in the original"):
        small_run(teacher=finished[0] / name, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_resume_with_another_teacher(tmp_path: Path) -> None:
    weights, run = tmp_path / "weights.pt", tmp_path / "run"
    torch.save(Small().state_dict(), weights)
    small_run(teacher=weights, output=run, stages=["original", "backbone", "plan", "uniform"])
    moved = weights.rename(tmp_path / "moved.pt")
    torch.save({name: tensor + 1 for name, tensor in Small().state_dict().items()}, weights)
    before = content(run / "stages")
    with pytest.raises(RunError, match=r"hash of the teacher's weights: '\w+' -> '\w+'"):
        small_run(teacher=weights, output=run)
    with pytest.raises(StoreError, match=r"there is no teacher at .*nothing.*--stages original --output"):
        small_run(teacher=tmp_path / "nothing", output=run)
    assert not (tmp_path / "nothing").exists()
    assert content(run / "stages") == before
    assert small_run(teacher=moved, output=run).model is not None, "the same teacher at another place"


def test_another_run_can_use_the_teacher_and_the_plan_of_a_killed_one(tmp_path: Path) -> None:
    killed, counting = tmp_path / "killed", Counting()
    assert exit_code(start(run_until, killed, SHORT, ("uniform", 4))) == KILLED
    plan = killed / "plan.json"
    other = {**SHORT, "backbone_ratio": 0.5, "teacher": killed, "plan": plan}
    result = small_run(output=tmp_path / "other", callbacks=[counting], **other)
    assert counting.steps == {"uniform": 6, "peel": 6}
    assert result.plan is not None
    assert result.plan.widths == read(plan)["slim"]["widths"]


def test_the_folder_of_a_run_without_an_original_is_refused_as_teacher(tmp_path: Path) -> None:
    small_run(teacher=Small(), output=tmp_path / "one", stages=["original"])
    with pytest.raises(StoreError, match=r"there is no teacher at .*one\. .*--stages original --output"):
        small_run(teacher=tmp_path / "one", output=tmp_path / "two")
    assert not (tmp_path / "two").exists()

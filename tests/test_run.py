"""`prune` and the run folder: what is in it, that it is never computed twice, and who may use it."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peel
from disks import small_disk_at
from killing import exit_code, start, wait_for
from peel.cli import main
from peel.errors import ConfigError, DamagedError, DataError, PeelError, RunError, StoreError
from peel.graph.count import count_macs
from peel.reporter import Silent
from peel.result import Result
from peel.train.data import Data
from peel.train.loop import evaluate
from peel.train.view import AS_IT_IS
from peel.workspace import Workspace
from small import CPU, SHORT, Small, few_digits, same_weights, small_run

pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(Silent):
    """Counts the steps of training in each stage."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.said: list[str] = []
        self.name = ""

    def stage(self, name: str, what: str) -> None:
        self.name = name
        self.said.append(what)

    def step(self, done: int, total: int, images: int) -> None:
        self.steps[self.name] = self.steps.get(self.name, 0) + 1


@pytest.fixture(scope="module")
def finished(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run that came to its end; its folder is not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, small_run(output=folder, seed=3)


@pytest.fixture
def own(finished: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with the time it was written at."""
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_run_folder_holds_what_is_documented(finished: tuple[Path, Result]) -> None:
    folder, _ = finished
    stages = {
        f"stages/{name}.{end}" for name in ("original", "backbone", "uniform", "peel") for end in ("json", "safetensors", "record.json")
    }
    top = {"settings.json", "environment.json", "plan.json", "metrics.jsonl", "slim.json", "slim.safetensors", "result.json", "report.html"}
    assert set(content(folder)) == stages | top | {".lock"}
    assert not list((folder / "checkpoints").iterdir()), "the checkpoints of finished stages are taken away"
    assert read(folder / "environment.json")["torch"] == torch.__version__


def test_settings_are_kept_as_given_and_as_they_were_resolved(finished: tuple[Path, Result]) -> None:
    settings = read(finished[0] / "settings.json")
    assert settings["given"] == {
        "model": "Small", "data": "digits", "budget": "50%", "recipe": "auto", "train": SHORT["train"], "search": SHORT["search"],
    }  # fmt: skip
    resolved = settings["resolved"]
    assert resolved["seed"] == 3
    assert (resolved["train"]["epochs"], resolved["search"]["epochs"], resolved["search"]["batch_size"]) == (2, 1, 64)
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
    assert [line["test"] for line in lines if line["stage"] == "peel"] == [epoch.test for epoch in result.history["peel"]]


def test_the_same_call_again_trains_nothing_and_gives_the_same_result(finished: tuple[Path, Result], own: Path) -> None:
    before, reporter = content(own), Counting()
    again = small_run(output=own, seed=3, reporter=reporter)
    assert reporter.steps == {}
    assert list(again.rows) == list(finished[1].rows)
    assert again.history == finished[1].history
    assert again.model is not None
    assert finished[1].model is not None
    assert same_weights(again.model, finished[1].model)
    after = content(own)
    assert set(after) == set(before)
    for name in before:
        if name.startswith("stages/") or name in ("settings.json", "plan.json", "metrics.jsonl"):
            assert after[name] == before[name], f"{name} was written again"
        elif name not in (".lock", "report.html"):
            assert after[name][1] == before[name][1], f"{name} changed"


def test_stages_that_finished_are_kept_when_a_later_one_is_lost(own: Path) -> None:
    before = content(own)
    for name in ("stages/peel.record.json", "result.json", "slim.json"):
        (own / name).unlink()
    reporter = Counting()
    small_run(output=own, seed=3, reporter=reporter)
    assert reporter.steps == {"peel": 6}
    after = content(own)
    assert all(after[name][1] == before[name][1] for name in ("stages/peel.safetensors", "slim.json", "slim.safetensors"))
    assert all(after[name] == before[name] for name in before if name.startswith(("stages/original", "stages/backbone", "stages/uniform")))


def test_checkpoints_that_a_kill_left_beside_a_finished_stage_are_taken_away(own: Path) -> None:
    Workspace(own).checkpoints("uniform").save({"epoch": 2}, 2, 0)
    small_run(output=own, seed=3)
    assert not list((own / "checkpoints").iterdir())


# The table


def test_the_costs_in_the_table_are_those_of_the_saved_networks(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    assert [row["name"] for row in result.rows] == ["original", "uniform", "peel"]
    for row in result.rows:
        network = peel.load(folder / row["file"], model=Small())
        assert row["params"] == sum(parameter.numel() for parameter in network.parameters())
        assert row["macs"] == count_macs(network, (torch.zeros(1, 3, 8, 8),), {})
    assert max(row["macs"] for row in result.rows[1:]) <= result.rows[0]["macs"] / 2
    assert result.rows == read(folder / "result.json")["rows"]


def test_the_accuracy_in_the_table_is_that_of_the_saved_networks(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    images, labels, _ = next(iter(few_digits().test.batches(torch.arange(90), 90, AS_IT_IS, CPU.device)))
    for row in result.rows:
        network = peel.load(folder / row["file"], model=Small()).eval()
        with torch.no_grad():
            scores = network(images)
        assert row["top1"] == (scores.argmax(1) == labels).sum().item() / 90
        assert row["top5"] == pytest.approx((scores.argsort(1, descending=True)[:, :5] == labels[:, None]).any(1).float().mean().item())
        assert row["loss"] == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-4)


def test_the_result_is_the_trained_slim_network_with_or_without_a_folder(finished: tuple[Path, Result]) -> None:
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


# Other settings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 4}, ["seed: 3 -> 4"]),
        ({"budget": "40%"}, ["method.budget: '50%' -> '40%'"]),
        ({"criterion": "weight", "keep": 0.7}, ["method.criterion: 'bn' -> 'weight'", "method.keep: 0.8 -> 0.7"]),
        ({"train": {"epochs": 3, "batch_size": 64}}, ["train.epochs: 2 -> 3"]),
        ({"search": {"epochs": 1, "lr": 0.05}}, ["search.lr: 0.1 -> 0.05"]),
        ({"groups": {"all": ["conv1", "conv2", "conv3", "conv4"]}}, ["groups.all: None -> ['conv1'"]),
        ({"data": few_digits(199)}, ["images: [200, 90] -> [199, 90]", "fingerprint: "]),
        ({"plan": {"conv1": 4, "conv2": 4, "conv3": 8, "conv4": 8}}, ["plan: None -> {'conv1': 4"]),
        ({"teacher": "elsewhere"}, ["teacher: 'train' -> 'elsewhere'"]),
    ],
)
def test_other_settings_on_an_existing_folder_are_refused_with_the_difference(
    changes: dict[str, Any], expected: list[str], own: Path
) -> None:
    before = content(own)
    with pytest.raises(RunError, match="was started with other settings") as caught:
        small_run(**{"output": own, "seed": 3, **changes})
    for line in expected:
        assert line in str(caught.value)
    unchanged = [name for name in before if name != ".lock"]
    after = content(own)
    assert set(after) == set(before)
    assert all(after[name] == before[name] for name in unchanged)


def test_a_run_with_zero_channels_that_only_one_kind_of_device_adds_names_the_device(own: Path) -> None:
    settings = read(own / "settings.json")
    settings["resolved"].update(pads=True, device="cuda")
    (own / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(RunError, match=r"pads: True -> False .*go on with the kind of --device that began the run"):
        small_run(output=own, seed=3)


def test_a_folder_of_another_version_of_peel_with_other_settings_is_said_to_be_one(own: Path) -> None:
    """What only the other version knows cannot be given to this one."""
    settings = read(own / "settings.json")
    resolved = settings["resolved"]
    del resolved["pads"], resolved["method"]["keep"]
    (own / "settings.json").write_text(json.dumps({**settings, "resolved": {"align": 1, **resolved}}))
    with pytest.raises(RunError, match="was begun by another version of peel") as caught:
        small_run(output=own, seed=3)
    said = str(caught.value)
    assert "align: 1 (only there)" in said
    assert "pads: False (only here)" in said
    assert "method.keep: 0.8 (only here)" in said
    assert "Finish it with the version that began it, or name another --output" in said
    assert "the same settings" not in said
    assert "None" not in said


@pytest.mark.parametrize("role", ["output", "teacher"])
def test_a_whole_run_and_a_teacher_alone_are_not_taken_for_two_versions(role: str, own: Path, tmp_path: Path) -> None:
    """The settings of a teacher that runs share are fewer."""
    (own / "stages" / "original.record.json").unlink()
    if role == "output":
        settings = read(own / "settings.json")
        (own / "settings.json").write_text(json.dumps({**settings, "resolved": {"seed": settings["resolved"]["seed"]}}))
    with pytest.raises(RunError, match="was started with other settings"):
        small_run(**{"output": tmp_path / "other", "seed": 3, role: own})


def test_images_that_changed_under_the_same_name_are_noticed(own: Path) -> None:
    data = few_digits()
    pixels = data.train.pixels.clone()  # type: ignore[attr-defined]
    pixels[0, 0, 0, 0] ^= 1
    altered = Data(data.name, data.classes, copy.copy(data.train), data.test, data.augment)
    object.__setattr__(altered.train, "pixels", pixels)
    with pytest.raises(RunError, match="fingerprint"):
        small_run(data=altered, output=own, seed=3)


def test_what_does_not_change_the_result_may_change(own: Path) -> None:
    reporter = Counting()
    small_run(output=own, seed=3, device="cpu", workers=1, checkpoint_seconds=5.0, reporter=reporter)
    assert reporter.steps == {}


def test_going_on_with_another_number_of_threads_is_said(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The threads share sums, which are then added in another order."""
    said = f"{own} was begun with threads 1 and goes on with 2: the bits may differ"
    small_run(output=own, seed=3)
    assert "threads" not in caplog.text
    torch.set_num_threads(2)
    try:
        small_run(output=own, seed=3)
    finally:
        torch.set_num_threads(1)
    assert said in caplog.text


# Who may use a folder


def hold(folder: Path, held: Path) -> None:
    with Workspace(folder):
        held.touch()
        time.sleep(60)


def test_a_second_process_is_refused_while_the_first_lives_and_not_after_it_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(hold, folder, tmp_path / "held")
    try:
        wait_for(tmp_path / "held")
        with pytest.raises(RunError, match=rf"in use by process {process.pid} on .* --output"):
            small_run(output=folder)
        assert set(content(folder)) == {".lock"}
    finally:
        process.kill()
    assert exit_code(process) == -signal.SIGKILL
    assert small_run(output=folder).model is not None


def test_who_has_taken_a_folder_just_now_is_told_although_it_does_not_say_so_yet(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, lambda: os.write(lock.fileno(), b"process 7 on earth"))
        timer.start()
        with pytest.raises(RunError, match="in use by process 7 on earth"), Workspace(tmp_path):
            pass
        timer.join()


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_an_output_that_is_a_file_or_below_one_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(RunError, match=r"output folder .*file.* --output"):
        small_run(output=tmp_path / place)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_folder_with_files_of_someone_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "thesis.tex").write_text("precious")
    (tmp_path / "notes" / ".writing-1").write_text("precious too")
    before = content(tmp_path)
    with pytest.raises(RunError, match=r"holds files that are not of a run \(notes, thesis.tex\)"):
        small_run(output=tmp_path)
    assert content(tmp_path) == before


def test_an_empty_folder_that_is_there_already_is_used(tmp_path: Path) -> None:
    assert small_run(output=tmp_path, steps=["original"]).folder == tmp_path
    assert (tmp_path / "settings.json").exists()


def with_little_room(folder: Path, size: int, said: Path) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        small_run(output=folder, seed=3, checkpoint_seconds=0.0)
    except PeelError as error:
        said.write_text(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("size", [5_000, 30_000])
def test_files_that_cannot_grow_stop_the_run_and_room_lets_it_go_on(size: int, tmp_path: Path, finished: tuple[Path, Result]) -> None:
    """5,000 bytes hold the settings but no checkpoint; 30,000 the slim networks' files too."""
    folder = tmp_path / "run"
    assert exit_code(start(with_little_room, folder, size, tmp_path / "said")) == 0
    assert "File too large" in (tmp_path / "said").read_text()
    assert not list(folder.rglob(".writing-*"))
    result = small_run(output=folder, seed=3)
    assert result.model is not None
    assert finished[1].model is not None
    assert same_weights(result.model, finished[1].model)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", "128k") as place:
        yield place


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(small_disk: Path, finished: tuple[Path, Result]) -> None:
    with pytest.raises(PeelError, match="No space left on device"):
        small_run(output=small_disk / "run", seed=3)
    assert (small_disk / "run" / "settings.json").exists()
    assert not list(small_disk.rglob(".writing-*"))
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    result = small_run(output=small_disk / "run", seed=3)
    assert result.model is not None
    assert finished[1].model is not None
    assert same_weights(result.model, finished[1].model)


def test_a_read_only_disk_is_refused(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in (small_disk / "run", small_disk / "new"):
        with pytest.raises(RunError, match=rf"output folder {folder}: Read-only file system"):
            small_run(output=folder)


# Parts of a run


WIDTHS = {"conv1": 5, "conv2": 3, "conv3": 11, "conv4": 7}


@pytest.mark.parametrize("form", ["mapping", "widths", "bare file", "plan file"])
def test_a_plan_from_elsewhere_is_trained_as_it_is(form: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"widths": WIDTHS, "budget": 1} if form == "plan file" else WIDTHS))
    plan: Any = WIDTHS if form == "mapping" else peel.Widths(WIDTHS) if form == "widths" else str(path)
    result = small_run(plan=plan, steps=["peel"], distill="none")
    assert isinstance(result.model, nn.Module)
    assert [result.model.get_submodule(name).out_channels for name in WIDTHS] == list(WIDTHS.values())
    assert list(result.history) == ["peel"]


def test_a_run_with_a_plan_from_elsewhere_keeps_it_and_trains_nothing_again(tmp_path: Path) -> None:
    result = small_run(plan=WIDTHS, output=tmp_path / "run")
    assert [row["name"] for row in result.rows] == ["original", "uniform", "peel"]
    assert "backbone" not in result.history
    assert read(tmp_path / "run" / "plan.json")["widths"] == WIDTHS
    reporter = Counting()
    small_run(plan=WIDTHS, output=tmp_path / "run", reporter=reporter)
    assert reporter.steps == {}


def test_widths_that_a_plan_does_not_name_stay(tmp_path: Path) -> None:
    plan = small_run(plan={"conv3": 5}, dry_run=True, budget="100%").plan
    assert plan is not None
    assert plan["widths"] == {"conv1": 8, "conv2": 8, "conv3": 5, "conv4": 16}


def test_the_plan_of_one_run_is_trained_by_another(finished: tuple[Path, Result]) -> None:
    result = small_run(plan=finished[0] / "plan.json", seed=3)
    assert result.model is not None
    assert finished[1].model is not None
    assert same_weights(result.model, finished[1].model), "the same widths, seed and recipe"


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
def test_only_the_steps_that_were_asked_for_are_done(steps: list[str], settings: dict[str, Any], trained: dict[str, int]) -> None:
    reporter = Counting()
    result = small_run(steps=steps, reporter=reporter, **settings)
    assert reporter.steps == trained
    assert [row["name"] for row in result.rows] == [name for name in trained if name != "backbone"]
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
def test_steps_that_cannot_work_are_refused_before_anything_is_trained(steps: list[str], message: str, tmp_path: Path) -> None:
    reporter = Counting()
    with pytest.raises(ConfigError, match=message):
        small_run(steps=steps, reporter=reporter, output=tmp_path / "run")
    assert reporter.steps == {}
    assert not (tmp_path / "run").exists()


def test_a_dry_run_trains_and_writes_nothing(tmp_path: Path) -> None:
    reporter = Counting()
    model = Small()
    before = copy.deepcopy(model)
    result = small_run(model, dry_run=True, output=tmp_path / "run", reporter=reporter)
    assert reporter.steps == {}
    assert same_weights(model, before)
    assert not list(tmp_path.iterdir())
    assert result.model is None
    assert result.rows == []
    assert result.plan is not None
    assert result.plan["rounds"][0]["shares"] == {"8x8": 0.5, "4x4": 0.5}
    assert result.plan["macs"] <= result.plan["budget"]
    assert result.estimate is not None
    assert list(result.estimate) == ["original", "backbone", "uniform", "peel"]
    assert all(seconds > 0 for seconds in result.estimate.values())


def test_groups_of_ones_own_are_the_ones_that_grow() -> None:
    groups = {"outer": ["conv1", "conv4"], "inner": ["conv2", "conv3"]}
    result = small_run(groups=groups, steps=["backbone", "plan"], policy="winner-take-all")
    assert result.plan is not None
    assert result.plan["groups"] == groups
    found = result.plan["rounds"][0]
    winner = max(found["shares"], key=lambda group: found["shares"][group])
    loser = "inner" if winner == "outer" else "outer"
    assert found["factors"][loser] == 1.0 < found["factors"][winner]
    backbone = result.plan["backbone"]["widths"]
    grown = {tie for tie, width in found["rounding"]["ideal_widths"].items() if width > backbone[tie] + 1e-9}
    assert grown == set(groups[winner])


# Teachers


def test_a_teacher_at_a_path_is_trained_once_and_used_by_every_run_that_names_it(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    one = small_run(teacher=tmp_path / "teacher", output=tmp_path / "one", reporter=first)
    kept = content(tmp_path / "teacher")
    assert first.steps["original"] == 6
    assert {"stages/original.json", "stages/original.safetensors", "stages/original.record.json"} <= set(kept)
    two = small_run(teacher=str(tmp_path / "teacher"), output=tmp_path / "two", seed=9, budget="40%", reporter=second)
    assert "original" not in second.steps
    assert content(tmp_path / "teacher") == kept
    assert two.rows[0]["top1"] == one.rows[0]["top1"]
    straight = small_run()
    assert one.model is not None
    assert straight.model is not None
    assert same_weights(one.model, straight.model), "where the teacher is kept does not matter"


def test_the_folder_of_a_run_is_a_teacher(finished: tuple[Path, Result]) -> None:
    reporter = Counting()
    result = small_run(teacher=finished[0], steps=["original"], reporter=reporter)
    assert reporter.steps == {}
    assert result.rows[0]["top1"] == finished[1].rows[0]["top1"]


@pytest.mark.parametrize("form", ["plain", "state_dict", "model", "module prefix", "compiled prefix", "peel", "module"])
def test_a_trained_teacher_is_taken_from_a_checkpoint_or_a_module(form: str, tmp_path: Path, finished: tuple[Path, Result]) -> None:
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
    reporter = Counting()
    result = small_run(teacher=teacher, steps=["original"], reporter=reporter)
    assert reporter.steps == {}
    expected = evaluate(trained, few_digits().test, CPU)
    assert (result.rows[0]["top1"], result.rows[0]["loss"]) == (expected.top1, expected.loss)


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
    torch.save(weights, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other classes", r"teacher.pt does not fit the model: fc.weight has shape \(7, 16\) there and \(10, 16\) here.*classes"),
        ("code", "teacher.pt cannot be read as weights without running code"),
        ("pickle", "teacher.pt cannot be read as weights without running code"),
        ("other network", "teacher.pt does not fit the model"),
        ("numbers", "teacher.pt holds no state_dict"),
        ("text", "teacher.pt cannot be read"),
        ("missing", "there is no teacher at .*teacher.pt"),
    ],
)
def test_a_teacher_that_cannot_be_used_is_refused_before_anything_is_written(kind: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "teacher.pt"
    write_teacher(kind, path)
    with pytest.raises((StoreError, RunError), match=message):
        small_run(teacher=path, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "canary").exists()


def test_a_teacher_module_with_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the teacher knows 7 classes, the data has 10"):
        small_run(teacher=Small(num_classes=7), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_stage_is_said_to_be_damaged(own: Path) -> None:
    (own / "result.json").unlink()
    weights = own / "stages" / "uniform.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(StoreError, match=r"uniform.safetensors is damaged"):
        small_run(output=own, seed=3)
    (own / "stages" / "original.record.json").write_text("{")
    with pytest.raises(RunError, match=r"original.record.json is damaged"):
        small_run(output=own, seed=3)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("stages/original.record.json", "{}", "it has no 'history'"),
        ("plan.json", "{}", "it has no 'widths'"),
        ("settings.json", "[]", "expected an object, found list"),
    ],
)
def test_a_file_with_something_else_in_it_is_said_to_be_damaged(name: str, content: str, reason: str, own: Path) -> None:
    (own / name).write_text(content)
    with pytest.raises(DamagedError, match=rf"{name} is damaged: {reason}\. Restore it from a copy, or .* another --output"):
        small_run(output=own, seed=3)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("peel.record.json", '{"history": []}', "it has no 'image_passes'"),
        ("peel.record.json", '{"history": {}, "image_passes": 1}', "its 'history' is of the kind dict, not list"),
        ("peel.record.json", '{"history": [], "image_passes": 1}', "its 'history' is not that of a training"),
        ("peel.record.json", '{"history": [{"epoch": 1}], "image_passes": 1}', "its 'history' is not that of a training"),
        ("settings.json", '{"resolved": 1}', "its 'resolved' is of the kind int, not dict"),
        ("settings.json", "[" * 100_000, "it is nested too deeply"),
        ("environment.json", "3", "expected an object, found int"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name: str, content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DamagedError, match=rf"{name} is damaged: {reason}\."):
        Workspace(tmp_path).read_json(name)


@pytest.mark.parametrize("content", ["{}", "{"])
def test_a_damaged_record_of_a_teacher_is_named(content: str, own: Path, tmp_path: Path) -> None:
    (own / "stages" / "original.record.json").write_text(content)
    with pytest.raises(DamagedError, match=r"original.record.json is damaged: .* another --teacher"):
        small_run(teacher=own, output=tmp_path / "other")


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
COMMAND = ["run", "own.py:model", "--train.epochs", "1", "--train.batch-size", "256", "--search.epochs", "1"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_runs_from_nothing_to_a_table_and_finds_its_folder_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert read(folder / "settings.json")["command"] == " ".join(["peel", *COMMAND])
    assert main(COMMAND) == 0
    second = capsys.readouterr()
    assert "finished before" in second.err
    assert "epoch 1/1" not in second.err
    assert second.out == first.out
    assert main([*COMMAND, "--seed", "1", "--steps", "original"]) == 0
    assert len(list((place / "runs").iterdir())) == 2


def test_the_command_as_json_and_quiet_prints_the_result_and_nothing_else(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "groups.json").write_text(json.dumps({"first": ["0"], "rest": ["3", "6"]}))
    options = ["--json", "--quiet", "--output", "out", "--groups", "groups.json", "--budget", "40%", "--distill", "none"]
    assert main([*COMMAND, *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out)
    assert document["rows"] == read(place / "out" / "result.json")["rows"]
    assert document["plan"]["groups"] == {"first": ["0"], "rest": ["3", "6"]}
    assert document["plan"]["macs"] <= 0.4 * document["plan"]["original"]["macs"]
    assert document["folder"] == "out"
    settings = read(place / "out" / "settings.json")["resolved"]
    assert (settings["train"]["epochs"], settings["train"]["batch_size"], settings["method"]["distill"]) == (1, 256, "none")


def test_every_field_of_a_recipe_can_be_given_on_the_command_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "epochs": "1", "batch-size": "300", "lr": "0.03", "momentum": "0.8", "weight-decay": "0.002", "warmup-epochs": "0.5",
        "warmup-from": "0.01", "schedule": "steps", "milestones": "0.4", "gamma": "0.3", "label-smoothing": "0.2", "augment": "none",
    }  # fmt: skip
    options = [part for name, value in fields.items() for part in (f"--train.{name}", value)]
    options += ["--train.no-nesterov", "--train.decay-norms", "--search.lr", "0.07"]
    assert main(["run", "own.py:model", "--steps", "original", "--output", "out", "--quiet", *options]) == 0
    resolved = read(place / "out" / "settings.json")["resolved"]
    for name, value in {**fields, "nesterov": False, "decay-norms": True}.items():
        found = resolved["train"][name.replace("-", "_")]
        assert found == ([0.4] if name == "milestones" else type(found)(value) if isinstance(found, int | float) else value), name
    assert resolved["search"]["lr"] == 0.07
    assert resolved["search"]["momentum"] == 0.8


def test_a_dry_run_of_the_command_shows_the_plan_and_the_time_and_leaves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "nothing was trained" in output
    assert "neutral plan" in output
    assert "about " in output
    assert not (place / "runs").exists()


@pytest.mark.slow
def test_output_of_a_run_into_a_pipe_has_no_escape_codes(place: Path) -> None:
    command = [sys.executable, "-m", "peel", *COMMAND, "--steps", "original"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "\x1b" not in found.stdout + found.stderr
    assert "original" in found.stdout

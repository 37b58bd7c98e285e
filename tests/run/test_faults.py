"""Faults as they happen to people, through the command line: real processes, signals and disks. docs/faults.md lists the promises."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import peel
from helpers.commands import line, run
from helpers.disks import small_disk_at
from helpers.folders import kept, weights
from helpers.killing import KILLED, command, exit_code, start, wait_for
from helpers.small import CPU, Small, few_digits, small_run
from peel.run.folder import RunFolder
from peel.train.checkpoint import Checkpoints
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")


# Checkpoints (F2, F3)


def write_some_bytes_and_die(folder: Path, count: int) -> None:
    """The system itself kills a process that writes beyond the limit, in the middle of its write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))
    Checkpoints(folder, "peel").save({"number": 2, "weight": torch.ones(5000)}, 2, 0)


@pytest.mark.parametrize("count", [1, 1000, 20_000])
def test_killed_after_some_bytes_of_a_checkpoint_the_one_before_is_used(count: int, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"):
        pass
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", "peel")
    first = checkpoints.save({"number": 1}, 1, 0)
    assert exit_code(start(write_some_bytes_and_die, checkpoints.folder, count)) == -signal.SIGXFSZ
    half = [path for path in checkpoints.folder.iterdir() if path != first]
    assert [path.stat().st_size for path in half] == [count], "it was killed in the middle of its write"
    assert checkpoints.newest() == {"number": 1}
    with RunFolder(tmp_path / "run"):
        assert list(checkpoints.folder.iterdir()) == [first], "the next start sweeps what was left behind"


def flip(data: bytes) -> bytes:
    return data[: len(data) // 3] + bytes([data[len(data) // 3] ^ 1]) + data[len(data) // 3 + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "one bit flipped": flip,
    "half cut off": lambda data: data[: len(data) // 2],
    "99 % cut off": lambda data: data[: len(data) // 100],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_where_every_checkpoint_is_damaged_the_command_stops_with_3_and_says_what_to_do(
    damage: str, killed: Path, whole: bytes
) -> None:
    metrics = (killed / "metrics.jsonl").read_text()
    for path in kept(killed):
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    code, said = run(killed)
    assert code == 3
    assert str(killed / "checkpoints") in said
    assert all(path.name[:30] in said for path in kept(killed))
    assert "Restore one of them from a copy, or delete them" in said
    assert "Traceback" not in said
    assert (killed / "metrics.jsonl").read_text() == metrics, "it did not train from the beginning"
    for path in kept(killed):
        path.unlink()
    assert run(killed)[0] == 0
    assert weights(killed) == whole


def test_a_checkpoint_of_another_run_is_named_and_not_taken(
    killed: Path, tmp_path: Path, whole: bytes
) -> None:
    other = tmp_path / "other"
    assert run(other, "--seed", "1", "--checkpoint-seconds", "0", PEEL_FAULT="18:kill")[0] == KILLED
    for path in kept(other):
        shutil.copy(path, killed / "checkpoints")
    code, said = run(killed, "--checkpoint-seconds", "0", PEEL_FAULT="16:kill")
    assert code == KILLED
    assert said.count("belongs to a run with other settings") == 2
    assert all(path.name in said for path in kept(other))
    assert run(killed)[0] == 0, "its own are still there, although the others call themselves newer"
    assert weights(killed) == whole


def test_a_file_of_the_run_with_something_else_in_it_stops_the_command_with_3(killed: Path) -> None:
    (killed / "state.json").write_text("[]")
    code, said = run(killed)
    assert code == 3
    assert f"{killed / 'state.json'} is damaged" in said
    assert "another --output" in said
    assert "Traceback" not in said


def test_checkpoints_of_another_run_alone_are_refused(killed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert run(other, "--seed", "1", PEEL_FAULT="18:kill")[0] == KILLED
    for path in kept(killed):
        path.unlink()
    shutil.copy(kept(other)[0], killed / "checkpoints")
    code, said = run(killed)
    assert code == 3
    assert kept(other)[0].name[:30] in said


# Being told to stop (F4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_from_outside_stops_soon_and_the_line_that_is_printed_goes_on(
    number: signal.Signals, tmp_path: Path, whole: bytes
) -> None:
    folder, said = tmp_path / "a run", tmp_path / "said"
    process = command(line(folder, model="helpers.small:Slow"), said, PAUSE="0.2")
    wait_for(folder / "metrics.jsonl")
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(process.pid, number)
    assert exit_code(process) == 128 + number
    assert time.monotonic() - began < 10
    assert len(kept(folder)) == 1
    name, *arguments = shlex.split(said.read_text().splitlines()[-1])
    assert name == "peel"
    assert exit_code(command(arguments, said)) == 0
    assert weights(folder) == whole


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", tmp_path / "said"
    process = command(line(folder, model="helpers.small:Slow"), said, PAUSE="60")
    wait_for(folder / "metrics.jsonl")
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    process.join(1)
    assert process.is_alive(), "the first one waits for the step"
    os.kill(process.pid, signal.SIGINT)
    assert exit_code(process, seconds=5) == 130
    assert "Traceback" not in said.read_text()


# Disks (F5)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", "1m") as place:
        yield place


def fill(disk: Path, room: int) -> Path:
    """A file that leaves so many bytes free."""
    path = disk / "filler"
    path.write_bytes(bytes(shutil.disk_usage(disk).free - room))
    assert shutil.disk_usage(disk).free == room
    return path


def test_a_disk_that_is_full_on_the_way_keeps_the_last_checkpoint_and_says_what_is_missing(
    disk: Path, whole: bytes
) -> None:
    folder = disk / "run"
    assert run(folder, PEEL_FAULT="15:kill")[0] == KILLED
    before = kept(folder)
    filler = fill(disk, 12 * 1024)
    code, said = run(folder)
    assert code == 2
    found = re.search(
        r"cannot write the checkpoint .* No space left on device \(([\d,]+) bytes are needed, ([\d,]+) are free\)",
        said,
    )
    assert found is not None, said
    needed, free = (int(number.replace(",", "")) for number in found.groups())
    assert needed == pytest.approx(before[0].stat().st_size, rel=0.2)
    assert free < needed
    assert "The checkpoints before it are kept" in said
    assert "Traceback" not in said
    assert kept(folder) == before
    assert not list(folder.rglob(".writing-*"))
    filler.unlink()
    code, said = run(folder)
    assert code == 0
    assert "going on after epoch 1 of 2" in said
    assert "stopped by an error" not in (folder / "report.html").read_text()
    assert weights(folder) == whole


def test_a_disk_that_is_full_is_noticed_before_the_first_step(disk: Path) -> None:
    fill(disk, 0)
    said = disk.parent / "said"
    assert exit_code(command(line(disk / "run", model="helpers.small:Slow"), said, PAUSE="60")) == 2
    assert "No space left on device (20 bytes are needed, 0 are free)" in said.read_text()


# Numbers that are none (F6)


def test_a_loss_that_is_no_number_is_noticed_within_a_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEEL_FAULT", "5:nan")
    recipe = Recipe(epochs=1, batch_size=4, lr=0.01, augment="none")
    with pytest.raises(peel.DivergedError, match=r"epoch 1, step 100\)"):
        fit(Small(), CrossEntropy(), peel.load_data("digits").train, recipe, engine=CPU, seed=0)


def test_a_rate_far_too_high_exits_with_4_and_the_good_checkpoint_stays(tmp_path: Path) -> None:
    options = [
        "--train.lr",
        "0.1",
        "--train.schedule",
        "steps",
        "--train.gamma",
        "1e12",
        "--train.milestones",
        "0.5",
    ]
    code, said = run(tmp_path / "run", *options)
    assert code == 4, said
    assert "epoch 2" in said
    assert "lower lr" in said
    assert (
        "The run was stopped by an error: the loss is no finite number any more"
        in (tmp_path / "run" / "report.html").read_text()
    )
    [path] = kept(tmp_path / "run")
    state = torch.load(path, weights_only=True)
    assert state["epoch"] == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["model"].values())


# Images (F12)


def test_one_image_of_each_class_and_class_names_with_gaps_are_enough_to_train(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("0", "2", "7", "19"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            Image.fromarray(np.full((12, 12, 3), int(label) * 10, dtype=np.uint8)).save(
                tmp_path / "data" / split / label / "only.png"
            )
    code, said = run(tmp_path / "run", "--data", str(tmp_path / "data"), "--train.batch-size", "4")
    assert code == 0, said
    settings = json.loads((tmp_path / "run" / "state.json").read_text())["resolved"]
    assert settings["images"] == [4, 4]
    assert sorted(settings["input"]["classes"]) == ["0", "19", "2", "7"]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_beyond_the_classes_is_named_before_anything_is_trained(
    label: int, split: str, tmp_path: Path
) -> None:
    data = few_digits()
    images: Any = getattr(data, split)
    labels = images.labels.clone()
    labels[3] = label
    wrong: Any = {split: replace(images, labels=labels)}
    kind = "training" if split == "train" else "test"
    with pytest.raises(
        peel.DataError,
        match=rf"the {kind} labels of digits go from {min(label, 0)} to {max(label, 9)}; with 10 classes",
    ):
        small_run(data=replace(data, **wrong), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()

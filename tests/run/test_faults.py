"""Faults through the command line: real processes, signals and disks. docs/faults.md lists the promises."""

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
from helpers.small import few_digits, small_run
from peel.run.store import RunFolder
from peel.train.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")


# Checkpoints


def write_some_bytes_and_die(folder: Path, count: int) -> None:
    """The system kills a process that writes beyond the limit, in the middle of its write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))
    Checkpoints(folder, "peel").save({"number": 2, "weight": torch.ones(5000)}, 2, 0)


@pytest.mark.parametrize("count", [1, 1000, 20_000])
def test_after_a_kill_within_a_checkpoint_the_one_before_is_used(count: int, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.write_json("state.json", {})
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", "peel")
    first = checkpoints.save({"number": 1}, 1, 0)
    assert exit_code(start(write_some_bytes_and_die, checkpoints.folder, count)) == -signal.SIGXFSZ
    half = [path for path in checkpoints.folder.iterdir() if path != first]
    assert [path.stat().st_size for path in half] == [count], "killed in the middle of the write"
    assert checkpoints.newest() == {"number": 1}
    with RunFolder(tmp_path / "run"):
        assert list(checkpoints.folder.iterdir()) == [first], "the next start removes the rest"


def flip(data: bytes) -> bytes:
    return data[: len(data) // 3] + bytes([data[len(data) // 3] ^ 1]) + data[len(data) // 3 + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "one bit flipped": flip,
    "half cut off": lambda data: data[: len(data) // 2],
    "99 % cut off": lambda data: data[: len(data) // 100],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=() if "bit" in name else pytest.mark.slow) for name in DAMAGE]
)
def test_if_every_checkpoint_is_corrupt_the_exit_code_is_3_and_a_message_tells_what_to_do(
    damage: str, killed: Path, whole: bytes
) -> None:
    metrics = (killed / "metrics.jsonl").read_text()
    for path in kept(killed):
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    code, output = run(killed)
    assert code == 3
    assert str(killed / "checkpoints") in output
    assert all(path.name[:30] in output for path in kept(killed))
    assert "Restore one of them from a copy, or delete them" in output
    assert "Traceback" not in output
    assert (killed / "metrics.jsonl").read_text() == metrics, "nothing was trained"
    for path in kept(killed):
        path.unlink()
    assert run(killed)[0] == 0
    assert weights(killed) == whole


@pytest.mark.slow
def test_checkpoints_of_another_run_are_named_and_not_used(
    killed: Path, tmp_path: Path, whole: bytes
) -> None:
    other = tmp_path / "other"
    assert run(other, "--seed", "1", "--checkpoint-seconds", "0", FAULT="18:kill")[0] == KILLED
    for path in kept(other):
        shutil.copy(path, killed / "checkpoints")
    code, output = run(killed)
    assert code == 0, output
    assert output.count("belongs to a run with other settings") == 2
    assert all(path.name in output for path in kept(other))
    assert weights(killed) == whole


def test_checkpoints_of_another_run_alone_are_refused(killed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert run(other, "--seed", "1", FAULT="18:kill")[0] == KILLED
    for path in kept(killed):
        path.unlink()
    shutil.copy(kept(other)[0], killed / "checkpoints")
    code, output = run(killed)
    assert code == 3
    assert kept(other)[0].name[:30] in output


def test_a_corrupt_file_of_the_run_has_exit_code_3(killed: Path) -> None:
    (killed / "state.json").write_text("[]")
    code, output = run(killed)
    assert code == 3
    assert f"{killed / 'state.json'} is corrupt" in output
    assert "another --output" in output
    assert "Traceback" not in output


# Signals


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow), signal.SIGINT]
)
def test_a_signal_stops_the_run_and_the_printed_command_resumes_it(
    number: signal.Signals, tmp_path: Path, whole: bytes
) -> None:
    folder, log = tmp_path / "a run", tmp_path / "log"
    process = command(line(folder, model="helpers.small:Slow"), log, PAUSE="0.2")
    wait_for(folder / "metrics.jsonl")
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(process.pid, number)
    assert exit_code(process) == 128 + number
    assert time.monotonic() - began < 10
    assert len(kept(folder)) == 1
    assert f"stopped by {number.name}" in log.read_text()
    name, *arguments = shlex.split(log.read_text().splitlines()[-1])
    assert name == "peel"
    assert exit_code(command(arguments, log)) == 0
    assert weights(folder) == whole


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = command(line(folder, model="helpers.small:Slow"), log, PAUSE="60")
    wait_for(folder / "metrics.jsonl")
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    process.join(1)
    assert process.is_alive(), "the first one waits for the step"
    os.kill(process.pid, signal.SIGINT)
    assert exit_code(process, seconds=5) == 130
    assert "Traceback" not in log.read_text()


# Disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", "1m") as place:
        yield place


def fill(disk: Path, room: int) -> Path:
    """A file that leaves this many bytes free."""
    path = disk / "filler"
    path.write_bytes(bytes(shutil.disk_usage(disk).free - room))
    assert shutil.disk_usage(disk).free == room
    return path


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(disk: Path, whole: bytes) -> None:
    folder = disk / "run"
    assert run(folder, FAULT="15:kill")[0] == KILLED
    before = kept(folder)
    filler = fill(disk, 12 * 1024)
    code, output = run(folder)
    assert code == 2
    assert re.search(r"cannot write the checkpoint .*: No space left on device", output), output
    assert "The checkpoints before it are kept" in output
    assert "Traceback" not in output
    assert kept(folder) == before
    assert not list(folder.rglob(".writing-*"))
    filler.unlink()
    code, output = run(folder)
    assert code == 0
    assert "resuming after epoch 1 of 2" in output
    assert "An error ended the run" not in (folder / "report.html").read_text()
    assert weights(folder) == whole


def test_a_full_disk_is_noticed_before_the_first_step(disk: Path) -> None:
    fill(disk, 0)
    log = disk.parent / "log"
    assert exit_code(command(line(disk / "run", model="helpers.small:Slow"), log, PAUSE="60")) == 2
    assert "No space left on device" in log.read_text()


# Divergence


def test_a_learning_rate_that_is_far_too_high_has_exit_code_4_and_keeps_the_good_checkpoint(
    tmp_path: Path,
) -> None:
    schedule = ["--train.schedule", "steps", "--train.gamma", "1e12", "--train.milestones", "0.5"]
    code, output = run(tmp_path / "run", "--train.lr", "0.1", *schedule)
    assert code == 4, output
    assert "epoch 2" in output
    assert "--train.lr" in output
    assert "An error ended the run: the loss is " in (tmp_path / "run" / "report.html").read_text()
    [path] = kept(tmp_path / "run")
    state = torch.load(path, weights_only=True)
    assert state["epoch"] == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["model"].values())


# Memory


def test_out_of_memory_a_batch_is_split_and_training_continues(tmp_path: Path) -> None:
    code, output = run(tmp_path / "run", FAULT="3:oom")
    assert code == 0, output
    assert "out of memory" in output or "memory is short" in output


def test_if_not_even_one_image_fits_the_exit_code_is_5(tmp_path: Path) -> None:
    code, output = run(tmp_path / "run", "--accumulate", "128", FAULT="3:oom")
    assert code == 5, output
    assert "does not fit" in output
    assert "Traceback" not in output


# Images


def test_one_image_of_each_class_is_enough_to_train(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("0", "2", "7", "19"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            Image.fromarray(np.full((12, 12, 3), int(label) * 10, dtype=np.uint8)).save(
                tmp_path / "data" / split / label / "only.png"
            )
    code, output = run(tmp_path / "run", "--data", str(tmp_path / "data"), "--train.batch-size", "4")
    assert code == 0, output
    identity = json.loads((tmp_path / "run" / "state.json").read_text())["subject"]
    assert sorted(identity["data"]["classes"]) == ["0", "19", "2", "7"]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_beyond_the_classes_is_named_before_training(label: int, split: str, tmp_path: Path) -> None:
    data = few_digits()
    images: Any = getattr(data, split)
    labels = images.labels.clone()
    labels[3] = label
    wrong: Any = {split: replace(images, labels=labels)}
    kind = "training" if split == "train" else "test"
    lowest, highest = min(label, 0), max(label, 9)
    message = rf"the {kind} labels of digits go from {lowest} to {highest}; 10 classes"
    with pytest.raises(peel.DataError, match=message):
        small_run(data=replace(data, **wrong), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""The output folder: who may use it, what else is in it, and disks that cannot be written."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.commands import line, run
from helpers.disks import small_disk_at
from helpers.folders import content, weights
from helpers.killing import command, exit_code, start, wait_for
from helpers.small import same_weights, small_run
from peel.errors import CorruptFileError, PeelError, RunError
from peel.run.folder import RunFolder
from peel.run.result import Result

pytestmark = pytest.mark.usefixtures("one_thread")


# Two at once (F17)


def freeze(folder: Path, held: Path) -> None:
    with RunFolder(folder):
        held.touch()
        time.sleep(60)


def test_a_second_process_is_refused_while_the_first_lives_and_not_after_it_was_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    process = start(freeze, folder, tmp_path / "held")
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
        with pytest.raises(RunError, match="in use by process 7 on earth"), RunFolder(tmp_path):
            pass
        timer.join()


def test_of_two_commands_at_the_same_time_one_runs_and_the_other_is_told_who(
    tmp_path: Path, whole: bytes
) -> None:
    folder = tmp_path / "run"
    processes = {
        command(line(folder, model="helpers.small:Slow"), tmp_path / str(i), PAUSE="0.1"): tmp_path / str(i)
        for i in range(2)
    }
    codes = {exit_code(process): said for process, said in processes.items()}
    assert set(codes) == {0, 2}
    winner = next(process for process in processes if process.exitcode == 0)
    assert f"{folder} is in use by process {winner.pid} on {os.uname().nodename}" in codes[2].read_text()
    assert weights(folder) == whole


def test_a_lock_that_a_dead_process_left_is_no_obstacle(killed: Path, whole: bytes) -> None:
    assert "process " in (killed / ".lock").read_text()
    assert run(killed)[0] == 0
    assert weights(killed) == whole


# What is there already


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
    assert small_run(output=tmp_path, stages=["original"]).folder == tmp_path
    assert (tmp_path / "state.json").exists()


# Disks


def with_little_room(folder: Path, size: int, said: Path) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        small_run(output=folder, seed=3, checkpoint_seconds=0.0)
    except PeelError as error:
        said.write_text(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("size", [5_000, 30_000])
def test_files_that_cannot_grow_stop_the_run_and_room_lets_it_go_on(
    size: int, tmp_path: Path, finished: tuple[Path, Result]
) -> None:
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


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(
    small_disk: Path, finished: tuple[Path, Result]
) -> None:
    with pytest.raises(RunError, match="No space left on device"):
        small_run(output=small_disk / "run", seed=3)
    assert (small_disk / "run" / "state.json").exists()
    assert not list(small_disk.rglob(".writing-*"))
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    result = small_run(output=small_disk / "run", seed=3)
    assert result.model is not None
    assert finished[1].model is not None
    assert same_weights(result.model, finished[1].model)


def test_a_disk_without_room_for_a_trained_network_is_no_damaged_file(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "64k") as disk, RunFolder(disk) as space:
        with pytest.raises(
            RunError, match=r"No space left on device \([\d,]+ bytes are needed.*the same command goes on"
        ) as caught:
            space.save_model("large", nn.Linear(200, 200))
        assert not isinstance(caught.value, CorruptFileError)
        space.save_model("small", nn.Linear(2, 2))


def test_a_read_only_disk_is_refused(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in (small_disk / "run", small_disk / "new"):
        with pytest.raises(RunError, match=rf"output folder {folder}: Read-only file system"):
            small_run(output=folder)

"""The run folder: who may use it, foreign files, and disks that cannot be written."""

from __future__ import annotations

import errno
import fcntl
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import peel
from helpers.commands import line, run
from helpers.disks import small_disk_at
from helpers.folders import content, weights
from helpers.killing import KILLED, command, exit_code, start, wait_for
from helpers.small import same_weights, small_run, taught
from peel.errors import PeelError, RunError, StoreError
from peel.run.result import Result
from peel.run.store import RunFolder
from peel.train.callbacks import Callback

pytestmark = pytest.mark.usefixtures("one_thread")


# Two processes


def refuse(number: int) -> Callable[..., None]:
    """A `flock` that the file system does not have."""

    def flock(*_: object) -> None:
        raise OSError(number, "there is no flock")

    return flock


def hold(folder: Path, held: Path, refused: int | None = None) -> None:
    if refused is not None:
        fcntl.flock = refuse(refused)
    with RunFolder(folder):
        held.touch()
        time.sleep(60)


def test_a_folder_is_locked_while_a_process_uses_it_and_free_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(hold, folder, tmp_path / "held")
    try:
        wait_for(tmp_path / "held")
        with pytest.raises(RunError, match=r"run is in use by another process.* --output"):
            small_run(output=folder)
        assert set(content(folder)) == {".lock"}
    finally:
        process.kill()
    assert exit_code(process) == KILLED
    assert small_run(output=folder, stages=["original"]).rows


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_folder_is_locked_on_a_file_system_without_flock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(number))
    folder = tmp_path / "run"
    process = start(hold, folder, tmp_path / "held", number)
    try:
        wait_for(tmp_path / "held")
        with pytest.raises(RunError, match=r"run is in use by another process.* --output"):
            small_run(output=folder)
    finally:
        process.kill()
    assert exit_code(process) == KILLED
    assert small_run(output=folder, stages=["original"]).rows, "the lock of a dead process does not count"
    assert not list(folder.glob(".lock*"))


def test_of_two_commands_at_the_same_time_one_runs_and_the_other_is_refused(tmp_path: Path) -> None:
    folder, logs = tmp_path / "run", [tmp_path / "0", tmp_path / "1"]
    arguments = line(folder, model="helpers.small:Slow")
    processes = [command(arguments, log, PAUSE="0.1") for log in logs]
    codes = [exit_code(process) for process in processes]
    assert sorted(codes) == [0, 2]
    assert f"{folder} is in use by another process" in logs[codes.index(2)].read_text()
    assert (folder / "result.json").exists()


def test_the_lock_of_a_killed_process_does_not_matter(killed: Path, whole: bytes) -> None:
    assert (killed / ".lock").exists()
    assert run(killed)[0] == 0
    assert weights(killed) == whole


# Foreign files


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_an_output_that_is_a_file_or_below_one_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(RunError, match=r"file.* --output"):
        small_run(output=tmp_path / place)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_folder_with_foreign_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "thesis.tex").write_text("precious")
    (tmp_path / "notes" / ".writing-1").write_text("precious too")
    before = content(tmp_path)
    with pytest.raises(RunError, match=r"holds files that are not of a run \(notes, thesis.tex\)"):
        small_run(output=tmp_path)
    assert content(tmp_path) == before


class NoStages(Callback):
    """Fails when something is evaluated or trained."""

    def on_stage_begin(self, name: str, description: str) -> None:
        raise AssertionError(f"{description} began")


def test_a_folder_that_cannot_be_used_is_noticed_before_the_original_is_evaluated(
    own: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("precious")
    given = {"model": taught(), "weights": "pretrained", "init": "inherit", "callbacks": [NoStages()]}
    for name, message in (("file", "is a file"), ("foreign", "thesis.tex"), ("run", "other settings")):
        with pytest.raises(RunError, match=message):
            small_run(output=tmp_path / name, **given)


def test_a_folder_that_nothing_was_written_to_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    for place in ("new/run", "given"):
        with pytest.raises(PeelError, match="batch of 1000"):
            small_run(output=tmp_path / place, train={"batch_size": 1000})
    assert list(tmp_path.rglob("*")) == [tmp_path / "given"]


@pytest.mark.parametrize("place", [".writing-abc", "stages/.writing-abc"])
def test_what_a_killed_export_left_in_the_folder_is_removed(place: str, own: Path) -> None:
    (own / place).mkdir()
    (own / place / "slim.onnx").write_bytes(b"half of a")
    with RunFolder(own):
        assert not (own / place).exists()


@pytest.mark.parametrize("name", ["stages", "checkpoints", "metrics.jsonl"])
def test_a_link_out_of_the_folder_is_refused_and_not_followed(name: str, own: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".writing-1").write_text("precious")
    for path in (own / "checkpoints", own / "metrics.jsonl"):
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    if name == "stages":
        (own / name).rename(own / "others")
    (own / name).symlink_to(precious)
    with pytest.raises(RunError, match=rf"{name} is a link.*--output"):
        RunFolder(own).__enter__()
    assert (precious / ".writing-1").exists()


def test_an_existing_empty_folder_is_used(tmp_path: Path) -> None:
    assert small_run(output=tmp_path, stages=["original"]).folder == tmp_path
    assert (tmp_path / "state.json").exists()


# Disks


def with_small_files(folder: Path, size: int, log: Path) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        small_run(output=folder, seed=3, checkpoint_seconds=0.0)
    except PeelError as error:
        log.write_text(f"{type(error).__name__}: {error}")


def assert_finishes_alike(folder: Path, finished: Result) -> None:
    result = small_run(output=folder, seed=3)
    assert result.model is not None
    assert finished.model is not None
    assert same_weights(result.model, finished.model)


@pytest.mark.parametrize("size", [8_000, 30_000])
def test_a_file_that_is_too_large_stops_the_run_which_resumes_later(
    size: int, tmp_path: Path, finished: tuple[Path, Result]
) -> None:
    """8,000 bytes hold the settings but no checkpoint; 30,000 hold the slim networks too."""
    folder = tmp_path / "run"
    assert exit_code(start(with_small_files, folder, size, tmp_path / "log")) == 0
    assert "File too large" in (tmp_path / "log").read_text()
    assert (folder / "state.json").exists()
    assert not list(folder.rglob(".writing-*"))
    assert_finishes_alike(folder, finished[1])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", "128k") as place:
        yield place


def test_a_full_disk_stops_the_run_which_resumes_later(
    small_disk: Path, finished: tuple[Path, Result]
) -> None:
    with pytest.raises(RunError, match="No space left on device"):
        small_run(output=small_disk / "run", seed=3)
    assert (small_disk / "run" / "state.json").exists()
    assert not list(small_disk.rglob(".writing-*"))
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert_finishes_alike(small_disk / "run", finished[1])


def test_a_disk_without_room_for_a_model_is_not_reported_as_a_corrupt_file(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "64k") as disk, RunFolder(disk) as folder:
        with pytest.raises(StoreError, match=r"cannot write .*large.*: No space left on device"):
            peel.save(nn.Linear(200, 200), folder.path("large"))
        peel.save(nn.Linear(2, 2), folder.path("small"))


def test_a_read_only_disk_is_refused(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in (small_disk / "run", small_disk / "new"):
        with pytest.raises(RunError, match=rf"folder {folder}: Read-only file system"):
            small_run(output=folder)

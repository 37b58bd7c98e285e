"""Checkpoints: a crash at any moment leaves a valid one, and the newest valid one is loaded."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.killing import die, die_at_replace, exit_code, start
from peel.errors import RunError
from peel.run.store import RunFolder
from peel.train.checkpoint import Checkpoints
from peel.utils.files import write_bytes


def state(number: int) -> dict[str, Any]:
    return {
        "number": number,
        "model": {"weight": torch.full((50,), float(number))},
        "history": [{"loss": 0.5}],
    }


def saved(folder: Path, *numbers: int) -> tuple[Checkpoints, list[Path]]:
    checkpoints = Checkpoints(folder, "peel")
    return checkpoints, [checkpoints.save(state(number), number, 0) for number in numbers]


def newest_number(checkpoints: Checkpoints) -> int:
    found = checkpoints.newest()
    assert found is not None
    assert torch.equal(found["model"]["weight"], torch.full((50,), float(found["number"])))
    return int(found["number"])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [truncate, flip_a_bit, empty, make_a_folder]


def test_the_newest_and_the_one_before_are_kept(tmp_path: Path) -> None:
    checkpoints, paths = saved(tmp_path, 1, 2, 3, 4)
    assert sorted(tmp_path.iterdir()) == sorted(paths[2:])
    assert newest_number(checkpoints) == 4


def test_later_steps_are_newer_than_earlier_ones_and_later_epochs_than_either(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "peel")
    for number, (epoch, step) in enumerate(
        [
            (0, 9),
            (0, 10),
            (1, 0),
            (2, 999),
            (10, 0),
            (10, 1000),
            (100, 0),
            (99_999, 0),
            (99_999, 9_999_999),
        ]
    ):
        checkpoints.save(state(number), epoch, step)
        assert newest_number(checkpoints) == number


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_respect_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_bytes(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


def test_without_checkpoints_there_is_no_newest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, "peel").newest() is None
    assert Checkpoints(tmp_path / "not there", "peel").newest() is None


def test_stages_do_not_load_each_others_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    other = Checkpoints(tmp_path, "backbone-2")
    other.save(state(7), 1, 0)
    (tmp_path / "peel-notes.pt").write_text("a file of the user's")
    assert Checkpoints(tmp_path, "backbone").newest() is None
    assert newest_number(other) == 7
    other.clear()
    assert newest_number(Checkpoints(tmp_path, "peel")) == 1
    Checkpoints(tmp_path, "peel").clear()
    assert [path.name for path in tmp_path.iterdir()] == ["peel-notes.pt"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_valid_checkpoint_is_loaded(
    damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, paths = saved(tmp_path, 1, 2)
    damage(paths[1])
    with caplog.at_level(logging.WARNING, "peel"):
        assert newest_number(checkpoints) == 1
    assert str(paths[1]) in caplog.text, "the corrupt file is named"
    # The next checkpoint replaces the corrupt one.
    if damage is not make_a_folder:
        checkpoints.save(state(2), 2, 0)
        assert newest_number(checkpoints) == 2


def test_checkpoints_of_another_run_are_named_not_loaded_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = (Checkpoints(tmp_path, "peel", run=run) for run in ("own", "other"))
    own.save(state(1), 1, 0)
    later = other.save(state(9), 9, 0)
    with caplog.at_level(logging.WARNING, "peel"):
        assert newest_number(own) == 1
    assert f"{later} is not used: it belongs to a run with other settings" in caplog.text
    own.save(state(2), 2, 0)
    assert newest_number(own) == 2
    assert not later.exists()


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_error_names_all_checkpoints_if_all_are_corrupt(damage: Any, tmp_path: Path) -> None:
    checkpoints, paths = saved(tmp_path, 1, 2)
    for path in paths:
        damage(path)
    with pytest.raises(
        RunError, match=r"stage peel .*peel-00002-0000000.*peel-00001-0000000.*(Restore|delete)"
    ):
        checkpoints.newest()
    assert all(path.exists() for path in paths)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "code ran")


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_code_in_a_checkpoint_is_refused_and_not_run(form: str, tmp_path: Path) -> None:
    checkpoints, paths = saved(tmp_path / "checkpoints", 1)
    buffer = io.BytesIO()
    document = {**state(2), "model": Canary(tmp_path / "canary")}
    torch.save(document, buffer) if form == "torch" else pickle.dump(document, buffer, protocol=2)
    data = buffer.getvalue()
    name = f"peel-00002-0000000-{hashlib.sha256(data).hexdigest()}.pt"
    (paths[0].parent / name).write_bytes(data)
    assert newest_number(checkpoints) == 1
    paths[0].unlink()
    with pytest.raises(RunError, match="peel-00002"):
        checkpoints.newest()
    assert not (tmp_path / "canary").exists()


def test_a_full_disk_keeps_the_checkpoints_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = saved(tmp_path, 1, 2)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        RunError,
        match=r"peel-00003.*No space left on device.*kept.*make room",
    ):
        checkpoints.save(state(3), 3, 0)
    monkeypatch.undo()
    assert newest_number(checkpoints) == 2
    assert len(list(tmp_path.iterdir())) == 2, "no incomplete file is left"


def write_and_die(folder: Path, after: bool) -> None:
    die_at_replace(1, after=after)
    Checkpoints(folder, "peel").save(state(3), 3, 0)


def write_half_and_die(folder: Path, after: bool) -> None:
    """Killed while the bytes are written."""
    import os

    os.fsync = lambda handle: die()
    Checkpoints(folder, "peel").save(state(3), 3, 0)


@pytest.mark.parametrize(
    ("target", "after", "expected"),
    [(write_and_die, False, 2), (write_and_die, True, 3), (write_half_and_die, False, 2)],
)
def test_a_kill_during_a_write_leaves_no_incomplete_checkpoint(
    target: Any, after: bool, expected: int, tmp_path: Path
) -> None:
    with RunFolder(tmp_path / "run") as run:
        run.write_json("state.json", {})
    folder = tmp_path / "run" / "checkpoints"
    checkpoints, _ = saved(folder, 1, 2)
    assert exit_code(start(target, folder, after)) == -signal.SIGKILL
    for path in folder.glob("*.pt"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem.rsplit("-", 1)[1]
    assert newest_number(checkpoints) == expected
    leftovers = [path for path in folder.iterdir() if path.suffix != ".pt"]
    assert bool(leftovers) is (not after)
    with RunFolder(tmp_path / "run"):
        assert not [path for path in folder.iterdir() if path.suffix != ".pt"], (
            "the next start deletes incomplete files"
        )
    assert newest_number(checkpoints) == expected


def overwrite_and_die(path: Path, after: bool) -> None:
    die_at_replace(1, after=after)
    write_bytes(path, b"new" * 1000)


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_during_an_overwrite_leaves_the_old_file_or_the_new_one(after: bool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_bytes(path, b"old")
    assert exit_code(start(overwrite_and_die, path, after)) == -signal.SIGKILL
    assert path.read_bytes() == (b"new" * 1000 if after else b"old")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_bytes(path, b"old")

    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refused)
    with pytest.raises(PermissionError):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]

"""Atomic writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peel.utils.files import write_bytes


def test_a_failed_write_keeps_the_old_content_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes(tmp_path / "file", b"old")

    def fail(handle: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_bytes(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_files_have_the_permissions_of_ordinary_files(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        write_bytes(tmp_path / "file", b"content")
    finally:
        os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640

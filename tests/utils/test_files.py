"""Atomic writes, and damage of JSON and TOML."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peel.errors import ConfigError, CorruptFileError
from peel.utils.files import check_target, parse_object, parse_toml, read_file, write_bytes


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


def test_a_name_with_a_nul_character_is_refused_as_others_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="its name holds a NUL character"):
        write_bytes(tmp_path / "a\0b", b"content")
    with pytest.raises(ConfigError, match=r"its name holds a NUL character\. Name another file with --to"):
        check_target(tmp_path / "a\0b", "--to")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"a":' * 5000 + "1" + "}" * 5000),
        ("a.json", '{"a":' * 50 + "1" + "}" * 50),
        ("a.toml", "a = " + "[" * 5000),
        ("a.toml", ".".join("a" * 5000) + " = 1"),
        ("a.toml", ".".join("a" * 50) + " = 1"),
    ],
)
def test_a_file_that_is_nested_too_deeply_is_corrupt(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CorruptFileError, match=f"{name} is corrupt: it is nested too deeply"):
        read_file(tmp_path / name, parse_object if name == "a.json" else parse_toml)

"""Atomic writes, reads with clear errors, and JSON."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import CorruptFileError, PeelError, RunError

T = TypeVar("T")


def write_bytes(path: Path, data: bytes) -> None:
    """Write atomically and durably: after a crash, `path` holds the old content or the new, never a part."""
    temporary = path.with_name(f".writing-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the new name to disk, if the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_file(path: Path, parse: Callable[[bytes], T], way_out: str = "Restore it from a copy.") -> T:
    """The parsed content of a file. An error names the file; for corrupt content it ends with `way_out`."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}.") from error
    except (PeelError, msgspec.MsgspecError, ValueError, KeyError) as error:
        reason = str(error).rstrip(".")
        raise CorruptFileError(f"{path} is corrupt: {reason}. {way_out}") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Every kind of damage is a ValueError."""
    try:
        value = json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value

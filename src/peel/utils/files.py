"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["is_compressed", "name_missing_space", "parse_object", "write_bytes", "write_json"]


def write_bytes(path: Path, data: bytes) -> None:
    """Write beside the target, make it durable, then put it in place in one step. What goes wrong is an OSError."""
    with name_missing_space(path, len(data)):
        _write_bytes(path, data)


def _write_bytes(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _umask() -> int:
    """What the user takes away from new files; it can only be read by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


@contextlib.contextmanager
def name_missing_space(path: Path, needed: int) -> Iterator[None]:
    """Where there is no room for a file, the error says how much is needed and how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno, f"{error.strerror} ({needed:,} bytes are needed, {free:,} are free)", str(path)
        ) from error


def is_compressed(file: IO[bytes]) -> bool:
    """Whether a zip file holds more than its own size: torch never compresses what it saves, and a small file could fill the memory."""
    size, unpacked = file.seek(0, os.SEEK_END), 0
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as stored:
            unpacked = sum(item.file_size for item in stored.infolist())
    file.seek(0)
    return unpacked > size


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def parse_object(data: bytes) -> dict[str, Any]:
    """Decoding errors are ValueErrors too, so that every kind of damage looks the same to the callers."""
    try:
        value = json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def _sync_folder(folder: Path) -> None:
    """Make the new name durable, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

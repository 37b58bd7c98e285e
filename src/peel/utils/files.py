"""Atomic writes, reads with clear errors, and JSON."""

import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

from ..errors import ConfigError, CorruptFileError, PeelError, RunError

T = TypeVar("T")

#: What names of files and folders begin with until they are complete.
WRITING = ".writing-"

#: How deep the lists and tables of a file may be nested. Deeper ones exhaust the stack of what reads them.
DEPTH = 32


def write_bytes(path: Path, data: bytes) -> None:
    """Write atomically and durably: after a crash, `path` holds the old content or the new, never a part."""
    check_name(path)
    temporary = path.with_name(f"{WRITING}{secrets.token_hex(8)}")
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


def check_name(path: Path) -> None:
    """Refuse a name that no file can have, as the system does with others: with an OSError."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "its name holds a NUL character", str(path))


def check_target(path: Path, flag: str) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    place = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if "\0" in str(path):
        reason = "its name holds a NUL character"
    elif not path.name or path.is_dir():
        reason = "it is a folder"
    elif not place.is_dir():
        reason = f"{place} is no folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        reason = f"nothing may be written to {place}"
    else:
        return
    raise ConfigError(f"cannot write {path}: {reason}. Name another file with {flag}.")


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder in `parent`, removed at the end with all that is left in it. It holds its lock, `.lock`."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    folder = Path(tempfile.mkdtemp(prefix=WRITING, dir=parent))
    lock = _lock_of(folder)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: its leftovers stay
            lock.acquire()
        yield folder
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove the temporary folders of processes that were killed, which hold no lock any more."""
    for folder in parent.glob(f"{WRITING}*"):
        if folder.is_dir() and not folder.is_symlink():
            with contextlib.suppress(Timeout, OSError), _lock_of(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", timeout=0)


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
    except RecursionError as error:
        raise CorruptFileError(f"{path} is corrupt: it is nested too deeply. {way_out}") from error
    except (PeelError, msgspec.MsgspecError, ValueError, KeyError) as error:
        reason = str(error).rstrip(".")
        raise CorruptFileError(f"{path} is corrupt: {reason}. {way_out}") from error


def parse_object(data: bytes, kind: Any = dict[str, Any]) -> dict[str, Any]:
    """A JSON object. Every kind of damage is a ValueError.

    `kind` is a `TypedDict` that the object must fit. Keys that it does not have stay in the object.
    """
    return _checked(data, json.loads, kind)


def parse_toml(data: bytes, kind: Any = dict[str, Any]) -> dict[str, Any]:
    """A TOML document, as `parse_object`."""
    return _checked(data, tomllib.loads, kind)


def _checked(data: bytes, loads: Callable[[str], Any], kind: Any) -> dict[str, Any]:
    try:
        value = loads(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    _refuse_deep(value)
    msgspec.convert(value, kind)
    return value


def _refuse_deep(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        tables = [item.values() if isinstance(item, dict) else item for item in level]
        level = [inner for table in tables for inner in table if isinstance(inner, dict | list)]
    if level:
        raise ValueError("it is nested too deeply")

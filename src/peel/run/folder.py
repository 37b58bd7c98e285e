"""The run folder. Every file is written atomically, so that a run can resume after any crash.

config.toml                          the settings as given
state.json, environment.json         what identifies the run (settings, fingerprints); versions
plan.json                            what each step decided
metrics.jsonl                        one line per epoch
checkpoints/                         the state of the running stage
stages/NAME.safetensors              the model of a finished stage
stages/NAME.record.json              how it was trained
result.json, report.html             the result
error.json                           the error that ended the last start
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from torch import nn

from ..errors import RunError
from ..surgery.serialization import save
from ..train.checkpoint import Checkpoints
from ..train.history import EpochRecord
from ..utils.files import WRITING, check_name, parse_object, read_file, remove_leftovers, write_bytes
from .result import StageRecord

T = TypeVar("T")

#: What `flock` answers on file systems without it, such as some network mounts.
NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

WAY_OUT = "Restore it from a copy, or start a new run with another --output."


class RunFolder:
    """A run folder, locked while it is open."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.run_id = ""
        self._made: list[Path] = []
        """The folders that it made to have a place, the innermost first."""
        self._lock: BaseFileLock = FileLock(self.folder / ".lock", timeout=0)

    def __enter__(self) -> RunFolder:
        places = (self.folder, *self.folder.parents)
        self._made = [place for place in places if not os.path.lexists(place)]
        try:
            check_name(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise RunError(f"{self.folder} is a file. Name another folder with --output.") from None
        except OSError as error:
            raise RunError(
                f"cannot create the folder {self.folder}: {error.strerror}. Name another with --output."
            ) from error
        try:
            self._refuse_foreign()
            self._acquire()
            self._remove_leftovers()
        except Timeout:
            raise RunError(
                f"{self.folder} is in use by another process. Wait for it to end, or name another folder "
                f"with --output. (If no process uses it, delete {self._lock.lock_file}.)"
            ) from None
        except OSError as error:
            self._lock.release()
            raise RunError(f"cannot use the folder {self.folder}: {error.strerror}.") from error
        return self

    def _refuse_foreign(self) -> None:
        """Refuse a folder of other files, and links: only what lies in the folder itself is written to."""
        names = sorted(entry.name for entry in self.folder.iterdir())
        foreign = [name for name in names if not name.startswith((".lock", WRITING))]
        if foreign and "state.json" not in names:
            raise RunError(
                f"{self.folder} holds files that are not of a run ({', '.join(foreign[:3])}). "
                f"Name another folder with --output."
            )
        for name in ("stages", "checkpoints", "metrics.jsonl"):
            if self.path(name).is_symlink():
                raise RunError(
                    f"{self.path(name)} is a link: a run writes to its own folder only. Copy what it points "
                    "to in its place, or start a new run with another --output."
                )

    def _remove_leftovers(self) -> None:
        """Remove what killed processes left half written."""
        for place in (self.folder, self.folder / "stages", self.folder / "checkpoints"):
            remove_leftovers(place)
            for leftover in place.glob(f"{WRITING}*"):
                if not leftover.is_dir():
                    leftover.unlink(missing_ok=True)

    def _acquire(self) -> None:
        """Lock the folder: with flock, or with a file that names the process where there is no flock."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # filelock says which of the two it uses
                self._lock.acquire()
        except OSError as error:
            if isinstance(error, Timeout) or error.errno not in NO_FLOCK:
                raise
            self.path(".lock").unlink(missing_ok=True)
            self._lock = SoftFileLock(self.path(".lock-process"), timeout=0)
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Unlock the folder. One that nothing was written to does not stay."""
        if not self.has("state.json"):
            self.path(".lock").unlink(missing_ok=True)
        self._lock.release()
        with contextlib.suppress(OSError):  # it is not empty
            for place in self._made:
                place.rmdir()

    # Files

    def path(self, name: str) -> Path:
        return self.folder / name

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def read(self, name: str, parse: Callable[[bytes], T]) -> T:
        return read_file(self.path(name), parse, WAY_OUT)

    def read_json(self, name: str, kind: type[T]) -> T:
        return self.read(name, lambda data: msgspec.convert(parse_object(data), kind))

    def write_bytes(self, name: str, data: bytes) -> None:
        with self._explained(name):
            self.path(name).parent.mkdir(exist_ok=True)
            write_bytes(self.path(name), data)

    def write_json(self, name: str, value: Any) -> None:
        self.write_bytes(name, (json.dumps(value, indent=1) + "\n").encode())

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {self.path(name)}: {error.strerror}. Files written before are complete; "
                "the same command resumes from them."
            ) from error

    # Stages

    def checkpoints(self, stage: str) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints", stage, run=self.run_id)

    def stage_record(self, stage: str) -> StageRecord | None:
        """The record of a stage, if it has finished."""
        name = f"stages/{stage}.record.json"
        return self.read_json(name, StageRecord) if self.has(name) else None

    def save_stage(self, stage: str, record: StageRecord, model: nn.Module) -> None:
        """Store the model, then the record: where the record exists, the stage is complete."""
        self.save_model(f"stages/{stage}", model)
        self.write_json(f"stages/{stage}.record.json", asdict(record))
        self.checkpoints(stage).clear()

    def save_model(self, name: str, model: nn.Module) -> None:
        save(model, self.path(name))

    # Metrics

    def log_epoch(self, stage: str, epoch: EpochRecord) -> None:
        path, line = self.path("metrics.jsonl"), _metrics_line(stage, epoch)
        with self._explained(path.name), path.open("a") as file:
            file.write(line)

    def restart_metrics(self, stage: str, history: Sequence[EpochRecord]) -> None:
        """Set the lines of a stage to those of its checkpoint: a killed run may have written more."""
        kept = []
        for line in self.read("metrics.jsonl", bytes).split(b"\n") if self.has("metrics.jsonl") else []:
            with contextlib.suppress(ValueError):
                if parse_object(line).get("stage", stage) != stage:
                    kept.append(line.decode() + "\n")
        text = "".join([*kept, *(_metrics_line(stage, epoch) for epoch in history)])
        self.write_bytes("metrics.jsonl", text.encode())


def _metrics_line(stage: str, epoch: EpochRecord) -> str:
    values = asdict(epoch)
    extra = values.pop("extra")
    return json.dumps({"stage": stage, **values, **extra}) + "\n"

"""The run folder: settings, plan, metrics, checkpoints, models. Whatever happens, what is in it is whole, and the same command goes on.

settings.json, environment.json      what was asked for and what it became; where it ran
plan.json                            what every step decided
metrics.jsonl                        a line per epoch, appended as it goes
checkpoints/                         the state of the stage that is running
stages/NAME.json, NAME.safetensors   the model of a finished stage, and
stages/NAME.record.json              how it was trained
result.json, report.html             the end
stopped.json                         the error that stopped the last start, where one did
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from torch import nn

from ..errors import RunError, StoreError
from ..surgery.serialization import load, save
from ..train.checkpoint import Checkpoints
from ..train.history import Epoch
from ..utils.files import name_missing_space, parse_object, write_bytes, write_json
from .resume import check_changes, what_is_fixed, with_what_is_free
from .stage_record import StageRecord, read_object, read_record

__all__ = ["RunFolder"]

log = logging.getLogger("peel")

#: What a run that was stopped before it wrote its settings may have left.
EARLY = (".lock", ".probe", "environment.json")

#: How often the name of whoever holds a folder is looked for, and the seconds before each look.
OWNER_LOOKS, OWNER_PAUSE = 10, 0.1


class RunFolder:
    """A run folder, locked for this process while it is open. `option` is what it was named with."""

    def __init__(self, folder: str | os.PathLike[str], option: str = "--output") -> None:
        self.folder, self.option = Path(folder), option
        self._lock: IO[str] | None = None
        self._run = ""

    def __enter__(self) -> RunFolder:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise RunError(
                f"the output folder {self.folder} is a file. Name another folder with {self.option}."
            ) from None
        except OSError as error:
            raise RunError(
                f"cannot make the output folder {self.folder}: {error.strerror}. Name another folder with {self.option}."
            ) from error
        self._refuse_foreign((*EARLY, "stages", "checkpoints", "metrics.jsonl"))
        self._take_lock()
        try:
            self._sweep()
            write_bytes(self.folder / ".probe", b"peel can write here\n")
            (self.folder / ".probe").unlink()
        except OSError as error:
            self.close()
            raise RunError(f"cannot write to the output folder {self.folder}: {error.strerror}.") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        """The system lets go of the lock when the process ends, however it ends."""
        path = self.folder / ".lock"
        try:
            self._lock = path.open("a+")
        except OSError as error:
            raise RunError(f"cannot write to the output folder {self.folder}: {error.strerror}.") from error
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = self._owner_of(self._lock)
            self.close()
            raise RunError(
                f"{self.folder} is in use by {owner}. Wait for it to end, or name another folder with {self.option}."
            ) from None
        with contextlib.suppress(OSError):  # on a full disk; the probe that follows says so
            os.ftruncate(self._lock.fileno(), 0)
            os.write(self._lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())

    @staticmethod
    def _owner_of(lock: IO[str]) -> str:
        """Who holds it, as it says in the file; whoever took it just now may still be about to write that."""
        for _ in range(OWNER_LOOKS):
            time.sleep(OWNER_PAUSE)
            lock.seek(0)
            if owner := lock.read().strip():
                return owner
        return "another process"

    def _refuse_foreign(self, own: Sequence[str]) -> None:
        """A folder with files of someone else's is left as it is."""
        try:
            names = sorted(entry.name for entry in self.folder.iterdir())
        except OSError as error:
            raise RunError(f"cannot read the output folder {self.folder}: {error.strerror}.") from error
        foreign = [name for name in names if name not in own and not name.startswith(".writing-")]
        if foreign and "settings.json" not in names:
            raise RunError(
                f"{self.folder} holds files that are not of a run ({', '.join(foreign[:3])}). Name another folder."
            )

    def _sweep(self) -> None:
        """Take away what a process that was killed while writing left behind."""
        for leftover in self.folder.rglob(".writing-*"):
            leftover.unlink(missing_ok=True)

    # Settings

    def open_or_resume(
        self, settings: dict[str, Any], environment: dict[str, Any], *, force: bool = False
    ) -> None:
        """Write the settings, or compare them with those that are there already.

        With `force`, a run goes on with other settings where that is possible; they take the place of the old, which stay on record.
        """
        if not (self.folder / "settings.json").exists():
            self._refuse_foreign(EARLY)
            if force:
                log.warning("%s holds no run that --force could go on with: one begins there.", self.folder)
            self._run = _hash_of(settings["resolved"])
            self.write_json("environment.json", environment)
            self.write_json("settings.json", {**settings, "run": self._run})
            return
        before = self.read_json("settings.json")
        begun = self.read_json("environment.json") if self.has("environment.json") else {}
        # What was kept before a change belongs to the run after it too.
        self._run = before.get("run") or _hash_of(before["resolved"])
        changed = check_changes(
            self.folder,
            before["resolved"],
            settings["resolved"],
            begun,
            environment,
            force=force,
            option=self.option,
        )
        after = {"forced": [], **before, **settings, "run": self._run}
        if changed:
            after["forced"] = [*after["forced"], self._change(changed)]
        else:
            after["resolved"] = with_what_is_free(before["resolved"], settings["resolved"])
        if after != {"forced": [], **before}:
            self.write_json("settings.json", after)

    def check_teacher(self, weights: str, *, force: bool = False) -> None:
        """Note the hash of the teacher's weights once it is known; from then on the teacher stays the same."""
        settings = self.read_json("settings.json")
        before = self.teacher_hash() or weights
        if before != weights and not force:
            raise RunError(
                f"{self.folder} was begun with another teacher: its weights had the hash {before}, now it is {weights}. Bring it back "
                f"to go on with the run, or name another {self.option} to start anew.\n"
                "With --force it goes on all the same, and its result says so."
            )
        if before != weights:
            log.warning(
                "%s goes on with another teacher than it was started with, and its result will say so.",
                self.folder,
            )
            changed = {"teacher_hash": (before, weights)}
            settings["forced"] = [*settings.get("forced", []), self._change(changed)]
        if settings.get("teacher_hash") != weights:
            self.write_json("settings.json", {**settings, "teacher_hash": weights})

    def teacher_hash(self) -> str | None:
        found: str | None = self.read_json("settings.json").get("teacher_hash")
        return found

    def _change(self, changed: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        """What is kept of a change that was forced."""
        return {
            "changes": {name: list(pair) for name, pair in changed.items()},
            "done": self.stages(),
            "begun": self._begun(),
        }

    def stages(self) -> list[str]:
        """Those that have finished, in the order of a run."""
        order = ("original", "backbone", "uniform", "peel")
        names = [path.name.removesuffix(".record.json") for path in self.folder.glob("stages/*.record.json")]
        return sorted(
            names,
            key=lambda name: (
                next((i for i, kind in enumerate(order) if name.startswith(kind)), len(order)),
                name,
            ),
        )

    def _begun(self) -> list[str]:
        """Stages that have a state, but have not finished."""
        names = {path.name.rsplit("-", 3)[0] for path in self.folder.glob("checkpoints/*.pt")}
        return sorted(names - {*self.stages()})

    # Files

    def write_json(self, name: str, value: Any) -> None:
        with self._written(name):
            write_json(self.folder / name, value)

    def write_text(self, name: str, text: str) -> None:
        with self._written(name):
            # A path of the user's may hold bytes that are no UTF-8.
            write_bytes(self.folder / name, text.encode(errors="backslashreplace"))

    def read_json(self, name: str) -> dict[str, Any]:
        return read_object(self.folder / name, self.option)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    # Stages

    def checkpoints(self, stage: str) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints", stage, run=self._run)

    def finished(self, stage: str) -> StageRecord | None:
        """The record of a stage, if it has finished."""
        name = f"stages/{stage}.record.json"
        return read_record(self.folder / name, self.option) if self.has(name) else None

    def finish(self, stage: str, record: StageRecord, model: nn.Module) -> None:
        """Keep the model and the record of a stage. The record comes last: where it is, the stage is whole."""
        self.save_model(f"stages/{stage}", model)
        self.write_json(f"stages/{stage}.record.json", record.described())
        self.checkpoints(stage).clear()

    def save_model(self, name: str, model: nn.Module) -> None:
        with self._written(name):
            try:
                save(model, self.folder / name)
            except StoreError as error:
                if isinstance(error.__cause__, OSError):
                    raise error.__cause__ from None
                raise

    def model_of(self, stage: str, original: nn.Module) -> nn.Module:
        return load(self.folder / "stages" / stage, model=original)

    # Metrics

    def log_epoch(self, stage: str, epoch: Epoch) -> None:
        path, line = self.folder / "metrics.jsonl", _line(stage, epoch)
        with self._written(path.name), name_missing_space(path, len(line)), path.open("a") as file:
            file.write(line)

    def restart_metrics(self, stage: str, history: Sequence[Epoch]) -> None:
        """Bring the lines of a stage to what its checkpoint knows; a killed run may have written more, less, or half a line."""
        path = self.folder / "metrics.jsonl"
        kept = []
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}.") from error
        for line in lines:
            with contextlib.suppress(ValueError):
                if parse_object(line).get("stage", stage) != stage:
                    kept.append(line.decode() + "\n")
        self.write_text("metrics.jsonl", "".join([*kept, *(_line(stage, epoch) for epoch in history)]))

    @contextlib.contextmanager
    def _written(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {self.folder / name}: {error.strerror}. What was written before is kept; "
                "the same command goes on from there."
            ) from error


def _hash_of(settings: Mapping[str, Any]) -> str:
    """What tells a run from others."""
    return hashlib.sha256(json.dumps(what_is_fixed(settings), sort_keys=True).encode()).hexdigest()


def _line(stage: str, epoch: Epoch) -> str:
    values = asdict(epoch)
    extra = values.pop("extra")
    return json.dumps({"stage": stage, **values, **extra}) + "\n"

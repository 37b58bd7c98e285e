"""Finished jobs, in memory and, if there is one, in a folder: a job whose record is there is not done again.

config.toml                          the settings as given
state.json, environment.json         what identifies the run (subject, jobs); versions
plan.json                            the plan of the method
metrics.jsonl                        one line per epoch
checkpoints/                         the state of the running stage
stages/NAME.safetensors              the network of a finished stage; its record is written last
stages/NAME.record.json              how it came about, and the key of its job
result.json, report.html             the result
error.json                           the error that ended the last start

Every file is written atomically, so that a run can resume after any crash.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors.torch
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from torch import nn

from ..cost.widths import Widths
from ..errors import CorruptFileError, RunError
from ..methods.method import Answer, Scores
from ..methods.plan import Plan
from ..surgery import attach_info, info_of, slim
from ..surgery.selection import ChannelScores
from ..surgery.serialization import load, save
from ..train.checkpoint import Checkpoints, non_persistent_buffers
from ..train.distributed import World
from ..train.history import EpochRecord
from ..utils.files import WRITING, check_name, parse_object, read_file, remove_leftovers, write_bytes
from .config import row_name
from .jobs import Job, Original, Solve, Start, Train
from .result import Record

T = TypeVar("T")

#: What `flock` answers on file systems without it, such as some network mounts.
NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

WAY_OUT = "Restore it from a copy, or start a new run with another --output."


class RunFolder:
    """A run folder, locked while it is open. Several workers share that of a comparison."""

    def __init__(self, folder: str | os.PathLike[str], *, is_shared: bool = False) -> None:
        self.folder, self.is_shared = Path(folder), is_shared
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
            if not self.is_shared:
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

    # Metrics

    def log_epoch(self, stage: str, epoch: EpochRecord) -> None:
        path, line = self._metrics(stage), _metrics_line(stage, epoch)
        with self._explained(path.name), path.open("a") as file:
            file.write(line)

    def restart_metrics(self, stage: str, history: Sequence[EpochRecord]) -> None:
        """Set the lines of a stage to those of its checkpoint: a killed run may have written more."""
        kept = []
        name = self._metrics(stage).relative_to(self.folder).as_posix()
        for line in self.read(name, bytes).split(b"\n") if self.has(name) else []:
            with contextlib.suppress(ValueError):
                if parse_object(line).get("stage", stage) != stage:
                    kept.append(line.decode() + "\n")
        text = "".join([*kept, *(_metrics_line(stage, epoch) for epoch in history)])
        self.write_bytes(name, text.encode())

    def _metrics(self, stage: str) -> Path:
        """One file for a run; one for each stage where several workers write."""
        path = self.path(f"metrics/{stage}.jsonl" if self.is_shared else "metrics.jsonl")
        path.parent.mkdir(exist_ok=True)
        return path


def _metrics_line(stage: str, epoch: EpochRecord) -> str:
    values = asdict(epoch)
    extra = values.pop("extra")
    return json.dumps({"stage": stage, **values, **extra}) + "\n"


@dataclass
class Store:
    """The finished jobs. Only the main process has the folder; the others get from it what they need."""

    model: nn.Module
    """Networks are rebuilt from it."""
    graph: Any
    world: World
    names: Callable[[Job], str]
    """Job -> the name of its files; empty for what is computed again at each start."""
    folder: RunFolder | None = None
    records: dict[str, Record] = field(default_factory=dict)
    """Key -> record, of what this process has done or read."""
    networks: dict[str, nn.Module] = field(default_factory=dict)
    answers: dict[str, tuple[Answer, Plan]] = field(default_factory=dict)

    # Records

    def record(self, job: Job) -> Record | None:
        """The record of a job, if it is done."""
        return self.find(self.names(job), job.key)

    def find(self, name: str, key: str) -> Record | None:
        if key in self.records:
            return self.records[key]
        found: Record | None = None
        path = f"stages/{name}.record.json"
        if self.folder is not None and name and self.folder.has(path):
            found = self.folder.read_json(path, Record)
            if found.key != key:
                found = None
        found = self.world.broadcast(found)
        if found is not None:
            self.records[key] = found
        return found

    def put(self, job: Job, record: Record, network: nn.Module | None = None) -> None:
        self.save(self.names(job), job.key, record, network)

    def save(self, name: str, key: str, record: Record, network: nn.Module | None = None) -> None:
        """Store the network, then the record: where the record exists, the job is done."""
        self.records[key] = record
        if network is not None:
            self.networks[key] = network
        if self.folder is None or not name:
            return
        if network is not None:
            save(network, self.folder.path(f"stages/{name}"))
        self.folder.write_json(f"stages/{name}.record.json", msgspec.to_builtins(record))
        self.clear(name, key)

    def clear(self, name: str, key: str) -> None:
        """Remove the checkpoints of a finished stage. A process may be killed between its record and this."""
        if self.folder is not None:
            self.checkpoints(name, key).clear()

    def checkpoints(self, name: str, key: str) -> Checkpoints:
        assert self.folder is not None
        return Checkpoints(self.folder.path("checkpoints"), name, run=key)

    # Networks

    def network(self, job: Job, widths: Mapping[str, int]) -> nn.Module:
        return self.load(self.names(job), job.key, widths)

    def load(self, name: str, key: str, widths: Mapping[str, int]) -> nn.Module:
        """The network of a finished job. The main process reads it and sends the weights to the others."""
        if key in self.networks:
            return self.networks[key]
        stored: Any = None
        if self.folder is not None:
            loaded = load(self.folder.path(f"stages/{name}"), self.model)
            if Widths(info_of(loaded).widths) != Widths(widths):
                file = self.folder.path(f"stages/{name}.safetensors")
                raise CorruptFileError(f"{file} has other widths than the plan. {WAY_OUT}")
            stored = loaded.state_dict(), non_persistent_buffers(loaded), info_of(loaded)
        weights, buffers, info = self.world.broadcast(stored)
        network = slim(self.model, widths, graph=self.graph).requires_grad_(True)
        network.load_state_dict(weights)
        for buffer_name, buffer in non_persistent_buffers(network).items():
            buffer.copy_(buffers[buffer_name])
        attach_info(network, info)
        self.networks[key] = network
        return network

    # Plans

    def put_answer(self, job: Solve, answer: Answer, plan: Plan, record: Record) -> None:
        self.answers[job.key] = answer, plan
        name = self.names(job)
        if self.folder is not None and name:
            if answer.scores is not None:
                self.folder.write_bytes(f"stages/{name}.scores.safetensors", _pack(answer.scores))
            if answer.network is not None:
                save(answer.network, self.folder.path(f"stages/{name}-network"))
            self.folder.write_bytes(_plan_file(name), plan.to_json())
        self.save(name, job.key, record)

    def answer(self, job: Solve) -> tuple[Answer, Plan]:
        """The answer and the plan of a finished job."""
        if job.key in self.answers:
            return self.answers[job.key]
        stored: tuple[Answer, Plan] | None = None
        if self.folder is not None:
            name, folder = self.names(job), self.folder

            def parse(data: bytes) -> Plan:
                plan = Plan.from_json(data)
                self.graph.check(plan.widths)
                return plan

            plan = folder.read(_plan_file(name), parse)
            scores_file = f"stages/{name}.scores.safetensors"
            scores = folder.read(scores_file, _unpack) if folder.has(scores_file) else None
            network = None
            if folder.has(f"stages/{name}-network.safetensors"):
                network = load(folder.path(f"stages/{name}-network"), self.model)
            stored = Answer(plan.widths, scores, network, notes=plan.notes), plan
        found = self.world.broadcast(stored)
        assert found is not None
        self.answers[job.key] = found
        return found


@dataclass(frozen=True)
class MethodFiles:
    """Where a method's own values are stored: `methods.work.Notebook`."""

    store: Store
    name: str
    key: str

    def _path(self, name: str) -> str:
        return f"stages/{self.name}.{name}.json"

    def read_value(self, name: str) -> bytes | None:
        folder = self.store.folder
        if folder is None or not folder.has(self._path(name)):
            return None
        found = folder.read(self._path(name), msgspec.json.decode)
        return msgspec.json.encode(found["value"]) if found.get("key") == self.key else None

    def write_value(self, name: str, data: bytes) -> None:
        if self.store.folder is not None:
            value = {"key": self.key, "value": msgspec.json.decode(data)}
            self.store.folder.write_json(self._path(name), value)

    def checkpoints(self, stage: str) -> Checkpoints | None:
        if self.store.folder is None:
            return None
        return self.store.checkpoints(f"{self.name}-{stage}", f"{self.key}-{stage}")


def names_of_run(plan: Solve) -> Callable[[Job], str]:
    """The files of a run: one original, one plan, and the networks by the names of their rows."""

    def name_of(job: Job) -> str:
        if isinstance(job, Original):
            return "original"
        if isinstance(job, Solve):
            return "plan" if job.key == plan.key else ""  # the uniform network beside it
        assert isinstance(job, Start | Train)
        return f"{row_of(job.solve)}-start" if isinstance(job, Start) else row_of(job.solve)

    return name_of


def row_of(solve: Solve) -> str:
    """The row of the table that a method's network has."""
    return row_name(solve.method.name)


def _plan_file(name: str) -> str:
    return "plan.json" if name == "plan" else f"stages/{name}.json"


def _pack(scores: Scores) -> bytes:
    prefix, values = ("atom", scores.by_atom) if isinstance(scores, ChannelScores) else ("tie", scores)
    return safetensors.torch.save(
        {f"{prefix}/{name}": value.detach().cpu().contiguous() for name, value in values.items()}
    )


def _unpack(data: bytes) -> Scores:
    tensors = safetensors.torch.load(data)
    values = {name.partition("/")[2]: value for name, value in tensors.items()}
    if all(name.startswith("tie/") for name in tensors):
        return values
    return ChannelScores({int(name): value for name, value in values.items()})

"""`RunRecord`: the files of a run folder, read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

from ..errors import CorruptFileError, RunError
from ..methods.plan import Plan
from ..utils.files import parse_object, parse_toml, read_file
from ..utils.text import short
from ..utils.validation import Channels, Epoch, Fraction, Seconds, Value, Whole

T = TypeVar("T")

# What the page and a resumed run read of each file. A file may hold more.


class Settings(TypedDict, total=False):
    """config.toml."""

    model: str
    data: str
    budget: str | int | float
    resource: str
    seed: Whole


class TaskNames(TypedDict, total=False):
    metric: str | None


class DataFacts(TypedDict, total=False):
    shape: list[Channels]


class Subject(TypedDict, total=False):
    task: TaskNames
    data: DataFacts


class Resolved(TypedDict, total=False):
    method: str


class State(TypedDict):
    """state.json."""

    command: NotRequired[str]
    subject: NotRequired[Subject]
    settings: NotRequired[Resolved]


class Environment(TypedDict, total=False):
    """environment.json."""

    device: str
    peel: str


class ErrorFile(TypedDict):
    """error.json."""

    error: str


class EpochLine(TypedDict):
    """A line of metrics.jsonl."""

    stage: str
    epoch: Epoch
    epochs: Epoch
    train: NotRequired[dict[str, float]]
    test: NotRequired[dict[str, float] | None]
    seconds: NotRequired[Seconds]
    images_per_second: NotRequired[Value]
    importance: NotRequired[dict[str, float | None]]


class NetworkRow(TypedDict):
    """A row of result.json."""

    name: str
    top1: Fraction | None
    macs: NotRequired[Whole]
    params: NotRequired[Whole]
    memory: NotRequired[Whole]
    seconds: NotRequired[Seconds]
    image_passes: NotRequired[Whole]
    file: NotRequired[str]
    loss: NotRequired[float | None]
    top5: NotRequired[Fraction | None]
    metric: NotRequired[float | None]
    predicted_latency: NotRequired[Seconds | None]
    latency: NotRequired[Seconds | None]
    before_training: NotRequired[dict[str, Value]]


class Ratio(TypedDict):
    """How many times as fast as the original."""

    median: Value
    low: Value
    high: Value
    verdict: str


class TimedNetwork(TypedDict):
    network: str
    backend: str
    macs: Whole | None
    speedup: Ratio | None
    efficiency: Value | None


class Conditions(TypedDict):
    batch: Whole
    threads: Whole
    cores: Whole
    precision: str
    device: str


class Bench(TypedDict, total=False):
    """What `peel bench --json` prints, or the error of a measurement."""

    error: str
    conditions: Conditions
    entries: list[TimedNetwork]
    notes: list[str]


class SearchCost(TypedDict, total=False):
    seconds: Seconds


class ResultFile(TypedDict, total=False):
    """result.json."""

    rows: list[NetworkRow]
    notes: list[str]
    bench: Bench | None
    search: SearchCost
    wall_seconds: Seconds


def parse_result(data: bytes) -> dict[str, Any]:
    """The content of result.json."""
    document = parse_object(data, ResultFile)
    bench = document.get("bench") or {}
    if (
        bench
        and "error" not in bench
        and not (bench.get("entries") and {"conditions", "notes"} <= bench.keys())
    ):
        raise ValueError("bench has neither times nor an error")
    return document


@dataclass(frozen=True)
class RunRecord:
    """What a finished, running or interrupted run has written; None or empty where a file is missing."""

    config: dict[str, Any]
    state: dict[str, Any]
    environment: dict[str, Any]
    plan: Plan | None
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None
    error: str | None = None
    """The error that ended the last start."""

    @classmethod
    def read(cls, folder: str | PathLike[str]) -> RunRecord:
        folder = Path(folder)
        state = _json(folder / "state.json", _parse_state, "peel-run", 3, 2)
        if state is None:
            raise RunError(
                f"{folder} is not a run folder: it has no state.json. Give a folder that `peel run` wrote."
            )
        error = _json(folder / "error.json", lambda data: parse_object(data, ErrorFile), "peel-error")
        return cls(
            config=_read(folder / "config.toml", lambda data: parse_toml(data, Settings)) or {},
            state=state,
            environment=_read(folder / "environment.json", lambda data: parse_object(data, Environment))
            or {},
            plan=_read(folder / "plan.json", Plan.from_json),
            metrics=_metrics(folder / "metrics.jsonl"),
            result=_json(folder / "result.json", parse_result, "peel-result"),
            error=error["error"] if error is not None else None,
        )


def _read(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """The content of a file; None where it is missing."""
    return read_file(path, parse) if path.exists() else None


def _json(
    path: Path, parse: Callable[[bytes], dict[str, Any]], form: str, version: int = 2, *older: int
) -> dict[str, Any] | None:
    """A JSON file that says its format. That of another version need not fit what `parse` expects."""
    given = _read(path, parse_object)
    if given is None:
        return None
    if given.get("format") != form or given.get("version") not in (version, *older):
        found = f"format {short(given.get('format'))}, version {short(given.get('version'))}"
        raise RunError(f"{path} has {found}; this version of peel reads {form!r}, version {version}.")
    return _read(path, parse)


def _parse_state(data: bytes) -> dict[str, Any]:
    """Version 2 had the settings and the subject in one."""
    given = parse_object(data, State)
    if "identity" in given:
        own = given.pop("identity")
        given = parse_object(json.dumps({**given, "subject": own, "settings": own}).encode(), State)
    return given


def _metrics(path: Path) -> list[dict[str, Any]]:
    """One object per line. A last line that a killed process left incomplete is ignored."""
    *lines, rest = (_read(path, bytes) or b"").split(b"\n")
    objects = []
    for number, line in enumerate([*lines, rest], 1):
        if not line.strip():
            continue
        try:
            objects.append(parse_object(line, EpochLine))
        except ValueError as error:
            if number > len(lines):
                break
            raise CorruptFileError(f"{path} is corrupt in line {number}: {error}.") from error
    return objects

"""`RunRecord`: the files of a run folder, read back."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CorruptFileError, RunError
from ..methods.plan import Plan
from ..utils.files import parse_object, read_file

T = TypeVar("T")


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
        state = _json(folder / "state.json", "peel-run")
        if state is None:
            raise RunError(
                f"{folder} is not a run folder: it has no state.json. Give a folder that `peel run` wrote."
            )
        error = _json(folder / "error.json", "peel-error")
        return cls(
            config=_read(folder / "config.toml", lambda data: tomllib.loads(data.decode())) or {},
            state=state,
            environment=_json(folder / "environment.json") or {},
            plan=_read(folder / "plan.json", Plan.from_json),
            metrics=_metrics(folder / "metrics.jsonl"),
            result=_json(folder / "result.json", "peel-result"),
            error=error["error"] if error is not None else None,
        )


def _read(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """The content of a file; None where it is missing."""
    return read_file(path, parse) if path.exists() else None


def _json(path: Path, form: str | None = None) -> dict[str, Any] | None:
    document = _read(path, parse_object)
    if document is None or form is None:
        return document
    if (document.get("format"), document.get("version")) != (form, 2):
        found = f"format {document.get('format')!r}, version {document.get('version')!r}"
        raise RunError(f"{path} has {found}; this version of peel reads {form!r}, version 2.")
    return document


def _metrics(path: Path) -> list[dict[str, Any]]:
    """One object per line. A last line that a killed process left incomplete is ignored."""
    data = _read(path, bytes) or b""
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    objects = []
    for number, line in lines:
        try:
            objects.append(parse_object(line))
        except ValueError as error:
            if number == lines[-1][0]:
                break
            raise CorruptFileError(f"{path} is corrupt in line {number}: {error}.") from error
    return objects

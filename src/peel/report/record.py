"""What a run leaves in its folder, read back as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CorruptFileError, RunError
from ..utils.files import parse_object

__all__ = ["RunRecord"]

VERSION = 1


@dataclass(frozen=True)
class RunRecord:
    """The JSON files of a run folder; what a run has not written yet is None or empty."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    plan: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None
    stopped: dict[str, Any] | None = None
    """Why the last start of the run came to no end, where an error stopped it."""

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """The record of a run that is finished, under way or was interrupted."""
        settings = _document(folder / "settings.json", "peel-run")
        if settings is None:
            raise RunError(
                f"{folder} is not the folder of a run: it has no settings.json. Give the folder that `peel run` wrote."
            )
        return cls(
            settings=settings,
            environment=_document(folder / "environment.json") or {},
            plan=_document(folder / "plan.json", "peel-plan"),
            metrics=_lines(folder / "metrics.jsonl"),
            result=_document(folder / "result.json", "peel-result"),
            stopped=_document(folder / "stopped.json", "peel-stopped"),
        )


def _document(path: Path, form: str | None = None) -> dict[str, Any] | None:
    data = _read(path)
    if data is None:
        return None
    try:
        document = parse_object(data)
    except ValueError as error:
        raise CorruptFileError(
            f"{path} is damaged: {error}. Restore the file, or run into a new folder."
        ) from error
    if form is not None and document.get("format") != form:
        raise RunError(
            f"{path} has the format {document.get('format')!r}, not {form!r}: it was not written by a run of peel."
        )
    if form is not None and document.get("version") != VERSION:
        raise RunError(
            f"{path} has format version {document.get('version')!r}; this peel reads version {VERSION}."
        )
    return document


def _lines(path: Path) -> list[dict[str, Any]]:
    """One object per line; a last line cut short by the end of the process that wrote it does not count."""
    lines = [
        (number, line)
        for number, line in enumerate((_read(path) or b"").split(b"\n"), start=1)
        if line.strip()
    ]
    objects = []
    for number, line in lines:
        try:
            objects.append(parse_object(line))
        except ValueError as error:
            if number == lines[-1][0]:
                break
            raise CorruptFileError(
                f"{path} is damaged in line {number}: {error}. Take the line out, or run into a new folder."
            ) from error
    return objects


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}.") from error

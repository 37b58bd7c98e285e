"""What the files of a run folder must hold, checked as they are read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import CorruptFileError, RunError
from ..train.history import Epoch, Metrics
from ..utils.files import parse_object

__all__ = ["StageRecord", "read_object", "read_record"]

#: The end of a file's name -> key -> of which kind.
FROZEN: dict[str, dict[str, type]] = {
    "settings.json": {"resolved": dict},
    "plan.json": {"widths": dict, "rounds": list},
    ".record.json": {"history": list, "image_passes": int},
    "result.json": {"rows": list, "notes": list},
}


@dataclass(frozen=True)
class StageRecord:
    """What is kept of a training that is done, beside its network."""

    history: list[Epoch]
    image_passes: int
    input: dict[str, Any] | None = None
    """How its images were made; None where that is not known."""
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds for epoch in self.history)

    def described(self) -> dict[str, Any]:
        """As it is written."""
        return {**asdict(self), "notes": list(self.notes)}


def read_record(path: Path, option: str = "--output") -> StageRecord:
    """The record of a stage that has finished."""
    found = read_object(path, option)
    history = [Epoch(**epoch) for epoch in found["history"]]
    return StageRecord(history, found["image_passes"], found.get("input"), tuple(found.get("notes", ())))


def read_object(path: Path, option: str = "--output") -> dict[str, Any]:
    """A file that a run wrote, with what it must hold; `option` names the folder that it is in."""
    try:
        found = parse_object(path.read_bytes())
        _check_held(found, next((held for end, held in FROZEN.items() if path.name.endswith(end)), {}))
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise CorruptFileError(
            f"{path} is damaged: {error}. Restore it from a copy, or start anew with another {option}."
        ) from error
    return found


def _check_held(found: Mapping[str, Any], held: Mapping[str, type]) -> None:
    for key, kind in held.items():
        if key not in found:
            raise ValueError(f"it has no {key!r}")
        if not isinstance(found[key], kind):
            raise ValueError(f"its {key!r} is of the kind {type(found[key]).__name__}, not {kind.__name__}")
    if "resolved" in held and not _is_forced(found.get("forced", [])):
        raise ValueError("its 'forced' is not what peel writes there")
    if held.keys() == {"rows", "notes"} and not (
        all(map(_is_row, found["rows"])) and _are_sentences(found["notes"])
    ):
        raise ValueError("its 'rows' or 'notes' are not those of a result")
    if "rounds" in held and not all(map(_is_round, found["rounds"])):
        raise ValueError("its 'rounds' are not those of a plan")
    if "history" in held and not _is_history(found["history"]):
        raise ValueError("its 'history' is not that of a training")
    if "history" in held and not isinstance(found.get("input"), dict | None):
        raise ValueError("its 'input' does not say how to feed the network")
    if "history" in held and not _are_sentences(found.get("notes", [])):
        raise ValueError("its 'notes' are no sentences")


def _is_round(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("distinct", True), bool)
        and isinstance(found.get("note", ""), str)
    )


def _is_row(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("name"), str)
        and isinstance(found.get("seconds"), int | float)
    )


def _are_sentences(notes: Any) -> bool:
    return isinstance(notes, list) and all(isinstance(note, str) for note in notes)


def _is_forced(changes: Any) -> bool:
    """Whether it is what `Workspace.settle` writes."""

    def is_change(change: Any) -> bool:
        if (
            not isinstance(change, dict)
            or not {"changes", "done", "begun"} <= change.keys()
            or not isinstance(change["changes"], dict)
        ):
            return False
        names = [change["done"], change["begun"]]
        if not all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in names):
            return False
        return all(
            isinstance(pair, list) and len(pair) == 2 and pair[0] != pair[1]
            for pair in change["changes"].values()
        )

    return isinstance(changes, list) and all(is_change(change) for change in changes)


def _is_history(epochs: list[Any]) -> bool:
    """Whether it is one of a training that is done: at its end there always is a test."""
    return bool(epochs) and all(_is_epoch(epoch) for epoch in epochs) and epochs[-1]["test"] is not None


def _is_epoch(epoch: Any) -> bool:
    if not isinstance(epoch, dict) or not _names(Epoch) - {"extra"} <= epoch.keys() <= _names(Epoch):
        return False
    test = epoch["test"]
    return (
        _are_numbers({name: epoch[name] for name in ("epoch", "of", "lr", "seconds", "images_per_second")})
        and _are_numbers(epoch["train"])
        and (test is None or (_are_numbers(test) and test.keys() == _names(Metrics)))
        and isinstance(epoch.get("extra", {}), dict)
    )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, int | float) for value in values.values())


def _names(kind: type[Epoch] | type[Metrics]) -> set[str]:
    return {field.name for field in fields(kind)}

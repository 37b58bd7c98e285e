"""The measured speed of a run's networks, as the terminal and the page write it."""

from collections.abc import Mapping
from typing import Any

from ..utils.text import format_number_of
from .charts import label

COLUMNS = ("speed-up", "over MACs")


def speed_cells(name: str, bench: Mapping[str, Any]) -> tuple[str, str]:
    """The cells of `COLUMNS` of a network; empty for the original."""
    entry = _entries(bench).get(name)
    if entry is None:
        return ("", "") if name == "original" else ("not timed", "")
    if entry["speedup"] is None:
        return "", ""
    ratio = entry["efficiency"]
    return f"{entry['speedup']['median']:.2f}", "" if ratio is None else f"{ratio:.2f}"


def speed_tile(name: str, bench: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Name, value and remark: how much faster than the original a network is."""
    entry = _entries(bench).get(name)
    if entry is None or entry["speedup"] is None:
        return None
    value, ratio = speed_cells(name, bench)
    verdict = entry["speedup"]["verdict"]
    remark = f"{ratio} of the reduction of MACs" if verdict == "faster" and ratio else verdict
    return "Speed-up, measured", value, remark


def speed_sentences(bench: Mapping[str, Any], has_latency: bool) -> list[str]:
    """Under which conditions networks were timed, which are not faster, and whether the machine was busy.

    `has_latency`: the table has columns of a latency model, which has conditions of its own.
    """
    if "error" in bench:
        return [f"The networks were not timed: {bench['error']}"]
    given, backend = bench["conditions"], bench["entries"][0]["backend"]
    conditions = (
        f"Speed-up over the original in torch {backend}, batch {given['batch']}, "
        f"{format_number_of(given['threads'], 'thread')} of {format_number_of(given['cores'], 'core')}, "
        f"{given['precision']}, {given['device']}."
    )
    conditions += " Latencies have the conditions of the latency model." if has_latency else ""
    verdicts = [
        f"{label(name)}: {entry['speedup']['verdict']} against the original ({_interval(entry)})."
        for name, entry in _entries(bench).items()
        if entry["speedup"] is not None and entry["speedup"]["verdict"] != "faster"
    ]
    return [conditions, *verdicts, *(f"Note: {note}" for note in bench["notes"])]


def _interval(entry: Mapping[str, Any]) -> str:
    return f"95 %: {entry['speedup']['low']:.2f} to {entry['speedup']['high']:.2f}"


def _entries(bench: Mapping[str, Any]) -> dict[str, Any]:
    return {entry["network"]: entry for entry in bench.get("entries", ())}

"""The end of a run on the terminal: the table, the notes, where the files are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..cost.budget import format_count
from ..errors import ConfigError
from ..run.result import Result
from ..run.resume import what_is_fixed
from .progress import clock

__all__ = ["draw_estimate", "draw_outcome", "read_groups", "run_folder"]

_TITLES = {"original": "original", "uniform": "uniform, same budget", "peel": "PEEL"}


def run_folder(model: str, data: str, arguments: Mapping[str, Any]) -> Path:
    """A folder named after the settings: the same command finds it again, also with what may change between starts; another does not."""
    name = re.sub(
        r"[^A-Za-z0-9_.-]+",
        "-",
        f"{Path(model).name}-{Path(data).name}-{arguments['budget']}-seed{arguments['seed']}",
    ).strip("-")
    told_apart_by = [model, data, what_is_fixed(arguments)]
    digest = hashlib.sha256(json.dumps(told_apart_by, sort_keys=True, default=str).encode()).hexdigest()
    return Path("runs") / f"{name}-{digest[:6]}"


def read_groups(path: Path) -> dict[str, Iterable[str]]:
    try:
        groups = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the groups in {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(groups, dict) or not all(isinstance(ties, list) for ties in groups.values()):
        raise ConfigError(f"{path} must be an object: group name -> list of tie names.")
    return groups


def draw_outcome(result: Result, console: Console, *, with_notes: bool = False) -> None:
    for note in result.notes if with_notes else ():
        console.print(f"note: {note}", markup=False)
    if result.rows:
        table = Table(title=None, box=None, padding=(0, 2, 0, 0))
        for name, side in (
            ("", "left"),
            ("top-1", "right"),
            ("top-5", "right"),
            ("MACs", "right"),
            ("params", "right"),
            ("time", "right"),
        ):
            table.add_column(name, justify=side)  # type: ignore[arg-type]
        full = result.rows[0]
        for row in result.rows:
            part = (
                f" ({row['macs'] / full['macs']:.0%})"
                if row is not full and full["name"] == "original"
                else ""
            )
            table.add_row(
                _TITLES[row["name"]],
                f"{row['top1']:.2%}",
                f"{row['top5']:.2%}",
                format_count(row["macs"]) + part,
                format_count(row["params"]),
                clock(row["seconds"]),
            )
        console.print(table)
    if result.folder is not None:
        files = [
            name
            for name in ("report.html", "slim.json", "plan.json", "metrics.jsonl", "result.json")
            if (result.folder / name).exists()
        ]
        console.print(f"\nfiles in {result.folder}: {', '.join(files)}", markup=False)
        if (result.folder / "slim.json").exists():
            is_own = "class" in json.loads((result.folder / "slim.json").read_text())["model"]
            console.print(
                f'the slim network: peel.load("{result.folder / "slim"}"{", model=..." if is_own else ""})',
                markup=False,
            )


def draw_estimate(result: Result, console: Console) -> None:
    assert result.plan is not None
    assert result.estimate is not None
    plan = result.plan
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tie", "original", "backbone", "uniform", "neutral plan"):
        table.add_column(name, justify="left" if name == "tie" else "right")
    backbone = plan.get("backbone", {}).get("widths", {})
    for tie, width in plan["original"]["widths"].items():
        table.add_row(
            escape(tie),
            str(width),
            str(backbone.get(tie, "")),
            str(plan["uniform"]["widths"][tie]),
            str(plan["widths"][tie]),
        )
    for cost in ("macs", "params"):
        values = (plan["original"], plan.get("backbone", {}), plan["uniform"], plan)
        table.add_row(cost, *(format_count(value[cost]) if cost in value else "" for value in values))
    console.print(table)
    console.print(f"\nbudget: {format_count(plan['budget'])} {plan['resource']} ({plan['budget']:,})")
    for name, seconds in result.estimate.items():
        console.print(f"about {clock(seconds)} for {name}")
    console.print(f"about {clock(sum(result.estimate.values()))} in all; nothing was trained")

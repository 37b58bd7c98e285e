"""The end of a run on the terminal: the table, the notes, the files."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from ..cost.budget import format_bytes, format_count, format_exact, format_latency
from ..report.speed import COLUMNS, speed_cells, speed_sentences
from ..run.result import Result, Row
from ..utils.text import format_duration
from .terminal import make_table

_TITLES = {"uniform": "uniform, same budget", "peel": "PEEL"}
_FILES = ("report.html", "slim.json", "plan.json", "metrics.jsonl", "result.json")


def draw_result(result: Result, console: Console, *, with_notes: bool = False) -> None:
    for note in result.notes if with_notes else ():
        console.print(f"note: {note}", markup=False)
    if result.rows:
        full = result.rows[0]
        top5 = ["top-5"] if full.top5 is not None else []
        steps = list(result.rows[-1].before_training)
        latency = _latency_columns(result.rows)
        bench = result.bench or {}
        costs = ("MACs", "params", "memory, 1 image", *latency, *(COLUMNS if bench else ()))
        table = make_table("", *steps, "top-1", *top5, *costs, "time")
        for row in result.rows:
            is_compared = row is not full and full.name == "original"
            table.add_row(
                _TITLES.get(row.name, row.name),
                *(
                    f"{row.before_training[step]:.2%}" if step in row.before_training else ""
                    for step in steps
                ),
                f"{row.top1:.2%}",
                *(f"{row.top5:.2%}" for _ in top5),
                format_count(row.macs) + (f" ({row.macs / full.macs:.0%})" if is_compared else ""),
                format_count(row.params),
                format_bytes(row.memory),
                *(_latency(getattr(row, field)) for field in latency.values()),
                *(speed_cells(row.name, bench) if bench else ()),
                format_duration(row.seconds),
            )
        console.print(table)
        for sentence in speed_sentences(bench, bool(latency)) if bench else ():
            console.print(sentence, markup=False)
    folder = result.folder
    if folder is None:
        return
    files = [name for name in _FILES if (folder / name).exists()]
    console.print(f"\nfiles in {folder}: {', '.join(files)}", markup=False)
    if "slim.json" in files:
        is_own = "class" in json.loads((folder / "slim.json").read_text())["model"]
        load = f'peel.load("{folder / "slim"}"{", model=..." if is_own else ""})'
        console.print(f"the slim network: {load}", markup=False)


def _latency_columns(rows: Sequence[Row]) -> dict[str, str]:
    """Title -> field of a row, for what is known of the latency."""
    columns = {"latency, predicted": "predicted_latency", "measured": "latency"}
    known = columns.items()
    return {title: name for title, name in known if any(getattr(row, name) is not None for row in rows)}


def _latency(nanoseconds: float | None) -> str:
    return "" if nanoseconds is None else format_latency(nanoseconds)


def draw_estimate(result: Result, console: Console) -> None:
    plan, estimate = result.plan, result.estimate
    assert plan is not None
    assert estimate is not None
    networks = plan.networks
    table = make_table("tie", *("equal shares" if name == "peel" else name for name in networks))
    for tie in plan.original.widths:
        table.add_row(escape(tie), *(str(network.widths[tie]) for network in networks.values()))
    table.add_row("macs", *(format_count(network.macs) for network in networks.values()))
    table.add_row("params", *(format_count(network.params) for network in networks.values()))
    table.add_row("memory, 1 image", *(format_bytes(network.memory) for network in networks.values()))
    if plan.original.latency is not None:
        table.add_row("latency", *(_latency(network.latency) for network in networks.values()))
    console.print(table)
    console.print(f"\nbudget: {format_exact(plan.budget, plan.resource)}")
    for name, amount in plan.limits.items():
        console.print(f"limit: {format_exact(amount, name)}")
    for name, seconds in estimate.items():
        console.print(f"about {format_duration(seconds)} for {name}")
    console.print(f"about {format_duration(sum(estimate.values()))} in all; nothing was trained")

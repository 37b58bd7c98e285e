"""The end of a run on the terminal: the table, the notes, the files."""

import json

from rich.console import Console
from rich.markup import escape

from ..cost.budget import format_bytes, format_cost, format_count
from ..run.result import Result
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
        table = make_table("", *steps, "top-1", *top5, "MACs", "params", "memory, 1 image", "time")
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
                format_duration(row.seconds),
            )
        console.print(table)
    folder = result.folder
    if folder is None:
        return
    files = [name for name in _FILES if (folder / name).exists()]
    console.print(f"\nfiles in {folder}: {', '.join(files)}", markup=False)
    if "slim.json" in files:
        is_own = "class" in json.loads((folder / "slim.json").read_text())["model"]
        load = f'peel.load("{folder / "slim"}"{", model=..." if is_own else ""})'
        console.print(f"the slim network: {load}", markup=False)


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
    console.print(table)
    console.print(f"\nbudget: {format_cost(plan.budget, plan.resource)} ({plan.budget:,})")
    for name, seconds in estimate.items():
        console.print(f"about {format_duration(seconds)} for {name}")
    console.print(f"about {format_duration(sum(estimate.values()))} in all; nothing was trained")

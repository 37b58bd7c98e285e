"""The end of a run on the terminal: the table, the notes, the files."""

import json

from rich.console import Console
from rich.markup import escape

from ..cost.budget import format_bytes, format_count, format_exact, format_latency
from ..report.summary import draw_rows
from ..run.result import Result
from ..utils.tables import make_table
from ..utils.text import format_duration

_FILES = ("report.html", "slim.json", "plan.json", "metrics.jsonl", "result.json")


def draw_result(result: Result, console: Console, *, with_notes: bool = False) -> None:
    for note in result.notes if with_notes else ():
        console.print(f"note: {note}", markup=False)
    if result.rows:
        draw_rows([vars(row) for row in result.rows], result.bench or {}, console)
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
    latencies = [network.latency for network in networks.values() if network.latency is not None]
    if latencies:
        table.add_row("latency", *map(format_latency, latencies))
    console.print(table)
    console.print(f"\nbudget: {format_exact(plan.budget, plan.resource)}")
    for name, amount in plan.limits.items():
        console.print(f"limit: {format_exact(amount, name)}")
    for name, seconds in estimate.items():
        console.print(f"about {format_duration(seconds)} for {name}")
    console.print(f"about {format_duration(sum(estimate.values()))} in all; nothing was trained")

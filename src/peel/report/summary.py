"""The result of a run as a table for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..cost.budget import format_bytes, format_count, format_exact, format_latency
from ..methods.plan import Plan
from ..utils.tables import draw_what_fits, fits, make_table, table_of
from ..utils.text import format_duration
from .charts import label
from .speed import COLUMNS, speed_cells, speed_sentences

if TYPE_CHECKING:
    from rich.console import Console

Rows = Sequence[Mapping[str, Any]]

#: Title -> field of a row, for what is known of the latency.
LATENCIES = {"latency, predicted": "predicted_latency", "measured": "latency"}

#: Left out in this order where a console is too narrow. The files of the run have them.
LEFT_OUT = ("top-5", "memory, 1 image", "time", "over MACs", "params", "cut", "recalibrated")


def draw_rows(rows: Rows, bench: Mapping[str, Any], console: Console, search_seconds: float = 0.0) -> None:
    """The networks of a run: one table, or where the console is too narrow, accuracy and cost apart."""
    names = ["uniform, same budget" if row["name"] == "uniform" else label(row["name"]) for row in rows]
    accuracy, cost = _accuracy(rows), _cost(rows, bench)
    left_out: list[str] = []
    if fits(table := table_of({"": names, **accuracy, **cost}), console):
        console.print(table)
    else:
        left_out += draw_what_fits({"": names, **accuracy}, LEFT_OUT, console)
        console.print()
        left_out += draw_what_fits({"": names, **cost}, LEFT_OUT, console)
    if left_out:
        console.print(f"left out, too narrow: {'; '.join(left_out)}", markup=False)
    has_latency = any(title in cost for title in LATENCIES)
    for sentence in speed_sentences(bench, has_latency) if bench else ():
        console.print(sentence, markup=False)
    if search_seconds:
        console.print(search_sentence(search_seconds), markup=False)


def search_sentence(seconds: float) -> str:
    return f"Finding the plan took {format_duration(seconds)}."


def _accuracy(rows: Rows) -> dict[str, list[str]]:
    """Title -> cells: the accuracies, or the metric of the user's own."""
    steps = list(rows[-1]["before_training"])
    score: Callable[[float], str] = "{:.2%}".format
    columns = {"top-1": "top1", "top-5": "top5"}
    if any(row["metric"] is not None for row in rows):
        score, columns = "{:.4g}".format, {"metric": "metric"}
    if all(row["top1"] is None and row["metric"] is None for row in rows):
        score, columns = "{:.4g}".format, {"loss": "loss"}
    cells = {step: [_cell(row["before_training"].get(step), score) for row in rows] for step in steps}
    return cells | _known(rows, columns, score)


def _cost(rows: Rows, bench: Mapping[str, Any]) -> dict[str, list[str]]:
    """Title -> cells: what the networks cost, and how fast they are."""
    full = rows[0]

    def macs(row: Mapping[str, Any]) -> str:
        is_compared = row is not full and full["name"] == "original"
        share = f" ({row['macs'] / full['macs']:.0%})" if is_compared else ""
        return format_count(row["macs"]) + share

    cells = {
        "MACs": [macs(row) for row in rows],
        "params": [format_count(row["params"]) for row in rows],
        "memory, 1 image": [format_bytes(row["memory"]) for row in rows],
        **_known(rows, LATENCIES, format_latency),
    }
    speeds = zip(*(speed_cells(row["name"], bench) for row in rows), strict=True) if bench else ()
    cells |= {title: list(column) for title, column in zip(COLUMNS, speeds, strict=False)}
    return cells | {"time": [format_duration(row["seconds"]) for row in rows]}


def _known(rows: Rows, fields: Mapping[str, str], show: Callable[[float], str]) -> dict[str, list[str]]:
    """The columns that have a value in some row."""
    known = {title: key for title, key in fields.items() if any(row[key] is not None for row in rows)}
    return {title: [_cell(row[key], show) for row in rows] for title, key in known.items()}


def _cell(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def draw_estimate(
    plan: Plan, estimate: Mapping[str, float], console: Console, notes: Sequence[str] = ()
) -> None:
    """The plan of a dry run, the seconds of its stages, and notes."""
    from rich.markup import escape

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
    for note in notes:
        console.print(f"note: {note}", markup=False)

"""The times of networks as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cost.budget import format_count
from ..utils.tables import make_table
from ..utils.text import format_number_of

if TYPE_CHECKING:
    from rich.console import Console

    from .bench import Benchmark, Entry


def draw_bench(result: Benchmark, console: Console) -> None:
    given = result.conditions
    runtime = f"ONNX Runtime {given['onnxruntime']}" if given["onnxruntime"] else "no ONNX Runtime"
    console.print(
        f"{given['device']}, {format_number_of(given['threads'], 'thread')} of "
        f"{format_number_of(given['cores'], 'core')}, batch {given['batch']}, "
        f"{given['precision']}, torch {given['torch']}, {runtime}",
        markup=False,
    )
    table = make_table(
        "network",
        "backend",
        "ms per batch",
        "p10 to p90",
        "samples/s",
        "MACs",
        "speed-up",
        "95 %",
        "over MACs",
    )
    for entry in result.entries:
        table.add_row(*_cells(entry))
    console.print(table)
    for entry in result.entries:
        if entry.speedup is not None and entry.speedup.verdict != "faster":
            text = f"{entry.network} in {entry.backend}: {entry.speedup.verdict} against {entry.baseline}"
            console.print(text, markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def _cells(entry: Entry) -> list[str]:
    from rich.markup import escape

    time, speedup = entry.seconds, entry.speedup
    cells = [
        escape(entry.network),
        entry.backend,
        f"{time.median * 1e3:.3g}",
        f"{time.p10 * 1e3:.3g} to {time.p90 * 1e3:.3g}",
        f"{entry.throughput:,.0f}",
        "-" if entry.macs is None else format_count(entry.macs),
    ]
    if speedup is None:
        return [*cells, "-", "-", "-"]
    ratio = "-" if entry.efficiency is None else f"{entry.efficiency:.2f}"
    return [*cells, f"{speedup.median:.2f}", f"{speedup.low:.2f} to {speedup.high:.2f}", ratio]

"""The times of networks as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cost.budget import format_count
from ..utils.tables import draw_what_fits
from ..utils.text import format_number_of

if TYPE_CHECKING:
    from rich.console import Console

    from .bench import Benchmark, Entry


TITLES = (
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

#: Left out in this order where a console is too narrow.
LEFT_OUT = ("samples/s", "MACs", "over MACs", "p10 to p90")


def draw_bench(result: Benchmark, console: Console) -> None:
    given = result.conditions
    runtime = f"ONNX Runtime {given['onnxruntime']}" if given["onnxruntime"] else "no ONNX Runtime"
    console.print(
        f"{given['device']}, {format_number_of(given['threads'], 'thread')} of "
        f"{format_number_of(given['cores'], 'core')}, batch {given['batch']}, "
        f"{given['precision']}, torch {given['torch']}, {runtime}",
        markup=False,
    )
    rows = map(_cells, result.entries)
    columns = dict(zip(TITLES, zip(*rows, strict=True), strict=True))
    left_out = draw_what_fits(columns, LEFT_OUT, console)
    if left_out:
        console.print(f"left out, too narrow: {'; '.join(left_out)}", markup=False)
    for entry in result.entries:
        if entry.speedup is not None and entry.speedup.verdict != "faster":
            text = f"{entry.network} in {entry.backend}: {entry.speedup.verdict} against {entry.baseline}"
            console.print(text, markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def _cells(entry: Entry) -> list[str]:
    time, speedup = entry.seconds, entry.speedup
    cells = [
        entry.network,
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

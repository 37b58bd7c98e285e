"""`peel bench`: latency and throughput of networks, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..cost.budget import format_count
from ..utils.tables import make_table
from .terminal import make_console, print_json, show_status

if TYPE_CHECKING:
    from rich.console import Console

    from ..deploy.bench import Benchmark, Entry


def bench(
    *networks: str,
    batch: int = 1,
    threads: int | None = None,
    device: str = "cpu",
    backend: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = (),
    seconds: float = 5.0,
    model: str | None = None,
    json: bool = False,
) -> int:
    """Latency and throughput of networks, interleaved in one process.

    Parameters
    ----------
    networks
        Run folders and saved models (slim.json), each with its original; files .onnx; names of models.
    batch
        Samples per batch.
    threads
        CPU threads. Default: one per core.
    device
        cpu, cuda, cuda:1, ...
    backend
        eager, compile, onnxruntime. Default: all that are installed and fit.
    seconds
        About this long for each network in each backend.
    model
        What builds the original of your own saved model: path/to/file.py:callable.
    json
        Print JSON instead of a table.
    """
    from ..deploy.bench import bench as run_bench
    from ..errors import PeelError

    if not networks:
        raise PeelError("name a run folder, a saved model, a file .onnx or a model: peel bench RUN.")
    console, notes = make_console(), make_console(stderr=True)
    with show_status(notes, "loading") as status:
        result = run_bench(
            networks,
            batch=batch,
            threads=threads,
            device=device,
            backends=backend or None,
            seconds=seconds,
            model=model,
            progress=status.update,
        )
    if json:
        print_json(result.to_dict())
    else:
        draw(result, console)
    return 0


def draw(result: Benchmark, console: Console) -> None:
    given = result.conditions
    runtime = f"ONNX Runtime {given['onnxruntime']}" if given["onnxruntime"] else "no ONNX Runtime"
    console.print(
        f"{given['device']}, {given['threads']} threads of {given['cores']} cores, batch {given['batch']}, "
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


def _cells(entry: Entry) -> list[Any]:
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

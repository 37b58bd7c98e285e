"""`peel compare`: methods side by side."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from ..errors import ConfigError, PeelError
from ..methods.method import Uniform
from ..run.compare import Comparison, tables_of
from ..run.config import Config, make_config
from ..run.loading import load_all
from ..run.store import RunFolder
from ..train.signals import handle_signals
from ..train.task import Task
from ..utils.process_state import preserve_process_state
from ..utils.tables import table_of
from ..utils.terminal import make_console, print_json, print_notes
from .launch import command_line
from .method_flags import given_settings

#: Says to a process that it is a worker, and which one.
WORKER = "PEEL_WORKER"

#: A worker that a signal has ended is replaced so often.
REPLACEMENTS = 3

#: Seconds between two looks at the folder.
LOOK = 1.0

Words = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]


def compare(
    model: str | None = None,
    /,
    *,
    methods: Words = ("sensitivity", "peel"),
    budgets: Words = ("50%",),
    seeds: str = "3",
    jobs: int = 1,
    output: Path = Path("runs/compare"),
    settings: Annotated[Config | None, Parameter(name="*")] = None,
    config: Path | None = None,
    json: bool = False,
) -> int:
    """Methods side by side, each at the same budgets, with the same data, recipe, original and seeds.

    Parameters
    ----------
    model
        Name or reference of the model. Default: cifar_resnet20.
    methods
        The methods. Uniform widths stand beside them in any case.
    budgets
        What the slim networks may cost.
    seeds
        How many, from 0; or which, separated by commas.
    jobs
        Workers on this machine. Each is a process with one thread, unless --threads says otherwise.
    output
        The folder. The same command resumes; more methods, budgets and seeds are added to it.
    config
        A TOML file with settings.
    json
        Print the rows as JSON.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs is at least 1, not {jobs}.")
    chosen = _config(vars(settings or Config()) | ({} if model is None else {"model": model}))
    tables = tables_of(methods, given_settings())
    is_worker = WORKER in os.environ
    with handle_signals(), preserve_process_state(), RunFolder(output, is_shared=True) as folder:
        comparison = _load(folder, chosen, tables, budgets, _seeds(seeds))
        if is_worker:
            comparison.work()
            return 0
        comparison.check()
        comparison.open(command_line())
        console = make_console(stderr=True)
        try:
            if jobs == 1:
                comparison.work(lambda text: console.print(text, markup=False))
            else:
                _start_workers(jobs, comparison, console)
        finally:
            comparison.write()
        rows = comparison.rows()
    if json:
        print_json({"rows": rows, "folder": str(output)})
    else:
        _draw(rows, make_console(), output)
    return 0 if all(row["status"] == "done" for row in rows) else 1


def _config(given: Mapping[str, Any]) -> Config:
    """The settings of all cells, without the flags that say for one run what the grid says for all."""
    for name, instead in (
        ("budget", "--budgets"),
        ("method", "--methods"),
        ("seed", "--seeds"),
        ("stages", "no stages"),
        ("plan", "no plan"),
    ):
        if given[name] != getattr(Config(), name):
            raise ConfigError(f"--{name} is a flag of peel run; a comparison takes {instead}.")
    return make_config({**given, "method": "uniform", "threads": given.get("threads") or 1})


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--seeds is a number, or numbers separated by commas, not {text!r}.") from None
    if not numbers or min(numbers) < 0 or (numbers == [0] and "," not in text):
        raise ConfigError(f"--seeds {text}: give how many seeds, at least 1, or which, such as 0,3,7.")
    return numbers if "," in text else list(range(numbers[0]))


def _load(
    folder: RunFolder,
    config: Config,
    tables: dict[str, dict[str, Any]],
    budgets: Sequence[str],
    seeds: Sequence[int],
) -> Comparison:
    assert config.data is not None
    loaded = load_all(
        config.model,
        config.data,
        config.weights,
        config,
        method=Uniform(),
        task=Task(),
        graph=None,
        callbacks=(),
        is_compared=True,
    )
    return Comparison(loaded, folder, config, tables, budgets, seeds)


def _start_workers(count: int, comparison: Comparison, console: Console) -> None:
    """The same command in several processes. One that a signal has ended is replaced."""
    logs = comparison.folder.path("workers")
    logs.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:

        def start(number: int) -> subprocess.Popen[bytes]:
            file = stack.enter_context((logs / f"{number}.log").open("ab"))
            variables = {**os.environ, WORKER: str(number), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "peel", *sys.argv[1:]]
            process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
            stack.callback(process.terminate)
            return process

        workers = {number: start(number) for number in range(count)}
        replaced, shown = 0, (-1, -1, -1)
        while workers:
            time.sleep(LOOK)
            if comparison.done != shown:
                shown = comparison.done
                console.print(f"{shown[0]} of {shown[2]} jobs done, {shown[1]} failed", markup=False)
            for number, process in list(workers.items()):
                code = process.poll()
                if code is None:
                    continue
                del workers[number]
                if code < 0 and replaced < REPLACEMENTS:
                    replaced += 1
                    console.print(f"worker {number} was ended by signal {-code}; it is replaced")
                    workers[number] = start(number)
                elif code:
                    end = (logs / f"{number}.log").read_text(errors="replace").strip().splitlines()[-1:]
                    raise PeelError(f"worker {number} failed: {' '.join(end)} ({logs / f'{number}.log'})")


def _draw(rows: Sequence[dict[str, Any]], console: Console, folder: Path) -> None:
    """Means over the seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["budget"], row["method"]), []).append(row)
    cells, notes = [], []
    for (budget, method), members in groups.items():
        done = [row for row in members if row["status"] == "done"]
        name = "metric" if any("metric" in row for row in done) else "top1"
        scores = [row[name] for row in done if row.get(name) is not None]
        mean = "" if not scores else f"{100 * statistics.fmean(scores):.2f}" if name == "top1" else ""
        spread = f"{100 * statistics.stdev(scores):.2f}" if len(scores) > 1 and name == "top1" else ""
        if scores and name == "metric":
            mean = f"{statistics.fmean(scores):.4g}"
        if failed := [row["error"] for row in members if row["status"] == "failed"]:
            notes.append(f"{method} at {budget}: {len(failed)} failed: {failed[0]}")
        cells.append([budget, method, f"{len(done)} of {len(members)}", mean, spread])
    titles = ("budget", "method", "seeds", "top-1 (%)", "std")
    columns = {title: [row[place] for row in cells] for place, title in enumerate(titles)}
    console.print(table_of(columns))
    print_notes(notes, console)
    console.print(f"\neach cell: {folder / 'compare.csv'}", markup=False)

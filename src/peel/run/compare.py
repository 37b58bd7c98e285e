"""Methods side by side: arms x budgets x seeds, as jobs in one folder, done by one worker or several.

A worker is a process that does what is missing in the folder. It takes the first job that nobody holds and
whose needs are done. A lock of the operating system says who holds a job: it ends with the process.
"""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..cost.constraint import Constraint
from ..errors import ConfigError, PeelError, RunError
from ..methods.check import checked
from ..methods.method import Method, Uniform
from ..methods.registry import find_method, prefix_of, spec_of
from ..methods.rehearsal import rehearse
from .config import Config
from .jobs import Arm, Cell, Job, Limits, Original, Solve, Start, Train, cells_of
from .loaded import Loaded, setup_of
from .original import find_original, given_hash
from .store import RunFolder, Store, row_of
from .subject import State, check_state, environment_of, write_state
from .worker import work

#: Seconds between two looks for a job, while others hold all that can be done.
WAIT = 0.5

COLUMNS = (
    "method",
    "budget",
    "seed",
    "status",
    "top1",
    "metric",
    "loss",
    "repaired_top1",
    "kept_top1",
    "original_top1",
    "macs",
    "params",
    "memory_bytes",
    "training_seconds",
    "method_seconds",
    "key",
    "error",
)


@dataclass
class Comparison:
    """The cells of a comparison, and the jobs that they need."""

    loaded: Loaded
    folder: RunFolder
    config: Config
    methods: Mapping[str, Mapping[str, Any]]
    """Row -> the settings of its method; `method` names it, where the row has a name of its own."""
    budgets: Sequence[str]
    seeds: Sequence[int]
    labels: dict[str, str] = field(default_factory=dict)
    """Key of a `Solve` job -> row."""

    def __post_init__(self) -> None:
        if not (self.methods and self.budgets and self.seeds):
            raise ConfigError("a comparison needs at least one method, one budget and one seed.")
        loaded = self.loaded
        loaded.given = None if loaded.new_classifier else find_original(loaded.weights, loaded)

    @cached_property
    def arms(self) -> dict[str, tuple[Arm, Method]]:
        """The uniform network comes first: it stands beside everything."""
        found: dict[str, tuple[Arm, Method]] = {}
        for label, table in {"uniform": {}, **self.methods}.items():
            reference = str(table.get("method", label))
            settings = {name: value for name, value in table.items() if name != "method"}
            method = Uniform() if label == "uniform" else find_method(reference, settings)
            spec, needs = spec_of(method, reference), method.needs
            found[label] = Arm(label, spec, needs.original, bool(needs.training)), method
        return found

    @cached_property
    def limits(self) -> dict[str, Limits]:
        """Budget as given -> what it allows."""
        config = self.loaded.config
        return {
            budget: Limits.of(
                Constraint.of(
                    self.loaded.graph,
                    budget,
                    resource=config.resource,
                    divisor=config.divisor,
                    freeze=config.freeze or (),
                    grow=config.grow,
                )
            )
            for budget in self.budgets
        }

    @cached_property
    def cells(self) -> list[tuple[str, Cell]]:
        """(budget, jobs) for each cell."""
        given = self.loaded.given
        setup = setup_of(self.loaded, given_hash(given))
        arms = [arm for arm, _ in self.arms.values()]
        found = [
            (budget, cell)
            for seed in self.seeds
            for budget, limits in self.limits.items()
            for cell in cells_of(arms, [limits], [seed], setup)
        ]
        self.labels |= {cell.solve.key: cell.arm.label for _, cell in found}
        return found

    @cached_property
    def jobs(self) -> list[Job]:
        """Each job once, after those that it needs. The jobs of one original follow one another."""
        jobs: dict[str, Job] = {}

        def add(job: Job) -> None:
            for needed in job.needs:
                add(needed)
            jobs.setdefault(job.key, job)

        for _, cell in self.cells:
            add(cell.train)
        order = {Original: 0, Solve: 1, Start: 2, Train: 3}
        return sorted(jobs.values(), key=lambda job: (_seed_of(job), order[type(job)]))

    @cached_property
    def solvers(self) -> dict[str, Method]:
        return {cell.solve.key: self.arms[cell.arm.label][1] for _, cell in self.cells}

    @cached_property
    def store(self) -> Store:
        def name_of(job: Job) -> str:
            if isinstance(job, Original):
                return f"original-{job.key[:8]}"
            row = row_of(job if isinstance(job, Solve) else job.solve)  # type: ignore[attr-defined]
            kind = {Solve: "-plan", Start: "-start", Train: ""}[type(job)]
            return f"{row}{kind}-{job.key[:8]}"

        return Store(self.loaded.model, self.loaded.graph, self.loaded.world, name_of, folder=self.folder)

    # Before the first job

    def check(self) -> None:
        """Methods find their errors now, with each budget."""
        for job in self.jobs:
            if isinstance(job, Solve) and job.seed == self.seeds[0] and self.store.record(job) is None:
                problem, method = self.loaded.problem(job), self.solvers[job.key]
                answer, _ = rehearse(method, problem, self.loaded.engine, self.labels[job.key])
                checked(answer, problem, method, self.labels[job.key])

    def open(self, command: str) -> None:
        """Compare the folder with an earlier start, and write what the comparison is."""
        loaded, environment = self.loaded, environment_of(self.loaded.engine)
        subject = {**loaded.subject, "folder": "of a comparison"}
        state = State(command, subject, {"methods": ", ".join(self.arms)}, {}, {})
        check_state(self.folder, state, environment)
        write_state(self.folder, state, environment, self.config)
        for path in self.folder.path("stages").glob("*.error.json"):
            path.unlink()  # failed jobs are tried again

    # Work

    def error_of(self, job: Job) -> str:
        """Why a job, or one that it needs, has failed; empty where none has."""
        path = f"stages/{self.store.names(job)}.error.json"
        if self.folder.has(path):
            return str(self.folder.read_json(path, dict[str, Any]).get("error", ""))
        return next(filter(None, map(self.error_of, job.needs)), "")

    def is_done(self, job: Job) -> bool:
        return self.store.record(job) is not None

    def work(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """Do what nobody else does, until nothing is left. A job that fails does not stop the others."""
        shown = -1
        while True:
            finished, failed, count = self.done
            if finished + failed != shown:
                shown = finished + failed
                tell(f"{finished} of {count} jobs done, {failed} failed")
            left = [job for job in self.jobs if not self.is_done(job) and not self.error_of(job)]
            if not left:
                return
            ready = [job for job in left if all(map(self.is_done, job.needs))]
            if not any(self._do(job) for job in ready):
                time.sleep(WAIT)

    def _do(self, job: Job) -> bool:
        """Do a job that nobody holds. False where somebody does."""
        with self._claim(job) as is_mine:
            if not is_mine or self.is_done(job):
                return is_mine and self.is_done(job)
            try:
                trainings = [one for one in self.jobs if isinstance(one, Train)]
                work([job], self.loaded, self.store, self.solvers, trainings)
            except (Exception, SystemExit) as error:
                if isinstance(error, RunError):  # the folder cannot be written
                    raise
                message = str(error) if isinstance(error, PeelError) else f"{type(error).__name__}: {error}"
                self.folder.write_json(f"stages/{self.store.names(job)}.error.json", {"error": message})
            finally:
                self._forget_others(job)
            return True

    def _forget_others(self, job: Job) -> None:
        """Networks are read again from their files. What belongs to another seed's original takes memory."""
        self.store.networks.clear()
        keys = {job.key, *(needed.key for needed in job.needs)}
        keys |= {deeper.key for needed in job.needs for deeper in needed.needs}
        caches = self.loaded.caches
        for name in [name for name in caches if not any(name.endswith(key) for key in keys)]:
            del caches[name]

    @contextlib.contextmanager
    def _claim(self, job: Job) -> Iterator[bool]:
        folder = self.folder.path("claims")
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / self.store.names(job), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    # Results

    @property
    def done(self) -> tuple[int, int, int]:
        """Numbers of jobs: finished, failed, all."""
        finished = sum(map(self.is_done, self.jobs))
        return finished, sum(bool(self.error_of(job)) for job in self.jobs), len(self.jobs)

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(budget, cell) for budget, cell in self.cells]

    def _row(self, budget: str, cell: Cell) -> dict[str, Any]:
        store, graph = self.store, self.loaded.graph
        row: dict[str, Any] = {"method": cell.arm.label, "budget": budget, "seed": cell.train.seed}
        row |= {"status": "missing", "key": cell.train.key}
        if error := self.error_of(cell.train):
            row |= {"status": "failed", "error": error}
        record, solved = store.record(cell.train), store.record(cell.solve)
        if solved is not None:
            widths = store.answer(cell.solve)[0].widths
            row |= {"macs": graph.macs(widths), "params": graph.params(widths)}
            trainings = [store.find(name, f"{cell.solve.key}-{name}") for name in solved.trainings]
            seconds = solved.seconds + sum(one.seconds for one in trainings if one is not None)
            row |= {"memory_bytes": graph.activation_bytes(widths), "method_seconds": seconds}
        if record is not None:
            last = (record.history[-1].test if record.history else None) or {}
            row |= {"status": "done", **(record.metrics or last), "training_seconds": record.seconds}
            row["repaired_top1"] = record.before_training.get("repaired")
            # Networks are ranked by their last epoch; a run would keep the one from before it here.
            row["kept_top1"] = (record.kept_metrics or {}).get("top1")
        if cell.train.teacher is not None and (original := store.record(cell.train.teacher)) is not None:
            last = (original.history[-1].test if original.history else None) or {}
            row["original_top1"] = (original.metrics or last).get("top1")
        return row

    def write(self) -> Path:
        """compare.csv: a row for each cell."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        self.folder.write_bytes("compare.csv", text.getvalue().encode())
        return self.folder.path("compare.csv")


def _seed_of(job: Job) -> int:
    seed = getattr(job, "seed", None)
    if isinstance(job, Start):
        seed = job.solve.seed
    return -1 if seed is None else int(seed)


def tables_of(labels: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Row -> settings of its method. A row may have a name of its own, where a table names its `method`."""
    tables = {}
    for label in labels:
        table = settings.get(label, settings.get(prefix_of(label), {}))
        tables[label] = dict(table)
    known = {name for label in labels for name in (label, prefix_of(label))}
    for name in settings.keys() - known:
        raise ConfigError(f"the settings of {name} are given, but it is not among --methods.")
    return tables

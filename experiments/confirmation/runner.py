"""What is missing of the jobs, done in several processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..allocation.results import read
from ..trained.lanes import run_jobs
from .work import (
    BUDGETS,
    METHODS,
    Lane,
    LogitsJob,
    OriginalJob,
    PlanJob,
    Setting,
    TrainJob,
    compute_logits,
    logits_path,
    make_plan,
    original_path,
    pairs_of,
    train_jobs,
    train_original,
    train_planned,
)

KINDS = {"originals": train_original, "logits": compute_logits, "plans": make_plan, "train": train_planned}


@dataclass(frozen=True)
class Options:
    """What a command is to do, and with what."""

    images: Path
    originals: Path
    results: Path
    data: Sequence[str]
    networks: Sequence[str]
    seeds: Sequence[int]
    teachers: Sequence[bool]
    lanes: int
    deadline: float
    count: int | None
    epochs: int | None
    batch_size: int | None
    compiles: bool

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return pairs_of(self.data, self.networks)

    @property
    def train_jobs(self) -> list[TrainJob]:
        return list(train_jobs(self.data, self.networks, self.seeds, self.teachers))

    @property
    def missing_jobs(self) -> list[TrainJob]:
        lines = read(self.results / "train.jsonl")
        trained = [{name: line.get(name) for name in TrainJob.__annotations__} for line in lines]
        return [job for job in self.train_jobs if asdict(job) not in trained]

    def missing_seeds(self, pair: tuple[str, str]) -> tuple[int, ...]:
        """Of the trainings with a teacher."""
        jobs = [job for job in self.missing_jobs if (job.data, job.network) == pair and job.teacher]
        return tuple(sorted({job.seed for job in jobs}))


def run(command: str, options: Options) -> None:
    """Do what is missing of a command."""
    jobs: list[Any]
    is_done = None
    if command == "originals":
        jobs = [OriginalJob(*pair) for pair in options.pairs]
        is_done = partial(has_original, options.originals)
    elif command == "logits":
        seeds = {pair: options.missing_seeds(pair) for pair in options.pairs}
        jobs = [LogitsJob(*pair, some) for pair, some in seeds.items() if some]
        is_done = partial(has_logits, options.originals)
    elif command == "plans":
        cells = itertools.product(METHODS, options.pairs, BUDGETS)
        jobs = [PlanJob(*pair, budget, method) for method, pair, budget in cells]
    else:
        jobs = options.train_jobs
    if not jobs:
        return
    setting = Setting(
        options.images,
        options.originals,
        options.results / "plans.jsonl",
        options.count,
        options.epochs,
        options.batch_size,
        compiles=options.compiles and command == "train",
    )
    run_jobs(
        jobs,
        KINDS[command],
        setting,
        open_lane=Lane.open,
        results=options.results / f"{command}.jsonl",
        lanes=options.lanes,
        deadline=options.deadline,
        kind=[name for name in ("data", "network", "budget", "method", "teacher") if name in asdict(jobs[0])],
        is_done=is_done,
    )


def run_all(options: Options) -> None:
    """Do what is missing of all commands, for one network and data set after the other."""
    end = time.monotonic() + options.deadline
    for name, network in options.pairs:
        pair = replace(options, data=[name], networks=[network])
        if not pair.missing_jobs:
            continue

        def do(command: str, lanes: int, pair: Options = pair) -> None:
            run(command, replace(pair, lanes=lanes, deadline=end - time.monotonic()))

        do("originals", 1)
        with ThreadPoolExecutor() as threads:  # a search leaves the GPU idle for most of the time
            for done in [threads.submit(do, "plans", options.lanes), threads.submit(do, "logits", 1)]:
                done.result()
        do("train", options.lanes)


def has_original(folder: Path, job: OriginalJob) -> bool:
    """A line in the results is not enough: on another machine, the network itself is missing."""
    return original_path(folder, job.data, job.network).exists()


def has_logits(folder: Path, job: LogitsJob) -> bool:
    return logits_path(folder, job.data, job.network).exists()

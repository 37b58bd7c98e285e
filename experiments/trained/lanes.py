"""Jobs in several processes that share the GPU. Each adds one line to a file of results."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from peel.cost.rounding import Divisor
from peel.data.datasets import Data, Split
from peel.methods.problem import Problem
from peel.train.engine import Engine, make_engine
from peel.train.recipe import Recipe, backbone_recipe
from peel.train.teacher_cache import CachedTeacher, LogitCache, make_logit_cache

from ..allocation.results import Line, read, write
from .images import load_images
from .networks import frozen_ties, graph_of, load_original
from .peer import fraction


class Setting(NamedTuple):
    """What all jobs of a command have in common."""

    images: Path
    originals: Path
    count: int | None = None
    batch_size: int | None = None
    divisor: Divisor = "auto"


class Lane(NamedTuple):
    """What a process works with."""

    setting: Setting
    data: Data
    engine: Engine
    caches: dict[tuple[str, int], LogitCache | None]

    @classmethod
    def open(cls, setting: Setting) -> Lane:
        torch.set_num_threads(1)
        engine = make_engine(compile="off", workers=0)
        return cls(setting, load_images(setting.images, engine.device, setting.count), engine, {})

    def recipe(self, recipe: Recipe) -> Recipe:
        recipe = recipe.changed(augment=self.data.augment)
        size = self.setting.batch_size
        return recipe if size is None else recipe.changed(batch_size=size)

    def problem(
        self, name: str, budget: str, seed: int, trained: nn.Module, *, streams: bool = False
    ) -> Problem:
        """The problem that a method solves. With `streams`, the residual streams keep their width."""
        graph = graph_of(name)
        return Problem(
            model=trained,
            graph=graph,
            budget=int(fraction(budget) * graph.macs()),
            resource="macs",
            divisor=self.setting.divisor,
            freeze=frozen_ties(name, streams=streams),
            data=self.data,
            backbone_recipe=self.recipe(backbone_recipe("finetune")),
            engine=self.engine,
            seed=seed,
            trained=trained,
            inherits=True,
        )

    def original(self, name: str, seed: int) -> nn.Module:
        trained = trained_model(self.setting.originals, name, seed)
        return self.engine.prepare(trained).eval().requires_grad_(False)

    def taught(self, name: str, seed: int) -> Split:
        """The training images, with cached logits of an original where the engine caches them."""
        key = name, seed
        if key not in self.caches:
            cached = self.engine.cache_teacher
            arguments = self.data.train, self.data.augment, len(self.data.classes), self.engine
            self.caches[key] = make_logit_cache(self.original(name, seed), *arguments) if cached else None
        logits = self.caches[key]
        return self.data.train if logits is None else CachedTeacher(self.data.train, logits)


@cache
def trained_model(folder: Path, name: str, seed: int) -> nn.Module:
    return load_original(folder, name, seed)


Work = Callable[[Any, Any], dict[str, Any]]
"""(lane, job) -> the fields of the line besides those of the job."""

_lane: Any
"""The lane of this process, set by `start_lane`."""


def start_lane(open_lane: Callable[[Any], Any], setting: Any) -> None:
    global _lane
    _lane = open_lane(setting)


def work_in_lane(work: Work, job: Any) -> dict[str, Any]:
    began = time.perf_counter()
    line = asdict(job) | work(_lane, job)
    gc.collect()
    torch.cuda.empty_cache()
    line |= {"seconds": round(time.perf_counter() - began, 2)}
    return line | {"torch": torch.__version__, "device": _lane.engine.description}


def run_jobs(
    jobs: Iterable[Any],
    work: Work,
    setting: Any,
    *,
    results: Path,
    lanes: int,
    open_lane: Callable[[Any], Any] = Lane.open,
    deadline: float = math.inf,
    kind: Sequence[str] = ("network", "budget", "epochs", "batch_size"),
    is_done: Callable[[Any], bool] | None = None,
) -> None:
    """Do the jobs that are missing in the results. None starts that would end after the deadline.

    `open_lane`: setting -> what a process works with. `kind`: jobs that are alike in these fields take about
    the same time. `is_done`: which jobs are not missing, where that is not seen from the results.
    """
    began, lines = time.monotonic(), read(results)
    jobs = list(jobs)
    fields = list(asdict(jobs[0])) if jobs else []
    known = {tuple(line.get(name) for name in fields) for line in lines}
    is_done = is_done or (lambda job: tuple(asdict(job).values()) in known)
    waiting = [job for job in jobs if not is_done(job)]
    running: dict[Future[dict[str, Any]], tuple[int, Any]] = {}
    last_kinds: list[Kind | None] = [None] * lanes
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(_start_process(open_lane, setting)) for _ in range(lanes)]
        while waiting or running:
            left = deadline - (time.monotonic() - began)
            in_time = [job for job in waiting if expected_seconds(asdict(job), lines, kind) < left]
            for lane in sorted(set(range(lanes)) - {lane for lane, _ in running.values()}):
                if in_time:
                    job = next_job(in_time, lane, last_kinds, kind)
                    last_kinds[lane] = kind_of(job, kind)
                    running[pools[lane].submit(work_in_lane, work, job)] = lane, job
                    in_time.remove(job)
                    waiting.remove(job)
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                _, job = running.pop(future)
                try:
                    line = future.result()
                except BrokenProcessPool:
                    raise
                except Exception:  # the job is missing in the results: the next start repeats it
                    print(f"failed: {job}\n{traceback.format_exc()}", flush=True)
                    continue
                write(results, line)
                lines.append(line)
                report(line, list(asdict(job)), time.monotonic() - began)
    print(f"{time.monotonic() - began:.0f} s, {len(lines)} lines, {len(waiting)} jobs left", flush=True)


def _start_process(open_lane: Callable[[Any], Any], setting: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start_lane, (open_lane, setting))


Kind = tuple[Any, ...]


def kind_of(job: Any, names: Sequence[str]) -> Kind:
    return tuple(asdict(job).get(name) for name in names)


def next_job(
    waiting: Sequence[Any], lane: int, last_kinds: Sequence[Kind | None], names: Sequence[str]
) -> Any:
    """A job of the kind that the lane did last: what was compiled and prepared is used again.

    Else the first of the kinds that the fewest lanes work on.
    """
    own = next((job for job in waiting if kind_of(job, names) == last_kinds[lane]), None)
    return own or min(waiting, key=lambda job: last_kinds.count(kind_of(job, names)))


def expected_seconds(job: Line, lines: Sequence[Line], kind: Sequence[str]) -> float:
    """From the last jobs that are alike, else from all in proportion to the epochs; a reserve of 10 %."""
    alike = [line for line in lines if all(line.get(name) == job.get(name) for name in kind)] or lines
    seconds = [line["seconds"] * job.get("epochs", 1) / line.get("epochs", 1) for line in alike[-20:]]
    return 1.1 * statistics.median(seconds) if seconds else 0.0


def report(line: Line, fields: Sequence[str], elapsed: float) -> None:
    key = " ".join(str(line[name]) for name in fields)
    result = line.get("error") or line.get("top1") or line.get("before")
    if isinstance(result, list):
        result = f"top-1 {result[-1]:.2%} after {len(result)} epochs"
    print(f"{elapsed:6.0f} s {key}: {result}, {line['seconds']:.1f} s", flush=True)

"""Training of one job, and of all missing jobs in several processes that share the GPU."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import peel
from peel.data.datasets import Split
from peel.errors import DivergedError
from peel.graph import ChannelGraph
from peel.steps.distillation import Distillation
from peel.surgery.padding import fast_widths, pad
from peel.train.engine import Engine, make_engine
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy, Objective
from peel.train.recipe import Recipe, named_recipe
from peel.utils.rng import derive_seed, seed_everything

from .allocations import BUDGETS, NETWORKS, network, uniform
from .images import Images, load
from .jobs import Job, jobs_of, parse_stage
from .results import RESULTS, Line, key_of, read, write
from .teaching import Taught, Teaching, load_table, mean_over_copies


class Lane(NamedTuple):
    """What a process trains with."""

    images: Images
    engine: Engine
    batch_size: int | None
    teaching: Teaching | None = None

    @classmethod
    def open(
        cls, path: Path, count: int | None, batch_size: int | None, teaching: Teaching | None = None
    ) -> Lane:
        torch.set_num_threads(1)
        engine = make_engine(compile="off", workers=0)
        return cls(load(path, engine.device, count), engine, batch_size, teaching)

    def recipe(self, epochs: int) -> Recipe:
        recipe = named_recipe("cifar-fast").changed(
            epochs=epochs, warmup_epochs=epochs / 10, augment="crop-flip"
        )
        return recipe if self.batch_size is None else recipe.changed(batch_size=self.batch_size)

    def train(self, job: Job) -> dict[str, Any]:
        """Train one allocation from scratch and return its line."""
        return self.train_model(job)[1]

    def train_model(self, job: Job) -> tuple[nn.Module, dict[str, Any]]:
        net, one = network(job.candidate.network), job.candidate
        seed_everything(derive_seed("init", one.allocation, job.seed))
        model = peel.slim(net.model, one.widths, graph=net.graph).requires_grad_(True)
        line: dict[str, Any] = {**asdict(one), "epochs": job.epochs, "seed": job.seed}
        objective: Objective = CrossEntropy(self.recipe(job.epochs).label_smoothing)
        train: Split = self.images.train
        if self.teaching is not None:
            folder, weight, temperature = self.teaching
            line |= {"weight": weight, "temperature": temperature}
            objective = Distillation(objective, nn.Identity(), weight, temperature)
            train = Taught(self.images.train, load_table(folder, one.network, self.engine.device))
        graph, recipe = net.graph.at(one.widths), self.recipe(job.epochs)
        return model, line | self.fit(model, graph, recipe, objective, train, job.seed)

    def fit(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        recipe: Recipe,
        objective: Objective,
        train: Split,
        seed: int,
    ) -> dict[str, Any]:
        """Train a model and return its scores. Odd widths are padded in a copy, as in `peel run`."""
        began, engine, line = time.perf_counter(), self.engine, dict[str, Any]()
        padded = pad(model, graph, fast_widths(model, graph)) if engine.pad_channels else None
        model = model if padded is None else padded.model
        try:
            last = fit(model, objective, train, recipe, engine=engine, seed=derive_seed("order", seed))[-1]
            line |= asdict(evaluate(model, self.images.held_out, engine))
            line |= mean_over_copies(model, self.images.held_out, engine)
            line |= {"train_loss": last.train["cross_entropy"], "epoch_seconds": last.seconds}
        except DivergedError as error:
            line |= {"error": str(error)}
        line |= {"seconds": round(time.perf_counter() - began, 2), "padded": padded is not None}
        return line | {"torch": torch.__version__, "device": engine.description}


_lane: Lane
"""The lane of this process, set by `start_lane`."""


def start_lane(path: Path, count: int | None, batch_size: int | None, teaching: Teaching | None) -> None:
    global _lane
    _lane = Lane.open(path, count, batch_size, teaching)
    for name in NETWORKS:
        network(name)


def train_in_lane(job: Job) -> dict[str, Any]:
    line = _lane.train(job)
    gc.collect()
    torch.cuda.empty_cache()
    return line


def run(
    stages: Sequence[str],
    results: Path,
    images: Path,
    lanes: int,
    deadline: float = math.inf,
    count: int | None = None,
    batch_size: int | None = None,
    teachers: Path | None = None,
    weight: float = 1.0,
    temperature: float = 1.0,
    basis: Path | None = None,
) -> None:
    """Train what is missing in the results. No training starts that would end after the deadline.

    Allocations follow from the trainings of the basis, by default the results; with a teacher, `RESULTS`.
    """
    began = time.monotonic()
    teaching = None if teachers is None else Teaching(teachers, weight, temperature)
    used = (0.0, 0.0) if teaching is None else (weight, temperature)
    lines = [line for line in read(results) if (line.get("weight", 0), line.get("temperature", 0)) == used]
    if basis is None and teaching is not None:
        basis = RESULTS
    source = lines if basis is None else read(basis)
    running: dict[Future[dict[str, Any]], Job] = {}
    with ProcessPoolExecutor(
        lanes, multiprocessing.get_context("spawn"), start_lane, (images, count, batch_size, teaching)
    ) as pool:
        while True:
            left = deadline - (time.monotonic() - began)
            known = {key_of(line) for line in lines} | {job.key for job in running.values()}
            while len(running) < lanes and (job := next_job(stages, source, lines, known, left)) is not None:
                running[pool.submit(train_in_lane, job)] = job
                known.add(job.key)
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                line = future.result()
                write(results, line)
                lines.append(line)
                report(line, time.monotonic() - began)
    print(f"{time.monotonic() - began:.0f} s, {len(lines)} lines", flush=True)


def next_job(
    stages: Sequence[str],
    basis: Sequence[Line],
    lines: Sequence[Line],
    known: set[tuple[Any, ...]],
    left: float,
) -> Job | None:
    """The first job of the stages that is not known and ends in time. Allocations depend on the basis."""
    jobs = (job for text in stages for job in jobs_of(parse_stage(text), basis))
    past = lines if basis is lines else [*basis, *lines]
    return next((job for job in jobs if job.key not in known and expected_seconds(job, past) < left), None)


def expected_seconds(job: Job, lines: Sequence[Line]) -> float:
    """From the last trainings of the same network, budget and schedule, if any, with a reserve of 10 %."""
    kind = job.candidate.network, job.candidate.budget, job.epochs
    alike = [line for line in lines if (line["network"], line["budget"], line["epochs"]) == kind] or lines
    per_epoch = [line["seconds"] / line["epochs"] for line in alike[-20:]]
    return 1.1 * job.epochs * statistics.median(per_epoch) if per_epoch else 0.0


def report(line: Line, elapsed: float) -> None:
    score = line["error"] if "error" in line else f"loss {line['loss']:.4f}, top-1 {line['top1']:.2%}"
    key = " ".join(map(str, key_of(line)))
    print(f"{elapsed:6.0f} s {key}: {score}, {line['seconds']:.1f} s", flush=True)


def measure(images: Path, count: int | None = None, batch_size: int | None = None) -> None:
    """Print the time of an epoch of each uniform network, alone on the device."""
    lane = Lane.open(images, count, batch_size)
    for name, budget in itertools.product(NETWORKS, BUDGETS):
        line = lane.train(Job(uniform(name, budget), 3, 0))
        seconds = line["epoch_seconds"]
        rate, rest = lane.images.train.size / seconds, line["seconds"] - 3 * seconds
        print(f"{name} {budget}: {seconds:.3f} s per epoch, {rate:,.0f} images/s, {rest:.1f} s besides")

"""Predictors that train no allocation: the trained original is cut to it, and repaired (see repair.py).

    python -m experiments.allocation originals --images images.pt --folder originals
    python -m experiments.allocation predict --images images.pt --folder originals

`predict` searches: random allocations with finer groups are scored, and the best point of a fit of their
losses is the result. Then it scores every allocation of the map. Each score adds one line to the results;
those that are there are skipped.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import peel
from peel.data.augmentation import EVAL
from peel.surgery.selection import select_best
from peel.train.loop import evaluate
from peel.utils.rng import derive_seed

from .allocations import BUDGETS, NETWORKS, Candidate, candidate, network, uniform
from .fit import (
    Array,
    cost_function,
    fit_loss,
    log_ratios,
    point_with_lowest_loss,
    samples_of,
    shifted,
    widths_at,
)
from .jobs import Job
from .repair import Lesson, principal_channels, refit, teach
from .results import FOUND, RECALIBRATED, REPAIRED, RESULTS, Line, read, write
from .teaching import make_table, table_path
from .train import Lane
from .trial import inner_groups

#: Seeds of the originals, and the epochs of their training.
ORIGINALS, EPOCHS = (0, 1), 16

#: Unlabeled training images for the repair, and sampled places of each.
IMAGES, PLACES = 2048, 8

#: The search: random allocations, the deviation of their log ratios around uniform, and the original.
DRAWN, SPREAD, TAUGHT_BY = 64, 0.35, 0

#: No random allocation has a finer group narrower or wider than this, as log ratios to uniform.
LIMITS = math.log(0.4), math.log(2.5)


class Task(NamedTuple):
    predictor: str
    candidate: Candidate
    original: int
    """Its seed."""

    @property
    def key(self) -> tuple[Any, ...]:
        one = self.candidate
        return self.predictor, one.network, one.budget, one.allocation, self.original


def key_of(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("predictor", "network", "budget", "allocation", "original"))


def original_path(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-{seed}.pt"


def load_original(folder: Path, name: str, seed: int, device: torch.device) -> nn.Module:
    model = copy.deepcopy(network(name).model).to(device).eval()
    model.load_state_dict(torch.load(original_path(folder, name, seed)))
    return model


# In a process


class Original(NamedTuple):
    model: nn.Module
    lesson: Lesson
    scores: dict[str, Tensor]


class Cutter:
    """What a process scores allocations with."""

    def __init__(self, lane: Lane, folder: Path) -> None:
        self.lane, self.folder = lane, folder
        self.originals: dict[tuple[str, int], Original] = {}

    def original(self, name: str, seed: int) -> Original:
        if (name, seed) not in self.originals:
            self.originals[name, seed] = self.load(name, seed)
        return self.originals[name, seed]

    def load(self, name: str, seed: int) -> Original:
        device, train = self.lane.engine.device, self.lane.images.train
        model = load_original(self.folder, name, seed, device)
        rng = torch.Generator().manual_seed(derive_seed("repair", seed))
        index = torch.randperm(train.size, generator=rng)[:IMAGES]
        lesson = teach(model, next(iter(train.batches(index, IMAGES, EVAL, device))).inputs, PLACES)
        torch.cuda.empty_cache()
        return Original(model, lesson, principal_channels(model, network(name).graph, lesson))

    def score(self, task: Task) -> dict[str, Any]:
        one, graph = task.candidate, network(task.candidate.network).graph
        original = self.original(one.network, task.original)
        began = time.perf_counter()
        model, scores = original.model, original.scores
        slim = peel.slim(model, one.widths, graph=graph, weights="inherit", scores=scores)
        kept = select_best(model, graph, graph.units(one.widths), scores)
        refit(slim, original.lesson, graph, kept, only_norms=task.predictor == RECALIBRATED)
        line = {"predictor": task.predictor, **asdict(one), "original": task.original}
        line |= asdict(evaluate(slim, self.lane.images.held_out, self.lane.engine))
        seconds = round(time.perf_counter() - began, 3)
        return line | {"seconds": seconds, "torch": torch.__version__, "device": self.lane.engine.description}


_cutter: Cutter
"""The cutter of this process, set by `start_cutter`."""


def start_cutter(images: Path, folder: Path, count: int | None, batch_size: int | None) -> None:
    global _cutter
    _cutter = Cutter(Lane.open(images, count, batch_size), folder)


def score_in_process(task: Task) -> dict[str, Any]:
    line = _cutter.score(task)
    gc.collect()
    torch.cuda.empty_cache()
    return line


def train_original(name: str, seed: int, epochs: int, taught: int) -> dict[str, Any]:
    """Train one original and keep it, with its logits for so many epochs of students."""
    one = candidate(name, "100%", "original", network(name).graph.widths)
    model, line = _cutter.lane.train_model(Job(one, epochs, seed))
    state = {
        key: value.half() if value.is_floating_point() else value for key, value in model.state_dict().items()
    }
    torch.save(state, original_path(_cutter.folder, name, seed))
    if taught:
        lane = _cutter.lane
        table = make_table(model, lane.images.train, taught, lane.engine)
        torch.save(table.cpu(), table_path(_cutter.folder, name))
    return line


# All processes


def open_pool(lanes: int, *arguments: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(lanes, multiprocessing.get_context("spawn"), start_cutter, arguments)


def originals(
    images: Path,
    folder: Path,
    results: Path,
    count: int | None = None,
    batch_size: int | None = None,
    networks: str = "",
    seeds: Sequence[int] = ORIGINALS,
    epochs: int = EPOCHS,
    taught: int = 0,
) -> None:
    """Train the originals, all at a time: of all networks, or of those with `networks` in the name."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(name, seed) for name in NETWORKS if networks in name for seed in seeds]
    wanted = [one for one in wanted if not original_path(folder, *one).exists()]
    with open_pool(max(1, len(wanted)), images, folder, count, batch_size) as pool:
        for future in as_completed(pool.submit(train_original, *one, epochs, taught) for one in wanted):
            write(results, future.result())
            print({key: value for key, value in future.result().items() if key != "widths"}, flush=True)


def predict(
    images: Path,
    folder: Path,
    results: Path,
    lanes: int,
    deadline: float = math.inf,
    count: int | None = None,
    batch_size: int | None = None,
) -> None:
    """Search, then score the map. Nothing starts after the deadline."""
    began = time.monotonic()
    with open_pool(lanes, images, folder, count, batch_size) as pool:

        def compute(tasks: Iterable[Task]) -> list[dict[str, Any]]:
            known = {key_of(line) for line in read(results)}
            missing = [task for task in tasks if task.key not in known]
            for batch in range(0, len(missing), 4 * lanes):
                if time.monotonic() - began > deadline:
                    break
                futures = [pool.submit(score_in_process, task) for task in missing[batch : batch + 4 * lanes]]
                for future in as_completed(futures):
                    write(results, future.result())
            print(f"{time.monotonic() - began:6.0f} s, {len(read(results))} lines", flush=True)
            return read(results)

        for budget, name in itertools.product(BUDGETS, NETWORKS):
            compute(search_tasks(name, budget))
            compute(found_tasks(read(results), name, budget))
        compute(map_tasks())


def map_tasks(trainings: Path = RESULTS) -> list[Task]:
    """Every allocation that was trained, except plans that differ between seeds."""
    found: dict[tuple[str, str, str], Candidate] = {}
    for line in read(trainings):
        cell = line["network"], line["budget"], line["allocation"]
        if line["budget"] in BUDGETS and not line["allocation"].startswith("trial"):
            found[cell] = candidate(*cell, line["widths"], line["shares"], line["backbone_ratio"])
    tasks = itertools.product((REPAIRED, RECALIBRATED), ORIGINALS, found.values())
    return [Task(predictor, one, seed) for predictor, seed, one in tasks]


# The search


def search_tasks(name: str, budget: str) -> list[Task]:
    """Scores of uniform and of random allocations with finer groups."""
    groups, rng = inner_groups(name), np.random.default_rng(1)
    logs = SPREAD * rng.standard_normal((DRAWN, len(groups)))
    logs = shifted(logs, cost_function(name, budget, groups), *limits(name, budget))
    widths = [widths_at(name, budget, groups, row) for row in logs]
    drawn = [candidate(name, budget, f"drawn 1-{i:02d}", one) for i, one in enumerate(widths)]
    return [Task(REPAIRED, one, TAUGHT_BY) for one in (uniform(name, budget), *drawn)]


def found_tasks(lines: Sequence[Line], name: str, budget: str) -> list[Task]:
    """The score of the result of the search; empty until the search is done."""
    known = {key_of(line): line for line in lines}
    tasks = search_tasks(name, budget)
    if not all(task.key in known for task in tasks):
        return []
    widths = best_point_of([known[task.key] for task in tasks], name, budget)
    return [Task(REPAIRED, candidate(name, budget, FOUND, widths), TAUGHT_BY)]


def best_point_of(lines: Sequence[Line], name: str, budget: str) -> dict[str, int]:
    """The best point of the fit of the scores.

    No group becomes narrower than half of the way, in logarithms, to its narrowest width in a score.
    """
    groups, base = inner_groups(name), uniform(name, budget)
    fit, logs = fit_loss(groups, lines, base.widths), samples_of(groups, lines, base.widths).logs
    bounds = np.stack([logs.min(0) / 2, logs.max(0)])
    widths = point_with_lowest_loss(name, budget, groups, fit, bounds)
    ratios = zip(groups, log_ratios(groups, widths, base.widths), strict=True)
    text = ", ".join(f"{group} {math.exp(log):.2f}" for group, log in ratios)
    print(f"{name}, {budget}: fit explains {fit.explained:.0%}; {text}", flush=True)
    return widths


def limits(name: str, budget: str) -> Array:
    """The lowest and the highest log ratio of each group. No layer becomes wider than in the original."""
    full, base = network(name).graph.widths, uniform(name, budget).widths
    room = [min(math.log(full[tie] / base[tie]) for tie in ties) for ties in inner_groups(name).values()]
    return np.stack([np.full(len(room), LIMITS[0]), np.minimum(room, LIMITS[1])])

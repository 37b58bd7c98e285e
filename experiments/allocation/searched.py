"""The plans of `peel run --method search`, with and without `--division sensitivity`, of an original.

    python -m experiments.allocation originals --images images.pt --folder originals --seeds 0 --epochs 24
    python -m experiments.allocation search --images images.pt --folder originals

The search has the images that trainings have, as in a run of a user: those that judge its networks are some
that the original was trained on. The held-out images of this experiment are not read. One line for each
network, budget and division.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

import peel
from peel.data.datasets import Data
from peel.methods.allocation import Space
from peel.methods.config import MethodConfig
from peel.methods.problem import Problem
from peel.methods.registry import find_method

from .allocations import BUDGETS, CLASSES, NETWORKS, candidate, network
from .predict import load_original
from .results import SEARCHED, read, write
from .train import Lane


def search(
    images: Path,
    folder: Path,
    results: Path = SEARCHED,
    networks: str = "",
    budget: str = "",
    count: int | None = None,
    batch_size: int | None = None,
) -> None:
    """Plan what is missing in the results: of all networks and budgets, or of some."""
    lane = Lane.open(images, count, batch_size)
    known = {(line["network"], line["budget"]) for line in read(results)}
    for name in (name for name in NETWORKS if networks in name):
        for one in (one for one in BUDGETS if budget in ("", one)):
            if (name, one) not in known:
                _plan(lane, name, one, folder, results)


def _plan(lane: Lane, name: str, budget: str, folder: Path, results: Path) -> None:
    began, net = time.perf_counter(), network(name)
    classes = tuple(map(str, range(CLASSES)))
    problem = Problem(
        model=net.model,
        graph=net.graph,
        budget=peel.parse_budget(budget, net.graph.macs()),
        resource="macs",
        divisor=1,
        freeze=net.freeze,
        data=Data("tiny-imagenet-32", classes, lane.images.train, lane.images.held_out, "crop-flip"),
        backbone_recipe=lane.recipe(1),
        engine=lane.engine,
        seed=0,
        trained=load_original(folder, name, 0, lane.engine.device),
    )
    config = MethodConfig(budget=problem.budget, method="search", division="sensitivity")

    def no_training(*_: object) -> None:
        raise AssertionError("the search trains nothing")

    plan = find_method("search").plan(problem, config, no_training)  # type: ignore[arg-type]
    last, space = plan.rounds[-1], Space(problem)
    undivided = space.rounded(space.ideal_at(np.log(list(last.factors.values()))))
    seconds = round(time.perf_counter() - began, 2)
    for allocation, widths in (("search", undivided), ("search divided", plan.widths)):
        line = asdict(candidate(name, budget, allocation, widths))
        write(results, line | {"factors": last.factors, "note": last.note, "seconds": seconds})
    print(name, budget, seconds, last.note, flush=True)

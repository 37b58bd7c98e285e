"""The plans of `peel run --method search`, with and without `--division sensitivity`, of an original.

    python -m experiments.allocation search --images images.pt --folder originals

As in a run of a user, the original is trained here, on the training images but for those that judge networks.
The held-out images of this experiment are not read. One line for each network, budget and division. Older
lines are of earlier forms of the search: in `search` and `search divided` the original was trained on all
training images, and there and in `search unseen` a group could become as wide as in the widest sample.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import peel
from peel.data.datasets import Data
from peel.methods.allocation import Space
from peel.methods.config import MethodConfig
from peel.methods.problem import Problem
from peel.methods.registry import find_method
from peel.train.objective import CrossEntropy
from peel.utils.rng import derive_seed, seed_everything

from .allocations import BUDGETS, CLASSES, NETWORKS, candidate, network
from .results import SEARCHED, read, write
from .train import Lane

#: Epochs and seed of the original.
EPOCHS, SEED = 24, 0

#: The allocations of a plan, without and with the division by sensitivity.
UNDIVIDED, DIVIDED = "search bounded", "search bounded divided"


def search(
    images: Path,
    folder: Path,
    results: Path = SEARCHED,
    networks: str = "",
    budget: str = "",
    epochs: int = EPOCHS,
    count: int | None = None,
    batch_size: int | None = None,
) -> None:
    """Plan what is missing in the results: of all networks and budgets, or of some."""
    lane = Lane.open(images, count, batch_size)
    for name in (name for name in NETWORKS if networks in name):
        for one in (one for one in BUDGETS if budget in ("", one)):
            known = {(line["network"], line["budget"], line["allocation"]) for line in read(results)}
            if (name, one, DIVIDED) not in known:
                problem = _problem(lane, name, one)
                _plan(problem, _original(lane, problem, name, epochs, folder), name, one, results)


def _problem(lane: Lane, name: str, budget: str) -> Problem:
    net, classes = network(name), tuple(map(str, range(CLASSES)))
    return Problem(
        model=net.model,
        graph=net.graph,
        budget=peel.parse_budget(budget, net.graph.macs()),
        resource="macs",
        divisor=1,
        freeze=net.freeze,
        data=Data("tiny-imagenet-32", classes, lane.images.train, lane.images.held_out, "crop-flip"),
        backbone_recipe=lane.recipe(1),
        engine=lane.engine,
        seed=SEED,
    )


def _original(lane: Lane, problem: Problem, name: str, epochs: int, folder: Path) -> nn.Module:
    """The original, trained as the search wants it."""
    file, graph = folder / f"{name}-search.pt", problem.graph
    seed_everything(derive_seed("init", "original", SEED))
    model = peel.slim(problem.model, graph.widths, graph=graph).requires_grad_(True)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        images, recipe = find_method("search").original_images(problem), lane.recipe(epochs)
        line = lane.fit(model, graph, recipe, CrossEntropy(recipe.label_smoothing), images, SEED)
        print(name, f"trained on {images.size} images", line, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    return lane.engine.prepare(model).eval().requires_grad_(False)


def _plan(problem: Problem, trained: nn.Module, name: str, budget: str, results: Path) -> None:
    began = time.perf_counter()
    problem = replace(problem, trained=trained)
    config = MethodConfig(budget=problem.budget, method="search", division="sensitivity")

    def no_training(*_: object) -> None:
        raise AssertionError("the search trains nothing")

    plan = find_method("search").plan(problem, config, no_training)  # type: ignore[arg-type]
    last, space = plan.rounds[-1], Space(problem)
    point = np.log(list(last.factors.values()))
    undivided = space.rounded(space.ideal_at(point), changed=space.hidden)
    seconds = round(time.perf_counter() - began, 2)
    for allocation, widths in ((UNDIVIDED, undivided), (DIVIDED, plan.widths)):
        line = asdict(candidate(name, budget, allocation, widths))
        write(results, line | {"factors": last.factors, "note": last.note, "seconds": seconds})
    print(name, budget, seconds, last.note, flush=True)

"""What is trained, and in which order.

A stage is written `NAME:EPOCHS:BUDGET:SEEDS` or `NAME:EPOCHS:BUDGET:SEEDS:NETWORK`, as `coarse:8:all:0` or
`uniform:24:10%:4-6:resnet`. The names are those of `jobs_of`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .allocations import BUDGETS, NETWORKS, Candidate, broad, coarse, fine, uniform
from .fit import fitted
from .results import Line, mean_scores

#: Epochs of the short trainings, from which `picked` and `fitted` choose.
SHORT = 8

#: Of the short trainings: how many of the best get a long one, and how many from there to the worst.
BEST, SPREAD = 3, 5

#: Seeds of long trainings differ from those of short ones: a lucky seed must not count twice.
STAGES = [
    "uniform:8:all:0-3",
    "coarse:8:all:0",
    "uniform:24:10%:4-6",
    "picked:24:10%:4",
    "broad:24:10%:4",
    "fitted:24:10%:4-7:resnet",
    "fine:24:10%:4",
    "uniform:24:10%:7",
    "broad:24:10%:5-6",
    "picked:24:10%:5:resnet",
    "uniform:24:10%:8-9:resnet",
    "fitted:24:10%:8-9:resnet",
    "picked:24:10%:5:mobilenet",
    "uniform:24:10%:8-9:mobilenet",
]


@dataclass(frozen=True)
class Job:
    candidate: Candidate
    epochs: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        one = self.candidate
        return one.network, one.budget, one.allocation, self.epochs, self.seed


class Stage(NamedTuple):
    name: str
    epochs: int
    budgets: tuple[str, ...]
    seeds: tuple[int, ...]
    networks: tuple[str, ...]


def parse_stage(text: str) -> Stage:
    name, epochs, budget, seeds, *part = text.split(":")
    first, _, last = seeds.partition("-")
    return Stage(
        name,
        int(epochs),
        BUDGETS if budget == "all" else (budget,),
        tuple(range(int(first), int(last or first) + 1)),
        tuple(network for network in NETWORKS if not part or part[0] in network),
    )


def jobs_of(stage: Stage, lines: Sequence[Line]) -> list[Job]:
    """The jobs of a stage. Networks and budgets alternate, so that the first jobs are a balanced part."""
    candidates: dict[str, Callable[[str, str], Sequence[Candidate]]] = {
        "uniform": lambda name, budget: [uniform(name, budget)],
        "coarse": lambda name, budget: coarse(name, budget)[1:],
        "broad": broad,
        "fine": fine,
        "picked": lambda name, budget: picked(lines, name, budget),
        "fitted": lambda name, budget: fitted(lines, name, budget, SHORT),
    }
    cells = itertools.product(stage.networks, stage.budgets)
    rows = itertools.zip_longest(*(candidates[stage.name](*cell) for cell in cells))
    chosen = [one for row in rows for one in row if one is not None]
    return [Job(one, stage.epochs, seed) for seed in stage.seeds for one in chosen]


def picked(lines: Sequence[Line], name: str, budget: str) -> list[Candidate]:
    """The best of the short trainings, and some evenly down to the worst; empty until all are done."""
    known = {one.allocation: one for one in coarse(name, budget)[1:]}
    scores = mean_scores(lines, name, budget, SHORT)
    if not known.keys() <= scores.keys():
        return []
    ranked = sorted(known, key=lambda allocation: scores[allocation].loss)
    rest = np.linspace(BEST - 1, len(ranked) - 1, SPREAD + 1)[1:].round().astype(int).tolist()
    return [known[ranked[place]] for place in (*range(BEST), *rest)]

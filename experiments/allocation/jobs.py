"""What is trained, and in which order.

A stage is written `NAME:EPOCHS:BUDGET:SEEDS` or `NAME:EPOCHS:BUDGET:SEEDS:NETWORK`, as `coarse:8:all:0` or
`uniform:24:10%:4-6:resnet`. The names are those of `candidates`; `uniform+fitted:24:10%:0-9` alternates.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import peel

from .allocations import BUDGETS, NETWORKS, Candidate, broad, candidate, coarse, fine, network, uniform
from .fit import (
    fine_fitted,
    fit_loss,
    fitted,
    log_ratios,
    on_budget,
    point_with_lowest_loss,
    samples_of,
    widths_at,
)
from .results import (
    FOUND,
    HIDDEN,
    LONG,
    REPAIRED,
    REPAIRS,
    SEARCHED,
    SENSITIVE,
    SHORT,
    Line,
    mean_scores,
    read,
)
from .trial import balanced, balanced_plans, inner_groups, plans, trials

#: Of the short trainings: how many of the best get a long one, and how many from there to the worst.
BEST, SPREAD = 3, 5

#: The stages of allocation.jsonl. MobileNetV2 has later ones in files of their own (docs/exploration.md): its
#: initial weights have changed, so they need their own uniform trainings.
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
    # Searches by trials, and more seeds for what the map suggests
    "trials:4:10%:0-9:resnet",
    "trials:2:10%:0-9:resnet",
    "uniform:24:10%:0-3:resnet",
    "last:24:10%:0-3:resnet",
    "fitted:24:10%:0-3:resnet",
    "last:24:10%:6-9:resnet",
    "uniform:24:25%:0-7:resnet",
    "fitted:24:25%:0-7:resnet",
    "finefitted:24:10%:0-6:mobilenet",
    "uniform:24:10%:0-3:mobilenet",
    "balanced:8:10%:0:mobilenet",
    "trial-4:24:10%:0-9:resnet",
    "finetrial-8:24:10%:0-3:mobilenet",
    # What a search with repaired networks finds (predict.py)
    "repair:24:10%:0-9",
    "repair:24:25%:0-9:resnet",
    "uniform:24:25%:8-9:resnet",
    "uniform:24:25%:0-5:mobilenet",
    "repair:24:25%:0-4:mobilenet",
    # Hidden channels only
    "hidden:24:10%:0-9:resnet",
    "hidden:24:25%:0-9:resnet",
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
    jobs = []
    for seed in stage.seeds:
        cells = itertools.product(stage.name.split("+"), stage.networks, stage.budgets)
        rows = itertools.zip_longest(*(candidates(*cell, seed, lines) for cell in cells))
        jobs += [Job(one, stage.epochs, seed) for row in rows for one in row if one is not None]
    return jobs


def candidates(stage: str, name: str, budget: str, seed: int, lines: Sequence[Line]) -> Sequence[Candidate]:
    """The allocations of a stage. `trial-4` is the plan of the search with trials of four epochs."""
    match stage.split("-"):
        case ["uniform"]:
            return [uniform(name, budget)]
        case ["coarse"]:
            return coarse(name, budget)[1:]
        case ["broad"]:
            return broad(name, budget)
        case ["fine"]:
            return fine(name, budget)
        case ["picked"]:
            return picked(lines, name, budget)
        case ["fitted"]:
            return fitted(lines, name, budget, SHORT)
        case ["finefitted"]:
            return fine_fitted(lines, name, budget, LONG)
        case ["fineratios"]:
            return fine_ratios(lines, name, budget)
        case ["last"]:
            return last_group(name, budget)
        case ["repair"]:
            return stored(REPAIRS, name, budget, FOUND)
        case ["hidden"]:
            return hidden_by_repair(name, budget)
        case ["search", *variant]:
            return stored(SEARCHED, name, budget, " ".join(("search", *variant)))
        case ["sensitivity", "within"]:
            return within_groups(name, budget)
        case ["sensitivity", *variant]:
            return stored(SENSITIVE, name, budget, " ".join(("sensitivity", *variant)))
        case ["trials"]:
            return trials(name, budget)
        case ["balanced"]:
            return balanced(name, budget)
        case ["finetrial", epochs]:
            return balanced_plans(lines, name, budget, int(epochs))
        case ["trial", epochs]:
            return plans(lines, name, budget, int(epochs), seed)
    raise ValueError(f"no stage {stage!r}")


def fine_ratios(lines: Sequence[Line], name: str, budget: str) -> list[Candidate]:
    """The widths over uniform of `fine fitted` at 10 %, shifted to this budget."""
    groups, tenth = inner_groups(name), uniform(name, "10%")
    found = fine_fitted(lines, name, "10%", LONG)
    if not found:
        return []
    logs = np.array([log_ratios(groups, one.widths, tenth.widths) for one in found])
    [row] = on_budget(name, budget, groups, logs)
    return [candidate(name, budget, "fine ratios", widths_at(name, budget, groups, row))]


def last_group(name: str, budget: str) -> list[Candidate]:
    """Winner-take-all: the whole pool to the last group, lambda 0.5."""
    wanted = f"{list(network(name).graph.groups)[-1]}/0.5"
    return [one for one in coarse(name, budget) if one.allocation == wanted]


def stored(path: Path, *cell: str) -> list[Candidate]:
    """The allocation of a file, by network, budget and name."""
    lines = read(path)
    cells = [(line["network"], line["budget"], line["allocation"]) for line in lines]
    return [candidate(*cell, lines[cells.index(cell)]["widths"])] if cell in cells else []


@cache
def hidden_by_repair(name: str, budget: str) -> list[Candidate]:
    """The best point of the search with repaired networks if the residual stream stays uniform.

    The scores overrate the stream: a network trained from scratch adapts to a narrow one.
    """
    groups, base = inner_groups(name), uniform(name, budget)
    lines = [
        line
        for line in read(REPAIRS)
        if (line["predictor"], line["network"], line["budget"], line["original"])
        == (REPAIRED, name, budget, 0)
        and (line["allocation"] == "uniform" or line["allocation"].startswith("drawn"))
    ]
    fit, logs = fit_loss(groups, lines, base.widths), samples_of(groups, lines, base.widths).logs
    bounds = np.stack([logs.min(0) / 2, logs.max(0)])
    bounds[:, [group.startswith("stream") for group in groups]] = 0.0
    return [candidate(name, budget, HIDDEN, point_with_lowest_loss(name, budget, groups, fit, bounds))]


@cache
def within_groups(name: str, budget: str) -> list[Candidate]:
    """What `repair hidden` gives to each group of hidden channels, divided inside it as by sensitivity."""
    found = stored(SENSITIVE, name, budget, "sensitivity hidden")
    if not found:
        return []
    [searched], [measured] = hidden_by_repair(name, budget), found
    base, graph = uniform(name, budget).widths, network(name).graph
    ideal: dict[str, float] = dict(searched.widths)
    for ties in (ties for group, ties in inner_groups(name).items() if group.startswith("hidden")):
        # With the stream fixed, the MACs are linear in each hidden width.
        costs = [graph.macs({**base, tie: base[tie] + 1}) - graph.macs(base) for tie in ties]
        spent = [sum(c * w.widths[t] for c, t in zip(costs, ties, strict=True)) for w in (searched, measured)]
        ideal.update({tie: measured.widths[tie] * spent[0] / spent[1] for tie in ties})
    widths = peel.round_to_budget(graph, ideal, budget, divisor=1, freeze=network(name).freeze, grow=True)
    return [candidate(name, budget, "sensitivity within", widths)]


def picked(lines: Sequence[Line], name: str, budget: str) -> list[Candidate]:
    """The best of the short trainings, and some evenly down to the worst; empty until all are done."""
    known = {one.allocation: one for one in coarse(name, budget)[1:]}
    scores = mean_scores(lines, name, budget, SHORT)
    if not known.keys() <= scores.keys():
        return []
    ranked = sorted(known, key=lambda allocation: scores[allocation].loss)
    rest = np.linspace(BEST - 1, len(ranked) - 1, SPREAD + 1)[1:].round().astype(int).tolist()
    return [known[ranked[place]] for place in (*range(BEST), *rest)]

"""The results file, one line per training, and statistics over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .allocations import BUDGETS

Line = Mapping[str, Any]
"""A line of the results."""

#: Epochs of the short trainings of the map, from which allocations are chosen, and of the long ones.
SHORT, LONG = 8, 24

RESULTS = Path(__file__).parents[1] / "results" / "allocation.jsonl"

#: Scores of cut networks by two predictors, and the allocation that a search finds (predict.py).
REPAIRS = RESULTS.with_name("repair.jsonl")
REPAIRED, RECALIBRATED, FOUND = "repaired", "recalibrated", "repair found"

#: The same search over hidden channels only: the residual stream stays uniform.
HIDDEN = "repair hidden"

#: Allocations by sensitivity (sensitivity.py).
SENSITIVE = RESULTS.with_name("sensitivity.jsonl")

#: Plans of `--method search` (searched.py), and their trainings.
SEARCHED = RESULTS.with_name("searched.jsonl")
SEARCHED_TRAINED = RESULTS.with_name("searched_trained.jsonl")

#: Trainings of MobileNetV2 whose depthwise layers start from the weights of the package (He by fan-out).
FAN_OUT = RESULTS.with_name("allocation_fan_out.jsonl")


def write(path: Path, line: Line) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("network", "budget", "allocation", "epochs", "seed"))


def schedules(lines: Iterable[Line]) -> list[int]:
    """The numbers of epochs that occur."""
    return sorted({line["epochs"] for line in lines})


def by_allocation(lines: Iterable[Line], name: str, budget: str, epochs: int) -> dict[str, list[Line]]:
    """Allocation -> its lines without an error, ordered by seed."""
    found: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        is_wanted = (line["network"], line["budget"], line["epochs"]) == (name, budget, epochs)
        if is_wanted and "error" not in line:
            found.setdefault(line["allocation"], []).append(line)
    return found


class Score(NamedTuple):
    """Means over seeds."""

    loss: float
    top1: float
    seeds: int


def mean_scores(lines: Iterable[Line], name: str, budget: str, epochs: int) -> dict[str, Score]:
    scores = {}
    for allocation, some in by_allocation(lines, name, budget, epochs).items():
        loss, top1 = (statistics.mean(line[field] for line in some) for field in ("loss", "top1"))
        scores[allocation] = Score(loss, top1, len(some))
    return scores


def seed_noise(lines: Iterable[Line], name: str, epochs: int, field: str) -> tuple[float, int]:
    """The standard deviation over seeds, pooled over allocations and budgets, and its degrees of freedom.

    Plans of searches are left out if they differ between seeds.
    """
    squares, freedom = 0.0, 0
    for budget in BUDGETS:
        for some in by_allocation(lines, name, budget, epochs).values():
            if len(some) > 1 and all(line["widths"] == some[0]["widths"] for line in some):
                squares += (len(some) - 1) * statistics.variance(line[field] for line in some)
                freedom += len(some) - 1
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def untrained_losses(lines: Iterable[Line], predictor: str, name: str, budget: str) -> dict[str, float]:
    """Allocation -> loss of the cut, untrained network minus that of uniform, the mean over originals."""
    cell = predictor, name, budget
    alike = [line for line in lines if (line["predictor"], line["network"], line["budget"]) == cell]
    zero = {line["original"]: line["loss"] for line in alike if line["allocation"] == "uniform"}
    losses: dict[str, list[float]] = {}
    for line in alike:
        losses.setdefault(line["allocation"], []).append(line["loss"] - zero[line["original"]])
    return {allocation: statistics.mean(some) for allocation, some in losses.items()}

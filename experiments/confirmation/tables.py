"""The table of the confirmation: search and published form minus uniform, corrected for all rows."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..allocation.results import Line, read
from ..trained.tables import table

FOLDER = Path(__file__).parents[1] / "results" / "confirmation"

#: Splits of all seeds into two groups that a permutation test enumerates; beyond them it draws as many.
MOST_SPLITS = 200_000

Row = tuple[Any, ...]
"""(data, network, budget, teacher)."""


def analyze(folder: Path) -> None:
    lines = [line for line in read(folder / "train.jsonl") if "error" not in line]
    print_plans(read(folder / "plans.jsonl"))
    rows = {tuple(line[name] for name in ("data", "network", "budget", "teacher")): None for line in lines}
    for method in ("search", "peel"):
        print_differences(lines, sorted(rows), method)
    for line in read(folder / "train.jsonl"):
        if "error" in line:
            print(f"\nDiverged: {line}")


def print_plans(lines: Sequence[Line]) -> None:
    print("\n## Plans: widths of groups over those of the uniform network, and seconds of the search")
    cells = []
    for line in lines:
        if line["method"] != "uniform":
            factors = ", ".join(f"{group} {factor:.2f}" for group, factor in line["factors"].items())
            names = (line[name] for name in ("data", "network", "budget", "method"))
            cells.append([*names, factors, f"{line['search_seconds']:.0f}", line["note"]])
    table(["data", "network", "budget", "method", "factors", "s", "note"], cells)


def print_differences(lines: Sequence[Line], rows: Sequence[Row], method: str) -> None:
    """Top-1 minus that of the uniform network. Seeds are not paired: pairing removes no noise."""
    values = {row: (scores(lines, row, method), scores(lines, row, "uniform")) for row in rows}
    full = {row: pair for row, pair in values.items() if min(map(len, pair)) > 1}
    chances = {row: permutation_p(*pair) for row, pair in full.items()}
    corrected = holm(chances)
    cells = []
    for row, (ours, uniform) in full.items():
        difference, half = welch(ours, uniform)
        names = [*row[:3], "yes" if row[3] else "no"]
        means = [f"{100 * statistics.mean(some):.2f}" for some in (uniform, ours)]
        change = f"{100 * difference:+.2f} ± {100 * half:.2f}"
        cells.append([*names, *means, change, f"{chances[row]:.4f}", f"{corrected[row]:.4f}", str(len(ours))])
    print(f"\n## {method} minus uniform, top-1 on the test images, 95 % intervals (Welch)")
    heads = ["data", "network", "budget", "teacher", "uniform", method, "difference", "p", "p, Holm", "n"]
    table(heads, cells)
    if full:
        pooled = [welch(*pair)[0] for pair in full.values()]
        print(f"\nMean over {len(full)} rows: {100 * statistics.mean(pooled):+.2f} points.")


def scores(lines: Sequence[Line], row: Row, method: str) -> list[float]:
    names = ("data", "network", "budget", "teacher")
    return [
        line["top1"]
        for line in sorted(lines, key=lambda line: line["seed"])
        if line["method"] == method and tuple(line[name] for name in names) == row
    ]


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The difference of means, and half of its 95 % interval."""
    errors = [statistics.variance(some) / len(some) for some in (first, second)]
    parts = [error**2 / (len(some) - 1) for error, some in zip(errors, (first, second), strict=True)]
    freedom = max(1.0, sum(errors) ** 2 / max(sum(parts), 1e-300))
    return statistics.mean(first) - statistics.mean(second), t_quantile(freedom) * math.sqrt(sum(errors))


def t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t, to 1 % from 3 degrees of freedom on (Cornish-Fisher)."""
    z = 1.959964
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + first + second + third


def permutation_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided: the fraction of splits of all seeds whose means differ by as much."""
    everything = np.array([*first, *second])
    count, size = len(everything), len(first)
    observed = abs(np.mean(first) - np.mean(second)) - 1e-12
    if math.comb(count, size) <= MOST_SPLITS:
        chosen = np.array(list(itertools.combinations(range(count), size)))
    else:
        rng = np.random.default_rng(0)
        chosen = np.argsort(rng.random((MOST_SPLITS, count)), axis=1)[:, :size]
    sums = everything[chosen].sum(1)
    differences = sums / size - (everything.sum() - sums) / (count - size)
    return float((np.abs(differences) >= observed).mean())


def holm(chances: Mapping[Row, float]) -> dict[Row, float]:
    """Corrected for all rows, step by step from the smallest."""
    corrected, largest = dict[Row, float](), 0.0
    for place, row in enumerate(sorted(chances, key=lambda row: chances[row])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[row]))
        corrected[row] = largest
    return corrected

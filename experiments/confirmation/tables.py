"""The tables of the confirmation: search and published form minus uniform.

The primary tests are one for each network and budget: the mean over data sets and teachers, Holm-corrected
for six. The single rows are Holm-corrected for twenty.
"""

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
from .work import CONTROLS

FOLDER = Path(__file__).parents[1] / "results" / "confirmation"

#: Splits of all seeds into two groups that a permutation test enumerates; beyond them it draws as many.
MOST_SPLITS = 200_000

#: Rows that are planned, and primary tests. A correction counts them also while some are missing.
ROWS, PRIMARY = 20, 6

#: With fewer seeds, an interval says nothing: such a difference is left out.
LEAST_SEEDS = 3

#: What is compared.
PAIRS = (
    ("search", "uniform"),
    *((method, base) for control in CONTROLS for method, base in (("search", control), (control, "uniform"))),
    ("peel", "uniform"),
    ("search", "peel"),
)

#: The data set that the choice was made on; the other one had a part in how sensitivity came up.
CHOICE_DATA = "tiny-imagenet-32"

Row = tuple[Any, ...]
"""(data, network, budget, teacher)."""


def analyze(folder: Path) -> None:
    lines = [line for line in read(folder / "train.jsonl") if "error" not in line]
    print_plans(read(folder / "plans.jsonl"))
    rows = {tuple(line[name] for name in ("data", "network", "budget", "teacher")): None for line in lines}
    first = [row for row in rows if row[0] == CHOICE_DATA]
    for data in sorted({row[0] for row in rows}, reverse=True):
        some = sorted(row for row in rows if row[0] == data)
        print_means(lines, some, "search", "uniform", f"{data} alone")
    for method, base in PAIRS:
        print_means(lines, sorted(rows), method, base)
        print_differences(lines, sorted(rows), method, base)
    given = [line for line in lines if "given_top1" in line]
    part = "teachers, the given test images"
    print_means(given, sorted(first), "search", "uniform", part, "given_top1")
    print_differences(given, sorted(first), "search", "uniform", "given_top1", "the given test images")
    for method, base in PAIRS:
        if base == "uniform":
            print_losses(lines, sorted(rows), method)
    for line in read(folder / "train.jsonl"):
        if "error" in line:
            print(f"\nDiverged: {line}")


def print_plans(lines: Sequence[Line]) -> None:
    print("\n## Plans, seconds of the search, factors of groups (over uniform; of PEEL, over its backbone)")
    cells = []
    for line in lines:
        if line["method"] != "uniform":
            factors = ", ".join(f"{group} {factor:.2f}" for group, factor in line["factors"].items())
            names = (line[name] for name in ("data", "network", "budget", "method"))
            cells.append([*names, factors, f"{line['search_seconds']:.0f}", line["note"]])
    table(["data", "network", "budget", "method", "factors", "s", "note"], cells)


def print_means(
    lines: Sequence[Line],
    rows: Sequence[Row],
    method: str,
    base: str,
    part: str = "data sets and teachers",
    field: str = "top1",
) -> None:
    """Mean differences over the rows of a network and budget: search minus uniform are the primary tests."""
    cells: dict[Row, list[tuple[list[float], list[float]]]] = {}
    for row in rows:
        pair = scores(lines, row, method, field), scores(lines, row, base, field)
        if min(map(len, pair)) >= LEAST_SEEDS:
            cells.setdefault((row[1], row[2]), []).append(pair)
    chances = {cell: stratified_p(pairs) for cell, pairs in cells.items()}
    corrected = holm(chances, PRIMARY)
    print(f"\n## {method} minus {base}: means over {part}, 95 % intervals")
    table(
        ["network", "budget", "rows", "difference", "p", "p, Holm"],
        [
            [*cell, str(len(pairs)), mean_difference(pairs), p_text(chances[cell]), p_text(corrected[cell])]
            for cell, pairs in cells.items()
        ],
    )
    every = [pair for pairs in cells.values() for pair in pairs]
    if every:
        print(f"\nMean over {len(every)} rows: {mean_difference(every)} points.")


def mean_difference(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str:
    """The mean of the differences of rows, in points, with its interval (Welch)."""
    mean = statistics.mean(statistics.mean(ours) - statistics.mean(uniform) for ours, uniform in pairs)
    groups = [some for pair in pairs for some in pair]
    errors = [statistics.variance(some) / len(some) / len(pairs) ** 2 for some in groups]
    parts = [error**2 / (len(some) - 1) for error, some in zip(errors, groups, strict=True)]
    freedom = max(1.0, sum(errors) ** 2 / max(sum(parts), 1e-300))
    return f"{100 * mean:+.2f} ± {100 * t_quantile(freedom) * math.sqrt(sum(errors)):.2f}"


def stratified_p(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Two-sided: the fraction of splits of the seeds of every row whose mean difference is as large."""
    rng = np.random.default_rng(0)
    total, observed = np.zeros(MOST_SPLITS), 0.0
    for ours, uniform in pairs:
        everything, size = np.array([*ours, *uniform]), len(ours)
        observed += float(np.mean(ours) - np.mean(uniform))
        chosen = np.argsort(rng.random((MOST_SPLITS, len(everything))), axis=1)[:, :size]
        total += _split_differences(everything, chosen)
    reached = int((np.abs(total) >= abs(observed) - 1e-12).sum())
    return (1 + reached) / (1 + MOST_SPLITS)


def print_differences(
    lines: Sequence[Line],
    rows: Sequence[Row],
    method: str,
    base: str,
    field: str = "top1",
    images: str = "the test images",
) -> None:
    """Differences of top-1. Seeds are not paired: pairing removes no noise."""
    values = {row: (scores(lines, row, method, field), scores(lines, row, base, field)) for row in rows}
    full = {row: pair for row, pair in values.items() if min(map(len, pair)) >= LEAST_SEEDS}
    chances = {row: permutation_p(*pair) for row, pair in full.items()}
    corrected = holm(chances, ROWS)
    cells = []
    for row, (ours, others) in full.items():
        difference, half = welch(ours, others)
        names = [*row[:3], "yes" if row[3] else "no"]
        means = [f"{100 * statistics.mean(some):.2f}" for some in (others, ours)]
        change = f"{100 * difference:+.2f} ± {100 * half:.2f}"
        cells.append([*names, *means, change, p_text(chances[row]), p_text(corrected[row]), str(len(ours))])
    print(f"\n## {method} minus {base}, top-1 on {images}, 95 % intervals (Welch)")
    heads = ["data", "network", "budget", "teacher", base, method, "difference", "p", "p, Holm", "n"]
    table(heads, cells)


def print_losses(lines: Sequence[Line], rows: Sequence[Row], method: str) -> None:
    """A method minus uniform: the losses of the last epoch."""
    print(f"\n## {method} minus uniform, losses of the last epoch, 95 % intervals (Welch)")
    cells = []
    for row in rows:
        changes = []
        for field in ("loss", "train_loss"):
            pair = [scores(lines, row, name, field) for name in (method, "uniform")]
            if min(map(len, pair)) >= LEAST_SEEDS:
                changes.append("{:+.3f} ± {:.3f}".format(*welch(*pair)))
        if changes:
            cells.append([*row[:3], "yes" if row[3] else "no", *changes])
    table(["data", "network", "budget", "teacher", "test", "training"], cells)


def scores(lines: Sequence[Line], row: Row, method: str, field: str = "top1") -> list[float]:
    names = ("data", "network", "budget", "teacher")
    return [
        line[field]
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
    return float((np.abs(_split_differences(everything, chosen)) >= observed).mean())


def _split_differences(
    everything: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """For each split, the mean of the chosen minus that of the others."""
    sums, size = everything[chosen].sum(1), chosen.shape[1]
    differences: np.ndarray[Any, Any] = sums / size - (everything.sum() - sums) / (len(everything) - size)
    return differences


def p_text(chance: float) -> str:
    return "< 0.0001" if chance < 1e-4 else f"{chance:.4f}"


def holm(chances: Mapping[Row, float], family: int) -> dict[Row, float]:
    """Corrected for so many tests, step by step from the smallest."""
    corrected, largest = dict[Row, float](), 0.0
    for place, row in enumerate(sorted(chances, key=lambda row: chances[row])):
        largest = max(largest, min(1.0, (family - place) * chances[row]))
        corrected[row] = largest
    return corrected

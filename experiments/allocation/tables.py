"""The tables of `analyze`: differences to uniform, worths of groups, predictions of long trainings.

All losses and accuracies are those of the held-out images, from which allocations were also chosen.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .allocations import BALANCED, BUDGETS, NETWORKS, coarse, fine_groups, groups_by_resolution, uniform
from .fit import Groups, fit_loss, predictions, worths
from .results import (
    FOUND,
    HIDDEN,
    LONG,
    RECALIBRATED,
    REPAIRED,
    REPAIRS,
    SHORT,
    Line,
    Score,
    by_allocation,
    mean_scores,
    read,
    schedules,
    seed_noise,
    untrained_losses,
)
from .trial import inner_groups, print_balanced, print_searches

#: Kinds of allocations with other groups than the method's: the first word of their names.
OTHER_GROUPS = ("fine", "kind", "free", "repair")

#: Left out where predictors are compared: allocations with a free last convolution, plans of searches by
#: trials (they differ between seeds), and the allocations that a predictor has chosen.
NOT_COMPARED = ("free", "trial", FOUND, HIDDEN)

#: Rows of the best and of the worst allocations in a table.
ROWS = 6


def analyze(results: Path) -> None:
    lines = read(results)
    for epochs, name, budget in itertools.product(schedules(lines), NETWORKS, BUDGETS):
        found = by_allocation(lines, name, budget, epochs)
        if "uniform" in found and len(found) > 1:
            print(f"\n## {name}, {budget}, {epochs} epochs: {len(found) - 1} allocations beside uniform\n")
            print_summary(lines, name, budget, epochs)
            print_allocations(lines, name, budget, epochs)
            print_worths(lines, name, budget, epochs)
    print_gains(lines)
    if len(schedules(lines)) > 1:
        print_prediction(lines, read(REPAIRS))
    for epochs, name, budget in itertools.product(schedules(lines), NETWORKS, BUDGETS):
        print_searches(lines, name, budget, epochs)
        print_balanced(lines, name, budget, epochs)


def print_summary(lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    """Uniform, the noise, the spread over allocations, and what the best of them would be by luck alone."""
    found = by_allocation(lines, name, budget, epochs)
    for field, unit in (("loss", -1.0), ("top1", 100.0)):
        deviation, freedom = seed_noise(lines, name, epochs, field)
        noise = abs(unit) * deviation
        base = [unit * line[field] for line in found["uniform"]]
        zero = statistics.mean(base)
        text = f"uniform {abs(zero):.4f}, deviation {statistics.stdev(base):.4f} over {len(base)} seeds"
        print(f"- {field}: {text}; {noise:.4f} over all ({freedom} degrees of freedom)")
        alone = [some[0] for one, some in found.items() if len(some) == 1 and not one.startswith(BALANCED)]
        once = [unit * line[field] for line in alone if line["allocation"] != "uniform"]
        if len(once) < 6:
            continue
        variance = statistics.variance(once)
        luck, true = noise * expected_maximum(len(once)), max(0.0, 1 - noise**2 / variance)
        text = f"deviation {math.sqrt(variance):.4f}, {true:.0%} of the variance is not noise"
        print(f"  - {len(once)} allocations of one seed: {text};")
        print(f"    the best is {max(once) - zero:+.4f} from uniform, by luck alone {luck:+.4f}")


def expected_maximum(count: int) -> float:
    """The mean of the largest of so many standard normal numbers."""
    drawn = np.random.default_rng(0).standard_normal((4000, count))
    return float(drawn.max(1).mean())


def print_allocations(lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    """The best and the worst allocations, with their differences to uniform."""
    scores = mean_scores(lines, name, budget, epochs)
    zero = scores["uniform"]
    noises = {field: seed_noise(lines, name, epochs, field) for field in ("loss", "top1")}
    ranked = sorted(scores, key=lambda allocation: scores[allocation].loss)
    hidden = set(ranked[ROWS:-ROWS]) - {"uniform"} if len(ranked) > 2 * ROWS + 2 else set()
    print(
        "\n| allocation | seeds | loss - uniform (95 %) | top-1 - uniform, points (95 %) |\n|---|---|---|---|"
    )
    for allocation in (one for one in ranked if one not in hidden):
        score = scores[allocation]
        texts = []
        for field, unit, digits in (("loss", 1, 3), ("top1", 100, 2)):
            noise, freedom = noises[field]
            gain = unit * (getattr(score, field) - getattr(zero, field))
            half = unit * t_quantile(freedom) * noise * math.sqrt(1 / score.seeds + 1 / zero.seeds)
            texts.append(f"{gain:+.{digits}f} ± {half:.{digits}f}" if allocation != "uniform" else "")
        print(f"| {allocation} | {score.seeds} | {texts[0]} | {texts[1]} |")
    if hidden:
        print(f"\n{len(hidden)} others lie between.")


def print_gains(lines: Sequence[Line]) -> None:
    """Long trainings minus uniform, with at least three seeds of each."""
    fields = [("top1", 100, 2), ("copies_top1", 100, 2), ("loss", 1, 3), ("train_loss", 1, 3)]
    print(f"\n## {LONG} epochs minus uniform (95 %, Welch)\n")
    print(f"| network, budget | allocation | seeds, uniform | {' | '.join(field for field, *_ in fields)} |")
    print("|---" * (3 + len(fields)) + "|")
    for name, budget in itertools.product(NETWORKS, BUDGETS):
        found = by_allocation(lines, name, budget, LONG)
        base = found.pop("uniform", [])
        for allocation, some in found.items():
            if min(len(some), len(base)) < 3:
                continue
            texts = []
            for field, unit, digits in fields:
                known = all(field in line for line in (*some, *base))
                both = ([unit * line[field] for line in rows] for rows in (some, base)) if known else None
                texts.append("" if both is None else "{:+.{d}f} ± {:.{d}f}".format(*gain(*both), d=digits))
            counts = f"{len(some)}, {len(base)}"
            print(f"| {name}, {budget} | {allocation} | {counts} | {' | '.join(texts)} |")


def gain(some: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The difference of the means, and half of its 95 % interval (Welch: each has its own variance)."""
    parts = [statistics.variance(values) / len(values) for values in (some, base)]
    squares = [part**2 / (len(values) - 1) for part, values in zip(parts, (some, base), strict=True)]
    half = t_quantile(sum(parts) ** 2 / sum(squares)) * math.sqrt(sum(parts))
    return statistics.mean(some) - statistics.mean(base), half


def t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t, by the first terms of its expansion around the normal one."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def print_worths(lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    """Which groups deserve more: their worth over their cost."""
    every = [line for some in by_allocation(lines, name, budget, epochs).values() for line in some]
    other = [line for line in every if line["allocation"].split()[0] in OTHER_GROUPS]
    fits: list[tuple[Any, list[Line]]] = [
        (groups_by_resolution(name), [line for line in every if line not in other])
    ]
    if other:
        fits.append((fine_groups(name), every))
    for groups, rows in fits:
        print_fit(groups, rows)


def print_fit(groups: Groups, rows: Sequence[Line]) -> None:
    """The fit of some losses of one network and budget, if there are enough allocations."""
    if len({line["allocation"] for line in rows}) < 2 * len(groups):
        return
    base = uniform(rows[0]["network"], rows[0]["budget"])
    fit = fit_loss(groups, rows, base.widths)
    part = f"{fit.explained:.0%} of what was left out"
    print(f"\nFit of {len(rows)} losses, power {fit.power:g}; explains {part}.\n")
    print("| group | part of the cost | part of the worth | worth over cost (95 %) |\n|---|---|---|---|")
    for group, cost, worth, low, high in worths(groups, rows, base):
        print(f"| {group} | {cost:.2f} | {worth:.2f} | {worth / cost:.2f} ({low:.2f} to {high:.2f}) |")


Predictor = Mapping[str, Score]
"""Allocation -> its predicted scores. Only their order matters."""


def print_prediction(lines: Sequence[Line], repairs: Sequence[Line]) -> None:
    """How well predictors rank allocations as trainings do."""
    print("\n## Predictors: rank correlations with trainings (95 %)\n")
    print("| network, budget | epochs | by | allocations | of losses | of top-1 |\n|---|---|---|---|---|---|")
    for epochs, name, budget in itertools.product(schedules(lines), NETWORKS, BUDGETS):
        if epochs < SHORT:
            continue
        trained = {
            one: score
            for one, score in mean_scores(lines, name, budget, epochs).items()
            if not one.startswith(NOT_COMPARED)
        }
        predictors = untrained(lines, repairs, name, budget)
        if epochs > SHORT:
            predictors |= by_short_trainings(lines, name, budget, trained)
        sets = [trained.keys() & predictor.keys() for predictor in predictors.values()]
        for allocations in sorted({tuple(sorted(some)) for some in sets if len(some) >= 5}, key=len):
            for label, predictor in predictors.items():
                if predictor.keys() >= set(allocations):
                    texts = correlations(predictor, trained, allocations)
                    print(f"| {name}, {budget} | {epochs} | {label} | {len(allocations)} | {texts} |")
    print_costs(repairs)
    for name, budget in itertools.product(NETWORKS, BUDGETS):
        known = {one.allocation for one in coarse(name, budget)}
        cell = REPAIRED, name, budget
        alike = [line for line in repairs if (line["predictor"], line["network"], line["budget"]) == cell]
        print(f"\n{name}, {budget}: losses of repaired networks")
        print_fit(groups_by_resolution(name), [line for line in alike if line["allocation"] in known])
        print_fit(inner_groups(name), [line for line in alike if not line["allocation"].startswith("free")])


def correlations(predictor: Predictor, trained: Mapping[str, Score], allocations: Sequence[str]) -> str:
    pairs = [
        ([getattr(scores[one], field) for one in allocations])
        for field in ("loss", "top1")
        for scores in (predictor, trained)
    ]
    return f"{correlation_text(*pairs[:2])} | {correlation_text(*pairs[2:])}"


def untrained(lines: Sequence[Line], repairs: Sequence[Line], name: str, budget: str) -> dict[str, Predictor]:
    """Predictors that train no allocation. The number of parameters is a control."""
    predictors: dict[str, Predictor] = {}
    for label in (REPAIRED, RECALIBRATED):
        losses = untrained_losses(repairs, label, name, budget)
        predictors[label] = {one: Score(loss, -loss, 0) for one, loss in losses.items()}
    sizes = {
        line["allocation"]: line["params"]
        for line in lines
        if (line["network"], line["budget"]) == (name, budget)
    }
    return predictors | {"parameters": {one: Score(-size, size, 0) for one, size in sizes.items()}}


def by_short_trainings(
    lines: Sequence[Line], name: str, budget: str, trained: Mapping[str, Score]
) -> dict[str, Predictor]:
    short = mean_scores(lines, name, budget, SHORT)
    known = {one.allocation: one.widths for one in coarse(name, budget)}
    widths = {one: known[one] for one in sorted(short.keys() & trained.keys() & known.keys())}
    if len(widths) < 5:
        return {}
    predicted = zip(widths, predictions(lines, name, budget, SHORT, widths), strict=True)
    by_fit = {one: Score(loss, -loss, 0) for one, loss in predicted}
    return {
        "its short training": {one: short[one] for one in widths},
        "fit of the others' short trainings": by_fit,
    }


def print_costs(repairs: Sequence[Line]) -> None:
    """Seconds of a score, and what repair gives without training."""
    print(
        "\n| network, budget | cut | seconds, median | uniform: loss | top-1 | agreement of two originals |"
    )
    print("|---|---|---|---|---|---|")
    for name, budget, label in itertools.product(NETWORKS, BUDGETS, (RECALIBRATED, REPAIRED)):
        cell = label, name, budget
        some = [line for line in repairs if (line["predictor"], line["network"], line["budget"]) == cell]
        if not some:
            continue
        seconds = statistics.median(line["seconds"] for line in some)
        base = [line for line in some if line["allocation"] == "uniform"]
        loss, top1 = (statistics.mean(line[field] for line in base) for field in ("loss", "top1"))
        first, second = (
            {line["allocation"]: line["loss"] for line in some if line["original"] == seed} for seed in (0, 1)
        )
        both = sorted(first.keys() & second.keys())
        agreement = rank_correlation(
            np.array([first[one] for one in both]), np.array([second[one] for one in both])
        )
        print(f"| {name}, {budget} | {label} | {seconds:.2f} | {loss:.3f} | {top1:.1%} | {agreement:.2f} |")


def correlation_text(first: Sequence[float], second: Sequence[float]) -> str:
    """The rank correlation with its 95 % bootstrap interval over allocations."""
    a, b = np.asarray(first), np.asarray(second)
    rng = np.random.default_rng(0)
    drawn = [rank_correlation(a[some], b[some]) for some in rng.integers(0, len(a), (4000, len(a)))]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return f"{rank_correlation(a, b):.2f} ({low:.2f} to {high:.2f})"


def rank_correlation(first: Any, second: Any) -> float:
    """Spearman's; NaN where all values are equal."""
    a, b = (
        (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2
        for values in (first, second)
    )
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else math.nan

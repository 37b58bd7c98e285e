"""The picture: the map of short trainings, how their fit predicts long ones, and what groups are worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .allocations import BUDGETS, NETWORKS, coarse, groups_by_resolution, uniform
from .fit import predictions, worths
from .results import (
    FAN_OUT,
    FOUND,
    HIDDEN,
    LONG,
    REPAIRED,
    REPAIRS,
    SEARCHED_TRAINED,
    SHORT,
    Line,
    by_allocation,
    mean_scores,
    read,
    seed_noise,
    untrained_losses,
)
from .tables import OTHER_GROUPS, correlation_text, gain

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "allocation.png"

#: Long trainings that are compared with uniform in the second picture: network, budget, allocation, label.
GAINS = (
    (NETWORKS[0], "10%", "fitted", "best point of the fit"),
    (NETWORKS[0], "10%", FOUND, "search with repaired networks"),
    (NETWORKS[0], "10%", HIDDEN, "the same, hidden channels only"),
    (NETWORKS[0], "10%", "trial-4", "searches by trials"),
    (NETWORKS[0], "10%", "4x4/0.5", "all to the last group"),
    (NETWORKS[0], "25%", "fitted", "best point of the fit"),
    (NETWORKS[0], "25%", FOUND, "search with repaired networks"),
    (NETWORKS[0], "25%", HIDDEN, "the same, hidden channels only"),
    (NETWORKS[1], "10%", "fine fitted", "best point, finer groups"),
    (NETWORKS[1], "10%", FOUND, "search with repaired networks"),
    (NETWORKS[1], "10%", "fine trial-8", "search by balanced trials"),
    (NETWORKS[1], "25%", FOUND, "search with repaired networks"),
)

#: The same for the picture of the results: plans of the search, with the initial weights of the package.
SEARCH_GAINS = tuple(
    (name, budget, *row)
    for (name, budget), best in zip(
        itertools.product(NETWORKS, BUDGETS), ("fitted", "fitted", "fine fitted", "fine ratios"), strict=True
    )
    for row in (
        (HIDDEN, "one factor a group, experiment"),
        ("search", "one factor a group, package"),
        ("search divided", "divided by sensitivity, package"),
        (best, "best point of many trainings"),
    )
)

COLORS = {
    "uniform": "black",
    "fitted": "magenta",
    "0.5": "tab:blue",
    "0.3": "tab:orange",
    "finer groups": "tab:green",
}


def color_of(allocation: str) -> str:
    """By its lambda, or its own."""
    if allocation.split()[0] in OTHER_GROUPS:
        return COLORS["finer groups"]
    return COLORS[allocation if allocation in COLORS else allocation.rpartition("/")[2]]


def plot(results: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines, repairs = read(results), read(REPAIRS)
    figure, axes = plt.subplots(3, 4, figsize=(15, 11), constrained_layout=True)
    for column, (name, budget) in zip(axes.T, itertools.product(NETWORKS, BUDGETS), strict=True):
        draw_map(column[0], lines, name, budget, SHORT)
        draw_repaired(column[2], lines, repairs, name, budget)
    for name, (left, right) in zip(NETWORKS, (axes[1, :2], axes[1, 2:]), strict=True):
        draw_prediction(left, lines, name, BUDGETS[0], SHORT, LONG)
        draw_worths(right, lines, name)
    handles = [
        plt.Line2D([], [], color=color, marker="o", linestyle="", label=kind)
        for kind, color in COLORS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), title="lambda", fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, field, unit in zip(axes, ("top1", "loss"), (100, 1), strict=True):
        draw_gains(axis, lines, GAINS, field, unit)
    figure.savefig(picture.with_stem(picture.stem + "-gains"), dpi=80)
    first = [line for line in lines if line["network"] == NETWORKS[0]]
    lines = [*first, *read(FAN_OUT), *read(SEARCHED_TRAINED)]
    figure, axes = plt.subplots(1, 2, figsize=(10, 5), sharey=True, layout="constrained")
    for axis, field, unit in zip(axes, ("top1", "loss"), (100, 1), strict=True):
        draw_gains(axis, lines, SEARCH_GAINS, field, unit)
    figure.savefig(picture.with_stem("search-gains"), dpi=80)


def draw_gains(
    axis: Any, lines: Sequence[Line], rows: Sequence[tuple[str, str, str, str]], field: str, unit: float
) -> None:
    """Long trainings minus uniform, with 95 % intervals; each dot is one seed minus the mean of uniform."""
    labels = []
    for place, (name, budget, allocation, text) in enumerate(rows):
        found = by_allocation(lines, name, budget, LONG)
        some, base = ([unit * line[field] for line in found[one]] for one in (allocation, "uniform"))
        center, half = gain(some, base)
        axis.scatter([value - sum(base) / len(base) for value in some], [place] * len(some), s=8, c="0.7")
        axis.errorbar(center, place, xerr=half, fmt="o", markersize=5, color=f"C{NETWORKS.index(name)}")
        labels.append(f"{name.removeprefix('cifar_')}, {budget}: {text} ({len(some)})")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.locator_params(axis="x", nbins=5)
    if field == "top1":
        axis.invert_yaxis()
    axis.set_xlabel(
        "top-1 minus uniform, points" if field == "top1" else "held-out loss minus uniform", fontsize=8
    )


def draw_map(axis: Any, lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    """All allocations, ranked by their loss."""
    known = {one.allocation for one in coarse(name, budget)}
    scores = {one: score for one, score in mean_scores(lines, name, budget, epochs).items() if one in known}
    ranked = sorted(scores, key=lambda allocation: scores[allocation].loss)
    zero, noise = scores["uniform"].loss, seed_noise(lines, name, epochs, "loss")[0]
    axis.axhspan(-2 * noise, 2 * noise, color="0.9")
    axis.axhline(0, color="black", linewidth=0.8)
    values = [scores[allocation].loss - zero for allocation in ranked]
    axis.scatter(range(len(ranked)), values, c=[color_of(one) for one in ranked], s=18, zorder=3)
    for place in (0, len(ranked) - 3, len(ranked) - 2, len(ranked) - 1):
        side, shift = ("left", 6) if place == 0 else ("right", -6)
        label, point = ranked[place], (place, values[place])
        axis.annotate(label, point, fontsize=7, ha=side, xytext=(shift, -3), textcoords="offset points")
    axis.set_title(f"{name}, {budget}, {epochs} epochs", fontsize=9)
    axis.set_xlabel("rank (gray: two deviations over seeds)", fontsize=8)
    axis.set_ylabel("held-out loss minus uniform", fontsize=8)


def draw_prediction(axis: Any, lines: Sequence[Line], name: str, budget: str, short: int, long: int) -> None:
    """Accuracies of long trainings over the loss that the fit of the other short trainings predicts."""
    scores = mean_scores(lines, name, budget, long)
    found = by_allocation(lines, name, budget, long)
    known = {one.allocation for one in coarse(name, budget)} | {"fitted"}
    widths = {one: some[0]["widths"] for one, some in found.items() if one in known}
    predicted = dict(zip(widths, predictions(lines, name, budget, short, widths), strict=True))
    noise = seed_noise(lines, name, long, "top1")[0]
    axis.axhline(0, color="black", linewidth=0.8)
    for one, loss in predicted.items():
        x, y = loss - predicted["uniform"], 100 * (scores[one].top1 - scores["uniform"].top1)
        half = 100 * noise / math.sqrt(scores[one].seeds)
        axis.errorbar(x, y, half, fmt="o", markersize=5, color=color_of(one), elinewidth=0.8)
        axis.annotate(one, (x, y), fontsize=6, xytext=(5, 2), textcoords="offset points")
    judged = [one for one in predicted if one != "fitted"]
    text = correlation_text([predicted[one] for one in judged], [-scores[one].top1 for one in judged])
    axis.set_title(f"{name.removeprefix('cifar_')}, {budget}: rank correlation {text}", fontsize=8)
    axis.margins(x=0.15)
    axis.set_xlabel(f"loss minus uniform, by the fit of {short} epochs", fontsize=8)
    axis.set_ylabel(f"top-1 minus uniform, points, {long} epochs", fontsize=8)


def draw_repaired(axis: Any, lines: Sequence[Line], repairs: Sequence[Line], name: str, budget: str) -> None:
    """Losses after training over the loss of the cut and repaired network, both minus uniform."""
    predicted = untrained_losses(repairs, REPAIRED, name, budget)
    texts = []
    for epochs, marker in ((SHORT, "o"), (LONG, "^")):
        scores = mean_scores(lines, name, budget, epochs)
        shown = [one for one in scores if one in predicted and not one.startswith("free")]
        for one in shown:
            x, y = predicted[one], scores[one].loss - scores["uniform"].loss
            edge = (
                {"facecolors": "none", "edgecolors": color_of(one)}
                if epochs == LONG
                else {"c": color_of(one)}
            )
            axis.scatter(x, y, marker=marker, s=16 if epochs == SHORT else 40, **edge)
        judged = [one for one in shown if one != FOUND]
        if len(judged) >= 5:
            text = correlation_text([predicted[one] for one in judged], [scores[one].loss for one in judged])
            texts.append(f"{epochs} epochs {text}")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_title(
        f"{name.removeprefix('cifar_')}, {budget}: rank correlation\n{', '.join(texts)}", fontsize=8
    )
    axis.set_xlabel("repaired, untrained: loss minus uniform", fontsize=8)
    axis.set_ylabel("trained (dots 8, triangles 24 epochs)", fontsize=8)


def draw_worths(axis: Any, lines: Sequence[Line], name: str) -> None:
    """Worth over cost of the groups by resolution, with intervals."""
    groups = groups_by_resolution(name)
    axis.axhline(1, color="black", linewidth=0.8)
    cells = [(budget, epochs) for epochs in (SHORT, LONG) for budget in BUDGETS]
    names = {one.allocation for one in coarse(name, BUDGETS[0])} | {"fitted"}
    for shift, (budget, epochs) in enumerate(cells):
        found = by_allocation(lines, name, budget, epochs)
        rows = [line for one, some in found.items() if one in names for line in some]
        if len({line["allocation"] for line in rows}) < 2 * len(groups):
            continue
        for place, one in enumerate(worths(groups, rows, uniform(name, budget))):
            x, ratio = place + 0.2 * shift - 0.3, one.worth / one.cost
            label = f"{budget}, {epochs} epochs" if place == 0 else None
            interval = [[max(0.0, ratio - one.low)], [max(0.0, one.high - ratio)]]
            axis.errorbar(x, ratio, interval, fmt="o", markersize=4, color=f"C{shift}", label=label)
    axis.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axis.set_title(f"{name.removeprefix('cifar_')}: above 1, a group deserves more", fontsize=8)
    axis.set_ylabel("worth over cost", fontsize=8)
    axis.legend(fontsize=7)

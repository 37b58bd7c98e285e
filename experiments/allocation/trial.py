"""Measured importance: the pool is given to one group at a time in short trainings, and a plan follows.

A search trains the uniform network and, for each group, the network with the whole pool in that group, all
with the same short schedule and two seeds. The held-out losses give the worth of each group by the model of
fit.py. The worths are shrunk towards the costs, for which the uniform network is the best one: the more the
losses differ between seeds, the closer the plan stays to uniform. If no worth differs from its cost, the plan
is uniform.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

import peel

from .allocations import (
    BALANCED,
    Candidate,
    candidate,
    coarse,
    fine_groups,
    groups_by_resolution,
    network,
    uniform,
)
from .fit import MAP_SEEDS, Array, Fit, Groups, cost_slope, log_ratios, on_budget, point_with_lowest_loss
from .results import Line, by_allocation

#: Lambda of the trials. A small one tells groups apart best: their widths differ most.
RATIO = 0.3

#: The power of the fit. Five to ten trainings cannot determine it.
POWER = 0.5

#: Standard deviation of worth over cost between groups, before anything is measured.
SPREAD = 0.6

#: A worth differs from its cost if it does so by this many posterior standard deviations.
THRESHOLD = 2.0

#: Seeds of one search.
SEEDS = 2

#: Balanced trials: logarithm of the widths over uniform before all are shifted to the budget, and the signs.
LEVEL = 0.55
FIRST_ROW = np.array([1, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1])


class Importance(NamedTuple):
    """Worth over cost of the groups: 1 where the uniform network gives a group what it deserves."""

    groups: tuple[str, ...]
    ratios: tuple[float, ...]
    deviations: tuple[float, ...]
    """Posterior standard deviations of the ratios."""
    weights: tuple[float, ...]
    """The weights of the fit."""
    noise: float
    """Standard deviation of a loss over seeds."""

    @property
    def told_apart(self) -> bool:
        pairs = zip(self.ratios, self.deviations, strict=True)
        return any(abs(ratio - 1) > THRESHOLD * deviation for ratio, deviation in pairs)


def trials(name: str, budget: str) -> list[Candidate]:
    """Uniform, and the whole pool to each group."""
    groups = network(name).graph.groups
    wanted = ["uniform", *(f"{group}/{RATIO:g}" for group in groups)]
    known = {one.allocation: one for one in coarse(name, budget)}
    return [known[one] for one in wanted]


def importance(
    groups: Groups,
    costs: Sequence[float],
    logs: Array,
    losses: Array,
    noise: float,
    spread: float = SPREAD,
) -> Importance:
    """The posterior of the worths.

    loss = base + sum of cost[g] * (total + extra[g]) * (ratio[g] ** -POWER - 1), where `extra` has the prior
    deviation spread * total. The total is found by iteration, because the prior depends on it.
    """
    cost = np.asarray(costs) / np.sum(costs)
    terms = (np.exp(-POWER * logs) - 1) * cost
    design = np.column_stack([np.ones(len(losses)), terms.sum(1), terms])
    total = 1.0
    for _ in range(100):
        penalty = np.diag([0.0, 0.0, *[(noise / (spread * total)) ** 2] * len(cost)])
        inverse = np.linalg.inv(design.T @ design + penalty)
        solution = inverse @ design.T @ losses
        total, before = max(float(solution[1]), 1e-3), total
        if abs(total - before) < 1e-9:
            break
    drawn = np.random.default_rng(0).multivariate_normal(solution, noise**2 * inverse, 4000)
    worths = np.maximum(solution[1] + solution[2:], 0.0)
    samples = np.maximum(drawn[:, 1:2] + drawn[:, 2:], 0.0)
    ratios = worths / max(float(worths @ cost), 1e-9)
    deviations = (samples / np.maximum(samples @ cost, 1e-9)[:, None]).std(0)
    weights = tuple((worths * cost).tolist())
    return Importance(tuple(groups), tuple(ratios.tolist()), tuple(deviations.tolist()), weights, noise)


def noise_of(lines: Sequence[Line]) -> float:
    """Standard deviation over seeds, pooled over allocations."""
    losses: dict[str, list[float]] = {}
    for line in lines:
        losses.setdefault(line["allocation"], []).append(line["loss"])
    repeated = [some for some in losses.values() if len(some) > 1]
    squares = sum((len(some) - 1) * statistics.variance(some) for some in repeated)
    freedom = sum(len(some) - 1 for some in repeated)
    if freedom == 0:
        raise ValueError("A search needs two trainings of one allocation to know the noise.")
    return math.sqrt(squares / freedom)


def measure_importance(name: str, budget: str, lines: Sequence[Line]) -> Importance:
    groups, base, graph = groups_by_resolution(name), uniform(name, budget), network(name).graph
    costs = [cost_slope(graph, base.widths, set(ties)) for ties in groups.values()]
    logs = np.array([log_ratios(groups, line["widths"], base.widths) for line in lines])
    losses = np.array([line["loss"] for line in lines])
    return importance(groups, costs, logs, losses, noise_of(lines))


def search_lines(
    lines: Sequence[Line], name: str, budget: str, epochs: int, seeds: Sequence[int]
) -> list[Line]:
    """The trials of one search, or an empty list if one is missing."""
    found = by_allocation(lines, name, budget, epochs)
    names = [one.allocation for one in trials(name, budget)]
    chosen = [line for one in names for line in found.get(one, []) if line["seed"] in seeds]
    return chosen if len(chosen) == len(names) * len(seeds) else []


def plans(lines: Sequence[Line], name: str, budget: str, epochs: int, seed: int) -> list[Candidate]:
    """The plan of the search that this seed belongs to: seeds 0 and 1, 2 and 3, and so on."""
    first = seed - seed % SEEDS
    chosen = search_lines(lines, name, budget, epochs, range(first, first + SEEDS))
    if not chosen:
        return []
    return [_plan(name, budget, epochs, tuple((line["allocation"], line["loss"]) for line in chosen))]


@cache
def _plan(name: str, budget: str, epochs: int, losses: tuple[tuple[str, float], ...]) -> Candidate:
    known = {one.allocation: one.widths for one in trials(name, budget)}
    lines = [{"allocation": one, "widths": known[one], "loss": loss} for one, loss in losses]
    return plan(name, budget, f"trial-{epochs}", measure_importance(name, budget, lines))


def plan(name: str, budget: str, allocation: str, measured: Importance) -> Candidate:
    """The best point of the fit, or uniform if the groups cannot be told apart."""
    base, groups = uniform(name, budget), groups_by_resolution(name)
    if not measured.told_apart:
        return candidate(name, budget, allocation, base.widths)
    logs = np.array([log_ratios(groups, one.widths, base.widths) for one in trials(name, budget)])
    limits = np.stack([logs.min(0) / 2, logs.max(0)])
    widths = point_with_lowest_loss(name, budget, groups, Fit(POWER, 0.0, measured.weights, math.nan), limits)
    return candidate(name, budget, allocation, widths)


# Many groups: all of them vary in every training


@cache
def balanced(name: str, budget: str) -> tuple[Candidate, ...]:
    """Eleven allocations in which each finer group is wide in about one half and narrow in the other.

    With uniform as the twelfth, any two groups vary independently of each other (a design of Plackett and
    Burman), so that each worth is measured by all trainings and not by one.
    """
    net, base, groups = network(name), uniform(name, budget), inner_groups(name)
    if not net.freeze:
        return ()
    rows = [np.roll(FIRST_ROW, shift) for shift in range(len(FIRST_ROW))]
    logs = on_budget(name, budget, groups, LEVEL * np.array(rows)[:, : len(groups)])
    found = []
    for i, row in enumerate(logs):
        factors = {tie: math.exp(row[place]) for place, ties in enumerate(groups.values()) for tie in ties}
        ideal = {tie: width * factors.get(tie, 1.0) for tie, width in base.widths.items()}
        widths = peel.round_to_budget(net.graph, ideal, budget, divisor=1, freeze=net.freeze, grow=True)
        found.append(candidate(name, budget, f"{BALANCED}-{i:02d}", widths))
    return tuple(found)


def inner_groups(name: str) -> dict[str, tuple[str, ...]]:
    """The finer groups without the last convolution, which stays as it is."""
    return {group: ties for group, ties in fine_groups(name).items() if group != "last"}


def balanced_plans(lines: Sequence[Line], name: str, budget: str, epochs: int) -> list[Candidate]:
    """The best point of the fit of the balanced trials and the uniform network; empty until all are done.

    It is shrunk, but not put back to uniform if groups cannot be told apart.
    """
    rows = balanced_losses(lines, name, budget, epochs)
    return [_balanced_plan(name, budget, epochs, rows)] if rows else []


def balanced_losses(
    lines: Sequence[Line], name: str, budget: str, epochs: int
) -> tuple[tuple[str, float], ...]:
    """Allocation and loss of the balanced trials and the uniform networks; empty until all are done."""
    found = by_allocation(lines, name, budget, epochs)
    names = ["uniform", *(one.allocation for one in balanced(name, budget))]
    if len(names) == 1 or not found.keys() >= set(names):
        return ()
    chosen = [line for one in names for line in found[one] if line["seed"] < MAP_SEEDS.start]
    return tuple((line["allocation"], line["loss"]) for line in chosen)


@cache
def _balanced_plan(name: str, budget: str, epochs: int, losses: tuple[tuple[str, float], ...]) -> Candidate:
    base, groups = uniform(name, budget), inner_groups(name)
    measured, logs = balanced_importance(name, budget, losses)
    limits = np.stack([logs.min(0) / 2, logs.max(0)])
    fit = Fit(POWER, 0.0, measured.weights, math.nan)
    widths = point_with_lowest_loss(name, budget, groups, fit, limits)
    return candidate(base.network, budget, f"fine trial-{epochs}", widths)


def balanced_importance(
    name: str, budget: str, losses: Sequence[tuple[str, float]]
) -> tuple[Importance, Array]:
    """The importance of the finer groups, and the logarithms of the widths of the trials over uniform."""
    base, groups, graph = uniform(name, budget), inner_groups(name), network(name).graph
    widths = {one.allocation: one.widths for one in (base, *balanced(name, budget))}
    costs = [cost_slope(graph, base.widths, set(ties)) for ties in groups.values()]
    logs = np.array([log_ratios(groups, widths[one], base.widths) for one, _ in losses])
    noise = noise_of([{"allocation": one, "loss": loss} for one, loss in losses])
    return importance(groups, costs, logs, np.array([loss for _, loss in losses]), noise), logs


def print_searches(lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    """A row for each search: worth over cost of the groups, the noise, the ratios of the plan's widths."""
    groups, base = groups_by_resolution(name), uniform(name, budget)
    seeds = sorted({line["seed"] for line in lines if line["epochs"] == epochs})
    rows = []
    for first in range(0, max(seeds, default=-1) + 1, SEEDS):
        chosen = search_lines(lines, name, budget, epochs, range(first, first + SEEDS))
        if chosen:
            [one] = plans(lines, name, budget, epochs, first)
            rows.append(
                (measure_importance(name, budget, chosen), log_ratios(groups, one.widths, base.widths))
            )
    if not rows:
        return
    count = epochs * SEEDS * len(trials(name, budget))
    print(f"\n## Searches by trials: {name}, {budget}, {epochs} epochs each, {count} epochs per search\n")
    heads = " | ".join(groups)
    print(f"| {heads} | noise | told apart | widths of the plan |\n|{'---|' * (len(groups) + 3)}")
    for measured, logs in rows:
        pairs = zip(measured.ratios, measured.deviations, strict=True)
        cells = " | ".join(f"{ratio:.2f} ± {2 * deviation:.2f}" for ratio, deviation in pairs)
        widths = " ".join(f"{math.exp(log):.2f}" for log in logs)
        print(f"| {cells} | {measured.noise:.3f} | {'yes' if measured.told_apart else 'no'} | {widths} |")


def print_balanced(lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    """The search by balanced trials: worth over cost of the finer groups, the ratios of the plan's widths."""
    rows, base, groups = (
        balanced_losses(lines, name, budget, epochs),
        uniform(name, budget),
        inner_groups(name),
    )
    if not rows:
        return
    measured, _ = balanced_importance(name, budget, rows)
    [one] = balanced_plans(lines, name, budget, epochs)
    logs = log_ratios(groups, one.widths, base.widths)
    print(f"\n## Search by balanced trials: {name}, {budget}, {len(rows)} trainings of {epochs} epochs\n")
    print(f"Noise {measured.noise:.3f}; told apart: {'yes' if measured.told_apart else 'no'}.\n")
    print("| group | worth over cost | width of the plan |\n|---|---|---|")
    for values in zip(measured.groups, measured.ratios, measured.deviations, logs, strict=True):
        group, ratio, deviation, log = values
        print(f"| {group} | {ratio:.2f} ± {2 * deviation:.2f} | {math.exp(log):.2f} |")

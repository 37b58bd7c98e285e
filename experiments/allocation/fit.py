"""A smooth fit: the loss is a constant plus, for each group, a term that falls with a power of its width."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import peel
from peel.graph import ChannelGraph

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
from .results import FOUND, HIDDEN, Line, by_allocation

Array = np.ndarray[Any, Any]
Groups = Mapping[str, Sequence[str]]
"""Group -> its ties."""

#: Exponents to choose from.
POWERS = (0.25, 0.5, 1.0, 2.0)

#: Seeds of the long trainings of the map, and the allocation that follows from them with finer groups.
MAP_SEEDS = range(4, 9)
FINE = "fine fitted"


class Fit(NamedTuple):
    """loss = base + sum of weights[group] * ratio[group] ** -power, with ratio = width / uniform width."""

    power: float
    base: float
    weights: tuple[float, ...]
    """One per group, none negative."""
    explained: float
    """Part of the variance over allocations that the fit explains when each is left out once."""

    def predict(self, logs: Array) -> Array:
        return predict(np.array([self.base, *self.weights]), logs, self.power)


def log_ratios(groups: Groups, widths: Mapping[str, int], base: Mapping[str, int]) -> list[float]:
    """For each group, the mean logarithm of its widths over those of the base."""
    return [statistics.mean(math.log(widths[tie] / base[tie]) for tie in ties) for ties in groups.values()]


def solve(logs: Array, loss: Array, power: float) -> Array:
    """Least squares; the lowest negative weight is set to zero until none is negative."""
    columns = np.column_stack([np.ones(len(logs)), np.exp(-power * logs)])
    active = list(range(columns.shape[1]))
    solution = np.zeros(columns.shape[1])
    while True:
        part = np.linalg.lstsq(columns[:, active], loss, rcond=None)[0]
        lowest = min(range(1, len(active)), key=lambda i: part[i], default=None)
        if lowest is None or part[lowest] >= 0:
            solution[active] = part
            return solution
        del active[lowest]


def predict(solution: Array, logs: Array, power: float) -> Array:
    values: Array = solution[0] + np.exp(-power * logs) @ solution[1:]
    return values


class Samples(NamedTuple):
    """Trainings as arrays: log ratios of the groups, losses, names of allocations."""

    logs: Array
    loss: Array
    names: Array


def samples_of(groups: Groups, lines: Sequence[Line], base: Mapping[str, int]) -> Samples:
    logs = [log_ratios(groups, line["widths"], base) for line in lines]
    losses = [line["loss"] for line in lines]
    return Samples(np.array(logs), np.array(losses), np.array([line["allocation"] for line in lines]))


def fit_loss(groups: Groups, lines: Sequence[Line], base: Mapping[str, int]) -> Fit:
    """The fit with the power that best predicts allocations that are left out."""
    logs, loss, names = samples_of(groups, lines, base)
    errors = {}
    for power in POWERS:
        predicted = np.empty(len(loss))
        for name in dict.fromkeys(names.tolist()):
            out = names == name
            predicted[out] = predict(solve(logs[~out], loss[~out], power), logs[out], power)
        errors[power] = float(((predicted - loss) ** 2).mean())
    power = min(errors, key=lambda power: errors[power])
    base_loss, *weights = solve(logs, loss, power).tolist()
    return Fit(power, base_loss, tuple(weights), 1 - errors[power] / float(loss.var()))


def predictions(
    lines: Sequence[Line], name: str, budget: str, epochs: int, widths: Mapping[str, Mapping[str, int]]
) -> list[float]:
    """The loss of each allocation (name -> widths) by the fit of the trainings of all other allocations."""
    found, base = by_allocation(lines, name, budget, epochs), uniform(name, budget).widths
    found = {one: some for one, some in found.items() if not one.startswith(BALANCED)}
    groups = groups_by_resolution(name)
    predicted = []
    for allocation, its_widths in widths.items():
        rest = [line for other, some in found.items() if other != allocation for line in some]
        logs = np.array([log_ratios(groups, its_widths, base)])
        predicted.append(float(fit_loss(groups, rest, base).predict(logs)[0]))
    return predicted


# The best allocation by the fit


def fitted(lines: Sequence[Line], name: str, budget: str, epochs: int) -> list[Candidate]:
    """The best point of the fit of the short trainings; empty until all of them are done."""
    cell = name, budget, "fitted"
    for line in lines:
        if (line["network"], line["budget"], line["allocation"]) == cell:
            return [candidate(*cell, line["widths"])]
    found = by_allocation(lines, name, budget, epochs)
    names = [one.allocation for one in coarse(name, budget)]
    if not found.keys() >= set(names):
        return []
    return [_fitted(name, budget, tuple((one, line["loss"]) for one in names for line in found[one]))]


@cache
def _fitted(name: str, budget: str, losses: tuple[tuple[str, float], ...]) -> Candidate:
    """No group becomes narrower than half of the way, in logarithms, to its narrowest width in a training."""
    groups, base = groups_by_resolution(name), uniform(name, budget)
    widths = {one.allocation: one.widths for one in coarse(name, budget)}
    lines = [{"allocation": one, "widths": widths[one], "loss": loss} for one, loss in losses]
    logs = samples_of(groups, lines, base.widths).logs
    limits = np.stack([logs.min(0) / 2, logs.max(0)])
    fit = fit_loss(groups, lines, base.widths)
    return candidate(name, budget, "fitted", point_with_lowest_loss(name, budget, groups, fit, limits))


def fine_fitted(lines: Sequence[Line], name: str, budget: str, epochs: int) -> list[Candidate]:
    """The best point of the fit with finer groups, from the long trainings of the map."""
    if not network(name).freeze:
        return []
    found = by_allocation(lines, name, budget, epochs)
    chosen = [line for some in found.values() for line in some if line["seed"] in MAP_SEEDS]
    rows = [
        (tuple(line["widths"].items()), line["loss"])
        for line in chosen
        if line["allocation"] not in (FINE, FOUND, HIDDEN)
    ]
    return [_fine_fitted(name, budget, tuple(rows))]


@cache
def _fine_fitted(
    name: str, budget: str, rows: tuple[tuple[tuple[tuple[str, int], ...], float], ...]
) -> Candidate:
    """The last convolution stays as it is."""
    groups, base = fine_groups(name), uniform(name, budget)
    lines = [{"allocation": str(widths), "widths": dict(widths), "loss": loss} for widths, loss in rows]
    logs = samples_of(groups, lines, base.widths).logs
    limits = np.stack([logs.min(0) / 2, logs.max(0)])
    limits[:, list(groups).index("last")] = 0.0
    fit = fit_loss(groups, lines, base.widths)
    return candidate(name, budget, FINE, point_with_lowest_loss(name, budget, groups, fit, limits))


def on_budget(name: str, budget: str, groups: Groups, logs: Array) -> Array:
    """Each row of log ratios, shifted by one number so that it spends the budget."""
    no_limit = np.full(logs.shape[1], math.inf)
    return shifted(logs, cost_function(name, budget, groups), -no_limit, no_limit)


def widths_at(name: str, budget: str, groups: Groups, logs: Array) -> dict[str, int]:
    """Widths at log ratios of the groups, rounded to the budget."""
    net, base = network(name), uniform(name, budget)
    factors = {tie: math.exp(logs[place]) for place, ties in enumerate(groups.values()) for tie in ties}
    ideal = {tie: max(1.0, width * factors.get(tie, 1.0)) for tie, width in base.widths.items()}
    return dict(peel.round_to_budget(net.graph, ideal, budget, divisor=1, freeze=net.freeze, grow=True))


def point_with_lowest_loss(name: str, budget: str, groups: Groups, fit: Fit, limits: Array) -> dict[str, int]:
    """The widths at the best point of the fit, rounded to the budget."""
    net, base = network(name), uniform(name, budget)
    place = {tie: i for i, ties in enumerate(groups.values()) for tie in ties}
    best = best_point(fit, cost_function(name, budget, groups), limits)
    factors = {tie: math.exp(best[place[tie]]) if tie in place else 1.0 for tie in net.graph.widths}
    ideal = {tie: base.widths[tie] * factor for tie, factor in factors.items()}
    return dict(peel.round_to_budget(net.graph, ideal, budget, divisor=1, freeze=net.freeze, grow=True))


def cost_function(name: str, budget: str, groups: Groups) -> Callable[[Array], Array]:
    """A function from rows of log ratios to costs over the budget. A tie of no group keeps its width."""
    graph, base = network(name).graph, uniform(name, budget)
    place = {tie: i for i, ties in enumerate(groups.values()) for tie in ties}
    units = {tie: base.widths[tie] / graph.steps[tie] for tie in graph.widths}
    target = peel.parse_budget(budget, graph.macs())

    def cost(logs: Array) -> Array:
        columns = []
        for tie, count in units.items():
            factor = np.exp(logs[:, place[tie]]) if tie in place else np.ones(len(logs))
            columns.append(count * factor)
        spent: Any = graph.mac_cost.total(columns)
        over: Array = spent / target
        return over

    return cost


def best_point(
    fit: Fit, cost: Callable[[Array], Array], limits: Array, rounds: int = 60, count: int = 400
) -> Array:
    """The log ratios with the lowest fitted loss and a cost of at most 1, by the cross-entropy method."""
    rng = np.random.default_rng(0)
    mean, spread = np.zeros(len(fit.weights)), np.full(len(fit.weights), 0.3)
    low, high = limits
    for _ in range(rounds):
        drawn = mean + spread * rng.standard_normal((count, len(mean)))
        logs = shifted(drawn, cost, low, high)
        loss = np.where(cost(logs) <= 1, fit.predict(logs), np.inf)
        best = logs[np.argsort(loss)[: count // 10]]
        mean, spread = best.mean(0), best.std(0) + 1e-3
    result: Array = best[0]
    return result


def shifted(logs: Array, cost: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Each row shifted by the number that spends the budget, found by bisection, within the limits."""
    below, above = np.full(len(logs), -3.0), np.full(len(logs), 3.0)
    for _ in range(30):
        middle = (below + above) / 2
        fits = cost(np.clip(logs + middle[:, None], low, high)) <= 1
        below, above = np.where(fits, middle, below), np.where(fits, above, middle)
    result: Array = np.clip(logs + below[:, None], low, high)
    return result


# What a group is worth


class Worth(NamedTuple):
    """What a group costs and is worth at the uniform network, each as a part of the sum over all groups."""

    group: str
    cost: float
    """Growth of the MACs with the logarithm of its widths."""
    worth: float
    """Fall of the fitted loss with the logarithm of its widths. At the best allocation it equals the cost."""
    low: float
    high: float
    """95 % bootstrap interval, over allocations, of worth over cost."""


def worths(groups: Groups, lines: Sequence[Line], base: Candidate) -> list[Worth]:
    graph = network(base.network).graph
    costs = np.array([cost_slope(graph, base.widths, set(ties)) for ties in groups.values()])
    costs /= costs.sum()
    logs, loss, names = samples_of(groups, lines, base.widths)
    fit = fit_loss(groups, lines, base.widths)
    worth = np.array(fit.weights) / sum(fit.weights)
    rng = np.random.default_rng(0)
    allocations = sorted(set(names.tolist()))
    ratios = []
    for _ in range(400):
        drawn = rng.choice(allocations, len(allocations))
        rows = np.concatenate([np.flatnonzero(names == name) for name in drawn])
        weights = solve(logs[rows], loss[rows], fit.power)[1:]
        ratios.append(weights / weights.sum() / costs)
    low, high = np.percentile(ratios, [2.5, 97.5], axis=0)
    return [Worth(*row) for row in zip(groups, costs, worth, low, high, strict=True)]


def cost_slope(graph: ChannelGraph, widths: Mapping[str, int], ties: set[str], step: float = 1e-4) -> float:
    """Growth of the MACs with the logarithm of these widths."""

    def macs(factor: float) -> float:
        units = {tie: widths[tie] / graph.steps[tie] for tie in graph.widths}
        return float(graph.mac_cost.total([n * factor if tie in ties else n for tie, n in units.items()]))

    return (macs(1 + step) - macs(1)) / step

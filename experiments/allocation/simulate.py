"""Which trials find a good allocation: searches simulated from the fit of the short trainings of the map.

The truth is the fit of a bootstrap sample of the map, so that it is as uncertain as the map is. The loss of a
trial is what the truth says plus the noise over seeds. The win of a search is the loss that its plan saves by
the truth. `best` is the win of a plan that knows the truth.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import trial
from .allocations import BUDGETS, NETWORKS, coarse, groups_by_resolution, network, uniform
from .fit import Array, Fit, best_point, cost_function, cost_slope, log_ratios, predict, samples_of, solve
from .results import SHORT, Line, by_allocation, read

#: Noise over seeds of a short training: deviation of the map around its fit.
NOISE = {"cifar_resnet18": 0.0185, "cifar_mobilenet_v2": 0.067}

SEARCHES = 24


def simulate(results: Path) -> None:
    lines = read(results)
    print(
        "| network, budget | lambda | trainings | spread | win | best | tenth percentile | loses |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, budget in itertools.product(NETWORKS, BUDGETS):
        for ratio, repeats, spread in itertools.product((0.5, 0.3), (1, 2), (0.3, 0.6, 100.0)):
            wins, best = simulated_wins(lines, name, budget, ratio, repeats, spread)
            low, loses = np.percentile(wins, 10), np.mean(np.array(wins) < 0)
            count = repeats * (1 + len(network(name).graph.groups))
            start = f"| {name}, {budget} | {ratio:g} | {count} | {spread:g}"
            print(f"{start} | {np.mean(wins):+.4f} | {np.mean(best):+.4f} | {low:+.4f} | {loses:.0%} |")


def simulated_wins(
    lines: Sequence[Line], name: str, budget: str, ratio: float, repeats: int, spread: float
) -> tuple[list[float], list[float]]:
    """What each search wins, and what could be won."""
    groups, base, graph = groups_by_resolution(name), uniform(name, budget), network(name).graph
    names = {one.allocation: one.widths for one in coarse(name, budget)}
    found = by_allocation(lines, name, budget, SHORT)
    logs, loss, _ = samples_of(groups, [line for one in names for line in found[one]], base.widths)
    wanted = ["uniform", *(f"{group}/{ratio:g}" for group in groups)] * repeats
    trials = np.array([log_ratios(groups, names[one], base.widths) for one in wanted])
    costs = [cost_slope(graph, base.widths, set(ties)) for ties in groups.values()]
    rng, zero = np.random.default_rng(0), np.zeros((1, len(groups)))

    def win(truth: Array, weights: tuple[float, ...]) -> float:
        fit = Fit(trial.POWER, 0.0, weights, 0.0)
        limits = np.stack([np.full(len(groups), np.log(0.55)), np.full(len(groups), np.log(2.0))])
        point = best_point(fit, cost_function(name, budget, groups), limits, rounds=20, count=150)
        before, after = (predict(truth, one, trial.POWER) for one in (zero, point[None]))
        return float(before[0] - after[0])

    wins, best = [], []
    for _ in range(SEARCHES):
        rows = rng.integers(0, len(loss), len(loss))
        truth = solve(logs[rows], loss[rows], trial.POWER)
        seen = predict(truth, trials, trial.POWER) + NOISE[name] * rng.standard_normal(len(trials))
        measured = trial.importance(groups, costs, trials, seen, NOISE[name], spread)
        wins.append(win(truth, measured.weights))
        best.append(win(truth, tuple(truth[1:].tolist())))
    return wins, best

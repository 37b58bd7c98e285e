"""Widths that meet a budget: the uniform network, and the rounding that every plan uses.

The promise of every function here: never above the budget, and so close below it that no tie could take one more step that
costs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from math import floor, lcm, prod
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import BudgetError, did_you_mean
from .budget import RESOURCES, Budget, format_count, parse_budget
from .widths import Widths

__all__ = ["cost_of", "resolve_budget", "round_to_budget", "uniform"]

#: The part of the budget that may be left over where smaller steps could use it.
GAP = 1e-3

#: Ways of rounding that are tried where nothing else helps.
MANY = 3**12

Cost = Callable[[Sequence[float]], float]
"""Units of the ties -> cost. Exact on whole units, continuous between them."""


@runtime_checkable
class Costed(Protocol):
    """What rounding needs of a `ChannelGraph`."""

    @property
    def widths(self) -> Widths: ...
    @property
    def steps(self) -> Mapping[str, int]: ...
    def units(self, widths: Mapping[str, int] | None = None) -> list[int]: ...
    def cost(self, resource: str) -> Cost: ...


def cost_of(graph: Costed, resource: str) -> Cost:
    """The cost function of a resource, in units of the ties."""
    if not isinstance(graph, Costed):
        raise BudgetError(
            f"the first argument is a ChannelGraph from peel.trace, not a {type(graph).__name__}."
        )
    if resource not in RESOURCES:
        known = ", ".join(RESOURCES)
        raise BudgetError(
            f"unknown resource {resource!r}; known are {known}.{did_you_mean(str(resource), RESOURCES)}"
        )
    return graph.cost(resource)


def resolve_budget(graph: Costed, budget: Budget, resource: str = "macs") -> int:
    """The budget as a whole number of the resource."""
    return parse_budget(budget, int(cost_of(graph, resource)(graph.units())))


def uniform(
    graph: Costed,
    budget: Budget,
    *,
    resource: str = "macs",
    divisor: int = 1,
    freeze: Iterable[str] = (),
    max_width: float | None = 1.0,
) -> Widths:
    """One factor for all ties, chosen so that the network meets the budget.

    `budget` is `"1.1G"`, `"87M"`, `"50%"`, a fraction or a whole number. Widths are multiples of `divisor`; ties in `hold` keep
    their width (the last convolution of MobileNetV2 is one that the literature holds). No tie grows beyond `cap` times its
    original width; `cap=None` lifts that.

    >>> peel.uniform(graph, "50%")
    Widths(conv1=45, layer1.0.conv1=45, ...)
    """
    cost = cost_of(graph, resource)
    target = resolve_budget(graph, budget, resource)
    ladder = _Ladder(graph, divisor, freeze, max_width)
    original = graph.units()
    _check_reachable(ladder, cost, target, resource)

    def ideal(factor: float) -> list[float]:
        return ladder.clamp([units * factor for units in original])

    low, high = 0.0, 1.0
    while high < 2**40 and cost(ideal(high)) < target:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(ideal(middle)) <= target else (low, middle)
    return _widths(graph, _exchange(ladder, ideal(low), cost, target))


def round_to_budget(
    graph: Costed,
    ideal: Mapping[str, float],
    budget: Budget,
    *,
    resource: str = "macs",
    divisor: int = 1,
    at_least: Mapping[str, int] | None = None,
    freeze: Iterable[str] = (),
    max_width: float | None = None,
) -> Widths:
    """Whole widths near the ideal ones: none below `at_least`, together never above the budget, and close to it.

    Ties in `hold` keep their width: the one in `at_least`, or the original one.
    """
    cost = cost_of(graph, resource)
    target = resolve_budget(graph, budget, resource)
    ladder = _Ladder(graph, divisor, freeze, max_width, at_least)
    _check_reachable(ladder, cost, target, resource)
    units = [ideal[name] / step for name, step in graph.steps.items()]
    return _widths(graph, _exchange(ladder, ladder.clamp(units), cost, target))


class _Ladder:
    """The widths that each tie may take, in units: from `bottom` to `top` in steps of `quantum`."""

    def __init__(
        self,
        graph: Costed,
        divisor: int,
        freeze: Iterable[str],
        max_width: float | None,
        at_least: Mapping[str, int] | None = None,
    ) -> None:
        if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor < 1:
            raise BudgetError(f"divisor must be a whole number of at least 1, not {divisor!r}.")
        if max_width is not None and not max_width > 0:
            raise BudgetError(f"max_width must be positive or None, not {max_width!r}.")
        held = {freeze} if isinstance(freeze, str) else set(freeze)
        for name in held - set(graph.widths):
            raise BudgetError(f"hold: no free tie is called {name!r}.{did_you_mean(name, graph.widths)}")
        floor_units = graph.units(at_least) if at_least is not None else None
        self.quantum: list[int] = []
        self.bottom: list[int] = []
        self.top: list[float] = []
        for i, (name, width) in enumerate(graph.widths.items()):
            step = graph.steps[name]
            units = width // step
            quantum = lcm(step, divisor) // step
            top = float("inf") if max_width is None else floor(max_width * units / quantum + 1e-9) * quantum
            bottom = quantum
            if floor_units is not None:
                bottom = max(bottom, -(-floor_units[i] // quantum) * quantum)
            if name in held or top < bottom:
                # Too narrow for the divisor, or to be held: the original width is the only one.
                bottom = top = units if floor_units is None else floor_units[i]
            self.quantum.append(quantum)
            self.bottom.append(bottom)
            self.top.append(top)

    def clamp(self, units: Sequence[float]) -> list[float]:
        return [min(max(u, low), high) for u, low, high in zip(units, self.bottom, self.top, strict=True)]

    def floor(self, units: Sequence[float]) -> list[int]:
        return [
            min(max(bottom, floor(u / quantum + 1e-9) * quantum), int(min(top, 2**62)))
            for u, quantum, bottom, top in zip(units, self.quantum, self.bottom, self.top, strict=True)
        ]


def _check_reachable(ladder: _Ladder, cost: Cost, target: int, resource: str) -> None:
    smallest = int(cost(ladder.bottom))
    if target < smallest:
        raise BudgetError(
            f"a budget of {format_count(target)} {resource} cannot be reached: the smallest network has "
            f"{format_count(smallest)} ({smallest:,}){' at multiples of the divisor' if max(ladder.quantum) > 1 else ''}."
        )
    if all(top < float("inf") for top in ladder.top):
        largest = int(cost([int(top) for top in ladder.top]))
        if target > largest:
            raise BudgetError(
                f"a budget of {format_count(target)} {resource} is more than these widths can use: {format_count(largest)} "
                f"({largest:,}). Pass a larger cap, or cap=None, to let layers grow beyond their original width."
            )


def _fill(ladder: _Ladder, ideal: Sequence[float], cost: Cost, target: int) -> list[int]:
    """Round down, then hand out single steps, first to the ties that lost most, while the budget allows."""
    units = ladder.floor(ideal)
    while cost(units) > target:
        # Ties that may not go below their bottom cost more than their share: the others give way, the most generous first.
        able = [i for i, u in enumerate(units) if u - ladder.quantum[i] >= ladder.bottom[i]]
        i = max(able, key=lambda i: units[i] / max(ideal[i], 1e-9))
        units[i] -= ladder.quantum[i]
    spent = cost(units)
    grown = True
    while grown:
        grown = False
        for i in sorted(range(len(units)), key=lambda i: (units[i] - ideal[i]) / max(ideal[i], 1e-9)):
            if units[i] + ladder.quantum[i] > ladder.top[i]:
                continue
            is_short = units[i] + ladder.quantum[i] / 2 <= ideal[i]
            units[i] += ladder.quantum[i]
            new = cost(units)
            # A step that costs nothing (a head that only runs in training) is taken to come nearer to the ideal, not to use up the budget.
            if new <= target and (new > spent or is_short):
                grown, spent = True, new
            else:
                units[i] -= ladder.quantum[i]
    return units


def _exchange(ladder: _Ladder, ideal: Sequence[float], cost: Cost, target: int) -> list[int]:
    """Fill, and where a gap is left, as in very small networks, take a step from one tie to give one to another, while that helps."""
    units = _fill(ladder, ideal, cost, target)
    for _ in range(len(units)):
        if target - cost(units) <= target * GAP:
            return units
        best, best_cost = units, cost(units)
        for i, j in permutations(range(len(units)), 2):
            tried = list(units)
            tried[i] -= ladder.quantum[i]
            tried[j] += ladder.quantum[j]
            if (
                tried[i] >= ladder.bottom[i]
                and tried[j] <= ladder.top[j]
                and best_cost < (tried_cost := cost(tried)) <= target
            ):
                best, best_cost = tried, tried_cost
        if best is units:
            return _nearest_rounding(ladder, ideal, cost, target) or units
        units = best
    return units


def _nearest_rounding(ladder: _Ladder, ideal: Sequence[float], cost: Cost, target: int) -> list[int] | None:
    """Of all ways to round each tie down or up or one step further down, the one nearest to the ideal that leaves no gap.

    None where there is none, where there are too many ways, or where the cost is not one that can be computed for many at once.
    """
    choices = []
    for u, quantum, bottom, top in zip(ideal, ladder.quantum, ladder.bottom, ladder.top, strict=True):
        low = floor(u / quantum + 1e-9) * quantum
        choices.append(
            sorted({int(min(max(value, bottom), top)) for value in (low - quantum, low, low + quantum)})
        )
    if prod(map(len, choices)) > MANY:
        return None
    columns: list[Any] = [
        grid.ravel()
        for grid in np.meshgrid(*(np.array(values, dtype=np.int64) for values in choices), indexing="ij")
    ]
    try:
        spent = np.asarray(cost(columns))
    except ValueError:  # a maximum, as of memory, is not a sum of products
        return None
    fits = np.flatnonzero((spent <= target) & (spent >= target * (1 - GAP)))
    if len(fits) == 0:
        return None
    distance = sum(((column[fits] - x) / max(x, 1e-9)) ** 2 for column, x in zip(columns, ideal, strict=True))
    best = fits[np.argmin(distance)]
    return [int(column[best]) for column in columns]


def _widths(graph: Costed, units: Sequence[int]) -> Widths:
    return Widths({name: units[i] * step for i, (name, step) in enumerate(graph.steps.items())})

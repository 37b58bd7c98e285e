"""Whole widths that meet a budget: the uniform network, and the rounding that every plan uses.

Both functions promise: the cost never exceeds the budget, and no tie can take one more step that costs
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from math import floor, inf, lcm, prod
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import BudgetError, did_you_mean
from .budget import RESOURCES, Budget, format_count, parse_budget
from .widths import Widths

__all__ = ["cost_of", "resolve_budget", "round_to_budget", "uniform"]

#: The part of the budget that may stay unused where smaller steps could use it.
_GAP = 1e-3

#: At most this many combinations are tried by `_nearest_rounding`.
_MAX_COMBINATIONS = 3**12

Cost = Callable[[Sequence[float]], float]
"""Units of the ties -> cost. Exact for whole units, continuous between them."""


@runtime_checkable
class Costed(Protocol):
    """The part of a `ChannelGraph` that rounding needs."""

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
            f"the first argument must be a ChannelGraph from peel.trace, not a {type(graph).__name__}."
        )
    if resource not in RESOURCES:
        hint = did_you_mean(str(resource), RESOURCES)
        raise BudgetError(f"unknown resource {resource!r}; choose one of {', '.join(RESOURCES)}.{hint}")
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
    """Scale all ties by one factor, so that the network meets the budget.

    Args:
        graph: from `peel.trace`.
        budget: `"1.1G"`, `"87M"`, `"50%"`, a fraction or a whole number.
        resource: `"macs"`, `"params"` or `"memory"`.
        divisor: widths are multiples of it.
        freeze: ties that keep their width. (The literature does so with the last convolution of MobileNetV2.)
        max_width: no tie grows beyond this multiple of its original width; None removes the limit.

    >>> peel.uniform(graph, "50%")
    Widths(conv1=45, layer1.0.conv1=45, ...)
    """
    cost = cost_of(graph, resource)
    target = resolve_budget(graph, budget, resource)
    limits = _Limits(graph, divisor, freeze, max_width)
    limits.check_reachable(cost, target, resource)
    original = graph.units()

    def ideal(factor: float) -> list[float]:
        return limits.clamp([units * factor for units in original])

    low, high = 0.0, 1.0
    while high < 2**40 and cost(ideal(high)) < target:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(ideal(middle)) <= target else (low, middle)
    return _widths(graph, _round(limits, ideal(low), cost, target))


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
    """Whole widths near `ideal`: none below `at_least`, together within the budget and close to it.

    Ties in `freeze` keep their width: the one in `at_least`, or the original one. Other options as in
    `uniform`.
    """
    cost = cost_of(graph, resource)
    target = resolve_budget(graph, budget, resource)
    limits = _Limits(graph, divisor, freeze, max_width, at_least)
    limits.check_reachable(cost, target, resource)
    units = [ideal[name] / step for name, step in graph.steps.items()]
    return _widths(graph, _round(limits, limits.clamp(units), cost, target))


class _Limits:
    """The widths that each tie may take, in units: from `low` to `high` in steps of `step`."""

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
        frozen = {freeze} if isinstance(freeze, str) else set(freeze)
        for name in frozen - set(graph.widths):
            raise BudgetError(f"freeze: no free tie is called {name!r}.{did_you_mean(name, graph.widths)}")
        self.step = [lcm(step, divisor) // step for step in graph.steps.values()]
        self.low = list(self.step)
        self.high: list[float] = [inf] * len(self.step)
        original = graph.units()
        smallest = graph.units(at_least) if at_least is not None else None
        for i, (name, units, step) in enumerate(zip(graph.widths, original, self.step, strict=True)):
            if max_width is not None:
                self.high[i] = floor(max_width * units / step + 1e-9) * step
            if smallest is not None:
                self.low[i] = max(step, -(-smallest[i] // step) * step)
            if name in frozen or self.high[i] < self.low[i]:
                # Frozen, or narrower than the divisor: only one width is allowed.
                self.low[i] = self.high[i] = (smallest or original)[i]

    def clamp(self, units: Sequence[float]) -> list[float]:
        return [min(max(u, low), high) for u, low, high in zip(units, self.low, self.high, strict=True)]

    def floor(self, units: Sequence[float]) -> list[int]:
        return [
            min(max(low, floor(u / step + 1e-9) * step), int(min(high, 2**62)))
            for u, step, low, high in zip(units, self.step, self.low, self.high, strict=True)
        ]

    def check_reachable(self, cost: Cost, target: int, resource: str) -> None:
        smallest = int(cost(self.low))
        if target < smallest:
            raise BudgetError(
                f"a budget of {format_count(target)} {resource} cannot be reached: the smallest network has "
                f"{format_count(smallest)} ({smallest:,})"
                f"{' at multiples of the divisor' if max(self.step) > 1 else ''}."
            )
        if inf not in self.high:
            largest = int(cost([int(high) for high in self.high]))
            if target > largest:
                raise BudgetError(
                    f"a budget of {format_count(target)} {resource} is more than these widths can use: "
                    f"{format_count(largest)} ({largest:,}). Pass a larger max_width, or max_width=None, to let "
                    "layers grow beyond their original width."
                )


def _round(limits: _Limits, ideal: Sequence[float], cost: Cost, target: int) -> list[int]:
    """Fill the budget. Where a gap is left (in very small networks), move steps from one tie to another."""
    units = _fill(limits, ideal, cost, target)
    for _ in range(len(units)):
        if target - cost(units) <= target * _GAP:
            return units
        best, best_cost = units, cost(units)
        for i, j in permutations(range(len(units)), 2):
            tried = list(units)
            tried[i] -= limits.step[i]
            tried[j] += limits.step[j]
            allowed = tried[i] >= limits.low[i] and tried[j] <= limits.high[j]
            if allowed and best_cost < (tried_cost := cost(tried)) <= target:
                best, best_cost = tried, tried_cost
        if best is units:
            return _nearest_rounding(limits, ideal, cost, target) or units
        units = best
    return units


def _fill(limits: _Limits, ideal: Sequence[float], cost: Cost, target: int) -> list[int]:
    """Round down, then add single steps while the budget allows, first to the ties furthest below their ideal."""
    units = limits.floor(ideal)
    while cost(units) > target:
        # Ties at their lower limit cost more than their share. The tie furthest above its ideal gives way.
        able = [i for i, u in enumerate(units) if u - limits.step[i] >= limits.low[i]]
        i = max(able, key=lambda i: units[i] / max(ideal[i], 1e-9))
        units[i] -= limits.step[i]
    spent = cost(units)
    grown = True
    while grown:
        grown = False
        for i in sorted(range(len(units)), key=lambda i: (units[i] - ideal[i]) / max(ideal[i], 1e-9)):
            if units[i] + limits.step[i] > limits.high[i]:
                continue
            is_short = units[i] + limits.step[i] / 2 <= ideal[i]
            units[i] += limits.step[i]
            new = cost(units)
            # A step that costs nothing (a head that only runs in training) is only taken towards the ideal.
            if new <= target and (new > spent or is_short):
                grown, spent = True, new
            else:
                units[i] -= limits.step[i]
    return units


def _nearest_rounding(limits: _Limits, ideal: Sequence[float], cost: Cost, target: int) -> list[int] | None:
    """Of all roundings by at most one step up or down, the one nearest to the ideal that leaves no gap, if any.

    None if there is none, if there are too many to try, or if the cost cannot be computed for many at once.
    """
    choices = []
    for u, step, low, high in zip(ideal, limits.step, limits.low, limits.high, strict=True):
        down = floor(u / step + 1e-9) * step
        choices.append(
            sorted({int(min(max(value, low), high)) for value in (down - step, down, down + step)})
        )
    if prod(map(len, choices)) > _MAX_COMBINATIONS:
        return None
    columns: list[Any] = [grid.ravel() for grid in np.meshgrid(*map(np.array, choices), indexing="ij")]
    try:
        spent = np.asarray(cost(columns))
    except ValueError:  # the peak of memory is a maximum, which does not take arrays
        return None
    fits = np.flatnonzero((spent <= target) & (spent >= target * (1 - _GAP)))
    if len(fits) == 0:
        return None
    distance = sum(((column[fits] - x) / max(x, 1e-9)) ** 2 for column, x in zip(columns, ideal, strict=True))
    best = fits[np.argmin(distance)]
    return [int(column[best]) for column in columns]


def _widths(graph: Costed, units: Sequence[int]) -> Widths:
    return Widths({name: units[i] * step for i, (name, step) in enumerate(graph.steps.items())})

"""Whole widths that meet a budget: the uniform network, and the rounding that every plan uses.

Both functions promise: the cost never exceeds the budget, and no tie can take one more step that costs
anything.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from math import floor, inf, lcm, prod
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import BudgetError, check_choice, did_you_mean
from ..utils.bisection import solve_increasing
from .budget import RESOURCES, Budget, format_count, parse_budget
from .widths import Widths

#: The fraction of the budget that may stay unused where smaller steps could use it.
_GAP = 1e-3

#: At most this many combinations are tried by `_nearest`.
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
    check_choice("resource", resource, RESOURCES, BudgetError)
    return graph.cost(resource)


def resolve_budget(graph: Costed, budget: Budget, resource: str = "macs") -> int:
    """The budget as a whole number of the resource."""
    return parse_budget(budget, int(cost_of(graph, resource)(graph.units())))


def fractional_units(graph: Costed, widths: Mapping[str, float]) -> list[float]:
    """As `graph.units`, of widths that need not be whole."""
    return [widths[name] / step for name, step in graph.steps.items()]


def name_set(names: str | Iterable[str]) -> frozenset[str]:
    """A set from one name or several."""
    return frozenset([names] if isinstance(names, str) else names)


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

    `budget` is `"1.1G"`, `"87M"`, `"50%"`, a fraction or a whole number of the `resource` (`"macs"`,
    `"params"` or `"memory"`). Widths are multiples of `divisor`. Ties in `freeze` keep their width. No tie
    grows beyond `max_width` times its original width; None removes that limit.

    >>> peel.uniform(graph, "50%")
    Widths(conv1=45, layer1.0.conv1=45, ...)
    """
    rounding = _Rounding(graph, budget, resource, divisor, freeze, max_width)
    original = graph.units()

    def ideal(factor: float) -> list[float]:
        return rounding.clamp([units * factor for units in original])

    factor, _ = solve_increasing(lambda factor: rounding.cost(ideal(factor)), rounding.target, 0.0)
    return rounding.widths(ideal(factor))


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
    rounding = _Rounding(graph, budget, resource, divisor, freeze, max_width, at_least)
    return rounding.widths(rounding.clamp(fractional_units(graph, ideal)))


class _Rounding:
    """Rounds widths to a budget. Each tie, in units, goes from `low` to `high` in steps of `step`."""

    def __init__(
        self,
        graph: Costed,
        budget: Budget,
        resource: str,
        divisor: int,
        freeze: Iterable[str],
        max_width: float | None,
        at_least: Mapping[str, int] | None = None,
    ) -> None:
        self.graph = graph
        self.cost = cost_of(graph, resource)
        self.target = resolve_budget(graph, budget, resource)
        if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor < 1:
            raise BudgetError(f"divisor must be a whole number of at least 1, not {divisor!r}.")
        if max_width is not None and not max_width > 0:
            raise BudgetError(f"max_width must be positive or None, not {max_width!r}.")
        frozen = name_set(freeze)
        for name in frozen - set(graph.widths):
            raise BudgetError(f"freeze: no free tie is called {name!r}.{did_you_mean(name, graph.widths)}")
        original = graph.units()
        smallest = graph.units(at_least) if at_least is not None else [0] * len(original)
        self.step = [lcm(step, divisor) // step for step in graph.steps.values()]
        self.low = [max(step, -(-u // step) * step) for u, step in zip(smallest, self.step, strict=True)]
        self.high: list[float] = [inf] * len(original)
        for i, (name, step) in enumerate(zip(graph.widths, self.step, strict=True)):
            if max_width is not None:
                self.high[i] = floor(max_width * original[i] / step + 1e-9) * step
            if name in frozen or self.high[i] < self.low[i]:
                # Frozen, or narrower than the divisor: only one width is allowed.
                self.low[i] = self.high[i] = smallest[i] or original[i]
        self._check_reachable(resource)

    def _check_reachable(self, resource: str) -> None:
        target, smallest = format_count(self.target), int(self.cost(self.low))
        if self.target < smallest:
            divisor = " at multiples of the divisor" if max(self.step) > 1 else ""
            raise BudgetError(
                f"a budget of {target} {resource} cannot be reached: the smallest network has "
                f"{format_count(smallest)} ({smallest:,}){divisor}."
            )
        if inf not in self.high and self.target > (largest := int(self.cost([int(u) for u in self.high]))):
            raise BudgetError(
                f"a budget of {target} {resource} is more than these widths can use: "
                f"{format_count(largest)} ({largest:,}). Pass a larger max_width, or max_width=None, "
                "to let layers grow beyond their original width."
            )

    def clamp(self, units: Sequence[float]) -> list[float]:
        return [min(max(u, low), high) for u, low, high in zip(units, self.low, self.high, strict=True)]

    def widths(self, ideal: Sequence[float]) -> Widths:
        """Whole widths near the ideal units."""
        units = self._exchange(self._fill(ideal), ideal)
        return Widths({name: units[i] * step for i, (name, step) in enumerate(self.graph.steps.items())})

    def _fill(self, ideal: Sequence[float]) -> list[int]:
        """Round down, then add single steps within the budget, first to ties far below their ideal."""
        limits = zip(ideal, self.step, self.low, strict=True)
        units = [max(low, floor(u / step + 1e-9) * step) for u, step, low in limits]
        while self.cost(units) > self.target:
            # Ties at their lower limit cost more than their ideal. The tie most above its ideal shrinks.
            able = [i for i, u in enumerate(units) if u - self.step[i] >= self.low[i]]
            i = max(able, key=lambda i: units[i] / max(ideal[i], 1e-9))
            units[i] -= self.step[i]
        spent = self.cost(units)
        grown = True
        while grown:
            grown = False
            for i in sorted(range(len(units)), key=lambda i: (units[i] - ideal[i]) / max(ideal[i], 1e-9)):
                if units[i] + self.step[i] > self.high[i]:
                    continue
                is_short = units[i] + self.step[i] / 2 <= ideal[i]
                units[i] += self.step[i]
                new = self.cost(units)
                # A step that costs nothing (a head only used in training) is only taken towards the ideal.
                if new <= self.target and (new > spent or is_short):
                    grown, spent = True, new
                else:
                    units[i] -= self.step[i]
        return units

    def _exchange(self, units: list[int], ideal: Sequence[float]) -> list[int]:
        """Where a gap is left (in very small networks), move steps between ties while that helps."""
        for _ in range(len(units)):
            if self.target - self.cost(units) <= self.target * _GAP:
                return units
            best, best_cost = units, self.cost(units)
            for i, j in permutations(range(len(units)), 2):
                tried = list(units)
                tried[i] -= self.step[i]
                tried[j] += self.step[j]
                allowed = tried[i] >= self.low[i] and tried[j] <= self.high[j]
                if allowed and best_cost < (tried_cost := self.cost(tried)) <= self.target:
                    best, best_cost = tried, tried_cost
            if best is units:
                return self._nearest(ideal) or units
            units = best
        return units

    def _nearest(self, ideal: Sequence[float]) -> list[int] | None:
        """Of all roundings by at most one step up or down, the one nearest to the ideal that leaves no gap.

        None if there is none, if there are too many, or if the cost cannot be computed for many at once.
        """
        choices = []
        for u, step, low, high in zip(ideal, self.step, self.low, self.high, strict=True):
            down = floor(u / step + 1e-9) * step
            options = {int(min(max(value, low), high)) for value in (down - step, down, down + step)}
            choices.append(sorted(options))
        if prod(map(len, choices)) > _MAX_COMBINATIONS:
            return None
        columns: list[Any] = [grid.ravel() for grid in np.meshgrid(*map(np.array, choices), indexing="ij")]
        try:
            spent = np.asarray(self.cost(columns))
        except ValueError:  # the peak of memory is a maximum, which does not take arrays
            return None
        fits = np.flatnonzero((spent <= self.target) & (spent >= self.target * (1 - _GAP)))
        if len(fits) == 0:
            return None
        distance = sum(
            ((column[fits] - u) / max(u, 1e-9)) ** 2 for column, u in zip(columns, ideal, strict=True)
        )
        best = fits[np.argmin(distance)]
        return [int(column[best]) for column in columns]

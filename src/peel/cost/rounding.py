"""Whole widths that meet a budget: the uniform network, and the rounding that every plan uses.

Both functions promise: every tie ends within one step of its ideal width, and the cost never exceeds the
budget. What single steps cannot spend stays unspent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import floor, inf, lcm
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import BudgetError, check_choice, did_you_mean
from ..utils.bisection import solve_increasing
from .budget import RESOURCES, Budget, format_count, parse_budget
from .polynomial import IntArray
from .widths import Widths

#: Rounding is good enough when it leaves this fraction of the budget unspent.
GAP = 1e-3

#: Up to this many ties, all ways to round them are compared.
MAX_TIES = 14

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
    return rounding.widths(rounding.scaled(graph.units()))


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
    """Whole widths within one step of `ideal`, together within the budget; none below `at_least`.

    An ideal that costs more than the budget is scaled down first. Ties in `freeze` keep their width: the one
    in `at_least`, or the original one. Other options as in `uniform`.
    """
    rounding = _Rounding(graph, budget, resource, divisor, freeze, max_width, at_least)
    units = rounding.clamp(fractional_units(graph, ideal))
    return rounding.widths(units if rounding.cost(units) <= rounding.target else rounding.scaled(units))


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
        # A tie that is narrower than the divisor keeps multiples of its own width.
        steps = zip(graph.steps.values(), original, strict=True)
        self.step = [min(lcm(step, divisor) // step, units) for step, units in steps]
        self.low = [max(step, u // step * step) for u, step in zip(smallest, self.step, strict=True)]
        self.high: list[float] = [inf] * len(original)
        for i, (name, step) in enumerate(zip(graph.widths, self.step, strict=True)):
            if max_width is not None:
                self.high[i] = max(self.low[i], floor(max_width * original[i] / step + 1e-9) * step)
            if name in frozen:
                self.low[i] = self.high[i] = smallest[i] or original[i]
        self._check_reachable(resource, max_width)

    def _check_reachable(self, resource: str, max_width: float | None) -> None:
        target, smallest = format_count(self.target), int(self.cost(self.low))
        if self.target < smallest:
            divisor = " at multiples of the divisor" if max(self.step) > 1 else ""
            raise BudgetError(
                f"a budget of {target} {resource} cannot be reached: the smallest network has "
                f"{format_count(smallest)} ({smallest:,}){divisor}."
            )
        if max_width is None:
            return
        widest = [max(low, floor(max_width * u)) for low, u in zip(self.low, self.graph.units(), strict=True)]
        if self.target > (largest := int(self.cost(widest))):
            raise BudgetError(
                f"a budget of {target} {resource} is more than these widths can use: "
                f"{format_count(largest)} ({largest:,}). Pass a larger max_width, or max_width=None, "
                "to let layers grow beyond their original width."
            )

    def clamp(self, units: Sequence[float]) -> list[float]:
        return [min(max(u, low), high) for u, low, high in zip(units, self.low, self.high, strict=True)]

    def scaled(self, units: Sequence[float]) -> list[float]:
        """The units times the one factor with which they cost the budget, within their limits."""

        def ideal(factor: float) -> list[float]:
            return self.clamp([u * factor for u in units])

        return ideal(solve_increasing(lambda factor: self.cost(ideal(factor)), self.target, 0.0)[0])

    def widths(self, ideal: Sequence[float]) -> Widths:
        """Whole widths near the ideal units, which cost no more than the budget."""
        down = [
            max(low, floor(u / step + 1e-9) * step)
            for u, step, low in zip(ideal, self.step, self.low, strict=True)
        ]
        # What rounding up adds: nothing where the ideal is whole.
        step = [step if u - d > 1e-6 else 0 for u, d, step in zip(ideal, down, self.step, strict=True)]
        units = self._improve(self._fill(down, step, ideal), down, step, ideal)
        return Widths({name: units[i] * unit for i, (name, unit) in enumerate(self.graph.steps.items())})

    def _fill(self, down: Sequence[int], step: Sequence[int], ideal: Sequence[float]) -> list[int]:
        """Round ties up while the budget allows it, first those that would be furthest below their ideal."""
        units, spent = list(down), self.cost(down)
        for i in sorted(range(len(units)), key=lambda i: (down[i] - ideal[i]) / ideal[i]):
            units[i] += step[i]
            cost = self.cost(units)
            # A step that costs nothing (a head only used in training) is only taken towards the ideal.
            if cost > self.target or (cost == spent and ideal[i] - down[i] < step[i] / 2):
                units[i] -= step[i]
            else:
                spent = cost
        return units

    def _improve(
        self, units: list[int], down: Sequence[int], step: Sequence[int], ideal: Sequence[float]
    ) -> list[int]:
        """Where a gap is left, round other ties up and down while that spends more."""
        spent = self.cost(units)
        while self.target - spent > self.target * GAP:
            columns: Any = _alternatives(np.array(units), np.array(down), np.array(step))
            costs = np.where((found := np.asarray(self.cost(columns))) <= self.target, found, -1)
            if costs.max(initial=-1) <= spent:
                break
            # Of those that leave no gap, the nearest to the ideal; else the one that spends most.
            distance = (((columns.T - ideal) / ideal) ** 2).sum(1)
            is_good = costs >= self.target * (1 - GAP)
            best = int(np.argmin(np.where(is_good, distance, inf)) if is_good.any() else np.argmax(costs))
            units, spent = [int(u) for u in columns[:, best]], costs[best]
        return units


def _alternatives(units: IntArray, down: IntArray, step: IntArray) -> IntArray:
    """Other ways to round, one per column: all of them for a few ties, else those of one or two changes."""
    ties = np.flatnonzero(step)
    if len(ties) <= MAX_TIES:
        is_up = np.arange(2 ** len(ties)) >> np.arange(len(ties))[:, None] & 1
    else:
        is_up = ((units - down) // step.clip(1))[ties]
        raised = [np.eye(len(ties), dtype=np.int64)[i] for i in np.flatnonzero(is_up == 0)]
        lowered = [np.eye(len(ties), dtype=np.int64)[i] for i in np.flatnonzero(is_up)]
        is_up = np.array([is_up + up - back for up in raised for back in (*lowered, 0)]).T
    columns = np.repeat(down[:, None], is_up.shape[-1], axis=1)
    columns[ties] += is_up * step[ties][:, None]
    return columns

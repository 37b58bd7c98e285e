"""`Constraint`: what a network may cost, and which widths are allowed. It is resolved once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BudgetError
from ..utils.bisection import solve_increasing
from .budget import Budget, format_cost, format_exact, parse_budget, parse_limits
from .costed import Cost, cost_of, fractional_units
from .rounding import Divisor, Rounding, check_divisor
from .widths import Widths

if TYPE_CHECKING:
    from ..graph.channel_graph import ChannelGraph


@dataclass(frozen=True, eq=False)
class Constraint:
    """What a network may cost, and which widths are allowed.

    Unless `grow` is set, no network costs more than the original in any resource.
    """

    graph: ChannelGraph
    resource: str
    """The one that is spent: of several limits, the one that allows the narrowest uniform network."""
    limits: Mapping[str, int]
    """Resource -> the most that a network may cost, in whole numbers. It holds `resource`."""
    divisor: Divisor = "auto"
    freeze: frozenset[str] = frozenset()
    """Ties that keep their width."""
    max_width: float | None = None
    """No tie becomes wider than this multiple of its original width."""
    grow: bool = False

    @classmethod
    def of(
        cls,
        graph: ChannelGraph,
        budget: Budget,
        *,
        resource: str = "macs",
        limits: Mapping[str, Budget] | None = None,
        divisor: Divisor = "auto",
        freeze: str | Iterable[str] = (),
        max_width: float | None = None,
        grow: bool = False,
    ) -> Constraint:
        """The only place that reads budgets. One above the original needs `grow`."""
        cost_of(graph, resource)
        if not graph.widths:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(graph.fixed.items())[:3])
            raise BudgetError(
                f"no channel of this network can be removed. Its ties are fixed: {reasons or 'none'}. Where "
                "other code than layers is the reason, capture the parts: "
                "peel.trace(..., modules=['backbone'])."
            )
        several = parse_limits(budget) if isinstance(budget, str) else {}
        given = {**(limits or {}), **(several or {resource: budget})}
        originals = {name: ceil(cost_of(graph, name)(graph.units())) for name in given}
        amounts = {name: parse_budget(given[name], originals[name], name) for name in given}
        # Of several limits, the one that a uniform network reaches first takes the place of the budget.
        if several:
            resource = binding_limit(graph, graph.widths, {name: amounts[name] for name in several})
        if amounts[resource] > originals[resource] and not grow:
            raise BudgetError(
                f"a budget of {format_cost(amounts[resource], resource)} is above the original network: "
                f"{format_exact(originals[resource], resource)}. To make the network larger, set grow=True "
                "(--grow, with --method peel or uniform)."
            )
        check_divisor(divisor)
        frozen = frozenset([freeze] if isinstance(freeze, str) else freeze)
        return cls(graph, resource, amounts, divisor, frozen, max_width, grow)

    def at(self, budget: int) -> Constraint:
        """The same with another amount of the resource, such as lambda times the budget."""
        return replace(self, limits={**self.limits, self.resource: budget})

    @property
    def budget(self) -> int:
        return self.limits[self.resource]

    @property
    def other_limits(self) -> dict[str, int]:
        """The limits of the resources that are not spent."""
        return {name: most for name, most in self.limits.items() if name != self.resource}

    @cached_property
    def bounds(self) -> dict[str, int]:
        """Resource -> what a network may cost: the limits and, unless it may grow, the original's costs."""
        bounds = dict(self.limits)
        for name in () if self.grow else self.graph.resources:
            original = max(1, ceil(self.graph.cost(name)(self.graph.units())))
            # The budget was compared with the original when it was read.
            bounds[name] = (
                bounds[name] if name == self.resource else min(bounds.get(name, original), original)
            )
        return bounds

    # Costs of units, which rounding works with. They need not be whole, and arrays hold many candidates.

    @cached_property
    def unit_cost(self) -> Cost:
        return cost_of(self.graph, self.resource)

    @cached_property
    def others(self) -> dict[str, Cost]:
        """Resource -> the fraction of its bound that units use, for all but the one that is spent."""
        costs = {name: self.graph.cost(name) for name in self.bounds if name != self.resource}
        return {name: _relative(cost, self.bounds[name]) for name, cost in costs.items()}

    def load(self, units: Any) -> Any:
        """The largest fraction of any bound that is used. At most 1 where the network is allowed."""
        load = self.unit_cost(units) / self.budget
        for other in self.others.values():
            load = np.maximum(load, other(units))
        return load

    def exceeded(self, units: Any) -> str | None:
        """The first resource of which these units use more than allowed."""
        if int(self.unit_cost(units)) > self.budget:
            return self.resource
        return next((name for name, other in self.others.items() if other(units) > 1 + 1e-12), None)

    # Costs of widths

    def cost(self, widths: Mapping[str, int]) -> int:
        """The cost in the resource that is spent."""
        return int(self.unit_cost(self.graph.units(widths)))

    def used(self, widths: Mapping[str, float]) -> dict[str, float]:
        """Resource -> the fraction of its limit that these widths use."""
        units = fractional_units(self.graph, widths)
        return {name: float(cost_of(self.graph, name)(units)) / most for name, most in self.limits.items()}

    def allows(self, widths: Mapping[str, float]) -> bool:
        """Whether these widths, which need not be whole, meet all limits."""
        return max(self.used(widths).values()) <= 1

    def excess(self, widths: Mapping[str, float]) -> str:
        """How these widths exceed a bound, for an error: empty where they do not."""
        units = fractional_units(self.graph, widths)
        name = self.exceeded(units)
        if name is None:
            return ""
        cost = float(cost_of(self.graph, name)(units))
        return (
            f"uses {cost / self.bounds[name]:.1%} of the limit of {name} ({format_exact(cost, name)} of "
            f"{format_cost(self.bounds[name], name)})"
        )

    # Widths

    def round(
        self,
        ideal: Mapping[str, float],
        at_least: Mapping[str, int] | None = None,
        freeze: Iterable[str] | None = None,
    ) -> Widths:
        """Whole widths within one step of `ideal`, together within the limits; none below `at_least`.

        An ideal that costs more than allowed is scaled down first. Frozen ties (`freeze` instead of those of
        the constraint) keep their width: the one in `at_least`, or the original one.
        """
        chosen = self if freeze is None else replace(self, freeze=frozenset(freeze))
        rounding = Rounding(chosen, at_least)
        # Bounds of single ties first: they may lower the cost below the limit, or raise it above.
        units = rounding.clamp(fractional_units(self.graph, ideal))
        return rounding.widths(units if chosen.load(units) <= 1 else rounding.scaled(units))

    @cached_property
    def uniform(self) -> Widths:
        """One factor for all ties: the baseline of every result."""
        is_wider = self.grow and self.budget > self.unit_cost(self.graph.units())
        # Where no tie becomes wider, no other resource exceeds the original.
        rounding = Rounding(replace(self, grow=True, max_width=None if is_wider else 1.0))
        return rounding.widths(rounding.scaled(self.graph.units()))


def _relative(cost: Cost, amount: int) -> Cost:
    return lambda units: cost(units) / amount


def binding_limit(graph: ChannelGraph, widths: Mapping[str, float], amounts: Mapping[str, int]) -> str:
    """The resource that is used up first as all widths grow by one factor."""
    units = fractional_units(graph, widths)

    def factor(resource: str) -> float:
        cost = cost_of(graph, resource)
        return solve_increasing(lambda f: float(cost([u * f for u in units])), amounts[resource], 1e-6)[0]

    return min(amounts, key=factor)


def uniform(
    graph: ChannelGraph,
    budget: Budget,
    *,
    resource: str = "macs",
    limits: Mapping[str, Budget] | None = None,
    divisor: Divisor = "auto",
    freeze: Iterable[str] = (),
    grow: bool = False,
) -> Widths:
    """Scale all ties by one factor, so that the network meets the budget.

    `budget` is `"1.1G"`, `"87M"`, `"50%"`, a fraction or a whole number of the `resource` (`"macs"`,
    `"params"`, `"memory"` or `"latency"`, which needs `graph.with_latency`). `limits` are budgets of other
    resources; `"macs<=1.1G, params<=8M"` gives all in one text. Widths are multiples of `divisor`; `"auto"`
    is 8, and finer in narrow layers. Ties in `freeze` keep their width. With `grow`, the budget may be above
    the original's cost.

    >>> peel.uniform(graph, "50%")
    Widths(conv1=48, layer1.0.conv1=40, ...)
    """
    options: dict[str, Any] = {"divisor": divisor, "freeze": freeze, "grow": grow}
    return Constraint.of(graph, budget, resource=resource, limits=limits, **options).uniform


def round_to_budget(
    graph: ChannelGraph,
    ideal: Mapping[str, float],
    budget: Budget,
    *,
    resource: str = "macs",
    limits: Mapping[str, Budget] | None = None,
    divisor: Divisor = "auto",
    at_least: Mapping[str, int] | None = None,
    freeze: Iterable[str] = (),
    max_width: float | None = None,
    grow: bool = False,
) -> Widths:
    """Whole widths within one step of `ideal`, together within the budget; none below `at_least`.

    An ideal that costs more than allowed is scaled down first. Ties in `freeze` keep their width: the one in
    `at_least`, or the original one. No tie becomes wider than `max_width` times its original width. Other
    options as in `uniform`.
    """
    options: dict[str, Any] = {"divisor": divisor, "freeze": freeze, "max_width": max_width, "grow": grow}
    return Constraint.of(graph, budget, resource=resource, limits=limits, **options).round(ideal, at_least)

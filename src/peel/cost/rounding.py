"""Whole widths that meet a budget: the uniform network, and the rounding that every plan uses.

Both functions promise: every tie ends within one step of its ideal width, and the cost never exceeds the
budget. What single steps cannot spend stays unspent. Unless growth is asked for, no network costs more than
the original in any resource.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor, inf, lcm
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import BudgetError, check_choice, did_you_mean
from ..utils.bisection import solve_increasing
from .budget import RESOURCES, Budget, format_cost, format_exact, parse_budget, parse_limits
from .polynomial import IntArray
from .widths import Widths

#: Rounding is good enough when it leaves this fraction of the budget unspent; the second for aligned widths.
GAP, ALIGNED_GAP = 1e-3, 5e-3

#: Aligned widths that leave more than this fraction unspent are replaced by less aligned ones.
MAX_ALIGNED_GAP = 1e-2

#: `divisor="auto"` takes multiples of the first of these that lie within this fraction of the ideal width.
ALIGNMENTS, REACH = (8, 4, 2), 1 / 8

#: The same for latency, which is known within a few percent, and where badly aligned widths are slow.
LATENCY_GAP, LATENCY_REACH = 5e-2, 1 / 4

#: Up to this many ties, all ways to round them are compared.
MAX_TIES = 14

Divisor = int | Literal["auto"]
"""Widths are multiples of this. `"auto"`: of 8, else of 4 or 2, within an eighth of the ideal width."""

Cost = Callable[[Any], Any]
"""Units of the ties -> cost. Exact for whole units, continuous between them. Arrays hold many candidates."""


@runtime_checkable
class Costed(Protocol):
    """The part of a `ChannelGraph` that rounding needs."""

    @property
    def widths(self) -> Widths: ...
    @property
    def steps(self) -> Mapping[str, int]: ...
    @property
    def fixed(self) -> Mapping[str, str]: ...
    @property
    def resources(self) -> tuple[str, ...]: ...
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


class Target(NamedTuple):
    """What a network may cost, in whole numbers: `budget` of one resource and `limits` of others."""

    resource: str
    budget: int
    limits: dict[str, int]


def resolve_budget(
    graph: Costed,
    budget: Budget,
    resource: str = "macs",
    grow: bool = False,
    limits: Mapping[str, Budget] | None = None,
) -> Target:
    """The budget in whole numbers. A budget above the original needs `grow`.

    Where the budget is several limits, the resource is the one that allows the narrowest uniform network.
    """
    cost_of(graph, resource)
    if not graph.widths:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(graph.fixed.items())[:3])
        raise BudgetError(
            f"no channel of this network can be removed. Its ties are fixed: {reasons or 'none'}. "
            "Where other code than layers is the reason, capture the parts: "
            "peel.trace(..., modules=['backbone'])."
        )
    several = parse_limits(budget) if isinstance(budget, str) else {}
    given = {**(limits or {}), **(several or {resource: budget})}
    originals = {name: ceil(cost_of(graph, name)(graph.units())) for name in given}
    amounts = {name: parse_budget(given[name], originals[name], name) for name in given}
    if several:
        resource = binding_limit(graph, graph.widths, {name: amounts[name] for name in several})
    target, original = amounts.pop(resource), originals[resource]
    if target > original and not grow:
        raise BudgetError(
            f"a budget of {format_cost(target, resource)} is above the original network: "
            f"{format_exact(original, resource)}. To make the network larger, set grow=True (--grow)."
        )
    return Target(resource, target, amounts)


def binding_limit(graph: Costed, widths: Mapping[str, float], amounts: Mapping[str, int]) -> str:
    """The resource that is used up first as all widths grow by one factor."""
    units = fractional_units(graph, widths)

    def factor(resource: str) -> float:
        cost = cost_of(graph, resource)
        return solve_increasing(lambda f: float(cost([u * f for u in units])), amounts[resource], 1e-6)[0]

    return min(amounts, key=factor)


class Limits:
    """What a network may cost: the target and, if `bounded`, no more than the original in any resource."""

    def __init__(self, graph: Costed, target: Target, *, bounded: bool) -> None:
        self.graph, self.target, self.resource = graph, target.budget, target.resource
        self.cost = cost_of(graph, target.resource)
        self.amounts = dict(target.limits)
        """What it may cost in other resources."""
        for name in graph.resources if bounded else ():
            original = max(1, ceil(graph.cost(name)(graph.units())))
            self.amounts[name] = min(self.amounts.get(name, original), original)
        self.amounts.pop(self.resource, None)
        self.others = [_relative(graph.cost(name), amount) for name, amount in self.amounts.items()]
        """What is used of the other limits; at most 1 each."""

    def load(self, units: Any) -> Any:
        """The largest fraction of any limit that is used. At most 1 where the network is allowed."""
        load = self.cost(units) / self.target
        for other in self.others:
            load = np.maximum(load, other(units))
        return load

    def exceeded(self, units: Any) -> str | None:
        """The first resource of which these units use more than allowed."""
        if int(self.cost(units)) > self.target:
            return self.resource
        pairs = zip(self.amounts, self.others, strict=True)
        return next((name for name, other in pairs if other(units) > 1 + 1e-12), None)

    def amount(self, resource: str) -> int:
        return self.target if resource == self.resource else self.amounts[resource]


def _relative(cost: Cost, amount: int) -> Cost:
    return lambda units: cost(units) / amount


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
    # Where no tie becomes wider, no other resource exceeds the original.
    allowed = Limits(graph, resolve_budget(graph, budget, resource, grow, limits), bounded=False)
    rounding = Rounding(allowed, divisor, freeze, max_width=None if grow else 1.0)
    return rounding.widths(rounding.scaled(graph.units()))


def round_to_budget(
    graph: Costed,
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
    allowed = Limits(graph, resolve_budget(graph, budget, resource, grow, limits), bounded=not grow)
    rounding = Rounding(allowed, divisor, freeze, max_width, at_least)
    units = rounding.clamp(fractional_units(graph, ideal))
    return rounding.widths(units if allowed.load(units) <= 1 else rounding.scaled(units))


class Rounding:
    """Rounds widths to a budget. Each tie, in units, goes from `low` to `high`."""

    def __init__(
        self,
        limits: Limits,
        divisor: Divisor,
        freeze: Iterable[str],
        max_width: float | None,
        at_least: Mapping[str, int] | None = None,
    ) -> None:
        is_whole = isinstance(divisor, int) and not isinstance(divisor, bool) and divisor >= 1
        if not is_whole and divisor != "auto":
            raise BudgetError(f'divisor must be "auto" or a whole number of at least 1, not {divisor!r}.')
        if max_width is not None and not max_width > 0:
            raise BudgetError(f"max_width must be positive or None, not {max_width!r}.")
        graph = limits.graph
        frozen = name_set(freeze)
        for name in frozen - set(graph.widths):
            hint = did_you_mean(name, graph.widths)
            raise BudgetError(f"freeze: no free tie is called {name!r}.{hint} peel inspect lists the ties.")
        self.graph, self.limits, self.divisor = graph, limits, divisor
        self.gap, self.max_gap, self.reach = ALIGNED_GAP if divisor == "auto" else GAP, MAX_ALIGNED_GAP, REACH
        if limits.resource == "latency":
            self.gap, self.max_gap, self.reach = LATENCY_GAP, LATENCY_GAP, LATENCY_REACH
        self.original = graph.units()
        smallest = graph.units(at_least) if at_least is not None else [0] * len(self.original)
        self.unit = list(graph.steps.values())
        # A tie that is narrower than the divisor keeps multiples of its own width.
        self.step = step = [
            1 if divisor == "auto" else min(lcm(unit, divisor) // unit, original)
            for unit, original in zip(self.unit, self.original, strict=True)
        ]
        self.low = [max(step, u // step * step) for u, step in zip(smallest, step, strict=True)]
        self.high: list[float] = [inf] * len(self.original)
        for i, name in enumerate(graph.widths):
            if max_width is not None:
                self.high[i] = max(
                    self.low[i], floor(max_width * self.original[i] / step[i] + 1e-9) * step[i]
                )
            if name in frozen:
                self.low[i] = self.high[i] = smallest[i] or self.original[i]
        self._check_reachable(max_width)

    def _check_reachable(self, max_width: float | None) -> None:
        resource, cost = self.limits.resource, self.limits.cost
        if (exceeded := self.limits.exceeded(self.low)) is not None:
            divisor = "" if self.divisor in (1, "auto") else " at multiples of the divisor"
            smallest = int(self.graph.cost(exceeded)(self.low))
            amount = self.limits.amount(exceeded)
            hint = f' Did you mean "{amount:g}%"?' if amount <= 100 else ""
            raise BudgetError(
                f"a budget of {format_cost(amount, exceeded)} cannot be reached: the smallest network has "
                f"{format_exact(smallest, exceeded)}{divisor}.{hint}"
            )
        if max_width is None:
            return
        target = format_cost(self.limits.target, resource)
        widest = [max(low, floor(max_width * u)) for low, u in zip(self.low, self.original, strict=True)]
        if self.limits.target > (largest := int(cost(widest))):
            raise BudgetError(
                f"a budget of {target} is more than these widths can use: "
                f"{format_exact(largest, resource)}. Choose a larger max_width."
            )

    def clamp(self, units: Sequence[float]) -> list[float]:
        return [min(max(u, low), high) for u, low, high in zip(units, self.low, self.high, strict=True)]

    def scaled(self, units: Sequence[float]) -> list[float]:
        """The units times the one factor with which they use up the limits."""

        def ideal(factor: float) -> list[float]:
            return self.clamp([u * factor for u in units])

        return ideal(solve_increasing(lambda factor: self.limits.load(ideal(factor)), 1.0, 0.0)[0])

    def widths(self, ideal: Sequence[float]) -> Widths:
        """Whole widths near the ideal units, within the limits.

        Where aligned widths leave too much of the budget, as in networks of few layers, finer ones are tried.
        """
        found = []
        for first in range(len(ALIGNMENTS) if self.divisor == "auto" else 1):
            around = [self.around(i, u, ALIGNMENTS[first:]) for i, u in enumerate(ideal)]
            down, up = np.array(around).T
            found.append(self._improve(self._fill(down, up, ideal), down, up, ideal))
            if self.limits.cost(found[-1]) >= self.limits.target * (1 - self.max_gap):
                break
        return self.whole(max(found, key=self.limits.cost))

    def whole(self, units: Sequence[int] | IntArray) -> Widths:
        """The widths of whole units."""
        return Widths({name: int(units[i]) * self.unit[i] for i, name in enumerate(self.graph.widths)})

    def around(self, i: int, ideal: float, alignments: Sequence[int]) -> tuple[int, int]:
        """The widths of a tie below and above its ideal, in units.

        The same where the ideal is whole; with `auto`, where it is that of the original.
        """
        low, high = self.low[i], self.high[i]
        if low == high:
            return low, low
        down, up = _multiples(ideal, self.step[i])
        if self.divisor == "auto" and not down == up == self.original[i]:
            pairs = [_multiples(ideal, lcm(self.unit[i], n) // self.unit[i]) for n in alignments]
            least, most = max(low, ideal * (1 - self.reach)), min(high, ideal * (1 + self.reach))
            down = next((u for u, _ in pairs if u >= least), down)
            up = next((u for _, u in pairs if u <= most), up)
        return down, int(min(up, high))

    def _misaligned(self, units: Any) -> Any:
        """How far each tie is from a multiple of 8: 0, 1, 2 or 3 powers of two. 0 with a given divisor."""
        if self.divisor != "auto":
            return np.zeros_like(units)
        widths = (units.T * self.unit).T
        return sum((widths % alignment != 0).astype(int) for alignment in ALIGNMENTS)

    def _fill(self, down: IntArray, up: IntArray, ideal: Sequence[float]) -> IntArray:
        """Round ties up while the budget allows it.

        First come those that are better aligned there, then those that would be furthest below their ideal.
        Ties that are better aligned below stay there.
        """
        gain = self._misaligned(down) - self._misaligned(up)
        units, spent = down.copy(), self.limits.cost(down)
        order = sorted(range(len(units)), key=lambda i: (-gain[i], (down[i] - ideal[i]) / ideal[i]))
        for i in order:
            units[i] = up[i]
            cost = self.limits.cost(units)
            # A step that costs nothing (a head only used in training) is only taken toward the ideal, or to a
            # better alignment.
            is_idle = cost == spent and gain[i] <= 0 and 2 * ideal[i] < down[i] + up[i]
            if gain[i] < 0 or is_idle or self.limits.load(units) > 1:
                units[i] = down[i]
            else:
                spent = cost
        return units

    def _improve(self, units: IntArray, down: IntArray, up: IntArray, ideal: Sequence[float]) -> IntArray:
        """Where a gap is left, round other ties up and down while that spends more."""
        target, spent = self.limits.target, self.limits.cost(units)
        while target - spent > target * self.gap:
            columns: Any = alternatives(units, down, up - down)
            costs = np.where(np.asarray(self.limits.load(columns)) <= 1, self.limits.cost(columns), -1)
            if costs.max(initial=-1) <= spent:
                break
            # Of those that leave no gap, the best aligned, then the nearest to the ideal. Else the one that
            # spends most.
            distance = (((columns.T - ideal) / ideal) ** 2).sum(1)
            is_good = costs >= target * (1 - self.gap)
            order = np.lexsort((distance, self._misaligned(columns).sum(0), ~is_good))
            best = order[0] if is_good.any() else np.argmax(costs)
            units, spent = columns[:, best], costs[best]
        return units


def _multiples(units: float, step: int) -> tuple[int, int]:
    """The multiples of `step` below and above; the same where the units are one."""
    down = floor(units / step + 1e-9) * step
    return down, down if units - down <= 1e-6 else down + step


def alternatives(units: IntArray, down: IntArray, step: IntArray) -> IntArray:
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

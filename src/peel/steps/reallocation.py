"""Step 4: the pool goes to the groups by their shares; each group's layers grow by one common factor.

Groups meet at layers that read channels of one and write channels of the next, so the cost of a group is not its own alone. Two ways to
solve for the factors:

telescoped   group by group from the input: the factor of a group is the one at which *the whole network*, with the groups before it
             grown already, costs as much more as the group's share of the pool. Meets the budget, and no group ever shrinks.
triangular   each layer is charged to the group of its output channels, and each group's own cost grows by its share. Meets the budget
             too, but a group after one that grew much pays for its wider input and may come out narrower than in the backbone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..cost.budget import Budget, format_count
from ..cost.polynomial import CostModel
from ..cost.rounding import cost_of, resolve_budget, round_to_budget
from ..cost.widths import Widths
from ..errors import BudgetError, ConfigError, did_you_mean
from ..graph import ChannelGraph
from ..methods.settings import SOLVERS

__all__ = [
    "Reallocation",
    "add_evenly",
    "group_factors",
    "grow_at_random",
    "reallocate",
    "reallocation",
    "shares_of",
]

Units = list[float]
Cost = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Reallocation:
    """What step 4 decided and what rounding did to it."""

    factors: Mapping[str, float]
    """Group -> how many times wider than in the backbone, before rounding."""
    ideal: Mapping[str, float]
    """Tie -> width before rounding."""
    widths: Widths
    ideal_cost: float
    spent: int


def shares_of(importance: Mapping[str, float], policy: str = "importance") -> dict[str, float]:
    """Equation 5: the part of the pool that each group gets. With `winner-take-all`, the most important group gets everything."""
    total = sum(importance.values())
    if not importance or not 0 < total < float("inf") or any(value < 0 for value in importance.values()):
        raise ConfigError(
            f"the importance of groups is a positive number each, or zero for some, not {dict(importance)}."
        )
    if policy == "winner-take-all":
        winner = max(importance, key=lambda group: importance[group])
        return {group: float(group == winner) for group in importance}
    return {group: value / total for group, value in importance.items()}


def reallocate(
    graph: ChannelGraph,
    backbone: Mapping[str, int],
    shares: Mapping[str, float],
    budget: Budget,
    *,
    resource: str = "macs",
    solver: Literal["telescoped", "triangular"] = "telescoped",
    divisor: int = 1,
    freeze: Iterable[str] = (),
    max_width: float | None = None,
) -> Widths:
    """The widths at which the budget is spent: the backbone, with the pool given to the groups by their shares.

    `shares` maps group names to weights; groups that are not named get nothing. With `cap`, no tie grows beyond that multiple of its
    original width, and what a group cannot take goes to the others.

    >>> peel.reallocate(graph, backbone, {"56x56": 0.4, "28x28": 0.3, "14x14": 0.2, "7x7": 0.1}, "50%")
    """
    return reallocation(
        graph,
        backbone,
        shares,
        budget,
        resource=resource,
        solver=solver,
        divisor=divisor,
        freeze=freeze,
        max_width=max_width,
    ).widths


def reallocation(
    graph: ChannelGraph,
    backbone: Mapping[str, int],
    shares: Mapping[str, float],
    budget: Budget,
    *,
    resource: str = "macs",
    solver: str = "telescoped",
    divisor: int = 1,
    freeze: Iterable[str] = (),
    max_width: float | None = None,
) -> Reallocation:
    """As `reallocate`, with the factors and what rounding did."""
    base = graph.check(backbone)
    target, cost = _target(graph, base, budget, resource)
    held = _names(freeze)
    factors = group_factors(
        graph, base, shares, target, resource=resource, solver=solver, freeze=held, max_width=max_width
    )
    ideal = _scaled(graph, base, factors, held, max_width)
    # Only the telescoped solve promises that no group shrinks.
    at_least = (
        base
        if solver == "telescoped"
        else base.replace({name: min(base[name], _floor(graph, name, ideal[name])) for name in base})
    )
    widths = round_to_budget(
        graph,
        ideal,
        target,
        resource=resource,
        divisor=divisor,
        at_least=at_least,
        freeze=held,
        max_width=max_width,
    )
    return Reallocation(factors, ideal, widths, cost(_to_units(graph, ideal)), int(cost(graph.units(widths))))


def group_factors(
    graph: ChannelGraph,
    base: Mapping[str, float],
    shares: Mapping[str, float],
    target: float,
    *,
    resource: str = "macs",
    solver: str = "telescoped",
    freeze: Iterable[str] = (),
    max_width: float | None = None,
) -> dict[str, float]:
    """The common factor of each group, in real numbers: the backbone `base` may have fractions of channels too."""
    checked = _check_shares(graph, shares)
    if solver not in SOLVERS:
        raise ConfigError(
            f"solver is {' or '.join(map(repr, SOLVERS))}, not {solver!r}.{did_you_mean(solver, SOLVERS)}"
        )
    held = _names(freeze)
    can_grow = {group for group, ties in graph.groups.items() if any(tie not in held for tie in ties)}
    if solver == "triangular":
        if max_width is not None:
            raise ConfigError(
                'cap needs solve="telescoped": the triangular solve cannot hand on what a group does not take.'
            )
        return _triangular(graph, base, checked, target, resource, held)
    return _telescoped(graph, base, checked, target, resource, held, can_grow, max_width)


def _telescoped(
    graph: ChannelGraph,
    base: Mapping[str, float],
    shares: Mapping[str, float],
    target: float,
    resource: str,
    held: frozenset[str],
    can_grow: set[str],
    max_width: float | None,
) -> dict[str, float]:
    cost = cost_of(graph, resource)
    factors = dict.fromkeys(graph.groups, 1.0)

    def total(changed: Mapping[str, float]) -> float:
        return cost(_to_units(graph, _scaled(graph, base, {**factors, **changed}, held, max_width)))

    open_groups = [group for group in graph.groups if group in can_grow and shares[group] > 0]
    while open_groups:
        spent = total({})
        pool = target - spent
        if pool <= target * 1e-12:
            break
        weight = sum(shares[group] for group in open_groups)
        still_open = []
        for group in open_groups:
            wanted = spent + pool * shares[group] / weight
            factors[group], is_full = _reach(
                lambda factor, group=group: total({group: factor}), wanted, factors[group]
            )  # type: ignore[misc]
            spent = wanted if not is_full else total({})
            if not is_full:
                still_open.append(group)
        if len(still_open) == len(open_groups):
            break
        open_groups = still_open
    return factors


def _triangular(
    graph: ChannelGraph,
    base: Mapping[str, float],
    shares: Mapping[str, float],
    target: float,
    resource: str,
    held: frozenset[str],
) -> dict[str, float]:
    models = {"macs": graph.mac_cost, "params": graph.param_cost}
    if resource not in models:
        raise ConfigError(
            f'solve="triangular" needs a resource that adds up over layers (macs, params), not {resource!r}.'
        )
    parts = _costs_by_group(graph, models[resource])
    cost = cost_of(graph, resource)
    start = _to_units(graph, base)
    pool = target - cost(start)
    factors = dict.fromkeys(graph.groups, 1.0)
    wanted = {group: part(start) + pool * shares[group] for group, part in parts.items()}

    def own(group: str, factor: float) -> float:
        return parts[group](_to_units(graph, _scaled(graph, base, {**factors, group: factor}, held, None)))

    # One sweep solves a chain of groups. Where a group also reads channels of a later one, sweeps converge quickly.
    for _ in range(30):
        before = dict(factors)
        for group in graph.groups:
            if any(tie not in held for tie in graph.groups[group]):
                factors[group], _ = _reach(
                    lambda factor, group=group: own(group, factor), wanted[group], 1e-6
                )  # type: ignore[misc]
        if all(abs(factors[group] - before[group]) < 1e-9 for group in factors):
            break
    return factors


def _costs_by_group(graph: ChannelGraph, model: CostModel) -> dict[str, Cost]:
    """Group -> the cost of the layers that write its channels, as a cost of its own."""
    index = {name: i for i, name in enumerate(graph.widths)}
    group_of = {index[tie]: group for group, ties in graph.groups.items() for tie in ties}
    return {
        group: CostModel(tuple(term for term in model.terms if group_of.get(term.tie) == group)).total
        for group in graph.groups
    }


def _reach(cost: Callable[[float], float], wanted: float, low: float) -> tuple[float, bool]:
    """The factor from `low` on at which a growing cost is `wanted`; or, where it stops short of that at any factor, the one from which
    on it grows no more; and whether it did."""
    if cost(low) >= wanted:
        return low, False
    high = max(2.0, 2 * low)
    while cost(high) < wanted and high < 2**40:
        high *= 2
    most = cost(high)
    is_full = most < wanted
    for _ in range(100):
        middle = (low + high) / 2
        grows_on = cost(middle) < most if is_full else cost(middle) <= wanted
        low, high = (middle, high) if grows_on else (low, middle)
    return low, is_full


def add_evenly(
    graph: ChannelGraph,
    backbone: Mapping[str, int],
    budget: Budget,
    *,
    resource: str = "macs",
    divisor: int = 1,
    freeze: Iterable[str] = (),
) -> Reallocation:
    """The `uniform` policy: the same number of channels added to every tie."""
    base = graph.check(backbone)
    held = _names(freeze)
    return _grow(
        graph,
        base,
        budget,
        resource,
        divisor,
        held,
        lambda amount: {n: w if n in held else w + amount for n, w in base.items()},
    )


def grow_at_random(
    graph: ChannelGraph,
    backbone: Mapping[str, int],
    budget: Budget,
    *,
    seed: int = 0,
    resource: str = "macs",
    divisor: int = 1,
    freeze: Iterable[str] = (),
) -> Reallocation:
    """The `random` policy: half of the ties, drawn at random, grow by a common factor."""
    base = graph.check(backbone)
    held = _names(freeze)
    free = [name for name in base if name not in held]
    drawn = set(random.Random(seed).sample(free, -(-len(free) // 2)))
    return _grow(
        graph,
        base,
        budget,
        resource,
        divisor,
        held,
        lambda amount: {n: w * (1 + amount) if n in drawn else w for n, w in base.items()},
    )


def _grow(
    graph: ChannelGraph,
    base: Widths,
    budget: Budget,
    resource: str,
    divisor: int,
    held: frozenset[str],
    grown: Callable[[float], dict[str, float]],
) -> Reallocation:
    """Grow by the one amount that spends the budget."""
    target, cost = _target(graph, base, budget, resource)
    amount, _ = _reach(lambda amount: cost(_to_units(graph, grown(amount))), target, 0.0)
    ideal = grown(amount)
    widths = round_to_budget(
        graph, ideal, target, resource=resource, divisor=divisor, at_least=base, freeze=held
    )
    factors = {
        group: sum(ideal[tie] for tie in ties) / sum(base[tie] for tie in ties)
        for group, ties in graph.groups.items()
    }
    return Reallocation(factors, ideal, widths, cost(_to_units(graph, ideal)), int(cost(graph.units(widths))))


def _target(graph: ChannelGraph, base: Widths, budget: Budget, resource: str) -> tuple[int, Cost]:
    cost = cost_of(graph, resource)
    target = resolve_budget(graph, budget, resource)
    spent = int(cost(graph.units(base)))
    if spent > target:
        raise BudgetError(
            f"the backbone costs {format_count(spent)} {resource} ({spent:,}) already, more than the budget of {format_count(target)}."
        )
    return target, cost


def _check_shares(graph: ChannelGraph, shares: Mapping[str, float]) -> dict[str, float]:
    for group, share in shares.items():
        if group not in graph.groups:
            raise ConfigError(
                f"shares: no group is called {group!r}.{did_you_mean(str(group), graph.groups)} The groups are {', '.join(graph.groups)}."
            )
        if not 0 <= share < float("inf"):
            raise ConfigError(f"shares: the share of {group} must be zero or positive, not {share!r}.")
    total = sum(shares.values())
    if not total > 0:
        raise ConfigError("shares: no group has a share above zero, so nothing can be given away.")
    return {group: shares.get(group, 0.0) / total for group in graph.groups}


def _scaled(
    graph: ChannelGraph,
    base: Mapping[str, float],
    factors: Mapping[str, float],
    held: frozenset[str],
    max_width: float | None,
) -> dict[str, float]:
    """Every tie times the factor of its group. A cap holds a tie back, but never below what it has."""
    scaled = dict(base)
    for group, ties in graph.groups.items():
        for tie in ties:
            if tie not in held:
                grown = base[tie] * factors[group]
                scaled[tie] = (
                    grown if max_width is None else max(base[tie], min(grown, max_width * graph.widths[tie]))
                )
    return scaled


def _names(freeze: Iterable[str]) -> frozenset[str]:
    return frozenset([freeze] if isinstance(freeze, str) else freeze)


def _to_units(graph: ChannelGraph, widths: Mapping[str, float]) -> Units:
    return [widths[name] / step for name, step in graph.steps.items()]


def _floor(graph: ChannelGraph, name: str, width: float) -> int:
    step = graph.steps[name]
    return max(step, int(width // step) * step)

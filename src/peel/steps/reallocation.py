"""Step 4: the groups get the pool by their shares. All layers of a group grow by one common factor.

The telescoped solver goes from the input to the output: each factor adds the group's share of the pool to the
cost of the whole network, with the groups before it already grown. No group becomes narrower. The triangular
solver adds the share to the cost of the layers that write the group's channels. A group pays for its wider
input, so it may become narrower than in the backbone.

All of this is arithmetic on the backbone as it was trained. Widths are aligned once, at the end, and groups
are rounded as a whole: a multiple of 8 is further away than what the shares move.
"""

import logging
import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Literal

from ..cost.budget import Budget
from ..cost.constraint import Constraint
from ..cost.costed import Cost, fractional_units
from ..cost.group_rounding import KEPT, GroupRounding, round_groups
from ..cost.polynomial import CostModel
from ..cost.rounding import ALIGNMENTS, Divisor
from ..cost.widths import Widths
from ..errors import ConfigError, check_choice
from ..graph import ChannelGraph
from ..utils.bisection import solve_increasing
from ..utils.validation import Channels, Value, Whole
from .backbone import refuse_above

log = logging.getLogger("peel")

POLICIES = ("importance", "winner-take-all", "equal", "random")

SOLVERS = ("telescoped", "triangular")

Numbers = Mapping[str, float]
"""One number per tie or per group."""


@dataclass(frozen=True)
class Round:
    """One round of reallocation."""

    widths: dict[str, Channels]
    factors: dict[str, Value]
    """Group -> the factor that its widths grow by, before rounding."""
    ideal_widths: dict[str, Value]
    """Before rounding to whole channels."""
    ideal_cost: Value
    cost: Whole
    unspent: int
    shares: dict[str, Value] | None = None
    """Group -> its share of the pool."""
    importance: dict[str, Value] | None = None
    """Group -> its importance (step 2)."""
    tie_importance: dict[str, Value] = field(default_factory=dict)
    distinct: bool = True
    """Whether the importance tells the groups apart; `note` explains it."""
    note: str = ""
    rounded_factors: dict[str, Value] = field(default_factory=dict)
    """Group -> its factor after rounding: the mean over its ties."""
    rounding_note: str = ""
    """What rounding did to the groups, where it is more than a reader expects."""


@dataclass(frozen=True)
class Growth:
    """A backbone that grows within a constraint. Widths may be fractional before rounding."""

    graph: ChannelGraph
    base: Numbers
    constraint: Constraint

    def __post_init__(self) -> None:
        refuse_above(self.constraint, self.base)

    def cost(self, widths: Numbers) -> float:
        return float(self.constraint.unit_cost(fractional_units(self.graph, widths)))

    def can_grow(self, group: str) -> bool:
        return any(tie not in self.constraint.freeze for tie in self.graph.groups[group])

    def scaled(self, factors: Numbers) -> dict[str, float]:
        """Every tie times the factor of its group, up to `max_width`, but never below its base width."""
        widths, freeze, max_width = dict(self.base), self.constraint.freeze, self.constraint.max_width
        for group, ties in self.graph.groups.items():
            for tie in ties:
                if tie not in freeze:
                    widths[tie] *= factors[group]
                if max_width is not None:
                    step = self.graph.steps[tie]
                    limit = max_width * self.graph.widths[tie] // step * step
                    widths[tie] = max(self.base[tie], min(widths[tie], limit))
        return widths

    def rounded(self, factors: dict[str, float], ideal: dict[str, float], *, in_groups: bool = True) -> Round:
        """Whole widths near the ideal ones; with `in_groups`, every group is near its factor.

        A tie may end below its backbone's width, by less than a step: groups without a share are aligned too.
        """
        graph, constraint = self.graph, self.constraint
        most = constraint.max_width or math.inf
        kept = {
            tie: int(width)
            for tie, width in self.base.items()
            if tie in constraint.freeze or width > most * graph.widths[tie]
        }
        groups = graph.groups if in_groups else {"all": tuple(graph.widths)}
        found = round_groups(constraint, ideal, groups, {**graph.steps, **kept})
        cost = int(self.cost(found.widths))
        rounded = {
            group: factor
            * math.exp(fmean(math.log(found.widths[tie] / ideal[tie]) for tie in graph.groups[group]))
            for group, factor in factors.items()
        }
        return Round(
            dict(found.widths),
            factors,
            ideal,
            self.cost(ideal),
            cost,
            constraint.budget - cost,
            rounded_factors=rounded,
            rounding_note=_rounding_note(found, constraint.divisor),
        )


def _rounding_note(found: GroupRounding, divisor: Divisor) -> str:
    """What rounding did to the groups, where a reader of the widths would ask."""
    if found.moved > KEPT:
        is_finest = divisor in ("auto", 1)
        refused = f"Multiples of {ALIGNMENTS[0]} would undo the reallocation. " if divisor == "auto" else ""
        multiples = "whole channels" if is_finest else f"multiples of {divisor}"
        way_out = "" if is_finest else " A smaller divisor keeps it."
        return (
            f"{refused}Rounding to {multiples} moves the groups by {found.moved:.0%} of what tells them "
            f"apart, so their order may change.{way_out}"
        )
    finer = {group: multiple for group, multiple in found.multiples.items() if multiple < ALIGNMENTS[0]}
    if divisor != "auto" or not finer:
        return ""
    listed = ", ".join(f"{group} ({multiple})" for group, multiple in finer.items())
    return f"Multiples of {ALIGNMENTS[0]} would undo the reallocation; groups with smaller ones: {listed}."


def shares_of(importance: Numbers, policy: str = "importance") -> dict[str, float]:
    """Equation 5: the share of each group. `winner-take-all` gives everything to the most important one."""
    shares = _normalized(importance, "importance")
    if policy == "winner-take-all":
        winner = max(importance, key=lambda group: importance[group])
        return {group: float(group == winner) for group in importance}
    return shares


def reallocate(
    graph: ChannelGraph,
    backbone: Mapping[str, int],
    shares: Mapping[str, float],
    budget: Budget,
    *,
    resource: str = "macs",
    limits: Mapping[str, Budget] | None = None,
    solver: Literal["telescoped", "triangular"] = "telescoped",
    divisor: Divisor = "auto",
    freeze: Iterable[str] = (),
    max_width: float | None = None,
    grow: bool = False,
) -> Widths:
    """The widths that spend the budget: the backbone, with the pool given to the groups by their shares.

    `shares` maps every group to a weight; 0 for nothing. A group stops growing where the network would cost
    more than the original in another resource (unless `grow`) or, with `max_width`, where its ties reach that
    multiple of their original width. The other groups get what it leaves.

    >>> peel.reallocate(graph, backbone, {"56x56": 0.4, "28x28": 0.3, "14x14": 0.2, "7x7": 0.1}, "50%")
    """
    constraint = Constraint.of(
        graph,
        budget,
        resource=resource,
        limits=limits,
        divisor=divisor,
        freeze=freeze,
        max_width=max_width,
        grow=grow,
    )
    found = grow_by_shares(Growth(graph, graph.check(backbone), constraint), shares, solver)
    if found.rounding_note:
        log.warning(found.rounding_note)
    return Widths(found.widths)


def grow_by_shares(growth: Growth, shares: Numbers, solver: str = "telescoped") -> Round:
    """The policies `importance` and `winner-take-all`: all ties of a group grow by one factor."""
    factors = group_factors(growth, shares, solver)
    return growth.rounded(factors, growth.scaled(factors))


def group_factors(growth: Growth, shares: Numbers, solver: str = "telescoped") -> dict[str, float]:
    """The factor of each group, before rounding."""
    check_choice("solver", solver, SOLVERS)
    solve = _telescoped if solver == "telescoped" else _triangular
    for group in shares:
        check_choice("each group of the shares", group, growth.graph.groups)
    for group in growth.graph.groups:
        if group not in shares:
            raise ConfigError(f"the shares do not name the group {group!r}: give it 0 if it gets nothing.")
        if shares[group] > 0 and not growth.can_grow(group):
            raise ConfigError(f"the group {group!r} has a share, but all its ties are frozen: give it 0.")
    return solve(growth, _normalized(shares, "shares"))


def _telescoped(growth: Growth, shares: Numbers) -> dict[str, float]:
    factors = dict.fromkeys(growth.graph.groups, 1.0)
    target = growth.constraint.budget

    def total(group: str, factor: float) -> float:
        return growth.cost(growth.scaled({**factors, group: factor}))

    def used(limit: Cost, group: str, factor: float) -> float:
        return float(limit(fractional_units(growth.graph, growth.scaled({**factors, group: factor}))))

    growing = [group for group in factors if growth.can_grow(group) and shares[group] > 0]
    while growing:
        spent = growth.cost(growth.scaled(factors))
        pool = target - spent
        if pool <= target * 1e-12:
            break
        weight = sum(shares[group] for group in growing)
        still_growing = []
        for group in growing:
            wanted = spent + pool * shares[group] / weight
            factor, is_full = solve_increasing(partial(total, group), wanted, factors[group])
            for limit in growth.constraint.others.values():
                if used(limit, group, factor) > 1:
                    factor, _ = solve_increasing(partial(used, limit, group), 1.0, factors[group])
                    is_full = True
            factors[group] = factor
            spent = growth.cost(growth.scaled(factors)) if is_full else wanted
            if not is_full:
                still_growing.append(group)
        if still_growing == growing:
            break
        # Groups that reached a limit leave a part of the pool to the others.
        growing = still_growing
    return factors


def _triangular(growth: Growth, shares: Numbers) -> dict[str, float]:
    graph, resource = growth.graph, growth.constraint.resource
    if growth.constraint.max_width is not None:
        raise ConfigError(
            'max_width needs solver="telescoped", which gives the rest of the pool to other groups.'
        )
    if resource not in ("macs", "params"):
        raise ConfigError(
            f'solver="triangular" needs a cost that adds up over layers, which {resource!r} does not.'
        )
    model = graph.mac_cost if resource == "macs" else graph.param_cost
    index = {name: i for i, name in enumerate(graph.widths)}
    costs = {}
    for group, ties in graph.groups.items():
        own = {index[tie] for tie in ties}
        costs[group] = CostModel(tuple(term for term in model.terms if term.tie in own)).total
    start = fractional_units(graph, growth.base)
    pool = growth.constraint.budget - growth.cost(growth.base)
    factors = dict.fromkeys(graph.groups, 1.0)

    def own_cost(group: str, factor: float) -> float:
        return costs[group](fractional_units(graph, growth.scaled({**factors, group: factor})))

    # One sweep solves a chain of groups. More are needed where a group reads channels of a later one.
    for _ in range(30):
        before = dict(factors)
        for group in filter(growth.can_grow, factors):
            wanted = costs[group](start) + pool * shares[group]
            factors[group], _ = solve_increasing(partial(own_cost, group), wanted, 1e-6)
        if all(abs(factors[group] - before[group]) < 1e-9 for group in factors):
            return factors
    raise ConfigError('these groups have no triangular solution: use solver="telescoped".')


def grow_equally(growth: Growth) -> Round:
    """The policy `equal`: the same number of channels is added to every tie."""
    return _grow(growth, set(growth.base) - growth.constraint.freeze, operator.add, in_groups=True)


def grow_at_random(growth: Growth, seed: int = 0) -> Round:
    """The policy `random`: half of the ties, drawn at random, grow by a common factor."""
    free = [name for name in growth.base if name not in growth.constraint.freeze]
    drawn = random.Random(seed).sample(free, -(-len(free) // 2))
    return _grow(growth, set(drawn), lambda width, by: width * (1 + by), in_groups=False)


def _grow(
    growth: Growth,
    growing: set[str],
    grow: Callable[[float, float], float],
    *,
    in_groups: bool,
) -> Round:
    """Grow some ties by the one amount that spends the budget."""
    constraint, base = growth.constraint, growth.base

    def widths(amount: float) -> dict[str, float]:
        return {name: grow(width, amount) if name in growing else width for name, width in base.items()}

    def load(amount: float) -> float:
        return float(constraint.load(fractional_units(growth.graph, widths(amount))))

    ideal = widths(solve_increasing(load, 1.0, 0.0)[0])
    factors = {}
    for group, ties in growth.graph.groups.items():
        factors[group] = sum(ideal[tie] for tie in ties) / sum(base[tie] for tie in ties)
    return growth.rounded(factors, ideal, in_groups=in_groups)


def _normalized(values: Numbers, name: str) -> dict[str, float]:
    """The values divided by their sum."""
    total = sum(values.values())
    if not 0 < total < float("inf") or min(values.values()) < 0:
        raise ConfigError(f"{name} must be zero or positive, and not all zero: {dict(values)}.")
    return {group: value / total for group, value in values.items()}

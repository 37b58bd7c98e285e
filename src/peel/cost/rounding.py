"""Whole widths that meet a constraint.

Every tie ends within one step of its ideal width, and the cost never exceeds the budget. What single steps
cannot spend stays unspent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, inf, lcm
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import BudgetError, did_you_mean
from ..utils.bisection import solve_increasing
from .budget import format_cost, format_exact
from .polynomial import IntArray
from .widths import Widths

if TYPE_CHECKING:
    from .constraint import Constraint

#: Rounding is good enough when it leaves this fraction of the budget unspent; the second for aligned widths.
#: Single channels of a network of ImageNet size spend a budget within .1 %, aligned ones within 1 %.
GAP, ALIGNED_GAP = 1e-3, 5e-3

#: Aligned widths that leave more than this fraction unspent are replaced by less aligned ones.
MAX_ALIGNED_GAP = 1e-2

#: `divisor="auto"` takes multiples of the first of these that lie within this fraction of the ideal width.
ALIGNMENTS, REACH = (8, 4, 2), 1 / 8

#: The same for latency, which is known within a few percent, and where badly aligned widths are slow: the
#: last 5 % of a budget could only be spent with widths such as 26 instead of 24 (docs/latency.md).
LATENCY_GAP, LATENCY_REACH = 5e-2, 1 / 4

#: Up to this many ties, all ways to round them are compared: 2^14 columns are one small array.
MAX_TIES = 14

Divisor = int | Literal["auto"]
"""Widths are multiples of this. `"auto"`: of 8, else of 4 or 2, within an eighth of the ideal width."""


def check_divisor(divisor: object) -> None:
    is_whole = isinstance(divisor, int) and not isinstance(divisor, bool) and divisor >= 1
    if not is_whole and divisor != "auto":
        raise BudgetError(f'divisor must be "auto" or a whole number of at least 1, not {divisor!r}.')


class Rounding:
    """Rounds widths to a constraint. Each tie, in units, goes from `low` to `high`."""

    def __init__(self, constraint: Constraint, at_least: Mapping[str, int] | None = None) -> None:
        max_width, divisor, graph = constraint.max_width, constraint.divisor, constraint.graph
        if max_width is not None and not max_width > 0:
            raise BudgetError(f"max_width must be positive or None, not {max_width!r}.")
        for name in constraint.freeze - set(graph.widths):
            hint = did_you_mean(name, graph.widths)
            raise BudgetError(f"freeze: no free tie is called {name!r}.{hint} peel inspect lists the ties.")
        self.graph, self.constraint, self.divisor = graph, constraint, divisor
        self.gap, self.max_gap, self.reach = ALIGNED_GAP if divisor == "auto" else GAP, MAX_ALIGNED_GAP, REACH
        if constraint.resource == "latency":
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
            if name in constraint.freeze:
                self.low[i] = self.high[i] = smallest[i] or self.original[i]
        self._check_reachable()

    def _check_reachable(self) -> None:
        constraint, max_width = self.constraint, self.constraint.max_width
        if (exceeded := constraint.exceeded(self.low)) is not None:
            divisor = "" if self.divisor in (1, "auto") else " at multiples of the divisor"
            smallest = int(self.graph.cost(exceeded)(self.low))
            amount = constraint.bounds[exceeded]
            hint = f' Did you mean "{amount:g}%"?' if amount <= 100 else ""
            raise BudgetError(
                f"a budget of {format_cost(amount, exceeded)} cannot be reached: the smallest network has "
                f"{format_exact(smallest, exceeded)}{divisor}.{hint}"
            )
        if max_width is None:
            return
        target = format_cost(constraint.budget, constraint.resource)
        widest = [max(low, floor(max_width * u)) for low, u in zip(self.low, self.original, strict=True)]
        if constraint.budget > (largest := int(constraint.unit_cost(widest))):
            raise BudgetError(
                f"a budget of {target} is more than these widths can use: "
                f"{format_exact(largest, constraint.resource)}. Choose a larger max_width."
            )

    def clamp(self, units: Sequence[float]) -> list[float]:
        return [min(max(u, low), high) for u, low, high in zip(units, self.low, self.high, strict=True)]

    def scaled(self, units: Sequence[float]) -> list[float]:
        """The units times the one factor with which they use up the limits."""

        def ideal(factor: float) -> list[float]:
            return self.clamp([u * factor for u in units])

        # Clamped widths no longer follow the factor, so the cost of all is bisected, not the factor computed.
        return ideal(solve_increasing(lambda factor: self.constraint.load(ideal(factor)), 1.0, 0.0)[0])

    def widths(self, ideal: Sequence[float]) -> Widths:
        """Whole widths near the ideal units, within the limits.

        Where aligned widths leave too much of the budget, as in networks of few layers, finer ones are tried.
        """
        found = []
        for first in range(len(ALIGNMENTS) if self.divisor == "auto" else 1):
            around = [self.around(i, u, ALIGNMENTS[first:]) for i, u in enumerate(ideal)]
            down, up = np.array(around).T
            found.append(self._improve(self._fill(down, up, ideal), down, up, ideal))
            if self.constraint.unit_cost(found[-1]) >= self.constraint.budget * (1 - self.max_gap):
                break
        return self.whole(max(found, key=self.constraint.unit_cost))

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
            # The coarsest alignment that stays within reach, for each side by itself.
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
        # Above zero where the width above is aligned better than the one below.
        gain = self._misaligned(down) - self._misaligned(up)
        units, spent = down.copy(), self.constraint.unit_cost(down)
        order = sorted(range(len(units)), key=lambda i: (-gain[i], (down[i] - ideal[i]) / ideal[i]))
        for i in order:
            units[i] = up[i]
            cost = self.constraint.unit_cost(units)
            # A step that costs nothing (a head only used in training) is only taken toward the ideal, or to a
            # better alignment.
            is_idle = cost == spent and gain[i] <= 0 and 2 * ideal[i] < down[i] + up[i]
            if gain[i] < 0 or is_idle or self.constraint.load(units) > 1:
                units[i] = down[i]
            else:
                spent = cost
        return units

    def _improve(self, units: IntArray, down: IntArray, up: IntArray, ideal: Sequence[float]) -> IntArray:
        """Where a gap is left, round other ties up and down while that spends more."""
        target, spent = self.constraint.budget, self.constraint.unit_cost(units)
        while target - spent > target * self.gap:
            columns: Any = alternatives(units, down, up - down)
            costs = np.where(
                np.asarray(self.constraint.load(columns)) <= 1, self.constraint.unit_cost(columns), -1
            )
            if costs.max(initial=-1) <= spent:
                break
            # Of those that leave no gap, the best aligned, then the nearest to the ideal. Else the one that
            # spends most.
            distance = (((columns.T - ideal) / ideal) ** 2).sum(1)
            is_good = costs >= target * (1 - self.gap)
            # lexsort ranks by its last key first: those that leave no gap, then by alignment, then by
            # distance.
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
        # One tie up, and one that is up down again, or none: pairs, as all ways would be too many.
        raised = [np.eye(len(ties), dtype=np.int64)[i] for i in np.flatnonzero(is_up == 0)]
        lowered = [np.eye(len(ties), dtype=np.int64)[i] for i in np.flatnonzero(is_up)]
        is_up = np.array([is_up + up - back for up in raised for back in (*lowered, 0)]).T
    columns = np.repeat(down[:, None], is_up.shape[-1], axis=1)
    columns[ties] += is_up * step[ties][:, None]
    return columns

"""Whole widths of groups of ties: rounding must not undo what a method gave to one group and not to another.

Rounding to a multiple of 8 changes a tie by up to an eighth. A reallocation moves groups by less: with lambda
0.8 and equal shares, those of ResNet-50 differ by 2.5 %. So the ties of a group are rounded together, some up
and some down, and the group as a whole comes out right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .constraint import Constraint
from .costed import fractional_units
from .polynomial import IntArray
from .rounding import ALIGNMENTS, Rounding, alternatives
from .widths import Widths

#: Rounding keeps a reallocation where it moves the groups, relative to each other, by at most this part of
#: what tells them apart. At 1/4, the logarithms of their factors before and after have a correlation of .97.
KEPT = 1 / 4

#: Groups that differ by less than this (deviation of their logarithms) are one: nothing can be undone.
ALIKE = 1e-3

#: The ideal widths are rounded at each of these scales (logarithms), and the best result is taken: at some of
#: them, whole widths spend the budget better. The last one rounds every tie down, which always fits.
SCALES = np.append(np.linspace(-0.04, 0.04, 161), -10.0)

#: What a part of the budget that is left unspent counts against groups that are moved.
GAP_WEIGHT = 20


@dataclass(frozen=True)
class GroupRounding:
    widths: Widths
    multiples: dict[str, int]
    """Group -> its widths are multiples of this, or of less in narrow layers."""
    moved: float
    """How far the groups are moved relative to each other, as a part of what tells them apart."""


def round_groups(
    constraint: Constraint,
    ideal: Mapping[str, float],
    groups: Mapping[str, Sequence[str]],
    at_least: Mapping[str, int],
) -> GroupRounding:
    """Whole widths within one step of `ideal` and within the limits, with every group near its ideal.

    Widths are rounded as by `Constraint.round`, which does not know of groups, where that moves the groups by
    little. With `divisor="auto"`, groups take smaller multiples only where the others move them too much.
    What tells groups apart is their ideal over the uniform network before rounding.
    """
    rounding = Rounding(constraint, at_least)
    wanted = fractional_units(constraint.graph, ideal)
    units = rounding.clamp(wanted)
    if constraint.load(units) > 1:
        units = rounding.scaled(units)
    return _GroupRounder(rounding, np.array(wanted), np.array(units), groups).run()


@dataclass(frozen=True)
class _Found:
    units: IntArray
    distances: Any
    """One for each group."""
    levels: Mapping[str, int]
    moved: float
    gap: float
    """The part of the budget that is left."""
    loss: float


class _GroupRounder:
    """Widths are in units, and groups are lists of places."""

    def __init__(
        self, rounding: Rounding, wanted: Any, ideal: Any, groups: Mapping[str, Sequence[str]]
    ) -> None:
        """`ideal` is what is wanted, clamped to the limits and to the allowed widths."""
        self.rounding, self.wanted, self.ideal = rounding, wanted, ideal
        places = {tie: place for place, tie in enumerate(rounding.graph.widths)}
        self.groups = {group: [places[tie] for tie in ties] for group, ties in groups.items()}
        # A reallocation may leave a part of the budget, where a group reaches another limit.
        self.goal = min(rounding.constraint.budget, rounding.constraint.unit_cost(ideal))
        uniform = np.array(rounding.scaled(rounding.original))
        self.spread = float(self._means(np.log(wanted / uniform)).std())

    def run(self) -> GroupRounding:
        levels = dict.fromkeys(self.groups, 0)
        plain = np.array(self.rounding.graph.units(self.rounding.widths(self.ideal)))
        best = self._best(plain[:, None], levels)
        while best.moved > KEPT:
            found = self._improved(self._best(self._columns(plain, levels), levels))
            best = min(best, found, key=lambda one: one.loss)
            if found.moved <= KEPT and found.gap <= self.rounding.max_gap:
                best = found
                break
            # The group that is furthest from the others takes smaller multiples.
            off = dict(zip(self.groups, np.abs(found.distances - found.distances.mean()), strict=True))
            coarse = [group for group, level in levels.items() if level < self._levels]
            if not coarse:
                break
            levels = {**levels}
            levels[max(coarse, key=lambda group: off[group])] += 1
        multiples = {group: self._multiple(level) for group, level in best.levels.items()}
        return GroupRounding(self.rounding.whole(best.units), multiples, best.moved)

    @property
    def _levels(self) -> int:
        """How often a group can take smaller multiples: of 8, 4, 2, and then any width."""
        return len(ALIGNMENTS) if self.rounding.divisor == "auto" else 0

    def _multiple(self, level: int) -> int:
        return (*ALIGNMENTS, 1)[level] if self.rounding.divisor == "auto" else int(self.rounding.divisor)

    def _columns(self, plain: IntArray, levels: Mapping[str, int]) -> IntArray:
        """A way to round in each column: one for each of `SCALES`."""
        columns = np.repeat(plain[:, None], len(SCALES), axis=1)
        for group, places in self.groups.items():
            finest = ALIGNMENTS[levels[group] :]
            around = {i: self.rounding.around(i, self.ideal[i], finest) for i in places}
            # Error diffusion: each tie takes the side that brings the sum of all errors closer to zero. The
            # smallest steps come last, so what is left is half of the smallest one.
            error = np.zeros(len(SCALES))
            for i in sorted(places, key=lambda i: around[i][0] / around[i][1]):
                down, up = (error + np.log(units / self.ideal[i]) - SCALES for units in around[i])
                is_up = np.abs(up) < np.abs(down)
                columns[i] = np.where(is_up, around[i][1], around[i][0])
                error = np.where(is_up, up, down)
        return columns

    def _improved(self, found: _Found) -> _Found:
        """Where a part of the budget is left, round other ties up and down while that is better."""
        around = np.zeros((2, len(self.ideal)), dtype=np.int64)
        for group, places in self.groups.items():
            for i in places:
                around[:, i] = self.rounding.around(i, self.ideal[i], ALIGNMENTS[found.levels[group] :])
        down, up = around
        while found.gap > self.rounding.gap:
            other = self._best(alternatives(found.units, down, up - down), found.levels)
            if other.loss >= found.loss:
                break
            found = other
        return found

    def _best(self, columns: IntArray, levels: Mapping[str, int]) -> _Found:
        constraint = self.rounding.constraint
        distances = self._means(np.log(columns / self.wanted[:, None]))
        moved = distances.std(0) / self.spread if self.spread > ALIKE else np.zeros(columns.shape[1])
        gap = 1 - constraint.unit_cost(columns) / self.goal
        loss = moved + GAP_WEIGHT * np.maximum(0.0, gap - self.rounding.gap)
        loss = np.where(np.asarray(constraint.load(columns)) <= 1, loss, np.inf)
        best = int(loss.argmin())
        numbers = (float(values[best]) for values in (moved, gap, loss))
        return _Found(columns[:, best], distances[:, best], levels, *numbers)

    def _means(self, values: Any) -> Any:
        """The mean of each group."""
        return np.array([values[places].mean(0) for places in self.groups.values()])

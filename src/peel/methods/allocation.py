"""Allocations of a budget: how much wider or narrower each group is than in the uniform network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..cost.rounding import Cost, Limits, Target, cost_of, fractional_units, round_to_budget
from ..cost.widths import Widths
from ..graph.parameters import hidden_ties
from ..utils.bisection import solve_increasing
from ..utils.rng import derive_seed
from .loss_fit import Array, spend
from .problem import Problem

#: Random allocations, and the deviation of the logarithms of their widths over uniform.
ALLOCATIONS, SPREAD = 64, 0.35

#: No group of a random allocation is narrower or wider than this, over uniform.
NARROWEST, WIDEST = 0.4, 2.5


@dataclass(frozen=True)
class Space:
    """The allocations of a budget. One is a row of logarithms: for each group, its widths over uniform."""

    problem: Problem

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The groups of the graph, hidden channels apart from the rest, without frozen ties."""
        graph, hidden = self.problem.graph, set(hidden_ties(self.problem.graph))
        found: dict[str, tuple[str, ...]] = {}
        for group, ties in graph.groups.items():
            free = [tie for tie in ties if tie not in self.problem.freeze]
            found[f"{group} stream"] = tuple(tie for tie in free if tie not in hidden)
            found[f"{group} hidden"] = tuple(tie for tie in free if tie in hidden)
        return {group: ties for group, ties in found.items() if ties}

    @property
    def frozen(self) -> dict[str, tuple[str, ...]]:
        return {"frozen": tuple(self.problem.freeze)} if self.problem.freeze else {}

    @property
    def hidden(self) -> list[str]:
        return [group for group in self.groups if group.endswith(" hidden")]

    @cached_property
    def uniform(self) -> Widths:
        return self.problem.uniform()

    @cached_property
    def limits(self) -> Limits:
        problem = self.problem
        # Unless the network may grow, no tie becomes wider, so no other resource exceeds the original.
        target = Target(problem.resource, problem.budget, dict(problem.limits))
        return Limits(problem.graph, target, bounded=False)

    def ideal(self, logs: Array) -> dict[str, Array]:
        """The widths of allocations before rounding: for each tie, one per row of `logs`."""
        factors = np.exp(logs)
        widths = {tie: np.full(len(logs), float(width)) for tie, width in self.uniform.items()}
        for place, ties in enumerate(self.groups.values()):
            for tie in ties:
                widths[tie] *= factors[:, place]
        return widths

    def load(self, logs: Array) -> Array:
        """The largest fraction of any limit that each allocation uses."""
        steps = self.problem.graph.steps
        units = np.array([values / steps[tie] for tie, values in self.ideal(logs).items()])
        load: Array = np.broadcast_to(self.limits.load(units), len(logs))
        return load

    def ideal_at(self, log: Array) -> dict[str, float]:
        """The widths of one allocation before rounding."""
        return {tie: float(values[0]) for tie, values in self.ideal(log[None]).items()}

    def rounded(self, ideal: Mapping[str, float], changed: Sequence[str] | None = None) -> Widths:
        """Whole widths near the ideal that meet the budget.

        With `changed`, the groups that differ from uniform: all others have exactly their uniform widths.
        """
        problem, kept = self.problem, set(self.problem.freeze)
        if changed is not None:
            kept = set(self.uniform) - {tie for group in changed for tie in self.groups[group]}
        at_least = {**problem.graph.steps, **{tie: self.uniform[tie] for tie in kept}}
        return round_to_budget(
            problem.graph,
            ideal,
            problem.budget,
            resource=problem.resource,
            limits=problem.limits,
            divisor=problem.divisor,
            at_least=at_least,
            freeze=kept,
            max_width=None if problem.grow else 1.0,
            grow=problem.grow,
        )

    def log(self, widths: Mapping[str, int]) -> list[float]:
        """The allocation of these widths: a group has the mean of its ties."""
        base, groups = self.uniform, self.groups.values()
        return [statistics.fmean(math.log(widths[tie] / base[tie]) for tie in ties) for ties in groups]

    def draw(self) -> Iterator[Widths]:
        """The uniform network and random allocations, each once."""
        low, high = np.full(len(self.groups), math.log(NARROWEST)), self._widest()
        rng = np.random.default_rng(derive_seed("search", self.problem.seed))
        logs = SPREAD * rng.standard_normal((ALLOCATIONS, len(self.groups)))
        known = {tuple(self.uniform.values())}
        yield self.uniform
        for log in spend(logs, self.load, low, high):
            widths = self.rounded(self.ideal_at(log))
            if tuple(widths.values()) not in known:
                known.add(tuple(widths.values()))
                yield widths

    def divided(self, ideal: Mapping[str, float], shape: Mapping[str, int]) -> dict[str, float]:
        """The layers of each group of hidden channels in proportion to `shape`.

        A group keeps its MACs. What this leaves of another resource is spent on all hidden channels alike.
        """
        widths, macs = dict(ideal), cost_of(self.problem.graph, "macs")
        for group in self.hidden:
            wanted = float(macs(fractional_units(self.problem.graph, widths)))
            widths = self._scaled(widths, self.groups[group], shape, macs, wanted)
        hidden = [tie for group in self.hidden for tie in self.groups[group]]
        return self._scaled(widths, hidden, widths, self.limits.load, 1.0, least=1.0)

    def _scaled(
        self,
        widths: Mapping[str, float],
        ties: Sequence[str],
        shape: Mapping[str, float],
        cost: Cost,
        wanted: float,
        least: float = 0.0,
    ) -> dict[str, float]:
        """These ties at `shape` times the factor, from `least` on, with which the network costs `wanted`."""
        graph = self.problem.graph
        most = dict.fromkeys(ties, math.inf) if self.problem.grow else graph.widths

        def scaled(factor: float) -> dict[str, float]:
            bounded = {tie: min(max(graph.steps[tie], factor * shape[tie]), most[tie]) for tie in ties}
            return {**widths, **bounded}

        factor, _ = solve_increasing(
            lambda factor: float(cost(fractional_units(graph, scaled(factor)))), wanted, least
        )
        return scaled(factor)

    def _widest(self) -> Array:
        """Unless the network may grow, no tie becomes wider than in the original."""
        full, base = self.problem.graph.widths, self.uniform
        room = [min(full[tie] / base[tie] for tie in ties) for ties in self.groups.values()]
        return np.array([math.log(WIDEST if self.problem.grow else min(WIDEST, most)) for most in room])

    def costs(self, step: float = 1e-4) -> Array:
        """For each group, how fast the cost of the uniform network grows with the logarithm of its widths."""
        cost = cost_of(self.problem.graph, self.problem.resource)

        def grown(ties: Sequence[str]) -> float:
            factors = {tie: 1 + step if tie in ties else 1.0 for tie in self.uniform}
            widths = {tie: width * factors[tie] for tie, width in self.uniform.items()}
            return float(cost(fractional_units(self.problem.graph, widths)))

        base = grown(())
        return np.array([(grown(ties) - base) / step for ties in self.groups.values()])

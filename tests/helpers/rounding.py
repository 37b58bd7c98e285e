"""The promises of rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import peel
from peel.cost.budget import Budget
from peel.cost.constraint import Constraint
from peel.steps.reallocation import Growth


def step_of(graph: peel.ChannelGraph, ideal: float, tie: str, divisor: int | str) -> float:
    """How far a tie may be from an ideal width, worked out from the documented rule."""
    unit = graph.steps[tie]
    return max(unit, ideal / 8) if divisor == "auto" else min(math.lcm(unit, int(divisor)), graph.widths[tie])


def assert_rounded(
    graph: peel.ChannelGraph,
    widths: Mapping[str, int],
    ideal: Mapping[str, float],
    budget: int,
    *,
    resource: str = "macs",
    divisor: int = 1,
    is_spent: bool = True,
) -> None:
    """Within the budget, each tie within one step of its ideal; if `is_spent`, no gap that could be spent."""
    count = getattr(graph, resource)
    steps = {tie: min(max(divisor, graph.steps[tie]), width) for tie, width in graph.widths.items()}
    assert count(widths) <= budget
    for tie, width in widths.items():
        assert abs(width - ideal[tie]) < steps[tie] + 1e-6, (tie, width, ideal[tie])
        assert width % steps[tie] == 0
    if is_spent and count(widths) < 0.999 * budget:
        for tie, width in widths.items():
            more = count({**widths, tie: width + steps[tie]})
            assert width >= ideal[tie] - 1e-6 or more > budget or more == count(widths), tie


def growing(
    graph: peel.ChannelGraph,
    base: Mapping[str, float],
    budget: Budget,
    resource: str = "macs",
    **options: Any,
) -> Growth:
    """A backbone that grows within a budget."""
    return Growth(graph, base, Constraint.of(graph, budget, resource=resource, **options))

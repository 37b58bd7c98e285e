"""The promises of rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import peel


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

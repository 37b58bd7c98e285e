"""Costs of widths that need not be whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError, check_choice
from .budget import RESOURCES

if TYPE_CHECKING:
    from ..graph.channel_graph import ChannelGraph

Cost = Callable[[Any], Any]
"""Units of the ties -> cost. Exact for whole units, continuous between them. Arrays hold many candidates."""


def cost_of(graph: ChannelGraph, resource: str) -> Cost:
    """The cost function of a resource, in units of the ties."""
    if not hasattr(graph, "steps"):
        raise BudgetError(
            f"the first argument must be a ChannelGraph from peel.trace, not a {type(graph).__name__}."
        )
    check_choice("resource", resource, RESOURCES, BudgetError)
    return graph.cost(resource)


def fractional_units(graph: ChannelGraph, widths: Mapping[str, float]) -> list[float]:
    """As `graph.units`, of widths that need not be whole."""
    return [widths[name] / step for name, step in graph.steps.items()]

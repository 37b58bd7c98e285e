"""What the cost room needs of a graph, and costs of widths that need not be whole."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from ..errors import BudgetError, check_choice
from .budget import RESOURCES
from .widths import Widths

Cost = Callable[[Any], Any]
"""Units of the ties -> cost. Exact for whole units, continuous between them. Arrays hold many candidates."""


@runtime_checkable
class Costed(Protocol):
    """The part of a `ChannelGraph` that costs and rounding need. This room is below that of graphs."""

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
    def check(self, widths: Mapping[str, int]) -> Widths: ...


def cost_of(graph: Costed, resource: str) -> Cost:
    """The cost function of a resource, in units of the ties."""
    if not isinstance(graph, Costed):
        raise BudgetError(
            f"the first argument must be a ChannelGraph from peel.trace, not a {type(graph).__name__}."
        )
    check_choice("resource", resource, RESOURCES, BudgetError)
    return graph.cost(resource)


def fractional_units(graph: Costed, widths: Mapping[str, float]) -> list[float]:
    """As `graph.units`, of widths that need not be whole."""
    return [widths[name] / step for name, step in graph.steps.items()]

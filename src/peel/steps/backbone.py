"""Step 1: the over-pruned backbone. It costs `ratio` (lambda) times the budget; the rest is the pool."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..cost.budget import Budget, format_cost, format_exact
from ..cost.rounding import (
    Divisor,
    Limits,
    Target,
    cost_of,
    fractional_units,
    name_set,
    resolve_budget,
    round_to_budget,
    uniform,
)
from ..cost.widths import Widths
from ..errors import BudgetError, ConfigError, check_choice
from ..graph import ChannelGraph
from ..utils.bisection import solve_increasing

BACKBONE_INITS = ("uniform", "equal")


def backbone(
    graph: ChannelGraph,
    budget: Budget,
    ratio: float = 0.8,
    *,
    resource: str = "macs",
    limits: Mapping[str, Budget] | None = None,
    init: str | Mapping[str, int] = "uniform",
    divisor: Divisor = 1,
    freeze: Iterable[str] = (),
    grow: bool = False,
) -> Widths:
    """The widths of the backbone. What it leaves of the budget is the pool of step 4.

    They are whole channels, not multiples of 8: alignment would move groups by more than step 4 does. It
    comes once, in `reallocate`.

    Of a latency, `ratio` counts for what it is above that of the smallest network.

    `init` is `"uniform"` (one factor for all ties), `"equal"` (the same number of channels in every tie), or
    widths of your own, which may cost up to the whole budget. Other options as in `uniform`.

    >>> peel.backbone(graph, "50%")
    Widths(conv1=40, layer1.0.conv1=40, ...)
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"the backbone ratio (lambda) must be above 0 and at most 1, not {ratio!r}.")
    target = resolve_budget(graph, budget, resource, grow, limits)
    if isinstance(init, Mapping):
        given = graph.check(init)
        refuse_above(Limits(graph, target, bounded=not grow), given)
        return given
    check_choice("init", init, BACKBONE_INITS)
    resource, whole, others = target
    # Much of a latency may be fixed: a kernel takes a while even for a single channel.
    fixed = cost_of(graph, resource)([1] * len(graph.widths)) if resource == "latency" else 0
    amount = max(2, int(fixed + max(0, whole - fixed) * ratio))
    frozen = name_set(freeze)
    options: dict[str, Any] = {"resource": resource, "limits": others, "divisor": divisor, "freeze": frozen}
    try:
        if init == "uniform":
            wider = grow and amount > cost_of(graph, resource)(graph.units())
            return uniform(graph, amount, **options, grow=wider)
        ideal = _equal(Limits(graph, Target(resource, amount, others), bounded=not grow), frozen)
        return round_to_budget(graph, ideal, amount, **options, grow=grow)
    except BudgetError as error:
        raise BudgetError(f"the backbone, which may cost {ratio:g} of the budget: {error}") from error


def refuse_above(limits: Limits, widths: Mapping[str, float]) -> None:
    """Refuse a backbone that costs more than allowed."""
    units, resource = fractional_units(limits.graph, widths), limits.resource
    exceeded = limits.exceeded(units)
    if exceeded == resource:
        raise BudgetError(
            f"the backbone costs {format_exact(limits.cost(units), resource)}, more than the budget of "
            f"{format_cost(limits.target, resource)}. Give narrower widths or a larger budget."
        )
    if exceeded is not None:
        raise BudgetError(
            f"the backbone meets the budget of {resource}, but exceeds the original in another resource, or "
            f"its limit: {exceeded}. Give narrower widths, or set grow=True (--grow)."
        )


def _equal(limits: Limits, frozen: frozenset[str]) -> dict[str, float]:
    """The same number of channels in every tie, as many as the limits allow, as fractional widths."""
    graph = limits.graph

    def ideal(channels: float) -> dict[str, float]:
        widths = graph.widths.items()
        return {name: w if name in frozen else max(channels, graph.steps[name]) for name, w in widths}

    def load(channels: float) -> float:
        return float(limits.load(fractional_units(graph, ideal(channels))))

    return ideal(solve_increasing(load, 1.0, 1.0)[0])

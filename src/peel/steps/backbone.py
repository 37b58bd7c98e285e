"""Step 1: the over-pruned backbone. It costs `ratio` (lambda) times the budget; the rest is the pool."""

from collections.abc import Iterable, Mapping

from ..cost.budget import Budget, format_cost
from ..cost.rounding import (
    Divisor,
    Limits,
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
    init: str | Mapping[str, int] = "uniform",
    divisor: Divisor = "auto",
    freeze: Iterable[str] = (),
    grow: bool = False,
) -> Widths:
    """The widths of the backbone. What it leaves of the budget is the pool of step 4.

    `init` is `"uniform"` (one factor for all ties), `"equal"` (the same number of channels in every tie), or
    widths of your own, which may cost up to the whole budget. Other options as in `uniform`.

    >>> peel.backbone(graph, "50%")
    Widths(conv1=40, layer1.0.conv1=40, ...)
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"the backbone ratio (lambda) must be above 0 and at most 1, not {ratio!r}.")
    target = resolve_budget(graph, budget, resource, grow)
    if isinstance(init, Mapping):
        given = graph.check(init)
        refuse_above(Limits(graph, target, resource, bounded=not grow), given)
        return given
    check_choice("init", init, BACKBONE_INITS)
    allowed, frozen = max(2, int(target * ratio)), name_set(freeze)
    try:
        if init == "uniform":
            wider = grow and allowed > cost_of(graph, resource)(graph.units())
            return uniform(graph, allowed, resource=resource, divisor=divisor, freeze=frozen, grow=wider)
        ideal = _equal(Limits(graph, allowed, resource, bounded=not grow), frozen)
        return round_to_budget(
            graph, ideal, allowed, resource=resource, divisor=divisor, freeze=frozen, grow=grow
        )
    except BudgetError as error:
        raise BudgetError(f"the backbone, which may cost {ratio:g} of the budget: {error}") from error


def refuse_above(limits: Limits, widths: Mapping[str, float]) -> None:
    """Refuse a backbone that costs more than allowed."""
    units, resource = fractional_units(limits.graph, widths), limits.resource
    spent = int(limits.cost(units))
    if spent > limits.target:
        raise BudgetError(
            f"the backbone costs {format_cost(spent, resource)} ({spent:,}), more than the budget of "
            f"{format_cost(limits.target, resource)}. Give narrower widths or a larger budget."
        )
    if any(other(units) > 1 for other in limits.others):
        raise BudgetError(
            f"the backbone meets the budget of {resource}, but exceeds the original in another resource. "
            "Give narrower widths, or set grow=True (--grow)."
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

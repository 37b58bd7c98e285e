"""Step 1: the over-pruned backbone. It costs `ratio` (lambda) times the budget; the rest is the pool."""

from collections.abc import Iterable, Mapping

from ..cost.budget import Budget, format_count
from ..cost.rounding import fractional_units, name_set, resolve_budget, round_to_budget, uniform
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
    divisor: int = 1,
    freeze: Iterable[str] = (),
    max_width: float | None = 1.0,
) -> Widths:
    """The widths of the backbone. What it leaves of the budget is the pool of step 4.

    `init` is `"uniform"` (one factor for all ties), `"equal"` (the same number of channels in every tie), or
    widths of your own, which may cost up to the whole budget. No tie of the uniform backbone becomes wider
    than `max_width` times its original width.

    >>> peel.backbone(graph, "50%")
    Widths(conv1=40, layer1.0.conv1=40, ...)
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"the backbone ratio (lambda) must be above 0 and at most 1, not {ratio!r}.")
    target = resolve_budget(graph, budget, resource)
    if isinstance(init, Mapping):
        given = graph.check(init)
        refuse_above(graph, given, target, resource)
        return given
    check_choice("init", init, BACKBONE_INITS)
    allowed, frozen = max(1, int(target * ratio)), name_set(freeze)
    try:
        if init == "uniform":
            return uniform(
                graph, allowed, resource=resource, divisor=divisor, freeze=frozen, max_width=max_width
            )
        ideal = _equal(graph, allowed, resource, frozen)
        return round_to_budget(graph, ideal, allowed, resource=resource, divisor=divisor, freeze=frozen)
    except BudgetError as error:
        raise BudgetError(f"the backbone, which may cost {ratio:g} of the budget: {error}") from error


def refuse_above(graph: ChannelGraph, widths: Mapping[str, float], target: int, resource: str) -> None:
    """Refuse a backbone that costs more than the budget."""
    spent = int(graph.cost(resource)(fractional_units(graph, widths)))
    if spent > target:
        raise BudgetError(
            f"the backbone costs {format_count(spent)} {resource} ({spent:,}), more than the budget of "
            f"{format_count(target)}. Give narrower widths or a larger budget."
        )


def _equal(graph: ChannelGraph, target: int, resource: str, frozen: frozenset[str]) -> dict[str, float]:
    """The same number of channels in every tie, as many as the target allows, as fractional widths."""
    cost = graph.cost(resource)

    def ideal(channels: float) -> dict[str, float]:
        widths = graph.widths.items()
        return {name: w if name in frozen else max(channels, graph.steps[name]) for name, w in widths}

    def spent(channels: float) -> float:
        return cost(fractional_units(graph, ideal(channels)))

    return ideal(solve_increasing(spent, target, 1.0)[0])

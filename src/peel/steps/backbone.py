"""Step 1: the over-pruned backbone. It costs `ratio` (lambda) times the budget; the rest is the pool."""

from collections.abc import Iterable, Mapping

from ..cost.budget import Budget, format_count
from ..cost.rounding import cost_of, resolve_budget, round_to_budget, uniform
from ..cost.widths import Widths
from ..errors import BudgetError, ConfigError
from ..graph import ChannelGraph
from ..utils.bisection import solve_increasing

BACKBONE_INITS: dict[str, str] = {
    "uniform": "every tie at the same fraction of its original width",
    "equal": "the same number of channels in every tie",
}


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
    cost = cost_of(graph, resource)
    target = resolve_budget(graph, budget, resource)
    if isinstance(init, Mapping):
        given = graph.check(init)
        spent = int(cost(graph.units(given)))
        if spent > target:
            raise BudgetError(
                f"the given backbone costs {format_count(spent)} {resource}, more than the budget of "
                f"{format_count(target)}. Give narrower widths or a larger budget."
            )
        return given
    if init not in BACKBONE_INITS:
        raise ConfigError(f"init is {' or '.join(map(repr, BACKBONE_INITS))}, or widths, not {init!r}.")
    part = max(1, int(target * ratio))
    frozen = {freeze} if isinstance(freeze, str) else set(freeze)
    try:
        if init == "uniform":
            return uniform(
                graph, part, resource=resource, divisor=divisor, freeze=frozen, max_width=max_width
            )
        ideal = _equal(graph, part, resource, frozen)
        return round_to_budget(graph, ideal, part, resource=resource, divisor=divisor, freeze=frozen)
    except BudgetError as error:
        raise BudgetError(f"the backbone, which may cost {ratio:g} of the budget: {error}") from error


def _equal(graph: ChannelGraph, target: int, resource: str, frozen: set[str]) -> dict[str, float]:
    """The same number of channels in every tie, as many as the target allows, as fractional widths."""
    cost = cost_of(graph, resource)

    def ideal(channels: float) -> dict[str, float]:
        widths = graph.widths.items()
        return {name: w if name in frozen else max(channels, graph.steps[name]) for name, w in widths}

    def spent(channels: float) -> float:
        return cost([width / graph.steps[name] for name, width in ideal(channels).items()])

    return ideal(solve_increasing(spent, target, 1.0)[0])

"""Step 1: the over-pruned backbone. It costs `ratio` (lambda) times the budget; the rest is the pool."""

from collections.abc import Iterable, Mapping

from ..cost.budget import Budget, format_cost, format_exact
from ..cost.constraint import Constraint
from ..cost.costed import fractional_units
from ..cost.rounding import Divisor
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
    constraint = Constraint.of(
        graph, budget, resource=resource, limits=limits, divisor=divisor, freeze=freeze, grow=grow
    )
    return backbone_within(constraint, ratio, init)


def backbone_within(
    constraint: Constraint, ratio: float = 0.8, init: str | Mapping[str, int] = "uniform"
) -> Widths:
    """`backbone`, of a constraint that is resolved already. Its divisor is that of the backbone."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"the backbone ratio (lambda) must be above 0 and at most 1, not {ratio!r}.")
    if isinstance(init, Mapping):
        given = constraint.graph.check(init)
        refuse_above(constraint, given)
        return given
    check_choice("init", init, BACKBONE_INITS)
    # Much of a latency may be fixed: a kernel takes a while even for a single channel.
    is_latency, ties = constraint.resource == "latency", len(constraint.graph.widths)
    fixed = constraint.unit_cost([1] * ties) if is_latency else 0
    part = constraint.at(max(2, int(fixed + max(0, constraint.budget - fixed) * ratio)))
    try:
        return part.uniform if init == "uniform" else part.round(_equal(part))
    except BudgetError as error:
        raise BudgetError(f"the backbone, which may cost {ratio:g} of the budget: {error}") from error


def refuse_above(constraint: Constraint, widths: Mapping[str, float]) -> None:
    """Refuse a backbone that costs more than allowed."""
    units, resource = fractional_units(constraint.graph, widths), constraint.resource
    exceeded = constraint.exceeded(units)
    if exceeded == resource:
        raise BudgetError(
            f"the backbone costs {format_exact(constraint.unit_cost(units), resource)}, more than the budget "
            f"of {format_cost(constraint.budget, resource)}. Give narrower widths or a larger budget."
        )
    if exceeded is not None:
        raise BudgetError(
            f"the backbone meets the budget of {resource}, but exceeds the original in another resource, or "
            f"its limit: {exceeded}. Give narrower widths, or set grow=True (--grow)."
        )


def _equal(constraint: Constraint) -> dict[str, float]:
    """The same number of channels in every tie, as many as the limits allow, as fractional widths."""
    graph, frozen = constraint.graph, constraint.freeze

    def ideal(channels: float) -> dict[str, float]:
        widths = graph.widths.items()
        return {name: w if name in frozen else max(channels, graph.steps[name]) for name, w in widths}

    def load(channels: float) -> float:
        return float(constraint.load(fractional_units(graph, ideal(channels))))

    return ideal(solve_increasing(load, 1.0, 1.0)[0])

"""Step 1: the over-pruned backbone. It costs `keep` (the paper's lambda) times the budget; the rest of the budget is the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..cost.budget import Budget, format_count
from ..cost.rounding import cost_of, resolve_budget, round_to_budget, uniform
from ..cost.widths import Widths
from ..errors import BudgetError, ConfigError
from ..graph import ChannelGraph

__all__ = ["backbone"]

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
    """The widths of the backbone; what it leaves of the budget is the pool that step 4 gives away.

    `init` is the paper's uniform network, its other starting point with the same number of channels in every layer, or widths of
    your own, which may cost anything up to the budget. No tie of the uniform network grows beyond `cap` times its original width.

    >>> peel.backbone(graph, "50%")
    Widths(conv1=40, layer1.0.conv1=40, ...)
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(
            f"ratio (lambda) is the part of the budget that the backbone may cost, above 0 and at most 1, not {ratio!r}."
        )
    cost = cost_of(graph, resource)
    target = resolve_budget(graph, budget, resource)
    if isinstance(init, Mapping):
        given = graph.check(init)
        spent = int(cost(graph.units(given)))
        if spent > target:
            raise BudgetError(
                f"the given backbone costs {format_count(spent)} {resource}, more than the budget of {format_count(target)}. "
                "Give narrower widths or a larger budget."
            )
        return given
    part = max(1, int(target * ratio))
    held = {freeze} if isinstance(freeze, str) else set(freeze)
    try:
        if init == "uniform":
            return uniform(graph, part, resource=resource, divisor=divisor, freeze=held, max_width=max_width)
        if init == "equal":
            return round_to_budget(
                graph,
                _equal(graph, part, resource, held),
                part,
                resource=resource,
                divisor=divisor,
                freeze=held,
            )
    except BudgetError as error:
        raise BudgetError(f"the backbone, which may cost {ratio:g} of the budget: {error}") from error
    raise ConfigError(f"init is {' or '.join(map(repr, BACKBONE_INITS))}, or widths, not {init!r}.")


def _equal(graph: ChannelGraph, target: int, resource: str, held: set[str]) -> dict[str, float]:
    """As many channels in every tie as the target affords, in fractions of a channel."""
    cost = cost_of(graph, resource)

    def ideal(channels: float) -> dict[str, float]:
        return {
            name: width if name in held else max(channels, graph.steps[name])
            for name, width in graph.widths.items()
        }

    def spent(channels: float) -> float:
        return cost([width / graph.steps[name] for name, width in ideal(channels).items()])

    low, high = 1.0, 2.0
    while spent(high) < target and high < 2**30:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) <= target else (low, middle)
    return ideal(low)

"""Widths from what each layer is worth: cut where the least is lost for the cost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .budget import Budget
from .rounding import (
    Costed,
    Divisor,
    cost_of,
    fractional_units,
    name_set,
    resolve_budget,
    round_to_budget,
    uniform,
)
from .widths import Widths

#: No layer keeps less than this fraction of its channels, or than half of those in the uniform network.
FLOOR = 0.1

#: A layer loses this fraction of its channels at a time.
BLOCK = 1 / 16

#: The fraction of the cost that is cut before all layers are compared again.
SWEEP = 0.02


def cut_to_budget(
    graph: Costed,
    losses: Mapping[str, Sequence[float]],
    budget: Budget,
    *,
    resource: str = "macs",
    limits: Mapping[str, Budget] | None = None,
    divisor: Divisor = "auto",
    freeze: Iterable[str] = (),
) -> Widths:
    """Cut blocks of channels, those with the least loss per cost first, until the budget is met.

    `losses`: tie -> what is lost with 0, 1, ... all of its units kept. Other ties follow the uniform
    network; those in `freeze` keep their width.
    """
    target, frozen = resolve_budget(graph, budget, resource, limits=limits), name_set(freeze)
    options: dict[str, Any] = {
        "resource": target.resource,
        "limits": target.limits,
        "divisor": divisor,
        "freeze": frozen,
    }
    base = uniform(graph, target.budget, **options)
    free = [tie for tie in losses if tie not in frozen]
    floors = floors_of(graph, base, free)
    widths: dict[str, float] = {**base, **{tie: graph.widths[tie] for tie in free}}
    amounts = {target.resource: target.budget, **target.limits}

    def used(resource: str, widths: Mapping[str, float]) -> float:
        return float(cost_of(graph, resource)(fractional_units(graph, widths))) / amounts[resource]

    def fits(widths: Mapping[str, float]) -> bool:
        return all(used(name, widths) <= 1 for name in amounts)

    while not fits(widths):
        binding = max(amounts, key=lambda name: used(name, widths))
        now = used(binding, widths)
        cuts = []
        for tie in free:
            for blocks in (1, 2, 4, 8):  # a latency model has steps: one block may save nothing
                width = _narrower(graph, tie, widths[tie], floors[tie], blocks)
                if (saved := now - used(binding, {**widths, tie: width})) > 0:
                    cuts.append(
                        (_lost(graph, losses[tie], tie, widths[tie], width) / saved, saved, tie, width)
                    )
                    break
        if not cuts:  # no tie saves anything alone: several make the peak of the memory
            narrower = {tie: _narrower(graph, tie, widths[tie], floors[tie], 1) for tie in free}
            if all(narrower[tie] == widths[tie] for tie in free):
                break
            widths |= narrower
        wanted = min(SWEEP * now, now - 1)
        for _, saved, tie, width in sorted(cuts):
            widths[tie] = width
            wanted -= saved
            if wanted <= 0:
                break
    return round_to_budget(graph, _share_rest(graph, widths, free, fits), target.budget, **options)


def _share_rest(
    graph: Costed, widths: Mapping[str, float], free: Iterable[str], fits: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    """The free layers scaled up by a common factor, as far as it fits: the last block may save too much."""

    def scaled(factor: float) -> dict[str, float]:
        return {**widths, **{tie: min(graph.widths[tie], factor * widths[tie]) for tie in free}}

    low, high = 1.0, 2.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(scaled(middle)) else (low, middle)
    return scaled(low)


def floors_of(graph: Costed, base: Mapping[str, int], ties: Iterable[str]) -> dict[str, float]:
    """The widths below which no layer is cut; `base` are those of the uniform network."""
    return {tie: max(1.0, min(FLOOR * graph.widths[tie], base[tie] / 2)) for tie in ties}


def _narrower(graph: Costed, tie: str, width: float, floor: float, blocks: int) -> float:
    """Some blocks narrower, in whole steps of the tie, and not below the floor."""
    step = graph.steps[tie]
    block = max(1, round(BLOCK * graph.widths[tie] / step)) * step
    return max(width - blocks * block, min(width, -(-floor // step) * step))


def _lost(graph: Costed, losses: Sequence[float], tie: str, before: float, after: float) -> float:
    return losses[int(after / graph.steps[tie])] - losses[int(before / graph.steps[tie])]

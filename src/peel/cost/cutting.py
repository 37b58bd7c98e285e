"""Widths from what each layer is worth: cut where the least is lost for the cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .constraint import Constraint
from .costed import cost_of, fractional_units
from .widths import Widths

if TYPE_CHECKING:
    from ..graph.channel_graph import ChannelGraph

#: No layer keeps less than this fraction of its channels, or than half of those in the uniform network.
FLOOR = 0.1

#: A layer loses this fraction of its channels at a time.
BLOCK = 1 / 16

#: The fraction of the cost that is cut before all layers are compared again.
SWEEP = 0.02


def cut_to_budget(constraint: Constraint, losses: Mapping[str, Sequence[float]]) -> Widths:
    """Cut blocks of channels, those with the least loss per cost first, until the limits are met.

    `losses`: tie -> what is lost with 0, 1, ... all of its units kept. Other ties follow the uniform
    network; frozen ones keep their width.
    """
    graph, base = constraint.graph, constraint.uniform
    free = [tie for tie in losses if tie not in constraint.freeze]
    floors = floors_of(graph, base, free)
    widths: dict[str, float] = {**base, **{tie: graph.widths[tie] for tie in free}}

    def used(resource: str, widths: Mapping[str, float]) -> float:
        cost = cost_of(graph, resource)(fractional_units(graph, widths))
        return float(cost) / constraint.limits[resource]

    fits = constraint.allows
    while not fits(widths):
        # The limit that is exceeded most is cut for. It may be another one in the next sweep.
        uses = constraint.used(widths)
        binding = max(uses, key=lambda name: uses[name])
        now = uses[binding]
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
        # `now` is the part of its limit that the binding resource uses. All ties are compared again after a
        # cut of 2 % of that: what a block saves depends on the other widths. Not more than what is above the
        # limit, `now - 1`, is cut.
        wanted = min(SWEEP * now, now - 1)
        for _, saved, tie, width in sorted(cuts):
            widths[tie] = width
            wanted -= saved
            if wanted <= 0:
                break
    return constraint.round(_share_rest(graph, widths, free, fits))


def _share_rest(
    graph: ChannelGraph,
    widths: Mapping[str, float],
    free: Iterable[str],
    fits: Callable[[dict[str, float]], bool],
) -> dict[str, float]:
    """The free layers scaled up by a common factor, as far as it fits: the last block may save too much."""

    def scaled(factor: float) -> dict[str, float]:
        return {**widths, **{tie: min(graph.widths[tie], factor * widths[tie]) for tie in free}}

    low, high = 1.0, 2.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(scaled(middle)) else (low, middle)
    return scaled(low)


def floors_of(graph: ChannelGraph, base: Mapping[str, int], ties: Iterable[str]) -> dict[str, float]:
    """The widths below which no layer is cut; `base` are those of the uniform network."""
    return {tie: max(1.0, min(FLOOR * graph.widths[tie], base[tie] / 2)) for tie in ties}


def _narrower(graph: ChannelGraph, tie: str, width: float, floor: float, blocks: int) -> float:
    """Some blocks narrower, in whole steps of the tie, and not below the floor."""
    step = graph.steps[tie]
    block = max(1, round(BLOCK * graph.widths[tie] / step)) * step
    return max(width - blocks * block, min(width, -(-floor // step) * step))


def _lost(graph: ChannelGraph, losses: Sequence[float], tie: str, before: float, after: float) -> float:
    return losses[int(after / graph.steps[tie])] - losses[int(before / graph.steps[tie])]

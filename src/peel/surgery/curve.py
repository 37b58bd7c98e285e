"""Accuracy against budget for a trained network that is cut and repaired, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..cost.rounding import Divisor, uniform
from ..cost.widths import Widths
from ..errors import BudgetError
from ..graph.channel_graph import ChannelGraph
from ..graph.parameters import residual_ties
from .calibration import Images, recalibrate
from .explain import explain_scores
from .repair import repair
from .slim import slim

#: The budgets of a curve, as fractions of the MACs.
BUDGETS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class CurvePoint:
    """Networks at one budget. Accuracies are what `judge` returned."""

    budget: float
    macs: int
    params: int
    cut: float
    recalibrated: float
    repaired: float
    repaired_streams_kept: float | None
    """With the residual streams at their original width; None where that does not meet the budget."""


def accuracy_curve(
    model: nn.Module,
    graph: ChannelGraph,
    images: Images,
    judge: Callable[[nn.Module], float],
    *,
    budgets: Sequence[float] = BUDGETS,
    resource: str = "macs",
    divisor: Divisor = "auto",
) -> Iterator[CurvePoint]:
    """Cut a trained model to uniform widths at each budget, and judge it cut, recalibrated and repaired.

    `images` are unlabeled and calibrate, `judge` measures a network. The channels that best explain the
    others are kept (`explain_scores`).
    """
    scores = explain_scores(model, graph, images)

    def repaired(widths: Widths) -> float:
        small = slim(model, widths, graph=graph, weights="inherit", scores=scores)
        repair(small, model, images, graph=graph)
        return judge(small)

    for budget in budgets:
        widths = uniform(graph, budget, resource=resource, divisor=divisor)
        plain = slim(model, widths, graph=graph, weights="inherit", scores=scores)
        cut = judge(plain)
        recalibrate(plain, images)
        hidden = _hidden_widths(graph, budget, resource, divisor)
        yield CurvePoint(
            budget=budget,
            macs=graph.macs(widths),
            params=graph.params(widths),
            cut=cut,
            recalibrated=judge(plain),
            repaired=repaired(widths),
            repaired_streams_kept=repaired(hidden) if hidden is not None else None,
        )


def _hidden_widths(graph: ChannelGraph, budget: float, resource: str, divisor: Divisor) -> Widths | None:
    """Uniform widths for all but the residual streams; None where there are none, or the budget is missed."""
    streams = residual_ties(graph)
    try:
        return uniform(graph, budget, resource=resource, divisor=divisor, freeze=streams) if streams else None
    except BudgetError:
        return None

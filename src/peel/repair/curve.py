"""Accuracy against budget for a trained network that is cut and repaired, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..cost.constraint import uniform
from ..cost.rounding import Divisor
from ..cost.widths import Widths
from ..graph.channel_graph import ChannelGraph
from ..surgery.slim import slim
from .calibration import Images, recalibrate
from .explain import explain_scores
from .repair import Repairer
from .sensitivity import measure_sensitivity

#: The budgets of a curve, as fractions of the MACs.
BUDGETS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class CurvePoint:
    """Networks at one budget. Accuracies are what `judge` returned.

    `macs` and `params` are of the uniform widths, which all but the last accuracy have.
    """

    budget: float
    macs: int
    params: int
    cut: float
    recalibrated: float
    repaired: float
    repaired_by_sensitivity: float
    """With widths and channels by `measure_sensitivity` instead of uniform widths."""
    macs_by_sensitivity: int
    params_by_sensitivity: int


def accuracy_curve(
    model: nn.Module,
    graph: ChannelGraph,
    images: Images,
    judge: Callable[[nn.Module], float],
    *,
    budgets: Sequence[float] = BUDGETS,
    resource: str = "macs",
    divisor: Divisor = "auto",
    on_note: Callable[[str], None] = lambda note: None,
) -> Iterator[CurvePoint]:
    """Cut a trained model to each budget, and judge it cut, recalibrated and repaired.

    `images` are unlabeled and calibrate, `judge` measures a network. Widths are uniform, and the channels
    that best explain the others are kept (`explain_scores`). Beside it: widths by sensitivity. `on_note` gets
    what a repair notes.
    """
    scores = explain_scores(model, graph, images)
    sensitivity = measure_sensitivity(model, graph, images)
    repairer = Repairer(model, images, graph)

    def repaired(widths: Widths, scores: Mapping[str, Tensor]) -> float:
        small = slim(model, widths, graph=graph, weights="inherit", scores=scores)
        for note in repairer.repair(small).notes:
            on_note(note)
        return judge(small)

    for budget in budgets:
        widths = uniform(graph, budget, resource=resource, divisor=divisor)
        plain = slim(model, widths, graph=graph, weights="inherit", scores=scores)
        cut = judge(plain)
        recalibrate(plain, images)
        least = sensitivity.widths(budget, resource=resource, divisor=divisor)
        yield CurvePoint(
            budget=budget,
            macs=graph.macs(widths),
            params=graph.params(widths),
            cut=cut,
            recalibrated=judge(plain),
            repaired=repaired(widths, scores),
            repaired_by_sensitivity=repaired(least, sensitivity.scores),
            macs_by_sensitivity=graph.macs(least),
            params_by_sensitivity=graph.params(least),
        )

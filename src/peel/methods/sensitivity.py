"""Widths by sensitivity: channels are cut where the output of the trained network changes least per cost.

Where trained weights are cut, all ties compete. Networks that are trained from scratch overrate residual
streams after a cut, because they adapt to a narrow stream: there each group keeps what it has in the uniform
network, and divides it among its hidden layers. Shares between groups were searched for too, and gained
0.15 ± 0.15 points over this (docs/archive/search.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..cost.constraint import Constraint
from ..cost.costed import Cost, cost_of, fractional_units
from ..cost.widths import Widths
from ..graph.channel_graph import ChannelGraph
from ..graph.parameters import hidden_ties
from ..repair.sensitivity import Sensitivity, sensitivity_passes
from ..utils.bisection import solve_increasing
from .method import Answer, Method, Needs, Problem, Scores

if TYPE_CHECKING:
    from .work import Work

#: With fewer images, the measurement is worse than no measurement (docs/repair.md).
LEAST_IMAGES = 64


@dataclass(frozen=True)
class LeastSensitive(Method):
    """Measures, without training, how much the output needs each layer, and cuts what it needs least."""

    needs = Needs(original=True)

    def solve(self, problem: Problem, work: Work) -> Answer:
        if reason := nothing_to_go_by(problem, work.training_images):
            return Answer(problem.constraint.uniform, notes=(f"The plan is uniform: {reason}.",))
        macs = float(sensitivity_passes(problem.graph) * problem.graph.macs())
        with work.timed(macs, "measuring how much the output needs each layer"):
            if work.is_rehearsal:
                return Answer(problem.constraint.uniform)
            measured = work.calibration.sensitivity
            if not problem.inherits:
                exact = replace(problem.constraint, divisor=1)
                return Answer(divide(problem, widths_by(measured, work, exact)), measured.scores)
            return better_of_uniform(problem, work, widths_by(measured, work, problem.constraint), measured)


def better_of_uniform(problem: Problem, work: Work, widths: Widths, measured: Sensitivity) -> Answer:
    """The better of these widths and the uniform ones after the repair, by the loss on held-out images.

    To first order, group and layer norms undo a cut: with them, and with few ties, sensitivity may lose. A
    method that is compared with others would keep its plan; this one is the default.
    """
    uniform = problem.constraint.uniform
    if problem.held_out is None or widths == uniform:
        return Answer(widths, measured.scores)
    candidates: dict[str, tuple[Widths, Scores | None]] = {
        "uniform": (uniform, None),
        "sensitivity": (widths, measured.scores),
    }
    losses = {name: work.loss(work.repaired(*chosen)) for name, chosen in candidates.items()}
    values = {"repaired_losses": losses}
    if losses["sensitivity"] <= losses["uniform"]:
        return Answer(widths, measured.scores, values=values)
    note = (
        f"The plan is the uniform network: after the repair its loss on {problem.held_out.size:,} held-out "
        f"training images is {losses['uniform']:.3g}, that of the widths by sensitivity "
        f"{losses['sensitivity']:.3g}."
    )
    return Answer(uniform, values=values, notes=(note,))


def nothing_to_go_by(problem: Problem, images: int) -> str:
    """Why layers cannot be told apart, so that the plan is uniform; empty where they can."""
    free = {tie for tie in problem.graph.widths if tie not in problem.constraint.freeze}
    most = max(map(len, hidden_groups(problem)), default=0) if not problem.inherits else len(free)
    if most < 2:
        of_group = "" if problem.inherits else " of a group"
        return f"no two layers{of_group} compete, because at most one tie can be cut there"
    if images < LEAST_IMAGES:
        return f"sensitivity is measured on at least {LEAST_IMAGES} training images, and here are {images}"
    return ""


def widths_by(measured: Sensitivity, work: Work, constraint: Constraint) -> Widths:
    """The widths by sensitivity. Their last digits may differ between processes: the main process decides."""
    return work.engine.world.broadcast(measured.widths_within(constraint))


def hidden_groups(problem: Problem) -> list[list[str]]:
    """The hidden ties of each group of the graph that may be cut. The residual streams are left out."""
    hidden = set(hidden_ties(problem.graph)) - problem.constraint.freeze
    groups = ([tie for tie in ties if tie in hidden] for ties in problem.graph.groups.values())
    return [ties for ties in groups if ties]


def divide(problem: Problem, shape: Mapping[str, int]) -> Widths:
    """The uniform network, with the hidden layers of each group in proportion to `shape`.

    A group keeps its MACs. What this leaves of another resource is spent on all hidden layers alike.
    """
    graph, groups, constraint = problem.graph, hidden_groups(problem), problem.constraint
    uniform, macs = constraint.uniform, cost_of(graph, "macs")
    widths: dict[str, float] = dict(uniform)
    for ties in groups:
        wanted = float(macs(fractional_units(graph, widths)))
        widths = _scaled(graph, widths, ties, shape, macs, wanted)
    hidden = [tie for ties in groups for tie in ties]
    load = replace(constraint, grow=True).load  # no tie is wider than in the original
    ideal = _scaled(graph, widths, hidden, widths, load, 1.0, least=1.0)
    kept = {tie: width for tie, width in uniform.items() if tie not in hidden}
    at_least = {**graph.steps, **kept}
    return replace(constraint, max_width=1.0).round(ideal, at_least, freeze=kept)


def _scaled(
    graph: ChannelGraph,
    widths: Mapping[str, float],
    ties: Sequence[str],
    shape: Mapping[str, float],
    cost: Cost,
    wanted: float,
    least: float = 0.0,
) -> dict[str, float]:
    """These ties at `shape` times the factor, from `least` on, with which the network costs `wanted`."""

    def scaled(factor: float) -> dict[str, float]:
        bounded = {
            tie: min(max(graph.steps[tie], factor * shape[tie]), float(graph.widths[tie])) for tie in ties
        }
        return {**widths, **bounded}

    factor, _ = solve_increasing(
        lambda factor: float(cost(fractional_units(graph, scaled(factor)))), wanted, least
    )
    return scaled(factor)

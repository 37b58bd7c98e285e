"""Widths by sensitivity: channels are cut where the output of the trained network changes least per cost.

Where trained weights are cut, all ties compete. Networks that are trained from scratch overrate residual
streams after a cut, because they adapt to a narrow stream: there each group keeps what it has in the uniform
network, and divides it among its hidden layers. Shares between groups were searched for too, and gained
0.15 ± 0.15 points over this (docs/archive/search.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..cost.constraint import Constraint
from ..cost.costed import Cost, cost_of, fractional_units
from ..cost.widths import Widths
from ..graph.channel_graph import ChannelGraph
from ..graph.parameters import hidden_ties
from ..repair.sensitivity import Sensitivity, measure_sensitivity, sensitivity_passes
from ..utils.bisection import solve_increasing
from .config import MethodConfig
from .method import Method, TrainBackbone
from .plan import Plan, assemble_plan
from .problem import Problem
from .start import calibration_images

#: With fewer images, the measurement is worse than no measurement (docs/repair.md).
LEAST_IMAGES = 64


class LeastSensitive(Method):
    """Measures, without training, how much the output needs each layer, and cuts what it needs least."""

    needs_trained = True
    # To first order, group and layer norms undo a cut: with them, and with few ties, it may lose to uniform.
    yields_to_uniform = True

    def __init__(self) -> None:
        self.measured: Sensitivity | None = None

    def notes(self, problem: Problem) -> list[str]:
        reason = nothing_to_go_by(problem)
        return [f"The plan is uniform: {reason}."] if reason else []

    def search_macs(self, problem: Problem) -> float:
        if nothing_to_go_by(problem):
            return 0.0
        return float(sensitivity_passes(problem.graph) * problem.graph.macs())

    def plan(self, problem: Problem, config: MethodConfig, train_backbone: TrainBackbone) -> Plan:
        if nothing_to_go_by(problem):
            return assemble_plan(problem, problem.constraint.uniform, config=config)
        measured = self.measure(problem)
        if problem.inherits:
            widths = widths_by(measured, problem, problem.constraint)
        else:
            exact = replace(problem.constraint, divisor=1)
            widths = divide(problem, widths_by(measured, problem, exact))
        return assemble_plan(problem, widths, config=config)

    def scores(self, problem: Problem) -> Mapping[str, Tensor] | None:
        return None if nothing_to_go_by(problem) else self.measure(problem).scores

    def measure(self, problem: Problem) -> Sensitivity:
        if self.measured is None:
            assert problem.trained is not None
            for callback in problem.callbacks:
                callback.on_stage_begin("plan", "measuring how much the output needs each layer")
            images = calibration_images(problem)
            self.measured = measure_sensitivity(problem.trained, problem.graph, images)
        return self.measured


def nothing_to_go_by(problem: Problem) -> str:
    """Why layers cannot be told apart, so that the plan is uniform; empty where they can."""
    free = {tie for tie in problem.graph.widths if tie not in problem.constraint.freeze}
    most = max(map(len, hidden_groups(problem)), default=0) if not problem.inherits else len(free)
    if most < 2:
        of_group = "" if problem.inherits else " of a group"
        return f"no two layers{of_group} compete, because at most one tie can be cut there"
    if problem.data.train.size < LEAST_IMAGES:
        return (
            f"sensitivity is measured on at least {LEAST_IMAGES} training images, and here are "
            f"{problem.data.train.size}"
        )
    return ""


def widths_by(measured: Sensitivity, problem: Problem, constraint: Constraint) -> Widths:
    """The widths by sensitivity. Their last digits may differ between processes: the main process decides."""
    return problem.engine.world.broadcast(measured.widths_within(constraint))


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

"""Widths by sensitivity: channels are cut where the output of the trained network changes least per cost."""

from collections.abc import Mapping

from torch import Tensor

from ..cost.widths import Widths
from ..surgery.sensitivity import TieSensitivity, measure_sensitivities
from .config import MethodConfig
from .method import Method, TrainBackbone
from .plan import Plan, assemble_plan
from .problem import Problem
from .ranking import floors_of, round_widths
from .start import calibration_images

#: A layer loses this fraction of its channels at a time.
BLOCK = 1 / 16

#: The fraction of the cost that is cut before all layers are compared again.
SWEEP = 0.02


class Sensitivity(Method):
    """Measures, without training, how much the output needs each layer, and cuts what it needs least."""

    needs_trained = True

    def __init__(self) -> None:
        self.measured: dict[str, TieSensitivity] | None = None

    def plan(self, problem: Problem, config: MethodConfig, train_backbone: TrainBackbone) -> Plan:
        # The last digits may differ between processes: the main process decides.
        widths = problem.engine.world.broadcast(widths_by_sensitivity(problem, self.measure(problem)))
        return assemble_plan(problem, widths, config=config)

    def scores(self, problem: Problem) -> Mapping[str, Tensor]:
        return {tie: found.scores for tie, found in self.measure(problem).items()}

    def measure(self, problem: Problem) -> dict[str, TieSensitivity]:
        if self.measured is None:
            assert problem.trained is not None
            self.measured = measure_sensitivities(problem.trained, problem.graph, calibration_images(problem))
        return self.measured


def widths_by_sensitivity(problem: Problem, measured: Mapping[str, TieSensitivity]) -> Widths:
    """Cut blocks of channels with the least change of the output per cost, until the budget is met.

    Ties that were not measured follow the uniform network.
    """
    graph, uniform = problem.graph, problem.uniform()
    free = [tie for tie in measured if tie not in problem.freeze]
    floors = floors_of(problem, free)
    widths: dict[str, float] = {**uniform, **{tie: graph.widths[tie] for tie in (*problem.freeze, *free)}}
    while not problem.allows(widths):
        used = problem.used(widths)
        resource = max(used, key=used.__getitem__)
        cuts = []
        for tie in free:
            width = _next_width(problem, tie, widths[tie], floors[tie])
            saved = used[resource] - problem.used({**widths, tie: width})[resource]
            if saved > 0:
                change = measured[tie].change
                lost = float(change[int(width)] - change[int(widths[tie])])
                cuts.append((lost / saved, saved, tie, width))
        if not cuts:
            break
        wanted = min(SWEEP * used[resource], used[resource] - 1)
        for _, saved, tie, width in sorted(cuts):
            widths[tie] = width
            wanted -= saved
            if wanted <= 0:
                break
    return round_widths(problem, widths)


def _next_width(problem: Problem, tie: str, width: float, floor: float) -> float:
    """One block narrower, in whole steps of the tie, and not below the floor."""
    step = problem.graph.steps[tie]
    block = max(1, round(BLOCK * problem.graph.widths[tie] / step)) * step
    return max(width - block, min(width, -(-floor // step) * step))

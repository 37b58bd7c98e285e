"""Widths by sensitivity: channels are cut where the output of the trained network changes least per cost."""

from collections.abc import Mapping

from torch import Tensor

from ..cost.widths import Widths
from ..surgery.sensitivity import Sensitivity, measure_sensitivity
from .config import MethodConfig
from .method import Method, TrainBackbone
from .plan import Plan, assemble_plan
from .problem import Problem
from .start import calibration_images


class LeastSensitive(Method):
    """Measures, without training, how much the output needs each layer, and cuts what it needs least."""

    needs_trained = True
    # To first order, group and layer norms undo a cut: with them, and with few ties, it may lose to uniform.
    yields_to_uniform = True

    def __init__(self) -> None:
        self.measured: Sensitivity | None = None

    def plan(self, problem: Problem, config: MethodConfig, train_backbone: TrainBackbone) -> Plan:
        return assemble_plan(problem, widths_by(self.measure(problem), problem), config=config)

    def scores(self, problem: Problem) -> Mapping[str, Tensor]:
        return self.measure(problem).scores

    def measure(self, problem: Problem) -> Sensitivity:
        if self.measured is None:
            assert problem.trained is not None
            for callback in problem.callbacks:
                callback.on_stage_begin("plan", "measuring how much the output needs each layer")
            images = calibration_images(problem)
            self.measured = measure_sensitivity(problem.trained, problem.graph, images)
        return self.measured


def widths_by(measured: Sensitivity, problem: Problem) -> Widths:
    """The widths by sensitivity at the budget of a problem."""
    widths = measured.widths(
        problem.budget,
        resource=problem.resource,
        limits=problem.limits,
        divisor=problem.divisor,
        freeze=problem.freeze,
    )
    # The last digits may differ between processes: the main process decides.
    return problem.engine.world.broadcast(widths)

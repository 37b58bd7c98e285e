"""`Method`: what PEEL, the uniform network and its peers have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from ..data.datasets import Split
from ..surgery.selection import ChannelScores
from ..train.callbacks import Callback
from ..train.objective import Objective
from ..train.recipe import Recipe
from .config import MethodConfig
from .plan import Plan, assemble_plan
from .problem import Problem

TrainBackbone = Callable[[str, nn.Module, Objective, Recipe, Split, Sequence[Callback]], nn.Module]
"""(stage, network, objective, recipe, images, callbacks) -> the trained network."""


class Method(ABC):
    """Answers a `Problem` with a `Plan`. All plans are then trained by the same recipe."""

    needs_trained = False
    """Whether it needs `problem.trained`, the trained original."""
    yields_to_uniform = False
    """Whether the plan is the uniform network where that has the lower loss after the repair.

    A method that is compared with others keeps its plan.
    """

    def trains_backbone(self, config: MethodConfig) -> bool:
        """Whether `plan` trains networks."""
        return False

    def search_macs(self, problem: Problem) -> float:
        """About how many multiply-adds `plan` takes without the training of networks."""
        return 0.0

    def original_images(self, problem: Problem) -> Split:
        """The images that the original is trained with, where the run trains it."""
        return problem.data.train

    def notes(self, problem: Problem) -> list[str]:
        """What to tell users before training. `problem.trained` is None where the run trains the original."""
        return []

    @abstractmethod
    def plan(self, problem: Problem, config: MethodConfig, train_backbone: TrainBackbone) -> Plan:
        """The widths of the slim network, and how the method came to them."""

    def preview(self, problem: Problem, config: MethodConfig) -> Plan:
        """What is known of the plan before training: at least its costs."""
        return assemble_plan(problem, problem.constraint.uniform, config=config)

    def check(self, problem: Problem, config: MethodConfig) -> None:
        """Find errors before training."""
        self.preview(problem, config)

    def scores(self, problem: Problem) -> Mapping[str, Tensor] | ChannelScores | None:
        """Which channels of the trained original to keep, where weights are inherited.

        Tie -> one score per channel. None: those that best explain the others.
        """
        return None


class Uniform(Method):
    """One factor for all layers."""

    def plan(self, problem: Problem, config: MethodConfig, train_backbone: TrainBackbone) -> Plan:
        return assemble_plan(problem, problem.constraint.uniform, config=config)

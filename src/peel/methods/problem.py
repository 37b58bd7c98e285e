"""What every method receives: a network, its graph and costs, a budget, data and the means to train."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ..cost.constraint import Constraint
from ..data.datasets import Data, Split
from ..graph import ChannelGraph
from ..train.callbacks import Callback
from ..train.engine import Engine
from ..train.history import Metrics
from ..train.loop import evaluate
from ..train.recipe import Recipe
from ..train.task import Task


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    graph: ChannelGraph
    constraint: Constraint
    """What the slim network may cost."""
    data: Data
    backbone_recipe: Recipe
    """The recipe for training the backbone."""
    engine: Engine
    seed: int
    trained: nn.Module | None = None
    """The trained original, once it is known."""
    inherits: bool = False
    """Whether networks are cut from the trained original; else they start from fresh weights."""
    repairs: bool = True
    """Whether those that are cut are repaired too."""
    task: Task = field(default_factory=Task)
    """Loss, metric, optimizer and training function of the user's own."""
    callbacks: Sequence[Callback] = ()
    """They are told the progress of a method's own work."""
    held_out: Split | None = None
    """Training images that no network is trained or repaired with: the better of two is chosen by them. None
    where networks start from fresh weights, and where none can be left out.
    """

    def evaluate(self, model: nn.Module) -> Metrics:
        """Loss and accuracies, or the metric of the task, over the test images."""
        return evaluate(model, self.data.test, self.engine, task=self.task)

    def held_out_loss(self, model: nn.Module) -> float | None:
        """On the images that are left out; of a task without a loss, its metric with the other sign."""
        if self.held_out is None:
            return None
        metrics = evaluate(model, self.held_out, self.engine, task=self.task)
        score = metrics.score
        return metrics.loss if metrics.loss is not None else None if score is None else -score

"""What a network starts from: fresh weights, or those of the trained original, cut and repaired."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..data.augmentation import EVAL
from ..graph.copying import deep_copy
from ..repair.calibration import recalibrate
from ..repair.explain import explain_scores
from ..repair.repair import Repairer, images_at_once
from ..surgery import slim
from ..surgery.selection import ChannelScores
from ..train.engine import eval_batch_size
from ..utils.rng import epoch_order
from .problem import Problem

#: Training images, without their labels, that repair and recalibration use at most; and per batch.
CALIBRATION_IMAGES, BATCH_SIZE = 1024, 128

Watch = Callable[[str, nn.Module], None]
"""Gets a network after each step of surgery: `cut`, `recalibrated`, `repaired`."""


@dataclass
class Start:
    """A network as its training begins."""

    network: nn.Module
    scores: dict[str, float] = field(default_factory=dict)
    """Accuracy on the test images after each step of surgery."""
    loss: float | None = None
    """On the held-out images, where weights are inherited."""


@dataclass(frozen=True)
class Starter:
    """Cuts networks from the trained original and repairs them. The original runs once for all of them."""

    problem: Problem

    @cached_property
    def images(self) -> list[tuple[Any, None]]:
        return calibration_images(self.problem)

    @cached_property
    def explained(self) -> Mapping[str, Tensor]:
        return explain_scores(self._original, self.problem.graph, self.images)

    @cached_property
    def repairer(self) -> Repairer:
        return Repairer(self._original, self.images, self.problem.graph)

    @property
    def _original(self) -> nn.Module:
        assert self.problem.trained is not None
        return self.problem.trained

    def network(
        self,
        widths: Mapping[str, int],
        scores: Mapping[str, Tensor] | ChannelScores | None = None,
        watch: Watch | None = None,
    ) -> nn.Module:
        """A network of these widths, ready to be trained.

        `scores` say which channels are kept: by default those that explain the others.
        """
        problem = self.problem
        network = slim(
            self._original, widths, graph=problem.graph, weights="inherit", scores=scores or self.explained
        )
        if watch is not None:
            watch("cut", network)
            recalibrated = deep_copy(network)
            recalibrate(recalibrated, self.images)
            watch("recalibrated", recalibrated)
        if problem.repairs:
            self.repairer.repair(network)
            if watch is not None:
                watch("repaired", network)
        if problem.engine.world.size > 1:  # their last digits may differ
            state = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
            network.load_state_dict(problem.engine.world.broadcast(state))
        return network.requires_grad_(True)


def calibration_images(problem: Problem, count: int | None = None) -> list[tuple[Any, None]]:
    """Batches of training images without augmentation, and without targets.

    As many as a repair can hold at a time: with more, each layer costs a pass of its own.
    """
    if count is None:
        count = min(CALIBRATION_IMAGES, images_at_once(problem.model, problem.graph))
    train, engine = problem.data.train, problem.engine
    order = epoch_order(train.size, problem.seed, -1)[:count]
    batch_size = min(BATCH_SIZE, eval_batch_size(train))
    batches = train.batches(order, batch_size, EVAL, engine.device, engine.workers)
    return [(batch.inputs, None) for batch in batches]

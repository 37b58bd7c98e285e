"""`Calibration`: the original on some training images, and networks that are cut from it and repaired."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..data.augmentation import EVAL
from ..data.datasets import Split
from ..errors import ConfigError
from ..graph.copying import deep_copy
from ..repair.calibration import recalibrate
from ..repair.explain import explain_scores
from ..repair.repair import Repairer, images_at_once
from ..repair.sensitivity import Sensitivity, measure_sensitivity
from ..surgery import slim
from ..train.engine import Engine, eval_batch_size
from ..utils.rng import derive_seed, epoch_order, seed_everything
from .method import Problem, Scores

#: Training images, without their labels, that repair and recalibration use at most; and per batch.
CALIBRATION_IMAGES, BATCH_SIZE = 1024, 128

NO_ORIGINAL = (
    "the method asks for what is made from the trained original, which it does not have: give it "
    "needs = peel.Needs(original=True)."
)

Watch = Callable[[str, nn.Module], None]
"""Gets a network after each step of surgery: `cut`, `recalibrated`, `repaired`."""


class Calibration:
    """Everything that is measured of the original on training images without labels, each thing once.

    The images are decoded once, and the original is recorded once for all repairs. As many images are taken
    as a repair can hold in one pass: with more, each layer costs a pass of its own.
    """

    def __init__(self, problem: Problem, engine: Engine) -> None:
        self.problem, self.engine = problem, engine
        self._repaired: list[tuple[dict[str, int], Scores | None, dict[str, Tensor]]] = []
        """Widths, scores and weights of repaired networks."""

    @property
    def original(self) -> nn.Module:
        if self.problem.original is None:
            raise ConfigError(NO_ORIGINAL)
        return self.problem.original

    @cached_property
    def batches(self) -> list[tuple[Any, None]]:
        count = min(CALIBRATION_IMAGES, images_at_once(self.problem.model, self.problem.graph))
        return calibration_batches(self.problem.train, self.engine, self.problem.seed, count)

    @cached_property
    def explained(self) -> Mapping[str, Tensor]:
        return explain_scores(self.original, self.problem.graph, self.batches)

    @cached_property
    def sensitivity(self) -> Sensitivity:
        return measure_sensitivity(self.original, self.problem.graph, self.batches)

    @cached_property
    def repairer(self) -> Repairer:
        return Repairer(self.original, self.batches, self.problem.graph)

    def cut(
        self, widths: Mapping[str, int], scores: Scores | None = None, watch: Watch | None = None
    ) -> nn.Module:
        """A network of these widths, cut from the original and, unless this is turned off, repaired.

        `scores` say which channels are kept: by default those that explain the others.
        """
        problem, world = self.problem, self.engine.world
        seed_everything(derive_seed("init", "final", problem.seed))  # of channels that the original lacks
        network = slim(
            self.original, widths, graph=problem.graph, weights="inherit", scores=scores or self.explained
        )
        if watch is not None:
            watch("cut", network)
            recalibrated = deep_copy(network)
            recalibrate(recalibrated, self.batches)
            watch("recalibrated", recalibrated)
        if problem.repairs:
            self._repair(network, dict(widths), scores)
            if watch is not None:
                watch("repaired", network)
        if world.size > 1:  # their last digits may differ
            state = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
            network.load_state_dict(world.broadcast(state))
        return network.requires_grad_(True)

    def _repair(self, network: nn.Module, widths: dict[str, int], scores: Scores | None) -> None:
        """A method that compares networks repairs them before the run asks for them again."""
        for known, chosen, weights in self._repaired:
            if known == widths and chosen is scores:
                network.load_state_dict(weights)
                return
        self.repairer.repair(network)
        self._repaired.append((widths, scores, deep_copy(network).state_dict()))

    def free(self) -> None:
        """Drop what is recorded, before networks are trained."""
        self._repaired.clear()
        for name in ("batches", "repairer"):
            self.__dict__.pop(name, None)


def calibration_batches(train: Split, engine: Engine, seed: int, count: int) -> list[tuple[Any, None]]:
    """Batches of training images without augmentation, and without targets."""
    order = epoch_order(train.size, seed, -1)[:count]
    batch_size = min(BATCH_SIZE, eval_batch_size(train))
    return [
        (batch.inputs, None)
        for batch in train.batches(order, batch_size, EVAL, engine.device, engine.workers)
    ]

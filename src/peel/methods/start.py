"""What a network starts from: fresh weights, or those of the trained original, cut and repaired."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..data.augmentation import EVAL
from ..surgery import slim
from ..surgery.calibration import recalibrate
from ..surgery.explain import explain_scores
from ..surgery.repair import repair
from ..surgery.selection import ChannelScores
from ..train.engine import eval_batch_size
from ..utils.rng import epoch_order
from .problem import Problem

#: Training images, without their labels, that repair and recalibration use.
CALIBRATION_IMAGES, BATCH_SIZE = 1024, 128

Watch = Callable[[str, nn.Module], None]
"""Gets a network after each step of surgery: `cut`, `recalibrated`, `repaired`."""


def start_network(
    problem: Problem,
    widths: Mapping[str, int],
    scores: Mapping[str, Tensor] | ChannelScores | None = None,
    watch: Watch | None = None,
) -> nn.Module:
    """A network of these widths, ready to be trained.

    Where it inherits weights, `scores` say which channels are kept: by default those that explain the others.
    """
    if not problem.inherits:
        return slim(problem.model, widths, graph=problem.graph).requires_grad_(True)
    original = problem.trained
    assert original is not None
    images = calibration_images(problem)
    chosen = scores or explain_scores(original, problem.graph, images)
    network = slim(original, widths, graph=problem.graph, weights="inherit", scores=chosen)
    if watch is not None:
        watch("cut", network)
        recalibrated = copy.deepcopy(network)
        recalibrate(recalibrated, images)
        watch("recalibrated", recalibrated)
    if problem.repairs:
        repair(network, original, images, graph=problem.graph)
        if watch is not None:
            watch("repaired", network)
    if problem.engine.world.size > 1:  # their last digits may differ
        state = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
        network.load_state_dict(problem.engine.world.broadcast(state))
    return network.requires_grad_(True)


def calibration_images(problem: Problem, count: int = CALIBRATION_IMAGES) -> list[tuple[Any, None]]:
    """Batches of training images without augmentation, and without targets."""
    train, engine = problem.data.train, problem.engine
    order = epoch_order(train.size, problem.seed, -1)[:count]
    batch_size = min(BATCH_SIZE, eval_batch_size(train))
    batches = train.batches(order, batch_size, EVAL, engine.device, engine.workers)
    return [(batch.inputs, None) for batch in batches]

"""Objectives: what training minimizes. An objective runs the model on a batch and returns named losses."""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import ModelError


@dataclass(frozen=True)
class Losses:
    """The loss to minimize, its terms by name, and the logits."""

    total: Tensor
    terms: dict[str, Tensor]
    logits: Tensor


class Objective(Protocol):
    def __call__(self, model: nn.Module, batch: Batch) -> Losses: ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy with the labels."""

    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        logits = get_logits(model(batch.images))
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.label_smoothing)
        return Losses(loss, {"cross_entropy": loss.detach()}, logits)


def get_logits(output: object) -> Tensor:
    """The logits in a model's output, in float32. With auxiliary heads the main logits come first."""
    if isinstance(output, tuple):
        output = output[0]
    if not isinstance(output, Tensor):
        output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the model returns a {type(output).__name__}; "
            "a classifier must return a tensor of logits, or a tuple that starts with one."
        )
    return output.float()

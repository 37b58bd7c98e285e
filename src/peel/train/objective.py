"""What training minimises. An objective runs the model on a batch and returns named losses; the loop knows nothing else about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import ModelError

__all__ = ["CrossEntropy", "Losses", "Objective"]


@dataclass(frozen=True)
class Losses:
    """The loss to minimise, its terms by name, and the class scores they were computed from."""

    total: Tensor
    terms: dict[str, Tensor]
    logits: Tensor


class Objective(Protocol):
    def __call__(self, model: nn.Module, batch: Batch) -> Losses: ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy with the labels; `label_smoothing` is spread evenly over all classes, the true one included."""

    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        scores = get_logits(model(batch.images))
        loss = F.cross_entropy(scores, batch.labels, label_smoothing=self.label_smoothing)
        return Losses(loss, {"cross_entropy": loss.detach()}, scores)


def get_logits(output: object) -> Tensor:
    """The class scores among what a model returns; networks with auxiliary heads give them first. Losses are computed in float32."""
    if isinstance(output, tuple):
        output = output[0]
    if not isinstance(output, Tensor):
        output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the model returns a {type(output).__name__}; a classifier returns a tensor of class scores, or a tuple that begins with it."
        )
    return output.float()

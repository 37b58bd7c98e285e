"""The first-order effect of each channel on the loss (Taylor): |gamma * dL/dgamma|, what scaling the channel away would change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.augmentation import EVAL
from ...errors import ConfigError
from ...utils.rng import epoch_order
from ..importance import CriterionInput, LayerScores, norm_scales, values_by_tie
from .weights import filters

__all__ = ["Gradient"]


@dataclass(frozen=True)
class Gradient:
    """The mean over mini-batches of the absolute effect, taken at the scales of norm layers; where a tie has none, at its filters.

    A sum over a group is the first-order effect of scaling the whole group. Layers are not normalised against each other, or all would
    come out alike.
    """

    batches: int = 20
    batch_size: int = 128

    def __post_init__(self) -> None:
        if self.batches < 1 or self.batch_size < 1:
            raise ConfigError(
                f"the gradient criterion needs at least one batch of one image, not {self.batches} of {self.batch_size}."
            )

    def measure(self, subject: CriterionInput) -> list[LayerScores]:
        scales = norm_scales(subject.model, subject.graph)
        places = [
            (name.rpartition(".")[0], name, axis, scale)
            for name, scale in scales.items()
            for axis in range(scale.ndim)
        ]
        places = [
            place
            for place in places
            if values_by_tie(subject.graph, place[1], place[2], place[3].new_zeros(place[3].shape[place[2]]))
        ]
        scaled = {
            tie
            for _, name, axis, scale in places
            for tie in values_by_tie(subject.graph, name, axis, scale.new_zeros(scale.shape[axis]))
        }
        for layer, name, axis, weight in filters(subject.model, subject.graph):
            # A filter before a norm layer has no effect by its size: the norm takes that away.
            if (
                not set(values_by_tie(subject.graph, name, axis, weight.new_zeros(weight.shape[axis])))
                & scaled
            ):
                places.append((layer, name, axis, weight))  # type: ignore[arg-type]
        sums = self._effects(subject, [(axis, tensor) for _, _, axis, tensor in places])
        return [
            LayerScores(tie, layer, part)
            for (layer, name, axis, _), values in zip(places, sums, strict=True)
            for tie, part in values_by_tie(subject.graph, name, axis, values).items()
        ]

    def _effects(self, subject: CriterionInput, places: list[tuple[int, Tensor]]) -> list[Tensor]:
        was_training = subject.model.training
        subject.model.eval()
        order = epoch_order(subject.train.size, subject.seed, -1)[: self.batches * self.batch_size]
        tensors = [tensor for _, tensor in places]
        sums = [torch.zeros(tensor.shape[axis], device=tensor.device) for axis, tensor in places]
        count = 0
        for batch in subject.train.batches(
            order, self.batch_size, EVAL, subject.engine.device, subject.engine.workers
        ):
            loss = subject.objective(subject.model, batch).total
            gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
            for total, gradient, (axis, tensor) in zip(sums, gradients, places, strict=True):
                if gradient is not None:
                    others = [other for other in range(tensor.ndim) if other != axis]
                    effect = gradient * tensor.detach()
                    total += (effect.sum(dim=others) if others else effect).abs()
            count += 1
        subject.model.train(was_training)
        return [total / max(1, count) for total in sums]

"""Step 2: the importance of layers, measured on the trained backbone.

The paper trains the backbone with an L1 term on the scales of norm layers (equation 3) and takes |gamma| as
the importance of a channel. The importance of a group is the mean over its channels (equation 4).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ..data.augmentation import EVAL
from ..data.batch import Batch
from ..data.datasets import Split
from ..errors import ConfigError
from ..graph import ChannelGraph
from ..graph.parameters import ChannelAxis, values_by_tie
from ..train.engine import Engine
from ..train.objective import Losses, Objective
from ..train.recipe import Recipe
from ..train.task import Task
from ..utils.rng import epoch_order

#: Groups cannot be told apart where no share differs from an equal share by more than this fraction.
ALIKE = 0.05


@dataclass(frozen=True)
class CriterionInput:
    """What a criterion measures."""

    model: nn.Module
    """The trained backbone, in evaluation mode."""
    graph: ChannelGraph
    """Its graph, at its own widths."""
    train: Split
    held_out: Split
    """Images that are not part of `train`, for criteria with `needs_held_out`."""
    objective: Objective
    engine: Engine
    seed: int
    task: Task = field(default_factory=Task)

    def batches(self, images: int, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Batches of training images without augmentation, the same ones for the same seed and start."""
        order = epoch_order(self.train.size, self.seed, -1)[start : start + images]
        batch_size = min(batch_size, getattr(self.train, "batch_size", batch_size))
        return self.train.batches(order, batch_size, EVAL, self.engine.device, self.engine.workers)


@dataclass(frozen=True)
class LayerScores:
    """The scores of one layer: one value per channel of a tie, or a single value for the tie."""

    tie: str
    layer: str
    values: Tensor


def layer_scores(graph: ChannelGraph, place: ChannelAxis, values: Tensor) -> list[LayerScores]:
    """Values along an axis of a parameter as the scores of its ties."""
    by_tie = values_by_tie(graph, place.name, place.axis, values)
    return [LayerScores(tie, place.layer, own) for tie, own in by_tie.items()]


class Criterion(Protocol):
    """A measure of importance. A slow one has `each_epoch = False` and is measured after the last epoch only.

    With `needs_held_out = True`, a fraction of the training images is held out for it.
    """

    def measure(self, inputs: CriterionInput) -> list[LayerScores]: ...


@dataclass(frozen=True)
class Importance:
    groups: Mapping[str, float]
    ties: Mapping[str, float]
    distinct: bool
    """Whether the groups can be told apart."""
    note: str
    """The same in words."""


def summarize(measured: Sequence[LayerScores], graph: ChannelGraph, reduce: str = "mean") -> Importance:
    """Equation 4: the importance of a group is the mean over its channels, or, as a setting, their sum."""
    by_tie: dict[str, list[Tensor]] = {tie: [] for tie in graph.widths}
    for item in measured:
        by_tie[item.tie].append(item.values.double().cpu())
    groups, errors = {}, {}
    for group, members in graph.groups.items():
        values = [value for tie in members for value in by_tie[tie]]
        if not values:
            raise ConfigError(
                f"the criterion measures nothing in group {group} ({', '.join(members[:3])}). Choose another "
                "criterion, or put these layers into another group."
            )
        joined = torch.cat(values)
        groups[group] = float(joined.mean() if reduce == "mean" else joined.sum())
        error = float(joined.std()) / math.sqrt(len(joined)) if len(joined) > 1 else 0.0
        errors[group] = error if reduce == "mean" else error * len(joined)
    ties = {tie: float(torch.cat(values).mean()) for tie, values in by_tie.items() if values}
    return Importance(groups, ties, *_compare(groups, errors))


def _compare(groups: Mapping[str, float], errors: Mapping[str, float]) -> tuple[bool, str]:
    """Whether the groups can be told apart, and a note about it."""
    total = sum(groups.values())
    if len(groups) < 2 or not total > 0:
        return False, "There is one group only." if len(groups) < 2 else "Every group has importance zero."
    shares = ", ".join(f"{group} {value / total:.1%}" for group, value in groups.items())
    equal = 1 / len(groups)
    low, high = min(groups, key=lambda g: groups[g]), max(groups, key=lambda g: groups[g])
    if all(abs(value / total / equal - 1) < ALIKE for value in groups.values()):
        reason = f"are within {ALIKE:.0%} of equal ones. A longer schedule or stronger L1 term may help"
    elif groups[high] - groups[low] < 2 * math.hypot(errors[low], errors[high]):
        reason = "differ by less than the spread of their channels. Other plans are as good as this one"
    else:
        return True, f"The groups differ: {shares}."
    return False, f"The groups cannot be told apart: their shares ({shares}) {reason}."


@dataclass(frozen=True)
class WithL1:
    """Equation 3: an objective with an L1 term on the scales of norm layers."""

    objective: Objective
    scales: Sequence[str]
    """Names of the scales."""
    l1_coefficient: float

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        losses = self.objective(model, batch)
        if not self.scales or self.l1_coefficient == 0:
            return losses
        scales = torch.cat([model.get_parameter(name).flatten() for name in self.scales])
        term = self.l1_coefficient * scales.abs().sum()
        return Losses(losses.total + term, {**losses.terms, "l1": term.detach()}, losses.output)


def l1_coefficient_for(l1_strength: float, recipes: Sequence[Recipe], steps_per_epoch: int) -> float:
    """The coefficient with which the L1 term moves a scale by `l1_strength` over the recipes of all rounds.

    The paper's 1e-4 is a strength of about 12.5.
    """
    rates = sum(recipe.lr_sum(steps_per_epoch) for recipe in recipes)
    return l1_strength * (1 - recipes[0].momentum) / rates

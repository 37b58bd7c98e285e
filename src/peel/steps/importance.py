"""Step 2: how important each layer is, measured on the trained backbone.

The paper trains the backbone with an L1 term on the scales of norm layers (equation 3, `Penalised`) and takes |gamma| as the importance of
a channel; a group's importance is the mean over its channels (equation 4). Other criteria stand behind the same one method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..data.batch import Batch
from ..data.datasets import Split
from ..errors import ConfigError
from ..graph import ChannelGraph
from ..train.engine import Engine
from ..train.objective import Losses, Objective
from ..train.recipe import Recipe

__all__ = [
    "Criterion",
    "CriterionInput",
    "Importance",
    "LayerScores",
    "WithL1",
    "l1_coefficient_for",
    "norm_scales",
    "summarise",
    "values_by_tie",
]

#: Groups whose shares all lie within this part of an equal share are as good as equal.
ALIKE = 0.05


@dataclass(frozen=True)
class CriterionInput:
    """What a criterion looks at."""

    model: nn.Module
    """The trained backbone."""
    graph: ChannelGraph
    """Its graph, at its own widths."""
    train: Split
    held_out: Split
    """For criteria that select; it is not part of `train`."""
    objective: Objective
    engine: Engine
    seed: int


@dataclass(frozen=True)
class LayerScores:
    """What a criterion found about one layer: a number per channel of one tie, or a single one for the tie as a whole."""

    tie: str
    layer: str
    values: Tensor


class Criterion(Protocol):
    def measure(self, subject: CriterionInput) -> list[LayerScores]: ...


@dataclass(frozen=True)
class Importance:
    groups: Mapping[str, float]
    ties: Mapping[str, float]
    distinct: bool
    """Whether the groups can be told apart."""
    note: str
    """That, in words."""


def summarise(measured: Sequence[LayerScores], graph: ChannelGraph, reduce: str = "mean") -> Importance:
    """Equation 4: the importance of a group is the mean over its channels, or, as a setting, their sum."""
    if reduce not in ("mean", "sum"):
        raise ConfigError(f'reduce is "mean" or "sum", not {reduce!r}.')
    per_tie: dict[str, list[Tensor]] = {tie: [] for tie in graph.widths}
    for item in measured:
        if not bool(torch.isfinite(item.values).all()):
            raise ConfigError(f"the importance of {item.layer} holds numbers that are not finite.")
        per_tie[item.tie].append(item.values.double().cpu())
    groups, errors = {}, {}
    for group, members in graph.groups.items():
        values = [value for tie in members for value in per_tie[tie]]
        if not values:
            raise ConfigError(
                f"this criterion measures nothing in group {group} ({', '.join(members[:3])}): its layers have no scales or weights it "
                "could read. Choose another criterion, or put these layers into another group."
            )
        joined = torch.cat(values)
        groups[group] = float(joined.mean() if reduce == "mean" else joined.sum())
        error = float(joined.std()) / math.sqrt(len(joined)) if len(joined) > 1 else 0.0
        errors[group] = error if reduce == "mean" else error * len(joined)
    ties = {tie: float(torch.cat(values).mean()) for tie, values in per_tie.items() if values}
    distinct, note = _tell_apart(groups, errors)
    return Importance(groups, ties, distinct, note)


def _tell_apart(groups: Mapping[str, float], errors: Mapping[str, float]) -> tuple[bool, str]:
    total = sum(groups.values())
    if len(groups) < 2 or not total > 0:
        return False, "There is one group only." if len(
            groups
        ) < 2 else "Every group has importance zero: nothing can be told from it."
    shares = {group: value / total for group, value in groups.items()}
    text = ", ".join(f"{group} {share:.1%}" for group, share in shares.items())
    equal = 1 / len(groups)
    furthest = max(abs(share / equal - 1) for share in shares.values())
    low, high = min(groups, key=lambda g: groups[g]), max(groups, key=lambda g: groups[g])
    noise = 2 * math.hypot(errors[low], errors[high])
    if furthest < ALIKE:
        return False, (
            f"The groups cannot be told apart: their shares ({text}) lie within {ALIKE:.0%} of equal ones. The plan is nearly the one "
            "that equal shares would give; a longer schedule, a stronger penalty (pull) or another criterion may tell more."
        )
    if groups[high] - groups[low] < noise:
        return False, (
            f"The groups cannot be told apart: the largest difference between their shares ({text}) is within the spread of their "
            "channels. Take the plan as one of many that are as good."
        )
    return True, f"The groups differ: {text}."


def values_by_tie(graph: ChannelGraph, name: str, axis: int, values: Tensor) -> dict[str, Tensor]:
    """Values along an axis of a tensor -> the free ties that lie there, with the values of each."""
    names = list(graph.widths)
    found: dict[str, list[Tensor]] = {}
    offset = 0
    for run in graph.layouts[name][axis]:
        if run.tie >= 0:
            found.setdefault(names[run.tie], []).append(values[offset : offset + run.length])
        offset += run.length
    return {tie: torch.cat(parts) for tie, parts in found.items()}


def norm_scales(model: nn.Module, graph: ChannelGraph) -> dict[str, nn.Parameter]:
    """The scales of norm layers (gamma), by name."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in graph.scales if name in parameters}


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
        term = (
            self.l1_coefficient
            * torch.cat([model.get_parameter(name).flatten() for name in self.scales]).abs().sum()
        )
        return Losses(losses.total + term, {**losses.terms, "sparsity": term.detach()}, losses.logits)


def l1_coefficient_for(l1_strength: float, recipe: Recipe, steps_per_epoch: int, *later: Recipe) -> float:
    """The coefficient at which the L1 term moves a scale by `pull` over the whole schedule: the paper's 1e-4 has a pull of about 12.5.

    Where the search has several rounds, `later` are the recipes of those after the first.
    """
    return (
        l1_strength * (1 - recipe.momentum) / sum(part.lr_sum(steps_per_epoch) for part in (recipe, *later))
    )

"""Global ranking: the channels of the whole trained network are ranked, and the last ones are cut.

A threshold decides which channels are kept. It is the lowest one whose network costs no more than the budget.
Scores are divided by the mean over their layer; otherwise layers with large weights would keep everything.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..cost.cutting import floors_of
from ..cost.widths import Widths
from ..graph.channel_graph import ChannelGraph
from ..graph.parameters import ChannelAxis
from ..steps.criteria.gradient import mean_effects
from ..steps.importance import CriterionInput
from ..surgery.selection import ChannelScores
from .method import Answer, Method, Needs, Problem

if TYPE_CHECKING:
    from .work import Work

#: Images that the effects of channels are measured on, and the batch size.
BATCHES, BATCH_SIZE = 20, 128


class GlobalRanking(Method):
    needs = Needs(original=True)

    @abstractmethod
    def scores(self, problem: Problem, work: Work) -> ChannelScores: ...

    def solve(self, problem: Problem, work: Work) -> Answer:
        if work.is_rehearsal:
            return Answer(problem.constraint.uniform)
        scores = self.scores(problem, work)
        # The last digits may differ between processes: the main process decides.
        return Answer(work.engine.world.broadcast(widths_by_rank(problem, scores)), scores)


@dataclass(frozen=True)
class Magnitude(GlobalRanking):
    """The norm of all weights that write or read a channel, each divided by the mean of its layer."""

    def scores(self, problem: Problem, work: Work) -> ChannelScores:
        assert problem.original is not None
        return ChannelScores.from_axes(problem.graph, _norms(problem.original, problem.graph))


@dataclass(frozen=True)
class Taylor(GlobalRanking):
    """The squared first-order effect on the loss of removing a channel (Molchanov et al., 2019)."""

    def scores(self, problem: Problem, work: Work) -> ChannelScores:
        assert problem.original is not None
        images, model = problem.train, problem.original.eval().requires_grad_(True)
        inputs = CriterionInput(
            model,
            problem.graph,
            images,
            images,
            problem.task.objective(),
            work.engine,
            problem.seed,
            problem.task,
        )
        effects = mean_effects(inputs, BATCHES, BATCH_SIZE, torch.square, with_shift=True)
        model.requires_grad_(False)
        return ChannelScores.from_axes(
            problem.graph, ((place, _relative(values)) for place, values in effects)
        )


def _norms(original: nn.Module, graph: ChannelGraph) -> Iterator[tuple[ChannelAxis, Tensor]]:
    """Squared norms along every axis of weights and scales that holds channels."""
    for name, parameter in original.named_parameters():
        if name in graph.gates or (parameter.ndim < 2 and name not in graph.scales):
            continue
        for axis in range(parameter.ndim):
            place = ChannelAxis(name, axis, parameter)
            if place.ties(graph):
                yield place, _relative(place.reduce(parameter.detach().square(), torch.sum))


def _relative(values: Tensor) -> Tensor:
    return values / values.mean().clamp_min(1e-12)


def widths_by_rank(problem: Problem, scores: ChannelScores) -> Widths:
    """The widths that a threshold on the scores leaves, rounded to the budget."""
    graph, uniform, freeze = problem.graph, problem.constraint.uniform, problem.constraint.freeze
    free = {
        tie: values for tie, values in scores.by_tie(graph).items() if tie not in problem.constraint.freeze
    }
    floors = floors_of(graph, uniform, free)
    thresholds = torch.cat([*free.values(), torch.tensor([float("inf")])]).sort().values

    def kept(place: int) -> dict[str, float]:
        counts = {tie: float((values >= thresholds[place]).sum()) for tie, values in free.items()}
        chosen = {tie: max(floors[tie], count * graph.steps[tie]) for tie, count in counts.items()}
        # Ties without a score, such as squeeze-excite layers, follow the uniform network.
        return {**uniform, **{tie: graph.widths[tie] for tie in freeze}, **chosen}

    last = len(thresholds) - 1

    def fits(place: int) -> bool:
        return place == last or problem.constraint.allows(kept(place))

    return problem.constraint.round(kept(bisect_left(range(last), True, key=fits)))

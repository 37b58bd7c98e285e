"""PEEL: steps 1 to 4 in order. Step 5 is the final training, which all methods share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from ..cost.constraint import Constraint
from ..cost.widths import Widths
from ..data.datasets import hold_out
from ..errors import ConfigError, did_you_mean
from ..graph import ChannelGraph
from ..graph.parameters import norm_scales, spans
from ..steps.backbone import backbone_within
from ..steps.criteria import find_criterion, measure_layers
from ..steps.importance import (
    Criterion,
    CriterionInput,
    Importance,
    LayerScores,
    WithL1,
    l1_coefficient_for,
    summarize,
)
from ..steps.reallocation import Growth, Round, grow_at_random, grow_by_shares, grow_equally, shares_of
from ..surgery import slim
from ..train.callbacks import Callback
from ..train.recipe import Recipe
from ..utils.rng import derive_seed, seed_everything
from .config import MethodConfig
from .method import Method, TrainBackbone
from .plan import Plan, assemble_plan
from .problem import Problem
from .start import Starter

#: Fraction of the training images held out for criteria with `needs_held_out`.
HELD_OUT = 0.1

#: The paper's coefficient of the L1 term.
L1_COEFFICIENT = 1e-4


@dataclass(frozen=True)
class Peel(Method):
    """Steps 1 to 4: backbone, importance, groups, reallocation; in one round or several."""

    criterion: Criterion | None = None
    """The user's own, where it is not a name."""

    def trains_backbone(self, config: MethodConfig) -> bool:
        return config.uses_importance

    def plan(self, problem: Problem, config: MethodConfig, train_backbone: TrainBackbone) -> Plan:
        return _Planner(problem, config, train_backbone, self.criterion).run()

    def preview(self, problem: Problem, config: MethodConfig) -> Plan:
        """The plan with the same importance for every group."""
        planner = _Planner(problem, config, _untrained, self.criterion)
        equal = dict.fromkeys(problem.graph.groups, 1.0)
        importance = Importance(equal, {}, False, "Nothing was trained: every group counts the same.")
        return planner.plan([planner.reallocate(planner.backbone, importance, problem.constraint)])

    def check(self, problem: Problem, config: MethodConfig) -> None:
        """Run steps 1 to 4 on an untrained backbone and 8 images."""
        few = problem.data.train.subset(torch.arange(min(8, problem.data.train.size)))
        engine = replace(problem.engine, workers=0)
        small = replace(problem, data=replace(problem.data, train=few), engine=engine, inherits=False)
        _Planner(small, replace(config, evaluations=1), _untrained, self.criterion).run()


def stage_of_round(number: int) -> str:
    return "backbone" if number == 0 else f"backbone-{number + 1}"


def recipe_of_round(problem: Problem, config: MethodConfig, number: int) -> Recipe:
    """The first round uses the whole backbone recipe, later rounds a fraction of its epochs."""
    recipe = problem.backbone_recipe
    return recipe if number == 0 else recipe.changed(epochs=max(1, round(recipe.epochs / config.rounds)))


def _untrained(stage: str, network: nn.Module, *_: Any) -> nn.Module:
    return network


@dataclass
class _ImportanceLog(Callback):
    """Adds the importance of the groups to the metrics of each epoch."""

    importance_of: Callable[[nn.Module], Importance]

    def extra_metrics(self, model: nn.Module) -> dict[str, Any]:
        return {"importance": dict(self.importance_of(model).groups)}


@torch.no_grad()
def _init_scales(
    network: nn.Module, value: float, graph: ChannelGraph, before: ChannelGraph | None = None
) -> None:
    """Set the scales of all norm layers, or only of the channels that the graph has beyond those before."""
    for name, scale in norm_scales(network, graph).items():
        for axis, runs in enumerate(graph.layouts[name]):
            kept = (
                [run.length for run in before.layouts[name][axis]] if before is not None else [0] * len(runs)
            )
            for (_, span), count in zip(spans(runs), kept, strict=True):
                # New channels follow those that are kept.
                scale[(slice(None),) * axis + (slice(span.start + count, span.stop),)] = value


@dataclass
class _Planner:
    problem: Problem
    config: MethodConfig
    train_backbone: TrainBackbone
    own_criterion: Criterion | None = None
    l1_coefficient: float | None = None

    def __post_init__(self) -> None:
        problem, config = self.problem, self.config
        settings = {"evaluations": config.evaluations} if config.criterion == "legr" else {}
        given = config.criterion if self.own_criterion is None else self.own_criterion
        self.criterion = find_criterion(given, **settings)
        # All arithmetic is on exact widths. They are aligned once, at the end.
        self.exact = replace(problem.constraint, divisor=1)
        self.backbone = backbone_within(self.exact, config.backbone_ratio, config.backbone_init)

    def run(self) -> Plan:
        problem, config, budget = self.problem, self.config, self.exact.budget
        pool = budget - self.exact.cost(self.backbone)
        before = widths = self.backbone
        network: nn.Module | None = None
        importance: Importance | None = None
        rounds: list[Round] = []
        for number in range(config.rounds):
            if config.uses_importance:
                network = self._widen(network, before, widths)
                network, importance = self._train_and_measure(number, network, problem.graph.at(widths))
            spent = pool * (number + 1) // config.rounds
            is_last = number + 1 == config.rounds
            part = problem.constraint if is_last else self.exact.at(budget - pool + spent)
            rounds.append(self.reallocate(widths, importance, part))
            before, widths = widths, Widths(rounds[-1].widths)
        return self.plan(rounds)

    def plan(self, rounds: Sequence[Round]) -> Plan:
        return assemble_plan(
            self.problem,
            rounds[-1].widths,
            backbone=self.backbone,
            rounds=tuple(rounds),
            l1_coefficient=self.l1_coefficient,
            config=self.config,
        )

    def _widen(self, network: nn.Module | None, before: Widths, widths: Widths) -> nn.Module:
        """The backbone of a round: new in the first, widened with its weights kept in later ones."""
        problem = self.problem
        seed_everything(derive_seed("backbone", problem.seed))
        old, new = problem.graph.at(before), problem.graph.at(widths)
        if network is not None:
            network = slim(network, widths, graph=old, weights="inherit")
            _init_scales(network, self.config.gamma_init, new, old)
        elif problem.inherits:
            network = Starter(problem).network(widths)
        else:
            network = slim(problem.model, widths, graph=problem.graph).requires_grad_(True)
            _init_scales(network, self.config.gamma_init, new)
        return network

    def _train_and_measure(
        self, number: int, network: nn.Module, graph: ChannelGraph
    ) -> tuple[nn.Module, Importance]:
        """Step 2: train the backbone, then measure its importance."""
        problem, config = self.problem, self.config
        recipe = recipe_of_round(problem, config, number)
        train, held_out = problem.data.train, problem.data.train
        if getattr(self.criterion, "needs_held_out", False):
            train, held_out = hold_out(problem.data.train, HELD_OUT, problem.seed)
        objective = problem.task.objective(recipe.label_smoothing)
        self.l1_coefficient = self._l1_coefficient(max(1, train.size // recipe.batch_size))

        def importance_of(model: nn.Module) -> Importance:
            inputs = CriterionInput(
                model, graph, train, held_out, objective, problem.engine, problem.seed, problem.task
            )
            is_trained = self.train_backbone is not _untrained
            scores = measure_layers(self.criterion, inputs, is_trained=is_trained)
            kept = self._without_ignored(scores)
            if not is_trained:
                kept = [replace(item, values=torch.ones_like(item.values)) for item in kept]
            return summarize(kept, graph, config.reduce)

        callbacks = [_ImportanceLog(importance_of)] if getattr(self.criterion, "each_epoch", True) else []
        with_l1 = WithL1(objective, list(norm_scales(network, graph)), self.l1_coefficient)
        trained = self.train_backbone(stage_of_round(number), network, with_l1, recipe, train, callbacks)
        problem.engine.prepare(trained)
        # Every process measures, and the last digits may differ: the main process decides.
        importance: Importance = problem.engine.world.broadcast(importance_of(trained))
        return trained, importance

    def _l1_coefficient(self, steps_per_epoch: int) -> float:
        config = self.config
        if config.l1_strength is not None:
            rounds = [recipe_of_round(self.problem, config, number) for number in range(config.rounds)]
            return l1_coefficient_for(config.l1_strength, rounds, steps_per_epoch)
        if config.l1_coefficient is not None:
            return config.l1_coefficient
        return L1_COEFFICIENT if config.criterion == "bn" else 0.0

    def _without_ignored(self, scores: list[LayerScores]) -> list[LayerScores]:
        """Without the layers that `ignore` names."""
        layers = [item.layer for item in scores]
        for pattern in self.config.ignore:
            matches = [layer for layer in layers if fnmatch(layer, pattern)]
            if not matches:
                raise ConfigError(
                    f"ignore: no measured layer matches {pattern!r}.{did_you_mean(pattern, layers)}"
                )
            if len(matches) == len(layers):
                raise ConfigError(f"ignore: {pattern!r} matches every layer, so nothing is left to measure.")
        return [item for item in scores if not any(fnmatch(item.layer, name) for name in self.config.ignore)]

    def reallocate(self, widths: Widths, importance: Importance | None, constraint: Constraint) -> Round:
        """Step 4."""
        problem, config = self.problem, self.config
        growth = Growth(problem.graph, widths, replace(constraint, max_width=config.max_width))
        if config.policy == "equal":
            return grow_equally(growth)
        if config.policy == "random":
            return grow_at_random(growth, problem.seed)
        assert importance is not None
        growing = {group: value for group, value in importance.groups.items() if growth.can_grow(group)}
        shares = {**dict.fromkeys(importance.groups, 0.0), **shares_of(growing, config.policy)}
        return replace(
            grow_by_shares(growth, shares, config.solver),
            shares=shares,
            importance=dict(importance.groups),
            tie_importance=dict(importance.ties),
            distinct=importance.distinct,
            note=importance.note,
        )

"""PEEL: steps 1 to 4 in their order. What each of them decided is kept in the plan, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from ..cost.widths import Widths
from ..data.datasets import hold_out
from ..errors import ConfigError, did_you_mean
from ..graph import ChannelGraph
from ..steps.backbone import backbone
from ..steps.criteria import find_criterion, measure_layers
from ..steps.importance import (
    CriterionInput,
    Importance,
    LayerScores,
    WithL1,
    l1_coefficient_for,
    norm_scales,
    summarise,
)
from ..steps.reallocation import Growth, Reallocation, add_evenly, grow_at_random, reallocation, shares_of
from ..surgery import slim
from ..train.objective import CrossEntropy, Objective
from ..train.recipe import Recipe
from ..utils.rng import derive_seed, seed_everything
from .problem import Problem
from .settings import Method

__all__ = [
    "HELD_OUT",
    "Plan",
    "TrainBackbone",
    "check_feasible",
    "equal_share_plan",
    "make_plan",
    "recipe_of_round",
    "stage_of_round",
]

#: The part of the training images that criteria which select (legr) look at, and nothing else.
HELD_OUT = 0.1

#: Images of a rehearsal.
REHEARSED = 8

#: The paper's coefficient of the L1 term.
PENALTY = 1e-4

TrainBackbone = Callable[
    [str, nn.Module, Objective, Recipe, Any, Callable[[nn.Module], dict[str, Any]] | None], nn.Module
]
"""Trains a model: stage name, model, objective, recipe, training images, what to note at the end of each epoch."""


@dataclass(frozen=True)
class Plan:
    widths: Widths
    document: dict[str, Any]
    """plan.json: what every step decided."""


def make_plan(
    problem: Problem, method: Method, train_backbone: TrainBackbone, *, is_dry: bool = False
) -> Plan:
    """Steps 1 to 4: the backbone, its importance, the groups, the reallocation; in one round or several."""
    planner = _Planner(problem, method, is_dry)
    current = planner.backbone
    pool = problem.budget - problem.cost(current)
    if method.policy in ("uniform", "random"):
        # These policies ask nothing about importance, so nothing is trained for them.
        return planner.finish([planner.round(current, None, problem.budget)])
    network: nn.Module | None = None
    rounds: list[_Round] = []
    for number in range(method.rounds):
        graph = problem.graph.at(current)
        network = planner.grown(network, rounds[-1].graph if rounds else None, current)
        network, importance = planner.learn(number, network, graph, train_backbone)
        part = (
            problem.budget
            if number + 1 == method.rounds
            else problem.budget - pool + pool * (number + 1) // method.rounds
        )
        rounds.append(planner.round(current, importance, part))
        current = rounds[-1].reallocation.widths
    return planner.finish(rounds)


def equal_share_plan(problem: Problem, method: Method) -> Plan:
    """The plan with the same importance for every group: what can be said before anything is trained."""
    planner = _Planner(problem, method)
    equal = dict.fromkeys(problem.graph.groups, 1.0)
    note = "Nothing was trained: every group counts the same."
    importance = None if method.policy in ("uniform", "random") else Importance(equal, {}, False, note)
    return planner.finish([planner.round(planner.backbone, importance, problem.budget)])


def check_feasible(problem: Problem, method: Method) -> None:
    """Steps 1 to 4 with a backbone that is not trained: what would be refused after hours of training is refused at once."""
    few = problem.data.train.subset(torch.arange(min(REHEARSED, problem.data.train.size)))
    small = replace(problem, data=replace(problem.data, train=few), engine=replace(problem.engine, workers=0))
    make_plan(
        small,
        replace(method, evaluations=1),
        lambda stage, network, *_: problem.engine.prepare(network),
        is_dry=True,
    )


def stage_of_round(number: int) -> str:
    return "backbone" if number == 0 else f"backbone-{number + 1}"


def recipe_of_round(problem: Problem, method: Method, number: int) -> Recipe:
    """The whole search recipe for the first round; for later ones, as many epochs as its share of the rounds."""
    epochs = problem.search.epochs
    return (
        problem.search
        if number == 0
        else problem.search.changed(epochs=max(1, round(epochs / method.rounds)))
    )


@dataclass(frozen=True)
class _Round:
    graph: ChannelGraph
    """At the widths before this round."""
    importance: Importance | None
    shares: dict[str, float] | None
    reallocation: Reallocation
    budget: int
    """What the network may cost after this round."""


class _Planner:
    def __init__(self, problem: Problem, method: Method, is_dry: bool = False) -> None:
        self.problem, self.method, self.is_dry = problem, method, is_dry
        self.backbone = backbone(
            problem.graph,
            problem.budget,
            method.keep,
            resource=problem.resource,
            init=method.start,  # type: ignore[arg-type]
            divisor=problem.divisor,
            freeze=problem.freeze,
            max_width=1.0 if problem.budget * method.keep <= problem.cost(problem.graph.widths) else None,
        )
        self.l1_coefficient: float | None = None

    def grown(self, before: nn.Module | None, graph: ChannelGraph | None, widths: Widths) -> nn.Module:
        """The backbone of this round: fresh in the first, widened with its weights kept in later ones."""
        seed_everything(derive_seed("backbone", self.problem.seed))
        if before is not None and graph is not None:
            return slim(before, widths, graph=graph, weights="inherit")
        network = slim(self.problem.model, widths, graph=self.problem.graph).requires_grad_(True)
        with torch.no_grad():
            for scale in norm_scales(network, self.problem.graph).values():
                scale.fill_(self.method.gamma_init)
        return network

    def learn(
        self, number: int, network: nn.Module, graph: ChannelGraph, train_backbone: TrainBackbone
    ) -> tuple[nn.Module, Importance]:
        """Step 2: train the backbone, then measure. The trained one need not be the one that was given: a resumed run reads it back."""
        problem, method = self.problem, self.method
        recipe = recipe_of_round(problem, method, number)
        train, held_out = problem.data.train, problem.data.train
        criterion = find_criterion(
            method.criterion, **({"evaluations": method.evaluations} if method.criterion == "legr" else {})
        )
        if getattr(criterion, "needs_held_out", False):
            train, held_out = hold_out(problem.data.train, HELD_OUT, problem.seed)
        objective = CrossEntropy(recipe.label_smoothing)
        self.l1_coefficient = self._penalty(max(1, train.size // recipe.batch_size))
        scales = list(norm_scales(network, graph))

        def measure(model: nn.Module) -> Importance:
            inputs = CriterionInput(model, graph, train, held_out, objective, problem.engine, problem.seed)
            measured = self._counted(measure_layers(criterion, inputs, is_trained=not self.is_dry))
            if self.is_dry:
                # What a network says that was never trained counts for nothing, be it infinite; only whether it can be asked.
                measured = [replace(item, values=torch.ones_like(item.values)) for item in measured]
            return summarise(measured, graph, method.reduce)

        def note(model: nn.Module) -> dict[str, Any]:
            return {"importance": dict(measure(model).groups)}

        # The slow criteria are measured once, at the end.
        each_epoch = note if getattr(criterion, "each_epoch", True) else None
        trained = train_backbone(
            stage_of_round(number),
            network,
            WithL1(objective, scales, self.l1_coefficient),
            recipe,
            train,
            each_epoch,
        )
        # Each process measures, and the last digits may differ: all go by what the first one found.
        return trained, problem.engine.world.broadcast(measure(trained))

    def _penalty(self, steps: int) -> float:
        if self.method.l1_strength is not None:
            first, *later = (
                recipe_of_round(self.problem, self.method, number) for number in range(self.method.rounds)
            )
            return l1_coefficient_for(self.method.l1_strength, first, steps, *later)
        if self.method.l1_coefficient is not None:
            return self.method.l1_coefficient
        return PENALTY if self.method.criterion == "bn" else 0.0

    def _counted(self, measured: list[LayerScores]) -> list[LayerScores]:
        layers = [item.layer for item in measured]
        for pattern in self.method.ignore:
            if not any(fnmatch(layer, pattern) for layer in layers):
                raise ConfigError(
                    f"ignore: no layer that is measured matches {pattern!r}.{did_you_mean(pattern, layers)}"
                )
            if all(fnmatch(layer, pattern) for layer in layers):
                raise ConfigError(f"ignore: {pattern!r} matches every layer, so nothing is left to measure.")
        return [
            item
            for item in measured
            if not any(fnmatch(item.layer, pattern) for pattern in self.method.ignore)
        ]

    def round(self, current: Widths, importance: Importance | None, budget: int) -> _Round:
        """Step 4."""
        problem, method = self.problem, self.method
        frozen = frozenset(problem.freeze)
        growth = Growth(problem.graph, current, problem.resource, problem.divisor, frozen, method.max_width)
        graph = problem.graph.at(current)
        if method.policy == "uniform":
            return _Round(graph, None, None, add_evenly(growth, budget), budget)
        if method.policy == "random":
            return _Round(
                graph,
                None,
                None,
                grow_at_random(growth, budget, problem.seed),
                budget,
            )
        assert importance is not None
        shares = shares_of(importance.groups, method.policy)
        found = reallocation(growth, shares, budget, method.solver)
        return _Round(graph, importance, shares, found, budget)

    def finish(self, rounds: list[_Round]) -> Plan:
        graph, method = self.problem.graph, self.method
        widths = rounds[-1].reallocation.widths
        networks = {
            "original": graph.widths,
            "backbone": self.backbone,
            "uniform": self.problem.uniform(),
            "peel": widths,
        }

        def described(name: str) -> dict[str, Any]:
            chosen = networks[name]
            return self.problem.described(chosen)

        document = {
            "format": "peel-plan",
            "version": 1,
            "resource": self.problem.resource,
            "budget": self.problem.budget,
            "original": described("original"),
            "backbone": {
                "keep": method.keep,
                "start": method.start if isinstance(method.start, str) else "given",
                **described("backbone"),
            },
            "pool": self.problem.budget - self.problem.cost(self.backbone),
            "groups": {group: list(ties) for group, ties in graph.groups.items()},
            "hold": list(self.problem.freeze),
            "criterion": method.criterion,
            "reduce": method.reduce,
            "penalty": self.l1_coefficient,
            "policy": method.policy,
            "solve": method.solver,
            "rounds": [self._described_round(item) for item in rounds],
            **described("peel"),
            "uniform": described("uniform"),
            "macs_by_group": {name: graph.macs_by_group(chosen) for name, chosen in networks.items()},
        }
        return Plan(widths, document)

    def _described_round(self, item: _Round) -> dict[str, Any]:
        graph, found = self.problem.graph, item.reallocation
        described: dict[str, Any] = {
            "factors": dict(found.factors),
            "widths": dict(found.widths),
            "macs": graph.macs(found.widths),
            "params": graph.params(found.widths),
            "rounding": {"ideal": found.ideal_cost, "spent": found.spent, "ideal_widths": dict(found.ideal)},
        }
        described["rounding"]["unused"] = item.budget - found.spent
        if item.importance is not None:
            described["importance"] = {
                "groups": dict(item.importance.groups),
                "ties": dict(item.importance.ties),
            }
            described["shares"] = item.shares
            described["distinct"] = item.importance.distinct
            described["note"] = item.importance.note
        return described

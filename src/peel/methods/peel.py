"""PEEL: steps 1 to 4 in order. Step 5 is the final training, which all methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import nn

from ..cost.constraint import Constraint
from ..cost.widths import Widths
from ..errors import ConfigError, check_choice, did_you_mean
from ..graph import ChannelGraph
from ..graph.parameters import norm_scales, spans
from ..steps.backbone import BACKBONE_INITS, backbone_within
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
from ..steps.reallocation import (
    POLICIES,
    SOLVERS,
    Growth,
    Round,
    grow_at_random,
    grow_by_shares,
    grow_equally,
    shares_of,
)
from ..surgery import slim
from ..train.callbacks import Callback
from ..train.recipe import Recipe
from ..utils.rng import derive_seed, seed_everything
from ..utils.tables import Table
from ..utils.validation import Count, NotNegative, Positive
from .method import Answer, Method, Needs, Problem
from .plan import Plan, read_widths

if TYPE_CHECKING:
    from .work import Work

#: The paper's coefficient of the L1 term.
L1_COEFFICIENT = 1e-4


@dataclass(frozen=True, kw_only=True)
class Peel(Method):
    """Reallocation (Hou et al.): groups of layers that matter more get more of what a backbone leaves.

    As published, unless changed. docs/paper.md names the section of the paper for each setting.
    """

    backbone_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Step 1: the fraction of the budget that the backbone costs (lambda)."""
    backbone_init: str | dict[str, int] = "uniform"
    """Step 1: the backbone's widths: uniform, equal (the same number of channels), or a JSON file."""
    criterion: Any = "bn"
    """Step 2: bn, weight, legr, reconstruction, gradient, taylor, or your own as path/file.py:Name."""
    reduce: str = "mean"
    """Step 2: a group's importance is the mean or the sum over its channels."""
    l1_coefficient: NotNegative | None = None
    """Step 2: the coefficient of the L1 term (alpha_s). Default: 1e-4 for the criterion bn, 0 for others."""
    l1_strength: NotNegative | None = None
    """Step 2: instead of l1_coefficient, the total shrinkage of a scale by the L1 term: 12.5 in the paper."""
    gamma_init: Positive = 1.0
    """Step 2: the initial scale of the backbone's norm layers."""
    ignore: tuple[str, ...] = ()
    """Step 2: layers whose importance is not counted, as patterns such as `*downsample*`."""
    evaluations: Count = 400
    """Step 2: candidates that the criterion legr evaluates."""
    policy: str = "importance"
    """Step 4: importance, winner-take-all, equal (the same number of channels) or random."""
    solver: str = "telescoped"
    """Step 4: telescoped or triangular."""
    rounds: Annotated[int, Meta(ge=1, le=100)] = 1
    """Step 4: rounds of reallocation; the backbone is widened and trained again between them."""
    max_width: Positive | None = None
    """Step 4: no layer grows beyond this multiple of its original width."""

    def __post_init__(self) -> None:
        for name, known in (("reduce", ("mean", "sum")), ("policy", POLICIES), ("solver", SOLVERS)):
            check_choice(name, getattr(self, name), known)
        if isinstance(self.backbone_init, str) and not self.backbone_init.endswith(".json"):
            check_choice("backbone_init", self.backbone_init, BACKBONE_INITS)
        if self.l1_coefficient is not None and self.l1_strength is not None:
            raise ConfigError("l1_coefficient and l1_strength set the same thing: give one of them.")
        for name in () if self.measures else ("max_width", "l1_strength", "l1_coefficient", "rounds"):
            if getattr(self, name) != getattr(Peel, name):
                raise ConfigError(f"policy={self.policy!r} does not use {name}: leave it out.")
        find_criterion(self.criterion)

    @property
    def measures(self) -> bool:
        """Whether a backbone is trained and measured; the policies equal and random need none."""
        return self.policy in ("importance", "winner-take-all")

    @property
    def needs(self) -> Needs:
        holds_out = self.measures and getattr(find_criterion(self.criterion), "needs_held_out", False)
        return Needs(held_out=holds_out, training="loss" if self.measures else "")

    def solve(self, problem: Problem, work: Work) -> Answer:
        """Steps 1 to 4."""
        # All arithmetic is on exact widths. They are aligned once, at the end: alignment is larger than what
        # is reallocated.
        exact = replace(problem.constraint, divisor=1)
        init = self.backbone_init
        if init not in BACKBONE_INITS:
            init = dict(read_widths(init, problem.graph, "backbone_init"))
        base = backbone_within(exact, self.backbone_ratio, init)  # step 1
        pool = exact.budget - exact.cost(base)
        before = widths = base
        network, importance, coefficient = None, None, None
        rounds: list[Round] = []
        for number in range(self.rounds):
            if self.measures:
                coefficient = self._l1_coefficient(problem, work)
                network = self._widened(network, before, widths, problem, work)
                network = self._train(number, network, problem.graph.at(widths), coefficient, problem, work)
                graph, name = problem.graph.at(widths), f"importance-{number + 1}"

                def measure(model: nn.Module = network, graph: ChannelGraph = graph) -> Importance:
                    return self._measure(model, graph, problem, work)

                importance = work.once(name, Importance, measure)  # steps 2 and 3
            is_last = number + 1 == self.rounds
            spent = exact.budget - pool + pool * (number + 1) // self.rounds
            rounds.append(
                self._reallocate(
                    widths, importance, problem, problem.constraint if is_last else exact.at(spent)
                )
            )
            before, widths = widths, Widths(rounds[-1].widths)
        return Answer(
            widths,
            others={"backbone": base},
            values={"rounds": msgspec.to_builtins(rounds), "l1_coefficient": coefficient, "pool": pool},
            tables=tuple(table_of(number, rounds, problem.graph.groups) for number in range(len(rounds))),
            notes=(*self._fixed_notes(problem), *([] if work.is_rehearsal else _notes(rounds, problem))),
        )

    def _fixed_notes(self, problem: Problem) -> list[str]:
        """What is known before anything is measured."""
        notes = []
        if self.measures and problem.task.train_fn is not None:
            notes.append("train_fn trains the backbone without an L1 term on the scales of norm layers.")
        if self.criterion == "legr" and problem.held_out is not None and problem.held_out.labels is None:
            notes.append("Classes are not known: legr judges candidates on random held-out samples.")
        return notes

    # Step 2

    def _widened(
        self, network: nn.Module | None, before: Widths, widths: Widths, problem: Problem, work: Work
    ) -> nn.Module:
        """The backbone of a round: new in the first, widened with its weights kept in later ones."""
        seed_everything(derive_seed("backbone", problem.seed))
        old, new = problem.graph.at(before), problem.graph.at(widths)
        if network is not None:
            network = slim(network, widths, graph=old, weights="inherit")
            _init_scales(network, self.gamma_init, new, old)
            return network
        network = work.start(widths)
        if not problem.inherits:
            _init_scales(network, self.gamma_init, new)
        return network

    def _train(
        self,
        number: int,
        network: nn.Module,
        graph: ChannelGraph,
        coefficient: float,
        problem: Problem,
        work: Work,
    ) -> nn.Module:
        recipe = self.recipe_of_round(problem, number)
        objective = WithL1(
            problem.task.objective(recipe.label_smoothing), list(norm_scales(network, graph)), coefficient
        )
        is_logged = getattr(self._criterion(work), "each_epoch", True)
        log = _ImportanceLog(lambda model: self._measure(model, graph, problem, work))
        callbacks = [log] if is_logged else []
        trained = work.train(stage_of_round(number), network, objective, recipe, callbacks=callbacks)
        return work.engine.prepare(trained)

    def recipe_of_round(self, problem: Problem, number: int) -> Recipe:
        """The first round uses the whole search recipe, later rounds a fraction of its epochs."""
        recipe = problem.recipes.search
        return recipe if number == 0 else recipe.changed(epochs=max(1, round(recipe.epochs / self.rounds)))

    def _l1_coefficient(self, problem: Problem, work: Work) -> float:
        if self.l1_strength is not None:
            recipes = [self.recipe_of_round(problem, number) for number in range(self.rounds)]
            steps = max(1, work.training_images // recipes[0].batch_size)
            return l1_coefficient_for(self.l1_strength, recipes, steps)
        if self.l1_coefficient is not None:
            return self.l1_coefficient
        return L1_COEFFICIENT if self.criterion == "bn" else 0.0

    def _criterion(self, work: Work) -> Criterion:
        evaluations = 1 if work.is_rehearsal else self.evaluations
        settings = {"evaluations": evaluations} if self.criterion == "legr" else {}
        return find_criterion(self.criterion, **settings)

    def _measure(self, model: nn.Module, graph: ChannelGraph, problem: Problem, work: Work) -> Importance:
        held_out = problem.train if problem.held_out is None else problem.held_out
        objective = problem.task.objective(problem.recipes.search.label_smoothing)
        inputs = CriterionInput(
            model, graph, problem.train, held_out, objective, work.engine, problem.seed, problem.task
        )
        scores = measure_layers(self._criterion(work), inputs, is_trained=not work.is_rehearsal)
        kept = self._without_ignored(scores)
        if not work.is_rehearsal:
            return summarize(kept, graph, self.reduce)
        equal = dict.fromkeys(graph.groups, 1.0)
        summarize([replace(item, values=torch.ones_like(item.values)) for item in kept], graph)
        return Importance(equal, {}, False, "Nothing was trained: every group counts the same.")

    def _without_ignored(self, scores: list[LayerScores]) -> list[LayerScores]:
        """Without the layers that `ignore` names."""
        layers = [item.layer for item in scores]
        for pattern in self.ignore:
            matches = [layer for layer in layers if fnmatch(layer, pattern)]
            if not matches:
                raise ConfigError(
                    f"ignore: no measured layer matches {pattern!r}.{did_you_mean(pattern, layers)}"
                )
            if len(matches) == len(layers):
                raise ConfigError(f"ignore: {pattern!r} matches every layer, so nothing is left to measure.")
        return [item for item in scores if not any(fnmatch(item.layer, name) for name in self.ignore)]

    # Step 4

    def _reallocate(
        self, widths: Widths, importance: Importance | None, problem: Problem, constraint: Constraint
    ) -> Round:
        growth = Growth(problem.graph, widths, replace(constraint, max_width=self.max_width))
        if self.policy == "equal":
            return grow_equally(growth)
        if self.policy == "random":
            return grow_at_random(growth, problem.seed)
        assert importance is not None
        growing = {group: value for group, value in importance.groups.items() if growth.can_grow(group)}
        shares = {**dict.fromkeys(importance.groups, 0.0), **shares_of(growing, self.policy)}
        return replace(
            grow_by_shares(growth, shares, self.solver),
            shares=shares,
            importance=dict(importance.groups),
            tie_importance=dict(importance.ties),
            distinct=importance.distinct,
            note=importance.note,
        )


def stage_of_round(number: int) -> str:
    return "backbone" if number == 0 else f"backbone-{number + 1}"


def rounds_of(plan: Plan) -> tuple[Round, ...]:
    """The rounds of reallocation that a plan of PEEL holds."""
    return msgspec.convert(plan.values.get("rounds", ()), tuple[Round, ...])


def _notes(rounds: Sequence[Round], problem: Problem) -> list[str]:
    alike = dict.fromkeys(item.note for item in rounds if item.note and not item.distinct)
    return [*alike, *filter(None, [rounds[-1].rounding_note]), *_why_uniform(rounds, problem)]


def _why_uniform(rounds: Sequence[Round], problem: Problem) -> list[str]:
    """Why a reallocation ends in the uniform network."""
    last, uniform = rounds[-1], problem.constraint.uniform
    if last.widths != dict(uniform):
        return []
    if len(problem.graph.groups) == 1:
        return ["The plan is the uniform network. All layers are in one group, so it gets the whole pool."]
    if not last.distinct:
        return []
    moved = max(abs(last.ideal_widths[tie] / uniform[tie] - 1) for tie in last.ideal_widths)
    return [
        "The plan is the uniform network. Before rounding, its widths differ from the uniform ones by at "
        f"most {moved:.1%}: divisor=1 keeps that."
    ]


def table_of(number: int, rounds: Sequence[Round], groups: Mapping[str, Sequence[str]]) -> Table:
    """How a round came to its widths."""
    item = rounds[number]
    columns: dict[str, dict[str, float] | None] = {
        "importance": item.importance,
        "share of the pool": item.shares,
        "factor on the backbone": item.factors,
        "after rounding": item.rounded_factors,
    }
    known = {name: values for name, values in columns.items() if values}
    return Table(
        f"Round {number + 1} of {len(rounds)}" if len(rounds) > 1 else "Reallocation",
        ("group", "ties", *known),
        tuple(
            (group, len(ties), *(values.get(group) for values in known.values()))
            for group, ties in groups.items()
        ),
        note=(
            f"{item.note} Before rounding, the plan costs {item.ideal_cost:,.0f}; after it, {item.cost:,}. "
            f"{item.unspent:,} of the budget are left. {item.rounding_note}"
        ).strip(),
        chart="bars",
    )


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

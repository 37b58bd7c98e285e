"""`Rehearsal`: a method's `solve` before anything is trained. It finds errors, and adds up the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..data.augmentation import EVAL
from ..data.datasets import Split
from ..errors import ConfigError
from ..graph.copying import deep_copy
from ..repair.sensitivity import Sensitivity, sensitivity_passes
from ..surgery import info_of, slim
from ..train.callbacks import Callback
from ..train.engine import Engine
from ..train.history import Metrics
from ..train.phases import Phase
from ..train.recipe import Recipe
from ..utils.process_state import preserve_process_state
from ..utils.rng import seed_everything
from .calibration import NO_ORIGINAL, Calibration, Watch
from .check import named_errors
from .method import Answer, Method, Problem, Scores
from .work import Goal, Stateful, T, Work

#: Images that a rehearsal sees, and images of the step that it trains.
IMAGES, STEP_IMAGES = 8, 2

#: A training step costs about this many forward passes.
PASSES_PER_STEP = 3


class Rehearsal(Work):
    """Answers at once: networks are not trained, the original may be untrained, nothing is stored."""

    is_rehearsal = True

    def __init__(self, problem: Problem, engine: Engine, *, sizes: Problem, has_original: bool) -> None:
        unmeasured = _Unmeasured(problem, engine, self, has_original=has_original)
        super().__init__(problem, engine, calibration=unmeasured, trainer=_refuse)
        self.sizes = sizes
        """The problem with all images."""

    @property
    def training_images(self) -> int:
        return self.sizes.train.size

    def train(
        self,
        name: str,
        network: nn.Module,
        objective: Goal,
        recipe: Recipe | None = None,
        *,
        images: Split | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> nn.Module:
        """One step without an update: an objective that fails does so here."""
        self._check_name("train", name)
        problem, recipe = self.problem, recipe or self.problem.recipes.search
        if problem.task.train_fn is None:
            engine = replace(self.engine, workers=0)
            twin = engine.prepare(deep_copy(network)).train()
            few = torch.arange(min(STEP_IMAGES, problem.train.size))
            phases = objective if isinstance(objective, Sequence) else [Phase(lambda *one: [objective(*one)])]
            for batch in problem.train.batches(few, len(few), EVAL, engine.device, 0):
                for losses in (one for phase in phases for one in phase.losses(twin, batch)):
                    losses.total.backward()  # type: ignore[no-untyped-call]
        passes = recipe.epochs * self.sizes.train.size * PASSES_PER_STEP
        self.spent.trained[name] = passes * float(macs_of(network, problem))
        return network

    def evaluate(self, network: nn.Module, images: Split | None = None) -> Metrics:
        split = images if images is not None else self.sizes.held_out
        if split is None:
            return super().evaluate(network)  # says what is missing
        self.spent.macs += split.size * macs_of(network, self.problem)
        task = self.problem.task
        if task.is_classification:
            return Metrics(1.0, 0.0, None)
        return Metrics(1.0, None, None, 0.0 if task.metric is not None else None)

    def once(self, name: str, kind: type[T], compute: Callable[[], T]) -> T:
        self._check_name("once", name)
        seed_everything(self.seed(name))
        return compute()

    def steps(self, name: str, count: int, state: Stateful | None = None) -> Iterator[int]:
        """One step, which stands for all of them."""
        self._check_name("steps", name)
        before = self.spent.macs
        yield 0
        self.spent.macs = before + (self.spent.macs - before) * count

    def recalibrate(self, network: nn.Module) -> None:
        return None


class _Unmeasured(Calibration):
    """Every channel counts the same, and cut networks are not repaired."""

    def __init__(self, problem: Problem, engine: Engine, work: Work, *, has_original: bool) -> None:
        super().__init__(problem, engine)
        self.work, self.has_original = work, has_original

    @property
    def original(self) -> nn.Module:
        if not self.has_original:
            raise ConfigError(NO_ORIGINAL)
        return self.problem.model if self.problem.original is None else self.problem.original

    @cached_property
    def explained(self) -> Mapping[str, Tensor]:
        graph, _ = self.problem.graph, self.original
        return {tie: torch.ones(width) for tie, width in graph.widths.items()}

    @cached_property
    def sensitivity(self) -> Sensitivity:
        graph = self.problem.graph
        self.work.spent.macs += float(sensitivity_passes(graph) * graph.macs())
        units = {tie: width // graph.steps[tie] for tie, width in graph.widths.items()}
        change = {tie: torch.linspace(1, 0, count + 1) for tie, count in units.items()}
        return Sensitivity(graph, self.explained, change)

    def cut(
        self, widths: Mapping[str, int], scores: Scores | None = None, watch: Watch | None = None
    ) -> nn.Module:
        assert self.original is not None
        return slim(self.problem.model, widths, graph=self.problem.graph).requires_grad_(True)


def rehearse(method: Method, problem: Problem, engine: Engine, name: str) -> tuple[Answer, Rehearsal]:
    """The preview of a method's answer, and what it asked for. Global state is left as it was."""

    def few(split: Split | None) -> Any:
        return None if split is None else split.subset(torch.arange(min(IMAGES, split.size)))

    small = replace(problem, train=few(problem.train), held_out=few(problem.held_out))
    has_original = method.needs.original or (bool(method.needs.training) and problem.inherits)
    engine = replace(engine, workers=0)
    rehearsal = Rehearsal(small, engine, sizes=problem, has_original=has_original)
    with preserve_process_state(), named_errors(name):
        answer = method.solve(small, rehearsal)
    return answer, rehearsal


def macs_of(network: nn.Module, problem: Problem) -> int:
    """Multiply-adds of a forward pass, by the widths that the network was built with."""
    known = info_of(network).widths
    widths = {tie: known.get(tie, width) for tie, width in problem.graph.widths.items()}
    return problem.graph.macs(widths)


def _refuse(*_: Any) -> nn.Module:
    raise AssertionError("a rehearsal trains nothing")

"""`Loaded`: a model with its data in this process. It is what all jobs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..cost.constraint import Constraint
from ..data.datasets import Data, Split
from ..graph import ChannelGraph
from ..methods.method import Method, Problem, Recipes
from ..steps.distillation import Terms
from ..train.callbacks import Callback
from ..train.distributed import World
from ..train.engine import Engine
from ..train.history import Metrics
from ..train.loop import evaluate
from ..train.task import Task
from .config import Config
from .jobs import Limits, Setup, Solve
from .result import Record


@dataclass(frozen=True)
class Given:
    """A trained original of the user's."""

    model: nn.Module
    file: str = "stages/original.safetensors"
    record: Record | None = None
    """How it was trained, where that is known."""


@dataclass
class Loaded:
    """Model, data, constraint and settings, checked against each other. Nothing of it is trained here."""

    model: nn.Module
    graph: ChannelGraph
    data: Data
    """Without the training images that are left out."""
    constraint: Constraint
    task: Task
    engine: Engine
    config: Config
    """The settings as resolved."""
    recipes: Recipes
    method: Method
    weights: nn.Module | Mapping[str, Tensor] | str = "train"
    new_classifier: bool = False
    """The model has pretrained weights but for its classifier: the original is trained from them."""
    held_out: Split | None = None
    """Training images that no network is trained or repaired with."""
    callbacks: Sequence[Callback] = ()
    notes: list[str] = field(default_factory=list)
    subject: dict[str, Any] = field(default_factory=dict)
    """What the jobs of a run share, for the refusal of another one."""
    given: Given | None = None
    """The trained original, where it is given and something needs it."""
    caches: dict[str, Any] = field(default_factory=dict)
    """What is made once for several jobs: by the key of the original."""

    @property
    def world(self) -> World:
        return self.engine.world

    @property
    def seed(self) -> int:
        return self.config.seed

    @cached_property
    def is_chosen(self) -> bool:
        """Whether mean and std were given, and are not doubted."""
        return self.config.mean is not None or self.config.std is not None

    def problem(self, job: Solve | None = None, original: nn.Module | None = None) -> Problem:
        """The question that a method is asked."""
        constraint = self.constraint
        if job is not None and job.limits != Limits.of(constraint):
            constraint = Constraint(
                self.graph,
                job.limits.resource,
                job.limits.limits,
                job.limits.divisor,  # type: ignore[arg-type]
                frozenset(job.limits.freeze),
                None,
                job.limits.grow,
            )
        return Problem(
            self.model,
            self.graph,
            constraint,
            self.data.train,
            self.recipes,
            self.seed if job is None else job.seed,
            original,
            self.config.inherits,
            self.config.repairs,
            self.task,
            self.held_out,
        )

    def evaluate(self, model: nn.Module) -> Metrics:
        """Loss and accuracies, or the metric of the task, over the test images."""
        return evaluate(self.engine.prepare(model), self.data.test, self.engine, task=self.task)

    def held_out_loss(self, model: nn.Module) -> float | None:
        """On the images that are left out; of a task without a loss, its metric with the other sign."""
        if self.held_out is None:
            return None
        metrics = evaluate(model, self.held_out, self.engine, task=self.task)
        score = metrics.score
        return metrics.loss if metrics.loss is not None else None if score is None else -score

    # What users see

    def begin_stage(self, stage: str, text: str) -> None:
        for callback in self.callbacks:
            callback.on_stage_begin(stage, text)

    def tell(self, notes: Sequence[str]) -> None:
        """Show each note once: at the start, before the final trainings, or at the end."""
        told = self.caches.setdefault("told", set())
        for note in notes:
            for callback in () if note in told else self.callbacks:
                callback.on_note(note)
            told.add(note)


def setup_of(loaded: Loaded, source: str) -> Setup:
    """What all arms share."""
    config = loaded.config
    terms = None
    if config.distill != "none":
        assert config.kd_weight is not None
        assert config.temperature is not None
        assert config.hard_weight is not None
        terms = Terms(config.kd_weight, config.temperature, config.hard_weight)
    final, search = loaded.recipes.final, loaded.recipes.search
    return Setup(source, final, final, search, config.distill, terms, config.inherits, config.repairs)

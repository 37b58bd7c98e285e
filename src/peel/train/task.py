"""`Task`: what networks learn and how they are judged. By default they classify images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import ConfigError
from .history import Metrics
from .objective import (
    CrossEntropy,
    Loss,
    ModelLoss,
    Objective,
    UserLoss,
    describe,
    explain_failure,
    get_logits,
    in_float32,
    name_of,
)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZER_HINT = (
    "Each network needs one of its own: give a function that makes it, such as "
    "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)."
)

TrainFunction = Callable[..., Any]
"""`train_fn(model, epochs=..., teacher=...)` trains a model in place. `teacher` may be None."""


@dataclass(frozen=True)
class Task:
    """The user's own loss, metric, optimizer and training function, each of which may be left out."""

    loss: Loss | str | None = None
    """`"model"`: the model computes its losses itself. None: cross entropy with class numbers."""
    metric: Any = None
    """`metric(output, target)` -> a number, or an object with `update(output, target)` and `compute()`.

    Higher is better. None: top-1, where the targets are class numbers.
    """
    optimizer: OptimizerFactory | None = None
    train_fn: TrainFunction | None = None
    is_classification: bool = True
    """Outputs are logits and targets are class numbers, of each sample or of each of its positions."""
    has_output: bool = True
    """In training the model returns a tensor that distillation can compare."""

    def __post_init__(self) -> None:
        if isinstance(self.loss, str) and self.loss != "model":
            raise ConfigError(f'loss is a function (output, target) -> scalar or "model", not {self.loss!r}.')
        for name in ("loss", "optimizer", "train_fn"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str) and not callable(value):
                hint = f" {OPTIMIZER_HINT}" if name == "optimizer" else ""
                raise ConfigError(f"{name} must be callable, not {describe(value)}.{hint}")
        if self.metric is not None and not callable(self.metric) and not self.is_accumulating:
            wanted = "a function (output, target) -> number, or an object with update and compute"
            raise ConfigError(f"metric is {wanted}, not {describe(self.metric)}.")

    @property
    def is_own(self) -> bool:
        """Whether code of the user's runs in training steps."""
        return self.loss is not None or self.optimizer is not None

    @property
    def is_accumulating(self) -> bool:
        return all(callable(getattr(self.metric, name, None)) for name in ("update", "compute", "reset"))

    @property
    def metric_name(self) -> str | None:
        return None if self.metric is None else name_of(self.metric).rpartition(".")[2]

    def names(self) -> dict[str, str | None]:
        """The names of the user's functions: part of what identifies a run."""
        given = {name: getattr(self, name) for name in ("loss", "metric", "optimizer", "train_fn")}
        return {
            name: value if isinstance(value, str | None) else name_of(value) for name, value in given.items()
        }

    def objective(self, label_smoothing: float = 0.0) -> Objective:
        if self.loss is None:
            return CrossEntropy(label_smoothing)
        return ModelLoss() if isinstance(self.loss, str) else UserLoss(self.loss)


class Scores:
    """Adds up loss and metric over the batches of an evaluation."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task = task
        #: Of the loss, then of top-1 and top-5, or of the metric.
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.count = self.classes = 0
        if task.is_accumulating:
            task.metric.reset()

    def add(self, model: nn.Module, output: Any, batch: Batch) -> None:
        output = in_float32(output)
        count = batch.targets.numel() if self.task.is_classification else batch.size
        loss = self._loss(model, output, batch, count)
        scores = self._hits(output, batch) if self.task.metric is None else self._metric(output, batch, count)
        self.sums += torch.stack([loss.double(), *scores])
        self.count += count

    def _loss(self, model: nn.Module, output: Any, batch: Batch, count: int) -> Tensor:
        task = self.task
        if task.loss == "model":
            return task.objective()(model, batch).total * count
        if callable(task.loss):
            return UserLoss(task.loss).value(output, batch.targets) * count
        if not task.is_classification:
            return self.sums.new_zeros(())
        return F.cross_entropy(get_logits(output), batch.targets, reduction="sum")

    def _hits(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """How many class numbers are the first, and among the first five."""
        if not self.task.is_classification:
            return self.sums.new_zeros(()), self.sums.new_zeros(())
        logits = get_logits(output)
        self.classes = logits.shape[1]
        is_hit = logits.topk(min(5, self.classes), dim=1).indices == batch.targets[:, None]
        return is_hit[:, 0].sum().double(), is_hit.sum().double()

    def _metric(self, output: Any, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        value: Any = 0.0
        with explain_failure(f"the metric {self.task.metric_name}"):
            if self.task.is_accumulating:
                self.task.metric.update(output, batch.targets)
            else:
                value = self.task.metric(output, batch.targets)
        return self.sums.new_tensor(self._number(value) * count), self.sums.new_zeros(())

    def _number(self, value: Any) -> float:
        is_number = value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__")
        if not is_number:
            raise ConfigError(
                f"the metric {self.task.metric_name} must return a number, not {describe(value)}."
            )
        return float(value)

    def result(self, sums: Tensor, count: int, classes: int) -> Metrics:
        """Of all processes together."""
        task = self.task
        loss, first, second = (sums / max(1, count)).tolist()
        has_loss = task.loss is not None or task.is_classification
        if task.metric is None:
            is_shown = task.is_classification
            top5 = second if is_shown and classes > 5 else None
            return Metrics(loss if has_loss else None, first if is_shown else None, top5)
        if task.is_accumulating:
            with explain_failure(f"the metric {task.metric_name}"):
                first = self._number(task.metric.compute())
        return Metrics(loss if has_loss else None, None, None, first)

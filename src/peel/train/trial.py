"""Tries model, loss and metric on one batch, before hours of training."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch, call_model
from ..data.datasets import Data, first_batch
from ..errors import ConfigError, DataError
from ..graph.copying import deep_copy
from ..utils.rng import epoch_order
from .objective import describe, main_output, name_of
from .task import Scores, Task

#: Samples of the trial: enough for the statistics of batch norm.
SAMPLES = 4

#: Samples whose class numbers are looked at.
MORE_SAMPLES = 64


def try_task(model: nn.Module, data: Data, task: Task) -> Task:
    """The task, with what the first samples say about it. A model, loss or metric that fails is an error."""
    model = deep_copy(model).cpu()
    batch = first_batch(data.train, SAMPLES)
    output = _try_model(model.eval(), batch, "training")
    task = replace(task, is_classification=not data.is_own or _is_classification(output, batch))
    if task.loss is None and task.train_fn is None and not task.is_classification:
        raise ConfigError(
            f"the target of the given data is {describe(batch.targets)} and the output of the model "
            f"{describe(output)}: these are not class numbers and logits. Give loss=, a function (output, "
            'target) -> scalar, or loss="model" for a model that computes its losses itself.'
        )
    if task.is_classification and data.is_own:
        _check_range(output, data)
    if task.loss is not None or task.train_fn is None:
        task = replace(task, has_output=_try_loss(model, batch, task))
    _try_evaluation(model, first_batch(data.test, SAMPLES), task)
    return task


def _try_model(model: nn.Module, batch: Batch, name: str) -> Any:
    try:
        with torch.inference_mode():
            return call_model(model, batch.inputs)
    except Exception as error:
        inputs = batch.inputs
        if isinstance(inputs, tuple):
            how = f"{len(inputs)} positional arguments, as they are a tuple (a list would be one argument)"
        else:
            how = "keyword arguments" if isinstance(inputs, Mapping) else "one argument"
        raise DataError(
            f"the model cannot take the inputs of the {name} data: {describe(inputs)}, passed as {how}. It "
            f"raises {type(error).__name__}: {error}"
        ) from error


def _is_classification(output: Any, batch: Batch) -> bool:
    """Whether targets are class numbers of the samples, or of their positions, and outputs their logits."""
    logits, targets = main_output(output), batch.targets
    if logits is None or not isinstance(targets, Tensor) or targets.dtype != torch.int64 or logits.ndim < 2:
        return False
    return targets.shape == (len(logits), *logits.shape[2:])


def _check_range(output: Any, data: Data) -> None:
    logits = main_output(output)
    assert logits is not None
    random = epoch_order(data.train.size, 0, -1)[:MORE_SAMPLES]
    batch = first_batch(data.train, random)
    lowest, highest = int(batch.targets.min()), int(batch.targets.max())
    if highest >= logits.shape[1]:
        raise DataError(
            f"the class numbers of the given data go from {lowest} to {highest}, but the model returns the "
            f"logits of {logits.shape[1]} classes. Number the classes from 0, or build a larger model."
        )


def _try_loss(model: nn.Module, batch: Batch, task: Task) -> bool:
    """Whether the model returns an output beside the loss."""
    losses = task.objective()(model.train(), batch)
    total = losses.total
    name = f"the loss {name_of(task.loss)}" if callable(task.loss) else "the loss"
    if not math.isfinite(float(total.detach())):
        raise ConfigError(f"{name} of the first samples is {float(total.detach())}: it must be finite.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "no parameter of the model requires a gradient: all are frozen, and nothing could be trained. "
            "Call model.requires_grad_(True)."
        )
    if not total.requires_grad:
        raise ConfigError(f"{name} has no gradient: it must be computed from the model's output by torch.")
    total.backward()  # type: ignore[no-untyped-call]
    return losses.output is not None


def _try_evaluation(model: nn.Module, batch: Batch, task: Task) -> None:
    output = _try_model(model.eval(), batch, "validation")
    scores = Scores(task, torch.device("cpu"))
    with torch.inference_mode():
        scores.add(model, output, batch)
    metrics = scores.result(scores.sums, scores.count, scores.classes)
    if metrics.metric is not None and not math.isfinite(metrics.metric):
        raise ConfigError(
            f"the metric {task.metric_name} of the first validation samples is {metrics.metric}: it must be "
            "finite."
        )

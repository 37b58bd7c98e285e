"""The criteria of step 2, by name, and criteria of the user's own.

A criterion is an object with one method, `measure(inputs) -> list[LayerScores]`. The user gives an object, or
`path/to/file.py:Name` or `package.module:Name`: a class that needs no arguments, or an instance.
"""

import traceback
from typing import Any

import torch
from torch import Tensor, nn

from ...data.datasets import Split, hold_out
from ...data.torch_data import as_split
from ...errors import ConfigError, PeelError, did_you_mean
from ...graph import ChannelGraph
from ...train.engine import Engine
from ...train.objective import Loss
from ...train.task import Task
from ...utils.references import load_object
from ..importance import Criterion, CriterionInput, Importance, LayerScores, summarize
from .gradient import Gradient, Taylor
from .legr import Legr
from .magnitude import NormScale, WeightMagnitude
from .reconstruction import Reconstruction

__all__ = [
    "CRITERIA",
    "Criterion",
    "CriterionInput",
    "LayerScores",
    "find_criterion",
    "measure_importance",
    "measure_layers",
]

#: Name -> class. The first line of its docstring is its description.
CRITERIA: dict[str, type] = {
    "bn": NormScale,
    "weight": WeightMagnitude,
    "legr": Legr,
    "reconstruction": Reconstruction,
    "gradient": Gradient,
    "taylor": Taylor,
}


def find_criterion(reference: object, **settings: Any) -> Criterion:
    """The criterion for a name (with settings), an object, or a reference to the user's code."""
    target: Any = reference
    if isinstance(reference, str):
        if reference not in CRITERIA and ":" not in reference:
            raise ConfigError(
                f"no criterion is called {reference!r}.{did_you_mean(reference, CRITERIA)} Known are "
                f"{', '.join(CRITERIA)}; for your own, write path/to/file.py:Name or package.module:Name."
            )
        target = CRITERIA[reference] if reference in CRITERIA else load_object(reference, ConfigError)
    if not callable(getattr(target, "measure", None)):
        raise ConfigError(f"the criterion {reference!r} has no method `measure(inputs)`.")
    try:
        criterion: Criterion = target(**settings) if isinstance(target, type) else target
    except Exception as error:
        made = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the criterion {reference!r} cannot be created: {made}") from error
    return criterion


def measure_layers(
    criterion: Criterion, inputs: CriterionInput, *, is_trained: bool = True
) -> list[LayerScores]:
    """Measure in evaluation mode, and check the scores. Those of an untrained network need not be finite."""
    name, was_training = type(criterion).__name__, inputs.model.training
    inputs.model.eval()
    try:
        scores = criterion.measure(inputs)
    except Exception as error:
        if isinstance(error, PeelError) or type(criterion) in CRITERIA.values():
            raise
        frame = traceback.extract_tb(error.__traceback__)[:2][-1]
        raised = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        raise ConfigError(f"the criterion {name} raised {raised}") from error
    finally:
        inputs.model.train(was_training)
    _check_scores(scores, name, inputs.graph, is_trained)
    return scores


def measure_importance(
    model: nn.Module,
    graph: ChannelGraph,
    data: Any,
    *,
    criterion: str | Criterion = "gradient",
    loss: Loss | str | None = None,
    reduce: str = "mean",
    seed: int = 0,
) -> Importance:
    """Step 2 for a loop of your own: the importance of each group of layers of a trained network.

    Args:
        model: the network; it is measured where it is, and not changed.
        graph: its graph, at its own widths: `graph.at(widths)`.
        data: a torch `Dataset` or `DataLoader`, as for `peel.prune`.
        criterion: a name (bn, weight, gradient, taylor, ...) or an object with `measure(inputs)`.
        loss: as for `peel.prune`; by default cross entropy with class numbers.
        reduce: the importance of a group is the `mean` or the `sum` over its channels.

    >>> importance = peel.measure_importance(backbone, graph.at(widths), train)
    >>> peel.reallocate(graph, widths, importance.groups, "50%")
    """
    found, split = find_criterion(criterion), as_split(data, "training data")
    train: Split = split
    held_out: Split = split
    if getattr(found, "needs_held_out", False):
        train, held_out = hold_out(split, 0.1, seed)
    task = Task(loss, is_classification=loss is None)
    engine = Engine(next(model.parameters()).device)
    inputs = CriterionInput(model, graph, train, held_out, task.objective(), engine, seed, task)
    return summarize(measure_layers(found, inputs), graph, reduce)


def _check_scores(scores: object, criterion: str, graph: ChannelGraph, is_trained: bool) -> None:
    if not isinstance(scores, list) or not all(isinstance(item, LayerScores) for item in scores):
        raise ConfigError(f"the criterion {criterion} must return a list of LayerScores, not {scores!r:.80}.")
    for item in scores:
        where, tie = f"the criterion {criterion}, layer {item.layer}:", item.tie
        if tie not in graph.widths:
            raise ConfigError(f"{where} no free tie is called {tie!r}.{did_you_mean(tie, graph.widths)}")
        values, width = item.values, graph.widths[tie]
        count = len(values) if isinstance(values, Tensor) and values.ndim == 1 else 0
        # A flattened layer has several values per channel, a grouped one has one for several channels.
        if not count or max(count, width) % min(count, width):
            wanted = f"a tensor with one value for each of the {width} channels of {tie}, or one for the tie"
            raise ConfigError(f"{where} values must be {wanted}, not {values!r:.80}.")
        if is_trained and not bool(torch.isfinite(values).all()):
            raise ConfigError(f"{where} some values are not finite.")

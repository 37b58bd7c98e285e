"""Checks of what a method answers, before anything is trained on it."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn

from ..cost.widths import Widths
from ..errors import ConfigError, PeelError
from ..graph.rebuild import new_shapes, tensors_of
from ..surgery.info import info_of
from ..surgery.selection import ChannelScores
from ..train.engine import is_out_of_memory
from .method import Answer, Method, Problem


def checked(answer: Any, problem: Problem, method: Method, name: str) -> tuple[Answer, Widths]:
    """The answer and its widths. An error names the method, what is wrong, and by how much."""
    if not isinstance(answer, Answer):
        raise ConfigError(f"the method {name} must return a peel.Answer, not {type(answer).__name__}.")
    try:
        widths = problem.graph.check(answer.widths)
    except PeelError as error:
        raise ConfigError(f"the widths of the method {name}: {error}") from error
    if missing := sorted(widths.keys() - dict(answer.widths).keys()):
        raise ConfigError(f"the answer of the method {name} has no width for {', '.join(missing[:3])}.")
    for tie in sorted(problem.constraint.freeze):
        if widths[tie] != problem.graph.widths[tie]:
            raise ConfigError(
                f"the method {name} gives {tie} {widths[tie]} channels, but it is frozen: it keeps "
                f"{problem.graph.widths[tie]} (--freeze)."
            )
    if excess := problem.constraint.excess(widths):
        raise ConfigError(
            f"the network of the method {name} {excess}. End solve() with problem.constraint.round(widths)."
        )
    if answer.network is not None:
        _check_network(answer.network, widths, problem, name)
    _check_words(answer, name)
    return answer, widths


def _check_words(answer: Answer, name: str) -> None:
    """What stands in plan.json and on the page."""
    for table in answer.tables:
        wrong = [row for row in table.rows if len(row) != len(table.columns)]
        if wrong or table.chart not in ("", "bars", "lines"):
            what = f"a row of {len(wrong[0])} cells" if wrong else f"the chart {table.chart!r}"
            raise ConfigError(
                f"the table {table.title!r} of the method {name} has {what}: rows have a cell for each of "
                f"the {len(table.columns)} columns, and chart is empty, bars or lines."
            )
    try:
        json.dumps(msgspec.to_builtins([dict(answer.values), answer.tables]), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the values and tables of the method {name} must be plain and finite: {error}."
        ) from error
    scores = answer.scores.by_atom if isinstance(answer.scores, ChannelScores) else answer.scores
    for place, values in (scores or {}).items():
        if not torch.isfinite(values).all():
            raise ConfigError(f"the scores of the method {name} are not all finite: those of {place}.")


@contextlib.contextmanager
def named_errors(name: str) -> Iterator[None]:
    """An error in the code of a method says which one it was, and where."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PeelError) or is_out_of_memory(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"the method {name} raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error


def _check_network(network: nn.Module, widths: Widths, problem: Problem, name: str) -> None:
    known = info_of(network).widths
    if {tie: known.get(tie) for tie in widths} != dict(widths):
        raise ConfigError(
            f"the network of the method {name} has other widths than its answer. Make it with "
            "peel.slim(..., widths), and train that."
        )
    tensors = tensors_of(network)
    for tensor, shape in new_shapes(problem.graph, problem.graph.units(widths)).items():
        if tensor not in tensors or tuple(tensors[tensor].shape) != shape:
            raise ConfigError(f"the network of the method {name}: {tensor} is not of shape {shape}.")
        if tensors[tensor].is_floating_point() and not torch.isfinite(tensors[tensor]).all():
            raise ConfigError(
                f"the network of the method {name} has weights that are not finite ({tensor}): its training "
                "diverged. Lower its learning rate."
            )

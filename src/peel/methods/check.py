"""Checks of what a method answers, before anything is trained on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..cost.widths import Widths
from ..errors import ConfigError, PeelError
from ..graph.rebuild import new_shapes, tensors_of
from ..surgery.info import info_of
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
    return answer, widths


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

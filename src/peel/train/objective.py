"""Objectives: what training minimizes. An objective runs the model on a batch and returns named losses."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batch import Batch, call_model, map_tensors
from ..errors import ConfigError, ModelError
from ..graph.layers import DROPOUTS, NORMS
from .engine import is_out_of_memory

Loss = Callable[[Any, Any], Tensor]
"""(output of the model, target) -> the loss, a scalar."""


@dataclass(frozen=True)
class Losses:
    """The loss to minimize, its terms by name (and top-1), and the main output of the model."""

    total: Tensor
    terms: dict[str, Tensor]
    output: Tensor | None
    """What distillation compares; None where the model returns no such tensor."""


class Objective(Protocol):
    def __call__(self, model: nn.Module, batch: Batch) -> Losses: ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy with the class numbers, of each sample or of each of its positions."""

    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        logits = get_logits(call_model(model, batch.inputs))
        loss = F.cross_entropy(logits, batch.targets, label_smoothing=self.label_smoothing)
        top1 = (logits.detach().argmax(1) == batch.targets).float().mean()
        return Losses(loss, {"cross_entropy": loss.detach(), "top1": top1}, logits)


@dataclass(frozen=True)
class UserLoss:
    """A loss of the user's own, of the output and the target."""

    loss: Loss

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        output = call_model(model, batch.inputs)
        return Losses(self.value(output, batch.targets), {}, main_output(output))

    def value(self, output: Any, targets: Any) -> Tensor:
        """The loss of an output, in float32 whatever the precision of the forward pass."""
        name = f"the loss {name_of(self.loss)}"
        with explain_failure(name), torch.autocast("cuda", enabled=False):
            value = self.loss(in_float32(output), targets)
        return _scalar(value, name)


@dataclass(frozen=True)
class ModelLoss:
    """The losses that a model computes itself when it is called with the targets in training mode.

    It returns a scalar, a dict of losses, or an object with `loss`. A dict of inputs holds the targets.
    """

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        more = () if isinstance(batch.inputs, Mapping) else (batch.targets,)
        with _training_without_norms(model):
            output = call_model(model, batch.inputs, *more)
        if isinstance(output, Mapping) and "loss" not in output:
            terms = {name: _scalar(value, f"the model's loss {name}") for name, value in output.items()}
            return Losses(torch.stack([*terms.values()]).sum(), _detached(terms), None)
        found = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
        return Losses(_scalar(found, "the model's loss"), {}, None)


@contextlib.contextmanager
def _training_without_norms(model: nn.Module) -> Iterator[None]:
    """Training mode, in which models compute losses. Norms and dropout keep the mode of the model."""
    if model.training:
        yield
        return
    changed = [part for part in model.modules() if not isinstance(part, (*NORMS, *DROPOUTS))]
    modes = [part.training for part in changed]
    try:
        for part in changed:
            part.training = True
        yield
    finally:
        for part, mode in zip(changed, modes, strict=True):
            part.training = mode


def _detached(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in terms.items()}


@contextlib.contextmanager
def explain_failure(name: str) -> Iterator[None]:
    """Errors of the user's own function say which one it was. Out of memory is handled elsewhere."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} failed: {type(error).__name__}: {error}") from error


def _scalar(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise ConfigError(f"{name} must return a scalar tensor of floats, not {describe(value)}.")
    return value.reshape(())


def describe(value: Any) -> str:
    """The kind of a value, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, list | tuple) and value:
        return f"a {type(value).__name__} of {len(value)}, first {describe(value[0])}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def name_of(item: object) -> str:
    """The name of a function or, of an object, of its class."""
    return str(getattr(item, "__qualname__", type(item).__qualname__))


def in_float32(output: Any) -> Any:
    """The output with tensors of half precision in float32. Objects of other libraries stay as they are."""
    if isinstance(output, Mapping) and type(output) not in (dict, OrderedDict):
        return output
    half = (torch.bfloat16, torch.float16)
    return map_tensors(output, lambda tensor: tensor.float() if tensor.dtype in half else tensor)


def main_output(output: object) -> Tensor | None:
    """The tensor that matters in a model's output, in float32. With auxiliary heads it comes first.

    Of a dict or an object it is `logits` or `out`.
    """
    if isinstance(output, tuple) and output:
        output = output[0]
    for name in ("logits", "out"):
        if isinstance(output, Mapping):
            output = output.get(name, output)
        elif not isinstance(output, Tensor):
            output = getattr(output, name, output)
    return output.float() if isinstance(output, Tensor) else None


def get_logits(output: object) -> Tensor:
    """The logits in a classifier's output."""
    logits = main_output(output)
    if logits is None:
        raise ModelError(
            f"the model returns a {type(output).__name__}; "
            "a classifier must return a tensor of logits, or a tuple that starts with one."
        )
    return logits

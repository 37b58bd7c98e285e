"""Capture a model with `torch.export`, leaving the given model exactly as it was.

The model itself is never run: a structural copy is captured, whose modules are new and whose tensors are shared (export works on
fakes and writes to none of them). Forward hooks of the user are not part of the copy, so none of them fires.
"""

from __future__ import annotations

import copy
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from ..errors import TraceError

PEEL = str(Path(__file__).resolve().parents[1])
TORCH = str(Path(torch.__file__).resolve().parent)


@dataclass(frozen=True)
class Capture:
    """One captured forward pass: operators in order, and what each placeholder and output stands for."""

    nodes: tuple[Node, ...]
    tensors: dict[str, str]
    """Placeholder name -> name of the parameter or buffer it stands for."""
    constants: dict[str, Tensor]
    """Placeholder name -> the tensor of the code that it stands for, with its numbers."""
    inputs: frozenset[str]
    """Placeholders that the caller's input enters by."""
    outputs: tuple[Node, ...]
    """The values that leave the model."""


def as_args(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one forward call, from a tensor, a tuple or a dict."""
    if isinstance(example_input, Tensor):
        args: tuple[Any, ...] = (example_input,)
        kwargs: dict[str, Any] = {}
    elif isinstance(example_input, tuple):
        args, kwargs = example_input, {}
    elif isinstance(example_input, dict):
        args, kwargs = (), example_input
    else:
        raise TraceError(
            f"example_input is a {type(example_input).__name__}; give a tensor with a batch axis first (such as "
            "torch.randn(1, 3, 224, 224)), a tuple of positional arguments, or a dict of keyword arguments."
        )
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not tensors:
        raise TraceError("example_input holds no tensor.")
    if any(tensor.ndim == 0 or 0 in tensor.shape for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise TraceError(
            f"example_input has shape {shapes}; every tensor needs a batch axis and no empty axis."
        )
    return args, kwargs


def with_batch(example_input: Any, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `batch` samples: the first sample of each tensor, repeated."""
    args, kwargs = as_args(example_input)

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach()[:1].expand(batch, *value.shape[1:]).contiguous()

    return tuple(resize(value) for value in args), {key: resize(value) for key, value in kwargs.items()}


def structural_copy(model: nn.Module, replace: dict[int, Tensor] | None = None) -> nn.Module:
    """A copy with new modules. Tensors are shared, except those replaced (by the `id` of the original).

    The user's forward hooks stay behind; torch's own (weight norm is one) are part of how the model computes and are kept.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo.update(computed_tensors(model))
    memo.update(replace or {})
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            hooks = getattr(module, name)
            for key, hook in list(hooks.items()):
                if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                    del hooks[key]
    return twin


def computed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Tensors that a module keeps as attributes and computed from parameters (the weight of weight norm), without their history:
    they are computed anew in each forward, and could not be copied otherwise."""
    return {
        id(value): value.detach()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }


@contextmanager
def untouched() -> Iterator[None]:
    """Restore what capturing could disturb outside the model: random states, warnings, the log of torch."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    loggers = [
        logging.getLogger(name) for name in ("torch.export", "torch._export", "torch._dynamo", "torch.fx")
    ]
    levels = [logger.level for logger in loggers]
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def capture(model: nn.Module, example_input: Any, *, training: bool = False) -> Capture:
    """The operators of one forward pass on one sample (two in training mode, where batch norm asks for more than one)."""
    args, kwargs = with_batch(example_input, 2 if training else 1)
    with untouched():
        try:
            twin = structural_copy(model).train(training)
            program = torch.export.export(twin, args, kwargs, strict=False)
        except Exception as error:
            raise TraceError(_explain(model, error, args, kwargs)) from error
    signature = program.graph_signature
    tensors = {
        spec.arg.name: spec.target
        for spec in signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None
    }
    constants = {
        spec.arg.name: program.constants[spec.target]
        for spec in signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
        and isinstance(program.constants.get(spec.target or ""), Tensor)
    }
    leaving = {spec.arg.name for spec in signature.output_specs if spec.kind == OutputKind.USER_OUTPUT}
    nodes = tuple(program.graph.nodes)
    outputs = tuple(node for node in nodes if node.name in leaving)
    inputs = frozenset(spec.arg.name for spec in signature.input_specs if spec.kind == InputKind.USER_INPUT)
    return Capture(nodes, tensors, constants, inputs, outputs)


def _explain(model: nn.Module, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why the capture failed, with the line of the user's code and what to do about it."""
    given = ", ".join(
        str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
        for value in (*args, *kwargs.values())
    )
    summary = str(error).strip().split("\n")[0] or type(error).__name__
    where = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((TORCH, PEEL, "<")):
            where = f"\n  at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
            break
    name = type(model).__name__
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in str(error) or "Could not guard" in str(error):
        advice = (
            "its forward pass branches on the values of a tensor. Use torch.where or torch.cond there, or take the decision "
            "outside of forward."
        )
    elif isinstance(error, RuntimeError | ValueError | TypeError) and "export" not in summary.lower():
        advice = f"check that the example input ({given}) is what the model expects: here, its forward pass raises {kind}."
    else:
        advice = "torch.export does not support what this line does; rewrite it with torch operators."
    return f"{name} cannot be captured: {summary}{where}\n  {advice[0].upper()}{advice[1:]}"

"""Capture a model with `torch.export` and leave the given model exactly as it was.

The model itself never runs. What is captured is a structural copy with new modules and shared tensors (export
works on fake tensors and writes to none of them). The user's forward hooks are part of what the model does:
the copy has copies of them, with copies of what they hold.
"""

import io
import logging
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map  # has no public name

from ..errors import TraceError
from ..utils.rng import get_rng_state, set_rng_state
from .caches import no_cached_tensors
from .copying import structural_copy

#: Folders whose code is not the user's, as frames name them (links are not resolved).
PEEL = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep


@dataclass(frozen=True)
class Capture:
    """One captured forward pass."""

    nodes: tuple[Node, ...]
    """The placeholders, then the operators in order."""
    tensors: dict[str, str]
    """Placeholder name -> name of its parameter or buffer."""
    constants: dict[str, Tensor]
    """Placeholder name -> the constant tensor of the code that it stands for."""
    input_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that the model was called with."""
    inputs: frozenset[Any]
    """Names of the placeholders of the model's inputs."""
    outputs: tuple[Node, ...]
    """The nodes whose values the model returns."""


def with_batch(example_input: Any, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call with `batch` samples: the first sample, repeated.

    Tensors inside lists, tuples and dicts may have no batch axis (the images of a detection network). Where
    there are any, the arguments stay as they are.
    """
    if isinstance(example_input, Mapping):  # also what the processors of transformers return
        example_input = dict(example_input)
    if isinstance(example_input, Tensor | list):
        example_input = (example_input,)
    is_call = isinstance(example_input, tuple | dict)
    if not is_call or not any(isinstance(value, Tensor) for value in tree_leaves(example_input)):
        what = "holds no tensor" if is_call else f"is a {type(example_input).__name__}"
        raise TraceError(
            f"example_input {what}; give a tensor with a batch axis first (torch.randn(1, 3, 224, 224), "
            "say), a list of tensors, a tuple of positional or a dict of keyword arguments."
        )
    args, kwargs = ((), example_input) if isinstance(example_input, dict) else (example_input, {})
    if any(_is_nest_of_tensors(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    shapes = input_shapes(args, kwargs)
    if any(not shape or 0 in shape for shape in shapes):
        given = ", ".join(map(str, shapes))
        raise TraceError(f"example_input has shape {given}; a tensor needs a batch axis and no empty axis.")

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # The same sample several times: what the code does with it is the same, and no values are made up.
        return value.detach()[:1].expand(batch, *value.shape[1:]).contiguous()

    return tuple(map(resize, args)), {key: resize(value) for key, value in kwargs.items()}


def _is_nest_of_tensors(value: Any) -> bool:
    return any(leaf is not value and isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def input_shapes(*arguments: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of all tensors in the arguments of a call."""
    return tuple(tuple(value.shape) for value in tree_leaves(arguments) if isinstance(value, Tensor))


@contextmanager
def untouched() -> Iterator[None]:
    """Restore what capturing could disturb outside the model: random states, caches, warnings, logging.

    Nothing is printed meanwhile: of a model that it cannot capture, torch prints the graph so far.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    cpu = torch.device("cpu")
    random_state = get_rng_state(cpu)
    disabled = logging.root.manager.disable
    nowhere = io.StringIO()
    with (
        torch.random.fork_rng(devices=devices),
        no_cached_tensors(),
        warnings.catch_warnings(),
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
            set_rng_state(random_state, cpu)


def capture(model: nn.Module, example_input: Any, *, training: bool = False) -> Capture:
    """The operators of one forward pass on one sample (two in training mode, where batch norm needs them)."""
    args, kwargs = with_batch(example_input, 2 if training else 1)
    shapes = input_shapes(args, kwargs)
    with untouched():
        try:
            twin = structural_copy(model).train(training)
            program = torch.export.export(twin, args, kwargs, strict=False)
        except Exception as error:
            raise TraceError(_explain(model, error, shapes)) from error
    _use_first_names(model, program.graph_module)
    signature = program.graph_signature
    nodes, returned = tuple(program.graph.nodes), signature.user_outputs
    for node in nodes:
        node.meta["val"] = tree_map(_with_numbers, node.meta.get("val"))
    constants = signature.inputs_to_lifted_tensor_constants
    return Capture(
        nodes=nodes,
        tensors={**signature.inputs_to_parameters, **signature.inputs_to_buffers},
        constants={name: program.constants[target] for name, target in constants.items()},
        input_shapes=shapes,
        inputs=frozenset(signature.user_inputs),
        outputs=tuple(node for node in nodes if node.name in returned),
    )


def _use_first_names(model: nn.Module, program: GraphModule) -> None:
    """A module that is registered twice has its first name in every call, as in `named_modules()`."""
    first: dict[nn.Module, str] = {}
    names = {
        name: first.setdefault(module, name) for name, module in model.named_modules(remove_duplicate=False)
    }
    if len(names) == len(first):
        return
    graphs = [part.graph for part in program.modules() if isinstance(part, GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        stack = node.meta.get("nn_module_stack") or {}
        for key, (path, kind) in stack.items():
            stack[key] = (names.get(path.split("@")[0], path), kind)


#: Stands for a length that depends on values (how many boxes are chosen). No network has this many channels.
_ANY_LENGTH = 7919


def _with_numbers(value: Any) -> Any:
    """A tensor of which some lengths are symbols, with numbers in their place."""
    if not isinstance(value, Tensor) or all(isinstance(size, int) for size in value.shape):
        return value
    shape = [size if isinstance(size, int) else _number(size) for size in value.shape]
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _number(size: torch.SymInt) -> int:
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, _ANY_LENGTH)))


def user_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost line of the user's code on the way to an error."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame for frame in frames if not frame.filename.startswith((TORCH, PEEL, "<"))), None)


def _explain(model: nn.Module, error: Exception, shapes: tuple[tuple[int, ...], ...]) -> str:
    """Why the capture failed, with the line of the user's code and what to do about it."""
    summary = str(error).strip().split("\n")[0][:200] or type(error).__name__
    kind = type(error).__name__
    frame = user_frame(error)
    modules = model.named_modules()
    scripted = next((name for name, part in modules if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        advice = f"{scripted or 'It'} is a TorchScript module: give the module that it was made from instead."
    elif "DataDependent" in kind or "data-dependent" in str(error) or "Could not guard" in str(error):
        advice = (
            "Its forward pass branches on the values of a tensor. Use torch.where or torch.cond there, "
            "or decide outside of forward."
        )
    elif isinstance(error, RuntimeError | ValueError | TypeError) and "export" not in summary.lower():
        given = ", ".join(map(str, shapes))
        advice = f"Check that the model expects the example input ({given}): its forward pass raises {kind}."
    else:
        what = "this line" if frame else "it"
        advice = f"torch.export does not support what {what} does; rewrite it with torch operators."
    where = f"\n  at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" if frame else ""
    return f"{type(model).__name__} cannot be captured: {summary}{where}\n  {advice}"

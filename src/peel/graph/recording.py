"""Run the user's code without data and record what it calls: the operators, their inputs, numbers and shapes.

The recording is made at the level of torch's Python functions (`F.relu`, `x + y`, `torch.cat`). So it shows
what the code does, not how torch decomposes it, and a run takes a few percent of the time of a capture.
"""

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map  # has no public name

from ..cost.count import OperatorCount, macs_over_one_channel, plain_attention
from ..utils.rng import seed_everything
from .capture import TORCH, untouched, user_frame, with_batch
from .channel_graph import ChannelGraph
from .copying import structural_copy
from .program import RecordedCall, Recording
from .rebuild import empty_as, evaluate, new_shapes, set_attributes, tensors_of

#: The code that runs the user's.
_GRAPH = str(Path(__file__).parent) + os.sep


@dataclass(frozen=True)
class Failure:
    """Where the code did not follow the widths."""

    modules: tuple[str, ...]
    """Modules whose code was running, outermost first."""
    line: str


class Twin:
    """A copy of a model, by default on the meta device, whose widths can be set and that can be run."""

    def __init__(self, model: nn.Module, example: tuple[Any, Any], *, with_data: bool = False) -> None:
        """`example` are positional and keyword arguments; `with_data` is for code that needs real tensors."""
        self.make = _zeros if with_data else partial(empty_as, device="meta")
        # Parameters stay shared with the model until a width changes: a run with data needs no copy of them.
        first = _shared if with_data else self.make
        # Also tensors in plain attributes: user code caches them there.
        plain = [
            value
            for module in model.modules()
            for value in vars(module).values()
            if isinstance(value, Tensor)
        ]
        tensors = [*tensors_of(model).values(), *(() if with_data else plain)]
        replaced = {id(tensor): first(tensor, tuple(tensor.shape)) for tensor in tensors}
        self.model = structural_copy(model, replaced)
        devices = [tensor.device for tensor in tensors_of(model).values()] if with_data else ["meta"]
        self.example = tree_map(lambda x: x.to(devices[0]) if isinstance(x, Tensor) else x, example)
        self.tensors = tensors_of(self.model)
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.modules = {module: name for name, module in self.model.named_modules()}
        self.state = [(module, _State(vars(module))) for module in self.modules if _is_plain(module)]

    def set_widths(self, graph: ChannelGraph, units: list[int], unchanged: Any = ()) -> None:
        """Resize tensors and set attributes, except those in `unchanged` ((module, attribute) pairs).

        Attributes that an earlier run set (a cache of the user's code) are gone.
        """
        for module, state in self.state:
            state.restore(vars(module))
        for name, shape in new_shapes(graph, units).items():
            tensor = self.tensors.get(name)
            if tensor is not None and tensor.shape != shape:
                tensor.data = self.make(tensor, shape).data
        for name, attributes in evaluate(graph.attributes, units).items():
            kept = {key: value for key, value in attributes.items() if (name, key) not in unchanged}
            set_attributes(self.model.get_submodule(name), kept)

    def run(
        self, expected: Sequence[RecordedCall] | None = None, *, training: bool = False
    ) -> Recording | Failure:
        """Record a forward pass. It ends at an error, or at the first call that is not as expected.

        In training mode it has two samples, which batch norm needs.
        """
        args, kwargs = self.example
        if training:
            args, kwargs = with_batch(args or kwargs, 2)
        self.model.train(training)
        # Inputs have numbers below zero, calls from zero on, and parameters names.
        inputs = {id(tensor): -1 - place for place, tensor in enumerate(_tensors((args, kwargs)))}
        recorder = _Recorder({**self.names, **inputs}, expected)
        try:
            with untouched(), torch.no_grad(), plain_attention(), recorder:
                seed_everything(0)  # layers that are dropped at random are the same in every run
                self.model(*args, **kwargs)
        except Exception as error:
            frame = user_frame(error)
            line = f"{Path(frame.filename).name}:{frame.lineno} `{frame.line}`" if frame else ""
            return Failure(self._running(error), str(error) if isinstance(error, _DivergedError) else line)
        done = len(recorder.calls)
        if expected is not None and done < len(expected):
            return Failure(("",), f"{expected[done].line} does not run")
        return Recording(tuple(recorder.calls), recorder.counter.macs)

    def _running(self, error: Exception) -> tuple[str, ...]:
        """The modules whose code was running when an error was raised, outermost first."""
        # torch does not say which module was running. The frames of the error have it as `self`.
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = [own for own in owners if isinstance(own, nn.Module) and own in self.modules]
        return tuple(dict.fromkeys(self.modules[module] for module in modules)) or ("",)


class _DivergedError(Exception):
    """The code calls something else than expected."""


class _Recorder(TorchFunctionMode):
    """Records calls, and stops at the first one that is not as expected."""

    def __init__(self, names: Mapping[int, int | str], expected: Sequence[RecordedCall] | None) -> None:
        self.expected = expected
        self.calls: list[RecordedCall] = []
        self.made: dict[int, int | str] = dict(names)
        """`id` of a tensor -> the call that made it, as in `RecordedCall.sources`."""
        self.kept: list[Any] = []
        """Results, so that no `id` is used twice."""
        self.counter = OperatorCount()  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        result = _shape_preserved(name, args, kwargs)
        if result is None and name in _WITHOUT_MACS:
            result = func(*args, **kwargs)
        elif result is None:
            with self.counter:
                result = func(*args, **kwargs)
            if func is torch.einsum:
                self.counter.macs += macs_over_one_channel(args, result)
        # `x[i] = y` returns nothing and changes x; what other calls return or change is their result.
        changed = [*args[:1]] if name == "__setitem__" else list(_tensors(result))
        if changed and not isinstance(self.made.get(id(changed[0])), str):  # batch norm counts its batches
            self._record(name, (args, kwargs), changed)
        return result

    def _record(self, name: str, arguments: Any, changed: list[Tensor]) -> None:
        number = len(self.calls)
        sources = tuple(self.made.get(id(tensor), "") for tensor in _tensors(arguments))
        shapes = tuple(tuple(tensor.shape) for tensor in changed)
        call = RecordedCall(name, sources, tuple(_numbers(arguments)), shapes, _place())
        if self.expected is not None:
            wanted = self.expected[number] if number < len(self.expected) else None
            # The same functions on the same tensors. Numbers and shapes may differ: they are compared
            # afterwards.
            if wanted is None or (wanted.name, wanted.sources) != (name, sources):
                instead = f" instead of {wanted.line}" if wanted and wanted.line != call.line else ""
                raise _DivergedError(f"{call.line} runs{instead}")
        self.calls.append(call)
        self.kept.append(changed)
        self.made.update((id(tensor), number) for tensor in changed)


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)
    elif isinstance(item, dict):
        for part in item.values():
            yield from _tensors(part)


def _numbers(item: Any) -> Iterator[Any]:
    if item is None or isinstance(item, int | float | str):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _numbers(part)
    elif isinstance(item, dict):
        for part in item.values():
            yield from _numbers(part)
    elif isinstance(item, slice):
        yield from (item.start, item.stop, item.step)


def _place() -> tuple[str, int]:
    """File and line of the innermost frame of the user's code."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, "<")):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_GRAPH):
        return "", 0
    return frame.f_code.co_filename, frame.f_lineno


_NAMES = """
    relu relu_ relu6 hardtanh hardtanh_ silu silu_ hardswish hardswish_ gelu sigmoid hardsigmoid batch_norm
    layer_norm
"""
_SHAPE_PRESERVING = set(_NAMES.split())


def _shape_preserved(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a function that keeps the shape: on the meta device torch takes a slow path for these."""
    value = args[0] if name in _SHAPE_PRESERVING and args else None
    if not isinstance(value, Tensor) or not value.is_meta:
        return None
    if name in ("batch_norm", "layer_norm"):
        channels = value.shape[1:2] if name == "batch_norm" else _normalized_shape(*args, **kwargs)
        vectors = [vector for vector in _tensors((args[1:], kwargs)) if vector.ndim]
        fits = name == "batch_norm" or value.shape[-len(channels) :] == channels
        if value.ndim < 2 or not fits or any(vector.shape != channels for vector in vectors):
            return None
        return value.detach()
    is_in_place = name.endswith("_") or kwargs.get("inplace", len(args) > 1 and args[-1] is True)
    return value if is_in_place else value.detach()


def _normalized_shape(value: Tensor, normalized_shape: Sequence[int], *rest: Any, **options: Any) -> Any:
    return torch.Size(normalized_shape)


_NAMES = """
    add add_ __add__ __iadd__ sub mul mul_ __mul__ __imul__ truediv cat stack view reshape flatten permute
    transpose mean sum size dim __get__ __getitem__ max_pool2d avg_pool2d adaptive_avg_pool2d chunk split
    dropout unsqueeze squeeze contiguous expand
"""
#: Functions that are not watched by the counter of MACs, which slows them down.
_WITHOUT_MACS = set(_NAMES.split())


def _shared(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor with the same data. Only that of parameters is shared: code may write to buffers."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().clone()


def _zeros(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return empty_as(tensor.detach(), shape).zero_()


def _is_plain(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)


class _State:
    """The attributes of a module, and what the lists, dicts and sets among them hold."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.attributes = dict(attributes)
        kinds = (list, dict, set)
        containers = [value for value in attributes.values() if isinstance(value, kinds)]
        self.contents = [
            (value, dict(value) if isinstance(value, dict) else list(value)) for value in containers
        ]

    def restore(self, attributes: dict[str, Any]) -> None:
        """Containers are changed in place: a hook may hold the same one. Others are not touched.

        A configuration may be a dict of a class of its own that refuses changes (diffusers has one).
        """
        # First the attributes, which may be other containers now; then what the old containers hold.
        attributes.clear()
        attributes.update(self.attributes)
        for value, before in self.contents:
            now = dict(value) if isinstance(value, dict) else list(value)
            if _identities(now) != _identities(before):
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)


def _identities(items: dict[Any, Any] | list[Any]) -> list[int]:
    """To compare what may be tensors."""
    return [*map(id, items), *(map(id, items.values()) if isinstance(items, dict) else ())]

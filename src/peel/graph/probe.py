"""Run the user's code once at other widths, on the meta device, to find widths that the code itself fixes.

The analysis reads what operators did. It cannot see whether a number such as the 26 of `torch.split(x, 26,
1)` was computed from a shape or written down. So the model is rebuilt at widths that differ from the original
in every free tie, and its forward runs on tensors without data. It must run through and cost what the graph
predicts.
"""

import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map  # has no public name

from ..cost.count import OperatorCount, plain_attention
from .capture import untouched, user_frame, with_batch
from .channel_graph import ChannelGraph
from .rebuild import empty_as, rebuild, zeros_as

_GOLDEN = 0.6180339887


@dataclass(frozen=True)
class Failure:
    """Where the code did not follow the widths."""

    modules: tuple[str, ...]
    """Modules whose code was running, outermost first."""
    line: str


def probing_units(graph: ChannelGraph, start: int = 1) -> list[int]:
    """Units above the original in every tie, by factors that differ from tie to tie and by `start`.

    Above, because code that takes the first 16 of 16 channels still runs with fewer channels, but not with
    more. Beyond the first start, narrow ties of the same width get different units, too.
    """
    return [
        units + max(1 + (start - 1) * (i % 5), int(units * (0.1 + 0.4 * ((i + start) * _GOLDEN % 1))))
        for i, units in enumerate(graph.units())
    ]


def probe(
    model: nn.Module,
    graph: ChannelGraph,
    example_input: Any,
    units: list[int] | None = None,
    *,
    with_data: bool = False,
) -> Failure | None:
    """Run the model at other widths. None if it does what the graph predicts.

    `with_data` runs on real zeros, for code that does not run on the meta device at any widths.
    """
    units = probing_units(graph) if units is None else units
    counted = _run(model, graph, example_input, units, with_data)
    if isinstance(counted, Failure):
        return counted
    predicted = graph.mac_cost.total(units)
    if counted == predicted:
        return None
    # The graph does not count operators without a rule. Then at least the differences must agree.
    original = graph.units()
    before = _run(model, graph, example_input, original, with_data)
    if not isinstance(before, Failure) and counted - before == predicted - graph.mac_cost.total(original):
        return None
    return Failure(("",), "its cost is not what was predicted")


def _run(
    model: nn.Module, graph: ChannelGraph, example_input: Any, units: list[int], with_data: bool
) -> int | Failure:
    """The MACs of the model at the given units, or where its code stopped."""
    with untouched(), torch.no_grad():
        make = zeros_as if with_data else partial(empty_as, device="meta")
        twin = rebuild(model, graph, units, make, keep_hooks=False).eval()
        args, kwargs = with_batch(example_input, 1)
        if not with_data:
            args, kwargs = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
        try:
            with plain_attention(), _ShapesOnly() as counter:  # type: ignore[no-untyped-call]
                twin(*args, **kwargs)
        except Exception as error:
            frame = user_frame(error)
            line = f"{Path(frame.filename).name}:{frame.lineno} `{frame.line}`" if frame else ""
            return Failure(_running(twin, error), line)
    return int(counter.macs)


class _ShapesOnly(OperatorCount):  # type: ignore[no-untyped-call]
    """Skips operators that keep the shape: on the meta device torch takes a slow path for each of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            value, *vectors = args[:5]
            if func._overloadpacket in _SHAPE_PRESERVING:
                return value
            if func._overloadpacket is torch.ops.aten.native_batch_norm and all(
                vector is None or vector.shape[0] == value.shape[1] for vector in vectors
            ):
                return value, value.new_empty(0), value.new_empty(0)
        return super().__torch_dispatch__(func, types, args, kwargs)


_ACTIVATIONS = "relu relu_ hardtanh hardtanh_ silu silu_ hardswish hardswish_ gelu sigmoid hardsigmoid"
_SHAPE_PRESERVING = {getattr(torch.ops.aten, name) for name in _ACTIVATIONS.split()}


def _running(model: nn.Module, error: Exception) -> tuple[str, ...]:
    """The modules whose code was running when an error was raised, outermost first."""
    names = {module: name for name, module in model.named_modules()}
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return tuple(dict.fromkeys(names[own] for own in owners if isinstance(own, nn.Module) and own in names))


def output_shapes(result: Any) -> list[tuple[int, ...]]:
    """Shapes of all tensors in what a model returned."""
    return [tuple(value.shape) for value in tree_leaves(result) if isinstance(value, Tensor)]

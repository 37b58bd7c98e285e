"""`trace`: model and example input -> `ChannelGraph`."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import TraceError
from .attribute_search import AttributeSearch
from .capture import Capture, capture
from .channel_graph import ChannelGraph
from .interpreter import Interpreter
from .rules import Rule, user_rules


def trace(
    model: nn.Module,
    example_input: Any,
    *,
    groups: Mapping[str, Iterable[str]] | None = None,
    rules: Mapping[str, Rule] | None = None,
) -> ChannelGraph:
    """Find which channels of a model are tied, what they cost and what is fixed. The model is not changed.

    Args:
        model: any `nn.Module` that `torch.export` can capture.
        example_input: a tensor with a batch axis first, a tuple of positional arguments or a dict of keyword
            arguments. Costs are those of one sample.
        groups: replaces the grouping by spatial size (group name -> tie names).
        rules: channel rules of operators for this call (`{"mylib::op": rule}`); see
        `peel.graph.register_rule`.

    >>> graph = peel.trace(torchvision.models.resnet18(), torch.randn(1, 3, 224, 224))
    >>> graph
    ChannelGraph(12 free ties in 4 groups, 1 fixed, 1,814,073,344 MACs, 11,689,512 params)
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    interpreter = Interpreter(model, user_rules(rules))
    with _no_garbage_collection():
        captured = capture(model, example_input)
        interpreter.run(captured)
        head = _capture_training_heads(model, example_input, captured)
        if head is not None:
            interpreter.run(head, counting=False)
        # Builds the ties and probes them.
        has_head = head is not None
        search = AttributeSearch(model, example_input, interpreter, captured, has_training_head=has_head)
        graph = search.run()
    return graph if groups is None else graph.regroup(groups)


def _capture_training_heads(model: nn.Module, example_input: Any, captured: Capture) -> Capture | None:
    """A capture in training mode, if the first one leaves parameters unused (Inception's auxiliary heads)."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if not any(captured.tensors.get(node.name) in parameters and not node.users for node in captured.nodes):
        return None
    try:
        return capture(model, example_input, training=True)
    except TraceError:
        return None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The collector would walk the captured program many times: a third of the time of the analysis."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

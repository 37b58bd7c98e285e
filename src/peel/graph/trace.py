"""`trace`: model and example input -> `ChannelGraph`."""

import gc
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from ..errors import TraceError
from .attribute_search import AttributeSearch
from .capture import Capture, capture, with_batch
from .channel_graph import OF_MODULES, ChannelGraph
from .interpreter import Interpreter
from .probe import probing_units
from .recording import Failure, Twin
from .rules import Rule, user_rules
from .submodules import as_calls, check_modules, find_modules, record_modules

log = logging.getLogger("peel")


def trace(
    model: nn.Module,
    example_input: Any,
    *,
    groups: Mapping[str, Iterable[str]] | None = None,
    rules: Mapping[str, Rule] | None = None,
    modules: str | Sequence[str] | None = None,
) -> ChannelGraph:
    """Find which channels of a model are tied, what they cost and what is fixed. The model is not changed.

    Args:
        model: any `nn.Module` that `torch.export` can capture, as a whole or through some of its submodules.
        example_input: a tensor with a batch axis first, a list of tensors, a tuple of positional arguments or
            a dict of keyword arguments. Costs are those of one sample; where a list, tuple or dict among the
            arguments holds tensors, those of the input as it is given.
        groups: replaces the grouping by spatial size (group name -> tie names).
        rules: channel rules of operators for this call (`{"mylib::op": rule}`); see
            `peel.graph.register_rule`.
        modules: the submodules to capture (`"backbone"`, `["backbone", "head"]`). Costs are then theirs.
            Default: the whole model; if it cannot be captured, the largest submodules that can.

    >>> graph = peel.trace(torchvision.models.resnet18(), torch.randn(1, 3, 224, 224))
    >>> graph
    ChannelGraph(12 free ties in 4 groups, 1 fixed, 1,814,073,344 MACs, 11,689,512 params)
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    known = user_rules(rules)
    with _no_garbage_collection():
        if modules is not None:
            graph = _trace_modules(model, example_input, known, check_modules(model, modules))
        else:
            graph = _trace_largest(model, example_input, known)
    return graph if groups is None else graph.regroup(groups)


def _trace_largest(model: nn.Module, example_input: Any, rules: Mapping[str, Rule]) -> ChannelGraph:
    """Trace the whole model, or else the largest submodules that can be captured."""
    try:
        captured = capture(model, example_input)
    except TraceError as error:
        found = _try_modules(model, example_input, rules)
        if found is None:
            raise
        log.warning(
            "%s\n  Traced through its modules %s instead: MACs are theirs, and other code is not analyzed.",
            error,
            ", ".join(found.modules),
        )
        return found
    return _trace(model, example_input, rules, captured)


def _trace(
    model: nn.Module, example_input: Any, rules: Mapping[str, Rule], captured: Capture
) -> ChannelGraph:
    interpreter = Interpreter(model, rules)
    interpreter.run(captured)
    training: Literal["", "captured", "run"] = ""
    if _uses_more_in_training(model, captured):
        try:
            interpreter.run(capture(model, example_input, training=True), counting=False)
            training = "captured"
        except TraceError as error:
            log.info("%s cannot be captured in training mode: %s", type(model).__name__, error)
            training = "run"
    # Builds the ties and probes them.
    return AttributeSearch(model, example_input, interpreter, captured, training=training).run()


def _try_modules(model: nn.Module, example_input: Any, rules: Mapping[str, Rule]) -> ChannelGraph | None:
    """A graph through the largest submodules that can be captured. None if it would have no free tie."""
    try:
        modules = find_modules(model, example_input)
        graph = _trace_modules(model, example_input, rules, modules) if modules else None
    except Exception as error:  # often the model does not run on this input: the failed capture says why
        log.info("%s cannot be traced through its modules: %s", type(model).__name__, error)
        return None
    return graph if graph is not None and graph.widths else None


def _trace_modules(
    model: nn.Module, example_input: Any, rules: Mapping[str, Rule], modules: tuple[str, ...]
) -> ChannelGraph:
    """Trace a model through the calls of some of its submodules."""
    module_calls = record_modules(model, example_input, modules)
    calls, call_input = as_calls(model, module_calls)
    graph = _trace(calls, call_input, rules, capture(calls, call_input))
    ties = {
        name: replace(tie, fixed=OF_MODULES.get(tie.fixed or "", tie.fixed))
        for name, tie in graph.ties.items()
    }
    graph = replace(graph, ties=ties, module_calls=replace(module_calls, results={}))
    _check_code_between(model, example_input, graph)
    return graph


def _check_code_between(model: nn.Module, example_input: Any, graph: ChannelGraph) -> None:
    """Run the whole model at other widths: the code between the submodules must not depend on them."""
    twin = Twin(model, with_batch(example_input, 1), with_data=True)
    for units in probing_units(graph) if graph.widths else ():
        twin.set_widths(graph, units)
        done = twin.run()
        if isinstance(done, Failure):
            raise TraceError(
                f"{type(model).__name__} was traced through {', '.join(graph.modules)}, but its code between "
                f"them does not run at other widths: {done.line}. Name other submodules with modules=[...]."
            )


def _uses_more_in_training(model: nn.Module, captured: Capture) -> bool:
    """Whether a capture leaves parameters unused (Inception's auxiliary heads, Wav2Vec2's mask)."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return any(captured.tensors.get(node.name) in parameters and not node.users for node in captured.nodes)


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

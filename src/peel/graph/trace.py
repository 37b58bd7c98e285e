"""`trace`: model and example input -> `ChannelGraph`."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from ..errors import TraceError
from .attributes import Lengths, guessed_attributes, layer_attributes
from .axes import Axis, Unit, axis_size, expand, is_free, root
from .capture import TORCH, Capture, as_args, capture, with_batch
from .channel_graph import ChannelGraph
from .interpreter import Interpreter, module_of
from .probe import Failure, probe, probing_units
from .rebuild import empty_as, rebuild
from .rules import RULES, Rule
from .ties import Builder, input_shapes

__all__ = ["trace"]

#: How many ties are tried one by one to find those that the code fixes; beyond that, all ties of the place are fixed.
_MAX_TRIALS = 60


def trace(
    model: nn.Module,
    example_input: Any,
    *,
    groups: Mapping[str, Iterable[str]] | None = None,
    rules: Mapping[str, Rule] | None = None,
) -> ChannelGraph:
    """Find out which channels of a model are tied, what they cost, and what must not change. The model is left exactly as it was.

    `example_input` is a tensor with a batch axis first, a tuple of positional arguments or a dict of keyword arguments; costs are
    those of one sample. `groups` overrides the grouping by spatial size (group name -> tie names). `rules` adds or replaces channel
    rules of operators (`{"mylib::op": rule}`).

    >>> graph = peel.trace(torchvision.models.resnet18(), torch.randn(1, 3, 224, 224))
    >>> graph
    ChannelGraph(12 free ties in 4 groups, 1 fixed, 1,814,073,344 MACs, 11,689,512 params)
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    as_args(example_input)
    with _no_garbage_collection():
        graph = _trace(model, example_input, {**RULES, **(rules or {})})
    return graph if groups is None else graph.regroup(groups)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The collector would walk through the whole captured program again and again, for a third of the time of the analysis."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _trace(model: nn.Module, example_input: Any, rules: Mapping[str, Rule]) -> ChannelGraph:
    captures = [capture(model, example_input)]
    interpreter = Interpreter(model, rules)
    interpreter.run(captures[0])
    if _has_unused_parameters(captures[0], model):
        # Heads that exist only in training (the auxiliary classifiers of Inception): their channels are tied all the same.
        try:
            captures.append(capture(model, example_input, training=True))
        except TraceError:
            pass
        else:
            interpreter.run(captures[1], counting=False)
    return _Prober(model, example_input, interpreter, captures).settle()


def _has_unused_parameters(captured: Capture, model: nn.Module) -> bool:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return any(captured.tensors.get(node.name) in parameters and not node.users for node in captured.nodes)


class _Prober:
    """Rebuilds the graph and runs the probe until the user's code follows the widths wherever they are free."""

    def __init__(
        self, model: nn.Module, example_input: Any, interpreter: Interpreter, captures: list[Capture]
    ) -> None:
        self.model = model
        self.example_input = example_input
        self.interpreter = interpreter
        self.captures = captures
        self.choice: dict[tuple[str, str], int] = {}
        """(module, attribute) -> which guess is in use"""
        self.use_seen: bool | None = None
        """Whether attributes may mirror axes that operators of their module merely worked on; None: not asked yet."""
        self.with_data, self.asked_for_data = False, False
        self.trials = _MAX_TRIALS
        self.shapes = input_shapes(*with_batch(example_input, 1))

    def settle(self) -> ChannelGraph:
        graph = self.build()
        while graph.widths:
            failure = self._probe(graph)
            if failure is None:
                if self._confirmed(graph):
                    break
                graph = self.build()
                continue
            if self._needs_data(graph):
                continue
            if not self._next_guess(failure) and not self._with_seen(failure):
                self._fix_culprits(graph, failure)
            graph = self.build()
        return graph

    def _probe(self, graph: ChannelGraph, units: list[int] | None = None) -> Failure | None:
        return probe(self.model, graph, self.example_input, units, with_data=self.with_data)

    def _confirmed(self, graph: ChannelGraph) -> bool:
        """Capture the network once more at other widths and compare every shape with what was predicted.

        Code may run at other widths and yet do something else: `x[:, :8]` and `x[:, 8:]` always fit together. Only operators that
        are called with lengths can hide that, so networks without any need no second capture.
        """
        if not self.interpreter.findings.literals:
            return True
        mismatch = self._first_mismatch(graph)
        if mismatch is None:
            return True
        node, axes = mismatch
        suspects = [axis for axis in axes if is_free(axis)] or [
            axis for axis in self._axes(node) if is_free(axis)
        ]
        if not suspects:
            suspects = [axis for _, _, axis in self.interpreter.findings.literals]
        for axis in suspects:
            self.interpreter.solver.fix(
                axis, f"the code of {module_of(node) or 'the model'} does not follow it: {_line_of(node)}"
            )
        return not any(unit.fixed is not None for unit in self.builder.free)

    def _first_mismatch(self, graph: ChannelGraph) -> tuple[Node, list[Axis]] | None:
        """The first operator whose result has another shape than predicted, with the axes that differ."""
        units = probing_units(graph)
        twin = rebuild(self.model, graph, units, empty_as, keep_hooks=False)
        values = self.interpreter.values()
        second = [node for node in capture(twin, self.example_input).nodes if node.op == "call_function"]
        first = [node for node in self.captures[0].nodes if node.op == "call_function"]
        for node, other in zip(first, second, strict=False):
            if node.target is not other.target:
                return node, self._axes(node)
            shapes = _shapes(other.meta.get("val"))
            predicted = _flat_values(values.get(node))
            for shape, axes in zip(shapes, predicted, strict=False):
                wrong = [
                    axis
                    for axis, size in zip(axes, shape, strict=True)
                    if self.builder.form(axis).value(units) != size
                ]
                if wrong:
                    return node, wrong
        return None if len(first) == len(second) else (first[-1], [])

    def _needs_data(self, graph: ChannelGraph) -> bool:
        """Code that does not run without data at its original widths either must be probed with data. Asked once."""
        if self.asked_for_data:
            return False
        self.asked_for_data = True
        self.with_data = self._probe(graph, graph.units()) is not None
        return self.with_data

    def _with_seen(self, failure: Failure) -> bool:
        """Attributes may also mirror axes that operators merely worked on. Asked once, and kept where the code gets further."""
        if self.use_seen is not None:
            return False
        self.use_seen = True
        self.use_seen = self._probe(self.build()) != failure
        return self.use_seen

    def build(self) -> ChannelGraph:
        self.builder = Builder(self.model, self.interpreter, self.captures)
        self.guesses: dict[tuple[str, str], list[Any]] = {}
        return replace(self.builder.build(self.shapes), attributes=self._attributes(self.builder))

    def _attributes(self, builder: Builder) -> dict[str, dict[str, Any]]:
        mirrors = self.interpreter.findings.mirrors
        lengths: dict[str, Lengths] = {}
        for module, number, axis in self.interpreter.findings.literals:
            form = builder.form(axis)
            forms = lengths.setdefault(module, Lengths()).single.setdefault(number, [])
            if form.units and form not in forms:
                forms.append(form)
        for module, numbers, axes in self.interpreter.findings.lists:
            listed = tuple(builder.form(axis) for axis in axes)
            lists = lengths.setdefault(module, Lengths()).lists.setdefault(numbers, [])
            if any(form.units for form in listed) and listed not in lists:
                lists.append(listed)
        if self.use_seen:
            for node in reversed(self.captures[0].nodes):
                if node.op == "call_function":
                    seen = lengths.setdefault(module_of(node), Lengths()).seen
                    for axis in self._axes(node):
                        form = builder.form(axis)
                        forms = seen.setdefault(form.value(builder.original), [])
                        if form.units and form not in forms:
                            forms.append(form)
        found: dict[str, dict[str, Any]] = {}
        for name, module in self.model.named_modules():
            known = {
                key: (axis_size(axis), builder.form(axis)) for key, axis in mirrors.get(name, {}).items()
            }
            attributes: dict[str, Any] = dict(layer_attributes(module, known))
            for attribute, guesses in guessed_attributes(module, lengths.get(name, Lengths())).items():
                if attribute in attributes or not guesses:
                    continue
                self.guesses[name, attribute] = guesses
                place = self.choice.get((name, attribute), 0)
                if place < len(guesses):
                    attributes[attribute] = guesses[place]
            if attributes:
                found[name] = attributes
        return found

    def _next_guess(self, failure: Failure) -> bool:
        """Where an attribute of a module on the way may mirror something else, or nothing, try that."""
        for module in reversed(failure.modules):
            for (name, attribute), guesses in self.guesses.items():
                place = self.choice.get((name, attribute), 0)
                if name == module and place < len(guesses):
                    self.choice[name, attribute] = place + 1
                    return True
        return False

    def _fix_culprits(self, graph: ChannelGraph, failure: Failure) -> None:
        reason = f"the code of {failure.modules[-1] or 'the model'} does not follow it"
        if failure.line:
            reason = f"{reason}: {failure.line}"
        for axes in self._suspects(failure):
            units = list(dict.fromkeys(root(atom.unit) for axis in axes for atom, _ in expand(axis)))
            units = [unit for unit in units if unit.fixed is None and unit in self.builder.index]
            if units:
                guilty = [unit for unit in units if self._fails_alone(graph, unit)] if self.trials > 0 else []
                for unit in guilty or units:
                    unit.fixed = reason
                return
        raise TraceError(
            f"{type(self.model).__name__} does not run at other widths, and no width explains it: {failure.line}"
        )

    def _suspects(self, failure: Failure) -> Iterable[list[Axis]]:
        """Axes at the place of failure, nearest first: lengths in calls, then whatever operators touched, then everything."""
        for module in reversed(failure.modules):
            yield [axis for name, _, axis in self.interpreter.findings.literals if name == module]
            yield [axis for node in self._nodes(module) for axis in self._axes(node)]
        yield [axis for axes in self.interpreter.tensors.values() for axis in axes]

    def _nodes(self, module: str) -> list[Node]:
        return [
            node
            for node in self.captures[0].nodes
            if node.op == "call_function" and module_of(node) == module
        ]

    def _axes(self, node: Node) -> list[Axis]:
        values = self.interpreter.values()
        near = [node, *node.all_input_nodes]
        return [axis for item in near for axis in _flat(values.get(item))]

    def _fails_alone(self, graph: ChannelGraph, unit: Unit) -> bool:
        """Whether the code stops when only this tie changes."""
        self.trials -= 1
        tie = self.builder.index[unit]
        units = graph.units()
        units[tie] = probing_units(graph)[tie]
        return self._probe(graph, units) is not None


def _flat_values(value: Any) -> list[tuple[Axis, ...]]:
    """The values in what an operator returned: one, or a tuple of them."""
    if not isinstance(value, tuple):
        return []
    many = (
        value
        and isinstance(value[0], tuple)
        and value[0]
        and isinstance(value[0][0], tuple)
        and isinstance(value[0][0][0], tuple)
    )
    return list(value) if many else [value]


def _flat(value: Any) -> list[Axis]:
    return [axis for item in _flat_values(value) for axis in item]


def _shapes(value: Any) -> list[tuple[int, ...]]:
    tensors = value if isinstance(value, list | tuple) else [value]
    return [tuple(tensor.shape) for tensor in tensors if isinstance(tensor, Tensor)]


def _line_of(node: Node) -> str:
    """The last line of the user's code on the way to an operator."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', node.stack_trace or "")
    own = [(path, line, code) for path, line, code in frames if not path.startswith(TORCH)]
    if not own:
        return str(node.target)
    path, line, code = own[-1]
    return f"{Path(path).name}:{line} `{code.strip()}`"

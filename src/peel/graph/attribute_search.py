"""Find the attributes that must follow the widths, and fix the widths that the user's code does not follow.

A block may keep a width in an attribute: `torch.split(x, self.width, 1)`. An integer attribute that equals a
length with which its module's forward called an operator is guessed to be that length. The code then runs at
other widths. Where it fails, other guesses are tried for the modules that were running. If none helps, the
ties that cause the failure are fixed, with the line of code as the reason.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.fx import Node

from ..cost.polynomial import CostModel, Form, Term
from ..errors import TraceError
from .axes import Axis, axis_size, is_free, symbols_of
from .call import module_of, results_of, values_in
from .capture import TORCH, Capture, with_batch
from .channel_graph import OUTPUT, ChannelGraph
from .interpreter import Interpreter
from .probe import probing_units, smallest_cause
from .program import Program, RecordedCall, Recording, predict_lengths
from .recording import Failure, Twin
from .ties import GraphBuilder

log = logging.getLogger("peel")

#: At most this many runs look for the ties that cause a failure. Beyond that, all ties there are fixed.
_MAX_TRIALS = 100

#: The layer that stands for all calls that no rule covers.
WITHOUT_RULE = "(operators without a rule)"

_FORMULA = " (torch.utils.flop_counter.register_flop_formula tells torch what an operator of yours costs)"

#: A number that is not itself a length in a call is taken for a width only if its name says so.
_WIDTH_NAME = re.compile(r"chan|chs|feature|plane|width|dim|hidden|filters|inp|oup|in_c|out_c|_c$")

Guesses = dict[tuple[str, int | tuple[int, ...]], list[Any]]
"""(module, number or numbers) -> the `Form` that this may be, or a tuple of forms."""


class AttributeSearch:
    """Builds and probes the graph again and again, until the user's code follows every free width."""

    def __init__(
        self,
        model: nn.Module,
        example_input: Any,
        interpreter: Interpreter,
        captured: Capture,
        *,
        training: Literal["", "captured", "run"] = "",
    ) -> None:
        self.model = model
        self.example_input = example_input
        self.interpreter = interpreter
        self.findings = interpreter.findings
        self.captured = captured
        self.training = training
        """Whether the code also runs in training mode, because it uses more parameters there."""
        self.training_calls: tuple[RecordedCall, ...] = ()
        self.operators = [node for node in captured.nodes if node.op == "call_function"]
        self.places = {node: _place_of(node) for node in self.operators}
        self.choice: dict[tuple[str, str], int] = {}
        """(module, attribute) -> which of its guesses is in use"""
        self.use_seen: bool | None = None
        """Whether attributes may also hold lengths of axes that operators of their module only worked on."""
        self.tested: set[tuple[type, str]] = set()
        """(class, attribute): attributes that are known to be lengths, or of no effect."""
        self.trials = _MAX_TRIALS

    def run(self) -> ChannelGraph:
        graph = self._build()
        if graph.widths:
            self._record_original(graph)
        while graph.widths:
            self.tried = [(graph.units(), self.original)]
            # Larger widths first: no two are equal, and code that takes the first 16 of 16 channels still
            # runs with fewer. The loop ends: each turn drops a guess, tries the seen lengths, which happens
            # once, or fixes a tie, and a fixed tie stays fixed.
            larger, *others = probing_units(graph)
            failed = self._first_failure(graph, [larger])
            if failed is None and self._attributes_are_lengths(graph):
                failed = self._first_failure(graph, others)
                if failed is None:
                    graph = self._with_uncounted_macs(graph)
                    return replace(graph, program=self._program(graph))
            if failed is not None:
                failure, units = failed
                if not (self._try_next_guess(failure) or self._try_seen_lengths(failure, units)):
                    self._fix_culprits(graph, failure, units)
            graph = self._build()
        return graph

    def _build(self) -> ChannelGraph:
        self.builder = GraphBuilder(self.model, self.interpreter, self.captured)
        values = self.interpreter.values.values()
        every = {axis: None for item in values for value in values_in(item) for axis in value}
        self.forms = dict.fromkeys(map(self.builder.form, every))
        self.shapes: dict[tuple[Any, ...], list[tuple[Form, ...]]] = defaultdict(list)
        """(place in the code, shape) -> what the operators there return, in terms of widths"""
        for node in self.operators:
            for tensor, axes in zip(results_of(node), values_in(self.interpreter.values[node]), strict=False):
                forms = tuple(map(self.builder.form, axes))
                self.shapes[self.places[node], tuple(tensor.shape)].append(forms)
        return self.builder.build(self._attributes())

    # Runs at other widths

    def _record_original(self, graph: ChannelGraph) -> None:
        """Record what the code does at its original widths: without data or, where that fails, with data."""
        found: tuple[Twin, bool, Recording] | None = None
        training: Recording | Failure | None = None
        # Without data, `x[mask] = y` fits at all widths: only a capture or data show what must fit.
        for with_data in (True, False) if self.training == "run" else (False, True):
            twin = Twin(self.model, with_batch(self.example_input, 1), with_data=with_data)
            twin.set_widths(graph, graph.units())
            original = twin.run()
            if isinstance(original, Failure):
                line = original.line
                continue
            training = twin.run(training=True) if self.training else None
            # A twin that also runs in training mode is better than one that runs in eval mode only.
            if found is None or not with_data or isinstance(training, Recording):
                found = twin, with_data, original
            if not isinstance(training, Failure):
                break
        if found is None:
            raise TraceError(f"{type(self.model).__name__} runs only in torch.export: {line}")
        self.twin, self.with_data, self.original = found
        self.training_calls = training.calls if isinstance(training, Recording) else ()
        if isinstance(training, Failure):
            log.warning(
                "%s does not run in training mode on the example input (%s). What it uses only there was not "
                "analyzed and keeps its shape.",
                type(self.model).__name__,
                training.line,
            )

    def _probe(self, graph: ChannelGraph, units: list[int]) -> Recording | Failure:
        """What the code does at other widths, or where that is not as predicted."""
        self.twin.set_widths(graph, units)
        done = self.twin.run(self.original.calls)
        if isinstance(done, Recording) and self.training_calls:
            trained = self.twin.run(self.training_calls, training=True)
            done = trained if isinstance(trained, Failure) else done
        if isinstance(done, Failure):
            return done
        tried = [(graph.units(), self.original), (units, done)]
        strange = predict_lengths(tried, self.forms)[1]
        strange = self._differing_call(units, done) if strange is None else strange
        if strange is not None:
            where = self.twin.run(self.original.calls[:strange])
            modules = where.modules if isinstance(where, Failure) else ("",)
            return Failure(modules, self.original.calls[strange].line)
        # Calls that no rule covers are not counted yet. Then at least the differences must agree.
        counted, before = done.macs, self.original.macs
        predicted, expected = graph.mac_cost.total(units), graph.mac_cost.total(graph.units())
        # A constant difference is a call without a rule: its channels are fixed, so its cost is the same.
        if counted != predicted and counted - before != predicted - expected:
            return Failure(("",), f"torch counts {counted:,} MACs, and the rules {predicted:,}{_FORMULA}")
        return done

    def _differing_call(self, units: list[int], done: Recording) -> int | None:
        """The first call with a shape that no operator on its line was predicted to return.

        That each length is a known one is not enough: where 16 channels are seen as 4 x 4, either 4 may be
        the one that follows the width, and both are known.
        """
        for number, (before, call) in enumerate(zip(self.original.calls, done.calls, strict=True)):
            for old, new in zip(before.shapes, call.shapes, strict=True):
                known = self.shapes.get((before.place, old))
                if known and all(tuple(form.value(units) for form in forms) != new for forms in known):
                    return number
        return None

    def _first_failure(
        self, graph: ChannelGraph, several: Iterable[list[int]]
    ) -> tuple[Failure, list[int]] | None:
        for units in several:
            done = self._probe(graph, units)
            if isinstance(done, Failure):
                return done, units
            self.tried.append((units, done))
        return None

    def _with_uncounted_macs(self, graph: ChannelGraph) -> ChannelGraph:
        """Count calls that no rule covers. All their channels are fixed, so their MACs are constant."""
        # Operators without a rule, such as fused recurrent layers.
        uncounted = self.original.macs - graph.macs()
        if uncounted <= 0:
            return graph
        terms = (*graph.mac_cost.terms, Term(WITHOUT_RULE, -1, uncounted, ()))
        return replace(graph, mac_cost=CostModel(terms))

    def _program(self, graph: ChannelGraph) -> Program:
        """The prediction for any widths, from what was recorded at those that were tried."""
        following: dict[int, set[int]] = {}
        for _, done in self.tried[1:]:
            for call, places in self.original.changed_numbers(done).items():
                following.setdefault(call, set()).update(places)
        uncounted = self.original.macs - graph.mac_cost.total(graph.units())
        lengths = predict_lengths(self.tried, self.forms)[0]
        calls = self.original.calls
        return Program(
            self.twin.example, self.with_data, calls, self.training_calls, following, lengths, uncounted
        )

    # Guesses

    def _attributes(self) -> dict[str, dict[str, Any]]:
        """Module -> attribute -> what it holds in terms of widths, by the guesses in use."""
        self.guesses: dict[tuple[str, str], list[Any]] = {}
        called, seen = self._called_lengths(), self._seen_lengths()
        for place, forms in self._lengths_at_head().items():
            seen[place] += forms
        found: dict[str, dict[str, Any]] = {}
        for name, module in self.model.named_modules():
            attributes: dict[str, Any] = {
                attribute: self.builder.form(axis)
                for attribute, axis in self.findings.attributes.get(name, {}).items()
                if is_free(axis) and getattr(module, attribute, None) == axis_size(axis)
            }
            for attribute, guesses in _guessed_attributes(name, module, called, seen).items():
                if attribute in attributes:
                    continue
                self.guesses[name, attribute] = guesses
                choice = self.choice.get((name, attribute), 0)
                if choice < len(guesses):
                    attributes[attribute] = guesses[choice]
            if attributes:
                found[name] = attributes
        return found

    def _called_lengths(self) -> Guesses:
        """The lengths that operators were called with, in terms of widths."""
        lengths: Guesses = defaultdict(list)
        for module, numbers, axes in self.findings.lengths:
            forms = tuple(self.builder.form(axis) for axis in axes)
            if any(form.units for form in forms):
                lengths[module, numbers].append(forms if isinstance(numbers, tuple) else forms[0])
        return lengths

    def _seen_lengths(self) -> Guesses:
        """The lengths of axes that operators only worked on, last operator first."""
        lengths: Guesses = defaultdict(list)
        for node in reversed(self.operators if self.use_seen else []):
            for axis in self._axes_at(node):
                if self.builder.form(axis).units:
                    lengths[module_of(node), axis_size(axis)].append(self.builder.form(axis))
        return lengths

    def _lengths_at_head(self) -> Guesses:
        """What the layers before the outputs read, for the modules that they are in.

        No operator is called with `num_features` of a timm network, but `reset_classifier` builds by it.
        """
        lengths: Guesses = defaultdict(list)
        for name, places in self.findings.consumers.items():
            axes = self.interpreter.tensors[name]
            # Axis 0 of a weight is what the layer writes: this one writes an output of the model.
            if any(symbol.fixed == OUTPUT for symbol in symbols_of(axes[0])):
                form = self.builder.form(axes[min(places)])
                module = name
                while module and form.units:
                    module = module.rpartition(".")[0]
                    lengths[module, axis_size(axes[min(places)])].append(form)
        return lengths

    def _try_next_guess(self, failure: Failure) -> bool:
        """Take the next guess for an attribute of a module that was running; after the last guess, none."""
        for module in reversed(failure.modules):
            for (name, attribute), guesses in self.guesses.items():
                choice = self.choice.get((name, attribute), 0)
                # Innermost module first: its attributes are used on the line that failed, those of outer
                # modules also by others.
                if name == module and choice < len(guesses):
                    self.choice[name, attribute] = choice + 1
                    return True
        return False

    def _try_seen_lengths(self, failure: Failure, units: list[int]) -> bool:
        """Let attributes hold lengths of axes that operators only worked on. Tried once; kept if it helps."""
        if self.use_seen is not None:
            return False
        self.use_seen = True
        self.use_seen = self._probe(self._build(), units) != failure
        return self.use_seen

    # Numbers that are no lengths

    def _attributes_are_lengths(self, graph: ChannelGraph) -> bool:
        """Drop guesses for attributes that are no lengths; False if there were any.

        If nothing but a number changes with an attribute, it equals a width by chance (a temperature, say),
        and it keeps its value.
        """
        units, done = self.tried[1]
        if not self.original.changed_numbers(done):
            return True
        dropped = False
        for kind, members in self._guesses_in_use().items():
            if kind in self.tested:
                continue
            self.tested.add(kind)
            self.twin.set_widths(graph, units, unchanged=members)
            # Run with the old value of this attribute. If shapes differ, it is a length. If only numbers
            # differ, the guess made the code compute something else: 16 channels and a temperature of 16.
            other = self.twin.run(self.original.calls)
            if isinstance(other, Failure) or _shapes(other) != _shapes(done):
                continue
            if other.changed_numbers(done):
                self.choice.update({member: len(self.guesses[member]) for member in members})
                dropped = True
        return not dropped

    def _guesses_in_use(self) -> dict[tuple[type, str], set[tuple[str, str]]]:
        """(class, attribute) -> the modules that have a guess for it, which all have the same code."""
        found: dict[tuple[type, str], set[tuple[str, str]]] = {}
        for (name, attribute), guesses in self.guesses.items():
            if self.choice.get((name, attribute), 0) < len(guesses):
                kind = type(self.model.get_submodule(name)), attribute
                found.setdefault(kind, set()).add((name, attribute))
        return found

    # Widths that the code does not follow

    def _fix_culprits(self, graph: ChannelGraph, failure: Failure, units: list[int]) -> None:
        """Fix the ties that must change for this failure; those near the place of the failure come first."""

        def fails(ties: Sequence[int]) -> bool:
            self.trials -= 1
            return isinstance(self._probe(graph, _with(graph.units(), units, ties)), Failure)

        # The first list of suspects that fails by itself holds a cause; later lists are wider, and slower.
        for axes in self._suspects(failure):
            suspects = dict.fromkeys(symbol for axis in axes for symbol in symbols_of(axis))
            free = [self.builder.index[symbol] for symbol in suspects if symbol in self.builder.index]
            if free and fails(free):
                guilty = smallest_cause(free, fails) if self.trials > 0 else free
                for tie in guilty:
                    self.builder.free[tie].fixed = _reason(self._users_module(failure), failure.line)
                return
        name = type(self.model).__name__
        raise TraceError(f"{name} does not run at other widths, and no tie explains it: {failure.line}")

    def _users_module(self, failure: Failure) -> str:
        """The innermost module that was running and is not one of torch's layers."""
        kinds = {name: type(self.model.get_submodule(name)).__module__ for name in failure.modules}
        return next((name for name in reversed(kinds) if not kinds[name].startswith("torch.nn.")), "")

    def _suspects(self, failure: Failure) -> Iterator[list[Axis]]:
        """Axes near the failure: those called with a length, then those of the operators, then all axes."""
        for module in reversed(failure.modules):
            yield [axis for name, _, axes in self.findings.lengths if name == module for axis in axes]
            yield [a for node in self.operators if module_of(node) == module for a in self._axes_at(node)]
        yield [axis for axes in self.interpreter.tensors.values() for axis in axes]

    def _axes_at(self, node: Node) -> list[Axis]:
        """The axes of the results and arguments of an operator."""
        values = (self.interpreter.values.get(item) for item in (node, *node.all_input_nodes))
        return [axis for item in values for value in values_in(item) for axis in value]


def _guessed_attributes(name: str, module: nn.Module, called: Guesses, seen: Guesses) -> dict[str, list[Any]]:
    """Attribute -> what it may hold in terms of widths, best guess first.

    `called` has the lengths that operators of the module were called with, `seen` those of the axes that they
    worked on.
    """
    guesses: dict[str, list[Any]] = {}
    for attribute, value in vars(module).items():
        numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            continue
        found = list(called.get((name, value if isinstance(value, int) else numbers), ()))
        if isinstance(value, int) and _WIDTH_NAME.search(attribute):
            # Code that says `torch.split(x, self.channels // 2, 1)` holds twice the length it calls with.
            for factor in range(2, 9):
                if value % factor == 0:
                    found += [_multiple(form, factor) for form in called.get((name, value // factor), ())]
            found += seen.get((name, value), ())
        if found:
            guesses[attribute] = list(dict.fromkeys(found))
    return guesses


def _with(units: list[int], other: Sequence[int], ties: Sequence[int]) -> list[int]:
    """The units, with those of some ties replaced by others."""
    return [other[tie] if tie in ties else own for tie, own in enumerate(units)]


def _shapes(recording: Recording) -> list[Any]:
    return [call.shapes for call in recording.calls]


def _multiple(form: Form, factor: int) -> Form:
    return Form(form.constant * factor, tuple((tie, times * factor) for tie, times in form.units))


def _reason(module: str, line: str) -> str:
    reason = f"the code of {module or 'the model'} does not follow it"
    return f"{reason}: {line}" if line else reason


def _place_of(node: Node) -> tuple[str, int]:
    """File and line of the user's code on the way to an operator, as in `RecordedCall.place`."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    own = [(file, int(line)) for file, line in frames if not file.startswith((TORCH, "<"))]
    return own[-1] if own else ("", 0)

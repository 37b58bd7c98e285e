"""Find the attributes that must follow the widths, and fix the widths that the user's code does not follow.

A block may keep a width in an attribute: `torch.split(x, self.width, 1)`. An integer attribute that equals a
length with which its module's forward called an operator is guessed to be that length. The
probe then runs the code at other widths. Where it fails, other guesses are tried for the modules that were
running. If none helps, the ties at that place are fixed, with the line of code as the reason.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import Node

from ..cost.polynomial import Form
from ..errors import TraceError
from .axes import Atom, Axis, Segment, Unit, axis_size, fix, is_free, units_of
from .call import module_of, results_of, values_in
from .capture import TORCH, Capture, capture
from .channel_graph import ChannelGraph
from .interpreter import Interpreter
from .probe import Failure, probe, probing_units
from .rebuild import empty_as, rebuild
from .ties import GraphBuilder

#: At most this many ties are tried one by one. Beyond that, all ties at the place of failure are fixed.
_MAX_TRIALS = 60

#: A number that is not itself a length in a call is taken for a width only if its name says so.
_WIDTH_NAME = re.compile(r"chan|chs|feature|plane|width|dim|hidden|filters|inp|oup|in_c|out_c|_c$")

Guesses = dict[tuple[str, int | tuple[int, ...]], list[Any]]
"""(module, number or numbers) -> the `Form` that this may be, or a tuple of forms."""


class AttributeSearch:
    """Builds and probes the graph again and again, until the user's code follows every free width."""

    def __init__(
        self, model: nn.Module, example_input: Any, interpreter: Interpreter, captured: Capture
    ) -> None:
        self.model = model
        self.example_input = example_input
        self.interpreter = interpreter
        self.findings = interpreter.findings
        self.captured = captured
        self.operators = [node for node in captured.nodes if node.op == "call_function"]
        self.choice: dict[tuple[str, str], int] = {}
        """(module, attribute) -> which of its guesses is in use"""
        self.use_seen: bool | None = None
        """Whether attributes may also hold lengths of axes that operators of their module only worked on."""
        self.with_data: bool | None = None
        """Whether the probe needs tensors with data."""
        self.trials = _MAX_TRIALS
        self.read: set[Node | str] = set()
        """Views and cuts whose other readings have been tried, and lines of code where none was right"""

    def run(self) -> ChannelGraph:
        graph = self._build()
        while graph.widths:
            # Twice: two widths that must fit together may do so by chance.
            failure = self._probe(graph) or self._probe(graph, probing_units(graph, 2))
            if failure is None:
                if self._shapes_are_as_predicted(graph):
                    break
            elif self._needs_data(graph):
                continue
            elif self._try_other_reading(graph, failure):
                pass
            elif not self._try_next_guess(failure) and not self._try_seen_lengths(failure):
                self._fix_culprits(graph, failure)
            graph = self._build()
        return graph

    def _build(self) -> ChannelGraph:
        self.builder = GraphBuilder(self.model, self.interpreter, self.captured)
        return self.builder.build(self._attributes())

    def _probe(self, graph: ChannelGraph, units: list[int] | None = None) -> Failure | None:
        return probe(self.model, graph, self.example_input, units, with_data=bool(self.with_data))

    # Guesses

    def _attributes(self) -> dict[str, dict[str, Any]]:
        """Module -> attribute -> what it holds in terms of widths, by the guesses in use."""
        self.guesses: dict[tuple[str, str], list[Any]] = {}
        called, seen = self._called_lengths(), self._seen_lengths()
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

    def _try_next_guess(self, failure: Failure) -> bool:
        """Take the next guess for an attribute of a module that was running; after the last guess, none."""
        for module in reversed(failure.modules):
            for (name, attribute), guesses in self.guesses.items():
                choice = self.choice.get((name, attribute), 0)
                if name == module and choice < len(guesses):
                    self.choice[name, attribute] = choice + 1
                    return True
        return False

    def _try_seen_lengths(self, failure: Failure) -> bool:
        """Let attributes hold lengths of axes that operators only worked on. Tried once; kept if it helps."""
        if self.use_seen is not None:
            return False
        self.use_seen = True
        self.use_seen = self._probe(self._build()) != failure
        return self.use_seen

    def _needs_data(self, graph: ChannelGraph) -> bool:
        """Whether the code does not run on the meta device even at its original widths. Tried once."""
        if self.with_data is not None:
            return False
        self.with_data = self._probe(graph, graph.units()) is not None
        return self.with_data

    def _try_other_reading(self, graph: ChannelGraph, failure: Failure) -> bool:
        """Read a view or cut of the modules that were running in another way, if the code follows it."""
        nodes = [node for node in self.findings.readings if module_of(node) in failure.modules]
        return any(
            self._can_reread(node)
            and not self._runs_at(node, graph)
            and self._reread(node, partial(self._runs_at, node))
            for node in nodes
        )

    def _can_reread(self, node: Node) -> bool:
        return node in self.findings.readings and not self.read & {node, _line_of(node)}

    def _runs_at(self, node: Node, graph: ChannelGraph) -> bool:
        """Whether the code runs when only the ties at an operator change."""
        return not self._fails(graph, self._axes_at(node))

    def _reread(self, node: Node, follows: Callable[[ChannelGraph], bool]) -> bool:
        """Read a view or cut in the next way in which the code follows its ties. Each is tried once."""
        self.read.add(node)
        before = self.interpreter, self.builder, self.guesses
        for reading in range(1, self.findings.readings[node]):
            self._use(before[0].reread({node: reading}))
            graph = self._build()
            if any(map(is_free, self._axes_at(node))) and follows(graph):
                return True
        self._use(before[0])
        _, self.builder, self.guesses = before
        self.read.add(_line_of(node))  # the same code in other blocks is not tried again
        return False

    def _use(self, interpreter: Interpreter) -> None:
        self.interpreter, self.findings = interpreter, interpreter.findings

    # Widths that the code does not follow

    def _fix_culprits(self, graph: ChannelGraph, failure: Failure) -> None:
        """Fix the ties near the failure that fail alone; if none does, all ties at the nearest place."""
        nearest: list[Unit] = []
        for axes in self._suspects(failure):
            units = dict.fromkeys(unit for axis in axes for unit in units_of(axis))
            free = [unit for unit in units if unit.fixed is None and unit in self.builder.index]
            guilty = [unit for unit in free if self.trials > 0 and self._fails_alone(graph, unit)]
            nearest = nearest or free
            if guilty or (nearest and self.trials <= 0):
                return self._fix(guilty or nearest, failure)
        if not nearest:
            name = type(self.model).__name__
            raise TraceError(f"{name} does not run at other widths, and no tie explains it: {failure.line}")
        return self._fix(nearest, failure)

    def _fix(self, units: list[Unit], failure: Failure) -> None:
        for unit in units:
            unit.fixed = _reason(failure.modules[-1], failure.line)

    def _suspects(self, failure: Failure) -> Iterator[list[Axis]]:
        """Axes near the failure: those called with a length, then those of the operators, then all axes."""
        for module in reversed(failure.modules):
            yield [axis for name, _, axes in self.findings.lengths if name == module for axis in axes]
            yield [a for node in self.operators if module_of(node) == module for a in self._axes_at(node)]
        yield [axis for axes in self.interpreter.tensors.values() for axis in axes]

    def _fails_alone(self, graph: ChannelGraph, unit: Unit) -> bool:
        """Whether the code fails when only this tie changes."""
        self.trials -= 1
        return self._fails(graph, [(Segment(Atom(unit), 1),)])

    def _fails(self, graph: ChannelGraph, axes: list[Axis]) -> bool:
        """Whether the code fails when only the ties of these axes change."""
        changed = {self.builder.index[u] for axis in axes for u in units_of(axis) if u in self.builder.index}
        if not changed:
            return False
        for wide in (probing_units(graph), probing_units(graph, 2)):
            units = [wide[tie] if tie in changed else own for tie, own in enumerate(graph.units())]
            if self._probe(graph, units) is not None:
                return True
        return False

    def _shapes_are_as_predicted(self, graph: ChannelGraph) -> bool:
        """Capture the network at other widths and compare every shape. Where one differs, fix its axes.

        Code may run at other widths and still do something else: `x[:, :8]` and `x[:, 8:]` always fit
        together. Only operators that are called with lengths can hide that, so other networks need no second
        capture.
        """
        mismatch = self._first_mismatch(graph) if self.findings.lengths else None
        if mismatch is None:
            return True
        node, axes = mismatch
        follows = partial(self._follows_at, node)
        if self._can_reread(node) and self._reread(node, follows):
            return False
        if self._reguess(module_of(node), follows):
            return False
        suspects = [axis for axis in axes if is_free(axis)]
        suspects = suspects or [axis for axis in self._axes_at(node) if is_free(axis)]
        for axis in suspects or [axis for _, _, axes in self.findings.lengths for axis in axes]:
            fix(axis, _reason(module_of(node), _line_of(node)))
        return not any(unit.fixed is not None for unit in self.builder.free)

    def _follows_at(self, node: Node, graph: ChannelGraph) -> bool:
        """Whether the code runs at other widths, and the result of an operator has the predicted shape."""
        return self._probe(graph) is None and (self._first_mismatch(graph) or (None,))[0] is not node

    def _reguess(self, module: str, follows: Callable[[ChannelGraph], bool]) -> bool:
        """Take another guess, or none, for an attribute of a module if the code follows that one."""
        before = dict(self.choice)
        for name, attribute in [key for key in self.guesses if key[0] == module]:
            first = before.get((name, attribute), 0)
            for choice in range(first + 1, len(self.guesses[name, attribute]) + 1):
                self.choice = {**before, (name, attribute): choice}
                if follows(self._build()):
                    return True
        self.choice = before
        self._build()
        return False

    def _first_mismatch(self, graph: ChannelGraph) -> tuple[Node, list[Axis]] | None:
        """The first operator whose result has another shape than predicted, with the axes that differ."""
        units = probing_units(graph)
        twin = rebuild(self.model, graph, units, empty_as, keep_hooks=False)
        operators = [node for node in capture(twin, self.example_input).nodes if node.op == "call_function"]
        for node, other in zip(self.operators, operators, strict=False):
            if node.target is not other.target:
                return node, self._axes_at(node)
            predicted = values_in(self.interpreter.values[node])
            for tensor, axes in zip(results_of(other), predicted, strict=False):
                sizes = zip(axes, tensor.shape, strict=True)
                wrong = [axis for axis, size in sizes if self.builder.form(axis).value(units) != size]
                if wrong:
                    return node, wrong
        return None if len(self.operators) == len(operators) else (self.operators[-1], [])

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


def _multiple(form: Form, factor: int) -> Form:
    return Form(form.constant * factor, tuple((tie, times * factor) for tie, times in form.units))


def _reason(module: str, line: str) -> str:
    reason = f"the code of {module or 'the model'} does not follow it"
    return f"{reason}: {line}" if line else reason


def _line_of(node: Node) -> str:
    """The last line of the user's code on the way to an operator."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', node.stack_trace or "")
    own = [frame for frame in frames if not frame[0].startswith(TORCH)]
    return "{}:{} `{}`".format(Path(own[-1][0]).name, *own[-1][1:]) if own else str(node.target)

"""From what the rules found to a `ChannelGraph`: ties get names, costs become polynomials, tensors get layouts."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..cost.polynomial import Form, Term, product
from .axes import Atom, Axis, Unit, axis_size, expand, leaves, root
from .capture import Capture
from .channel_graph import Buffered, ChannelGraph, Layout, Member, Run, Tie
from .grouping import group_ties, spatial_sizes
from .interpreter import Interpreter, Producer, Value

_MAX_CAUSES = 12


class Builder:
    """Holds the numbering of ties and atoms while the parts of the graph are made."""

    def __init__(self, model: nn.Module, interpreter: Interpreter, captures: list[Capture]) -> None:
        self.model = model
        self.interpreter = interpreter
        self.findings = interpreter.findings
        self.capture = captures[0]
        self.births_of: dict[Unit, list[Producer]] = {}
        for producer in self.findings.producers:
            for unit in _units(producer.axis):
                producers = self.births_of.setdefault(unit, [])
                if all(
                    producer.layer != other.layer or producer.node is not other.node for other in producers
                ):
                    producers.append(producer)
        self._fix_leftovers()
        self.names, self.widths = self._name_units()
        self.free = [unit for unit in self.names if unit.fixed is None]
        self.index = {unit: i for i, unit in enumerate(self.free)}
        self.original = [unit.size for unit in self.free]
        self.atoms: dict[Atom, int] = {}
        self._forms: dict[int, tuple[Axis, Form]] = {}

    def _fix_leftovers(self) -> None:
        """What no layer produces cannot be chosen, and one channel cannot be divided."""
        for axes in self.interpreter.tensors.values():
            for axis in axes:
                for unit in _units(axis):
                    if unit.fixed is None and unit not in self.births_of:
                        unit.fixed = "no layer of the captured network produces it"
                    elif unit.fixed is None and unit.size == 1:
                        unit.fixed = (
                            "a single channel, or channels permuted so that they only stay or go as a whole"
                        )

    def _name_units(self) -> tuple[dict[Unit, str], dict[Unit, int]]:
        """Names after the layer where a unit is born; with the slice of its outputs where the layer bears several."""
        names: dict[Unit, str] = {}
        widths: dict[Unit, int] = {}
        for producer in self.findings.producers:
            segments = expand(producer.axis)
            units = list(dict.fromkeys(root(atom.unit) for atom, _ in segments))
            if all(unit.fixed is not None for unit in units):
                if not any(unit in names for unit in units) and producer.layer not in names.values():
                    names[units[0]], widths[units[0]] = producer.layer, axis_size(segments)
                continue
            for unit in units:
                if unit in names:
                    continue
                offset = _first_offset(segments, unit)
                widths[unit] = sum(unit.size * inner for atom, inner in segments if root(atom.unit) is unit)
                names[unit] = (
                    producer.layer
                    if len(units) == 1
                    else f"{producer.layer}[{offset}:{offset + widths[unit]}]"
                )
        return _unique(names), widths

    # Numbers in terms of ties

    def form(self, axis: Axis) -> Form:
        """The length of an axis as a constant plus units of ties."""
        # Values share axes: most are asked for many times. The axis is kept, so that its identity stays its own.
        known = self._forms.get(id(axis))
        if known is None:
            known = self._forms[id(axis)] = (axis, self._form(axis))
        return known[1]

    def _form(self, axis: Axis) -> Form:
        constant = 0
        times: dict[int, int] = {}
        for atom, inner in expand(axis):
            for unit, multiple in leaves(atom.unit):
                if unit in self.index:
                    times[self.index[unit]] = times.get(self.index[unit], 0) + multiple * inner
                else:
                    constant += unit.size * multiple * inner
        return Form(constant, tuple(sorted(times.items())))

    def layout(self, axes: Value) -> Layout:
        result = []
        for axis in axes:
            runs: list[Run] = []
            for atom, inner in expand(axis):
                unit = root(atom.unit)
                if unit in self.index:
                    runs.append(
                        Run(self.index[unit], self.atoms.setdefault(atom, len(self.atoms)), inner, unit.size)
                    )
                elif runs and runs[-1].tie == -1:
                    runs[-1] = Run(-1, -1, 1, runs[-1].size + unit.size * inner)
                else:
                    runs.append(Run(-1, -1, 1, unit.size * inner))
            result.append(tuple(runs))
        return tuple(result)

    def charged_tie(self, *axes: Axis) -> int:
        """The first tie met, looking through the axes in order."""
        for axis in axes:
            for tie, _ in self.form(axis).units:
                return tie
        return -1

    # Parts of the graph

    def build(self, input_shapes: tuple[tuple[int, ...], ...]) -> ChannelGraph:
        layouts = {name: self.layout(axes) for name, axes in self.interpreter.tensors.items()}
        ties = self._ties(layouts)
        free = [ties[self.names[unit]] for unit in self.free]
        return ChannelGraph(
            ties=ties,
            groups=group_ties(free),
            layouts=layouts,
            attributes={},
            consumers={name: tuple(sorted(places)) for name, places in self.findings.consumers.items()},
            scales=tuple(self.findings.scales),
            num_atoms=len(self.atoms),
            input_shapes=input_shapes,
            operators=tuple(self.findings.operators),
            constants=tuple(self.findings.constants),
            unknown_operators=dict(self.findings.unknown_operators),
            mac_terms=self._mac_terms(),
            param_terms=self._param_terms(),
            buffered=self._buffered(),
        )

    def _ties(self, layouts: dict[str, Layout]) -> dict[str, Tie]:
        spatial = spatial_sizes(self.births_of, self.capture, self.interpreter)
        members = self._members(layouts)
        inexact = self._inexact()
        ties: dict[str, Tie] = {}
        for unit, name in self.names.items():
            ties[name] = Tie(
                name=name,
                width=self.widths[unit],
                step=self.widths[unit] // unit.size if unit.fixed is None else 1,
                fixed=unit.fixed,
                inexact=inexact.get(unit),
                members=tuple(members.get(unit, ())),
                causes=tuple(unit.causes)[:_MAX_CAUSES],
                spatial=spatial.get(unit, ()),
                layers=tuple(dict.fromkeys(producer.layer for producer in self.births_of[unit])),
            )
        return ties

    def _members(self, layouts: dict[str, Layout]) -> dict[Unit, list[Member]]:
        members: dict[Unit, list[Member]] = {}
        seen: set[int] = set()
        for name, layout in layouts.items():
            axes = self.interpreter.tensors[name]
            if id(axes) in seen:
                continue
            seen.add(id(axes))
            for place, runs in enumerate(layout):
                stretches: dict[int, list[int]] = {}
                offset = 0
                for run in runs:
                    if run.tie >= 0:
                        first_and_size = stretches.setdefault(run.tie, [offset, 0])
                        first_and_size[1] += run.length
                    offset += run.length
                for tie, (first, size) in stretches.items():
                    unit = self.free[tie]
                    multiplicity = str(Fraction(size, self.widths[unit]))
                    members.setdefault(unit, []).append(Member(name, place, first, size, multiplicity))
        return members

    def _inexact(self) -> dict[Unit, str]:
        inexact: dict[Unit, str] = {}
        for axes in self.interpreter.tensors.values():
            for axis in axes:
                for atom, _ in expand(axis):
                    if atom.inexact is not None:
                        inexact.setdefault(root(atom.unit), atom.inexact)
        return inexact

    def _mac_terms(self) -> tuple[Term, ...]:
        return tuple(
            product(
                charge.layer,
                self.charged_tie(charge.output, *charge.axes),
                [self.form(axis) for axis in charge.axes],
            )
            for charge in self.findings.mac_terms
        )

    def _param_terms(self) -> tuple[Term, ...]:
        layer_of = {name: name.rpartition(".")[0] or name for name, _ in self.model.named_parameters()}
        charged: dict[str, int] = {}
        for name, layer in layer_of.items():
            # A layer is charged to one tie as a whole: the bias of a classifier goes where its weight does.
            if charged.get(layer, -1) < 0:
                charged[layer] = self.charged_tie(*self.interpreter.tensors[name])
        return tuple(
            product(layer, charged[layer], [self.form(axis) for axis in self.interpreter.tensors[name]])
            for name, layer in layer_of.items()
        )

    def _buffered(self) -> tuple[Buffered, ...]:
        """Results of operators with the span in which they are alive; views and in-place results prolong what they share."""
        order = {node: i for i, node in enumerate(self.capture.nodes)}
        values = self.interpreter.values()
        owner: dict[Node, Node] = {}
        dies: dict[Node, int] = {}
        for node in self.capture.nodes:
            if node.name in self.capture.tensors or node.op == "output":
                continue
            owner[node] = next(
                (owner[arg] for arg in node.all_input_nodes if arg in owner and _shares(node)), node
            )
            last_use = max((order[user] for user in node.users), default=order[node])
            dies[owner[node]] = max(dies.get(owner[node], 0), last_use)
        buffered = []
        for node, last in dies.items():
            tensors = node.meta.get("val")
            many = isinstance(tensors, list | tuple)
            pairs = zip(tensors, values[node], strict=True) if many else [(tensors, values[node])]  # type: ignore[arg-type]
            for tensor, axes in pairs:
                if isinstance(tensor, Tensor):
                    forms = tuple(self.form(axis) for axis in axes)
                    buffered.append(Buffered(forms, tensor.element_size(), order[node], last))
        return tuple(buffered)


def _shares(node: Node) -> bool:
    """Whether the operator's result shares memory with its first tensor argument."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_function"  # getitem of a split
    name = schema.name.split("::")[-1]
    if name in (
        "contiguous",
        "reshape",
        "flatten",
        "to",
        "dropout",
        "chunk",
        "split",
        "split_with_sizes",
        "expand_as",
        "type_as",
    ):
        return True
    return any(result.alias_info is not None for result in schema.returns)


def _units(axis: Axis) -> Iterable[Unit]:
    return dict.fromkeys(root(atom.unit) for atom, _ in expand(axis))


def _first_offset(segments: Axis, unit: Unit) -> int:
    offset = 0
    for segment in segments:
        if root(segment.atom.unit) is unit:
            return offset
        offset += axis_size((segment,))
    return offset


def _unique(names: dict[Unit, str]) -> dict[Unit, str]:
    """Two ties born in one layer that is called twice with different results: number the later ones."""
    taken: dict[str, int] = {}
    result = {}
    for unit, name in names.items():
        taken[name] = taken.get(name, 0) + 1
        result[unit] = name if taken[name] == 1 else f"{name}#{taken[name]}"
    return result


def input_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))

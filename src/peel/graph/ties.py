"""From the findings of the rules to a `ChannelGraph`: named ties, costs as polynomials, tensor layouts."""

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from torch import nn
from torch.fx import Node

from ..cost.activations import Activation, ActivationCost
from ..cost.polynomial import CostModel, Form, Term, product
from .axes import Atom, Axis, Symbol, Value, axis_size, expand, symbols_of
from .call import Producer, results_of, values_in
from .capture import Capture
from .channel_graph import ChannelGraph, Layout, Member, Run, Tie, stretches
from .gates import gate_parameters
from .grouping import group_ties, spatial_sizes
from .interpreter import Interpreter

_MAX_CAUSES = 12

#: Why an axis is fixed that an operator made with a constant length.
_NO_REASON = "the code gives it a constant length"


class GraphBuilder:
    """Numbers the ties and atoms, and makes the parts of the graph."""

    def __init__(self, model: nn.Module, interpreter: Interpreter, captured: Capture) -> None:
        self.model = model
        self.interpreter = interpreter
        self.findings = interpreter.findings
        self.captured = captured
        self.producers: dict[Symbol, list[Producer]] = {}
        for producer in self.findings.producers:
            for symbol in symbols_of(producer.axis):
                self.producers.setdefault(symbol, []).append(producer)
        self._fix_leftovers()
        self.names, self.widths = self._name_symbols()
        self.free = [symbol for symbol in self.names if symbol.fixed is None]
        self.index = {symbol: i for i, symbol in enumerate(self.free)}
        self.atoms: dict[Atom, int] = {}
        self._forms: dict[Axis, Form] = {}

    def _fix_leftovers(self) -> None:
        """Fix symbols that no layer produces, and symbols of one channel."""
        for axes in self.interpreter.tensors.values():
            for symbol in (symbol for axis in axes for symbol in symbols_of(axis)):
                # No output of a layer is tied to it, so nothing says which of its channels to keep.
                if symbol.fixed is None and symbol not in self.producers:
                    symbol.fixed = "no layer of the captured network produces it"
                elif symbol.fixed is None and symbol.size == 1:
                    symbol.fixed = "a single channel, or channels that only stay or go as a whole"

    def _name_symbols(self) -> tuple[dict[Symbol, str], dict[Symbol, int]]:
        """Name each symbol after the first layer that produces it, with a slice if that produces several."""
        names: dict[Symbol, str] = {}
        widths: dict[Symbol, int] = {}
        for producer in self.findings.producers:
            segments = expand(producer.axis)
            symbols = symbols_of(segments)
            # A fixed layer is listed once, so that `graph.fixed` says why; its parts are of no interest.
            if all(symbol.fixed is not None for symbol in symbols):
                if not any(symbol in names for symbol in symbols) and producer.layer not in names.values():
                    names[symbols[0]], widths[symbols[0]] = producer.layer, axis_size(segments)
                continue
            parts = stretches((segment.atom.symbol, axis_size((segment,))) for segment in segments)
            for symbol, (offset, size) in parts.items():
                if symbol not in names:
                    part = f"[{offset}:{offset + size}]" if len(symbols) > 1 else ""
                    names[symbol], widths[symbol] = f"{producer.layer}{part}", size
        # A layer that is called twice may produce two ties: number ties with the same name.
        taken = Counter[str]()
        for symbol, name in names.items():
            taken[name] += 1
            if taken[name] > 1:
                names[symbol] = f"{name}#{taken[name]}"
        return names, widths

    # Numbers in terms of ties

    def form(self, axis: Axis) -> Form:
        """The length of an axis as a constant plus units of ties."""
        if (known := self._forms.get(axis)) is not None:
            return known
        constant = 0
        times: dict[int, int] = {}
        for atom, inner in expand(axis):
            tie = self.index.get(atom.symbol)
            if tie is None:
                constant += atom.symbol.size * inner
            else:
                times[tie] = times.get(tie, 0) + inner
        found = self._forms[axis] = Form(constant, tuple(sorted(times.items())))
        return found

    def _runs(self, axis: Axis) -> tuple[Run, ...]:
        runs: list[Run] = []
        for atom, inner in expand(axis):
            symbol = atom.symbol
            if symbol in self.index:
                number = self.atoms.setdefault(atom, len(self.atoms))
                runs.append(Run(self.index[symbol], number, inner, symbol.size))
            elif runs and runs[-1].tie == -1:
                # Constant parts side by side are one: only their total length matters.
                runs[-1] = Run(-1, -1, 1, runs[-1].size + symbol.size * inner)
            else:
                runs.append(Run(-1, -1, 1, symbol.size * inner))
        return tuple(runs)

    def _term(self, layer: str, axes: Value, charged: Iterable[Axis]) -> Term:
        """The product of the axes, charged to the first tie in `charged`; to -1 if there is none."""
        # Each cost counts for one tie, so that those of all groups add up to the total: the first axis that
        # is free, the output first.
        tie = next((tie for axis in charged for tie, _ in self.form(axis).units), -1)
        return product(layer, tie, [self.form(axis) for axis in axes])

    # Parts of the graph

    def build(self, attributes: Mapping[str, Mapping[str, Any]]) -> ChannelGraph:
        tensors = self.interpreter.tensors
        layouts = {name: tuple(self._runs(axis) for axis in axes) for name, axes in tensors.items()}
        ties = self._ties(layouts)
        return ChannelGraph(
            ties=ties,
            groups=group_ties([ties[self.names[symbol]] for symbol in self.free]),
            layouts=layouts,
            attributes=attributes,
            consumers={name: tuple(sorted(places)) for name, places in self.findings.consumers.items()},
            scales=tuple(self.findings.scales),
            gates=gate_parameters(self.captured, self.interpreter),
            num_atoms=len(self.atoms),
            input_shapes=self.captured.input_shapes,
            operators=tuple(self.findings.operators),
            constants=tuple(self.findings.constants),
            unknown_operators=dict(self.findings.unknown_operators),
            failed_rules=dict(self.findings.failed_rules),
            mac_cost=self._mac_cost(),
            param_cost=self._param_cost(),
            activation_cost=self._activation_cost(),
        )

    def _ties(self, layouts: dict[str, Layout]) -> dict[str, Tie]:
        spatial = spatial_sizes(self.producers, self.captured, self.interpreter)
        members = self._members(layouts)
        tensors = self.interpreter.tensors.values()
        atoms = [segment.atom for axes in tensors for axis in axes for segment in expand(axis)]
        # A symbol may have several inexact atoms: reversed, so that the first reason wins.
        inexact = {atom.symbol: atom.inexact for atom in reversed(atoms) if atom.inexact is not None}
        return {
            name: Tie(
                name=name,
                width=self.widths[symbol],
                step=self.widths[symbol] // symbol.size if symbol.fixed is None else 1,
                fixed=_NO_REASON if symbol.fixed == "" else symbol.fixed,
                inexact=inexact.get(symbol),
                members=tuple(members.get(symbol, ())),
                causes=tuple(symbol.causes)[:_MAX_CAUSES],
                spatial=spatial.get(symbol, ()),
                layers=tuple(dict.fromkeys(producer.layer for producer in self.producers[symbol])),
            )
            for symbol, name in self.names.items()
        }

    def _members(self, layouts: dict[str, Layout]) -> dict[Symbol, list[Member]]:
        members: dict[Symbol, list[Member]] = {}
        seen: set[int] = set()
        for name, layout in layouts.items():
            axes = self.interpreter.tensors[name]
            if id(axes) in seen:  # tied weights: the same tensor under another name
                continue
            seen.add(id(axes))
            for place, runs in enumerate(layout):
                for tie, (offset, size) in stretches((run.tie, run.length) for run in runs).items():
                    if tie >= 0:
                        symbol = self.free[tie]
                        # How often a channel of the tie is in this axis: 49 times in a flattened 7x7 map.
                        multiplicity = str(Fraction(size, self.widths[symbol]))
                        members.setdefault(symbol, []).append(Member(name, place, offset, size, multiplicity))
        return members

    def _mac_cost(self) -> CostModel:
        terms = self.findings.mac_terms
        return CostModel(
            tuple(self._term(term.layer, term.axes, (term.output, *term.axes)) for term in terms)
        )

    def _param_cost(self) -> CostModel:
        tensors = self.interpreter.tensors
        layer_of = {name: name.rpartition(".")[0] or name for name, _ in self.model.named_parameters()}
        # A layer is charged to one tie as a whole: the bias of a classifier goes with its weight.
        charged: dict[str, list[Axis]] = {}
        for name, layer in layer_of.items():
            charged.setdefault(layer, []).extend(tensors[name])
        terms = (self._term(layer, tensors[name], charged[layer]) for name, layer in layer_of.items())
        return CostModel(tuple(terms))

    def _activation_cost(self) -> ActivationCost:
        """Results of operators and when they are alive. Views and in-place results prolong that."""
        nodes = self.captured.nodes
        order = {node: i for i, node in enumerate(nodes)}
        owner: dict[Node, Node] = {}
        last_use: dict[Node, int] = {}
        for node in nodes:
            if node.name in self.captured.tensors or node.op == "output":
                continue
            # A view is alive in its owner's memory: the owner lives as long as the last of its views.
            shared = (owner[arg] for arg in node.all_input_nodes if arg in owner) if _is_view(node) else ()
            owner[node] = next(iter(shared), node)
            used = max((order[user] for user in node.users), default=order[node])
            last_use[owner[node]] = max(last_use.get(owner[node], 0), used)
        activations = []
        for node, last in last_use.items():
            for tensor, axes in zip(results_of(node), values_in(self.interpreter.values[node]), strict=True):
                forms = tuple(self.form(axis) for axis in axes)
                activations.append(Activation(forms, tensor.element_size(), order[node], last))
        return ActivationCost(tuple(activations))


_VIEWS = "contiguous reshape flatten to dropout chunk split split_with_sizes expand_as type_as"


def _is_view(node: Node) -> bool:
    """Whether the result of an operator shares memory with its first tensor argument."""
    schema = getattr(node.target, "_schema", None)  # torch has no public access to the aliasing of operators
    if schema is None:
        return node.op == "call_function"  # getitem of a split
    is_alias = any(result.alias_info is not None for result in schema.returns)
    return is_alias or schema.name.split("::")[-1] in _VIEWS.split()

"""The abstract interpretation: every tensor of a captured forward pass as a tuple of axes, one rule per operator.

Parameters and buffers are tensors like any other. Their axes start unknown and are the same unknowns in every capture of the model,
so a second capture (in training mode, for heads that only exist there) adds to what the first one found.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn.modules.conv import _ConvNd

from ..utils.fingerprint import fingerprint
from .axes import Axis, AxisSolver, axis_size, constant, is_free, unknown
from .capture import Capture
from .channel_graph import OUTPUT

Value = tuple[Axis, ...]
Rule = Callable[..., Any]
"""(interpreter, node, values of the arguments) -> value of the result"""

#: Checks that export leaves in the graph: they return nothing.
_IGNORED = {"aten::_assert_tensor_metadata", "aten::_assert_async", "aten::sym_constrain_range_for_size"}


@dataclass(frozen=True)
class Producer:
    """Where channels come from: a layer that produces them."""

    layer: str
    axis: Axis
    node: Node
    spatial: tuple[int, ...]


@dataclass(frozen=True)
class MacTerm:
    """What a layer costs: one multiply-add for each element of the product of these axes."""

    layer: str
    axes: Value
    output: Axis
    """The channels that the layer produces; empty where it is a product of computed tensors."""


@dataclass
class Findings:
    """What the rules tell beside equalities."""

    producers: list[Producer] = field(default_factory=list)
    mac_terms: list[MacTerm] = field(default_factory=list)
    consumers: dict[str, set[int]] = field(default_factory=dict)
    """Weight -> the axes over which it sums what comes in: where a channel takes effect."""
    scales: dict[str, None] = field(default_factory=dict)
    """Weights of norm layers, in order."""
    literals: list[tuple[str, int, Axis]] = field(default_factory=list)
    """(module, number, axis): lengths that an operator was called with, perhaps from an attribute of the module."""
    mirrors: dict[str, dict[str, Axis]] = field(default_factory=dict)
    """Module -> attribute of its kind of layer -> the axis it must agree with."""
    lists: list[tuple[str, tuple[int, ...], Value]] = field(default_factory=list)
    """(module, numbers, axes): whole lists of lengths, likewise."""
    operators: list[str] = field(default_factory=list)
    """Every operator that runs, in order, as `operator_name` calls it."""
    constants: list[str] = field(default_factory=list)
    """The numbers and words that each of them is called with, and the fingerprints of tensors that the code brings along."""
    unknown_operators: dict[str, str] = field(default_factory=dict)
    """Operator without a rule -> the first place it was met."""


#: How a layer names its weight, or the parameters that its weight is computed from.
_WEIGHT_SUFFIX = re.compile(r"\.(weight(_[vg]|_orig)?|parametrizations\.weight\.original\d*)$")


def module_of(node: Node) -> str:
    """The name of the innermost module whose forward called the operator; empty for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name: str = list(stack.values())[-1][0]
    return name.split("@")[0]


def _graph_of(node: Node) -> Graph | None:
    """The graph that a `get_attr` node refers to, if it refers to one."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    target = getattr(owner, str(node.target), None)
    return target.graph if isinstance(target, GraphModule) else None


def _rule_name(target: Any) -> str:
    """`aten.add_.Tensor` -> `aten::add_`: rules do not depend on the overload."""
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else str(target)


def operator_name(target: Any) -> str:
    """`aten.add_.Tensor` -> `add`: what an operator computes, whichever overload does so, in place or not."""
    if getattr(target, "_schema", None) is None:
        return str(
            getattr(target, "__name__", target)
        )  # the text of a function of Python would hold an address
    return _rule_name(target).removeprefix("aten::").rstrip("_")


def _constants_of(node: Node) -> str:
    """`[1, 1], 0.5`: what an operator is called with that is no tensor, nor where or in which type it computes."""
    given = [*node.args, *node.kwargs.values()]
    lists = [[*item] if isinstance(item, list | tuple) else item for item in given]
    return ", ".join(
        str(item) for item in lists if all(isinstance(part, int | float | str) for part in _listed(item))
    )


def _listed(item: Any) -> list[Any]:
    return item if isinstance(item, list) else [item]


class Interpreter:
    """Runs the rules over captures; collects equalities in `solver` and everything else in `findings`."""

    def __init__(self, model: nn.Module, rules: Mapping[str, Callable[..., Any]]) -> None:
        self.solver = AxisSolver()
        self.findings = Findings()
        self.rules = rules
        self.tensors: dict[str, Value] = {}
        self._first_name: dict[str, str] = {}
        self._values: dict[Node, Any] = {}
        self._tensor_of: dict[Node, str] = {}
        self._counting = True
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.tensors[name] = tuple(
                unknown(size) if size > 1 else constant(1, "a single channel") for size in tensor.shape
            )
        # A tensor under two names (tied weights) is one tensor, known by its first name; export may use either.
        first: dict[int, str] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            self._first_name[name] = first.setdefault(id(tensor), name)
            self.tensors[name] = self.tensors[first[id(tensor)]]
        # Kernel axes are fixed before anything is computed from a weight (weight standardisation flattens inputs and kernel).
        for name, module in model.named_modules():
            if isinstance(module, _ConvNd):
                for axis in self.tensors.get(f"{name}.weight" if name else "weight", ())[2:]:
                    self.solver.fix(axis, "kernel size")

    def run(self, capture: Capture, *, counting: bool = True) -> None:
        """Apply the rules to every operator. Costs are taken from the captures that count."""
        self._counting = counting
        for node in capture.nodes:
            if node.op == "placeholder":
                name = self._first_name.get(capture.tensors.get(node.name, ""))
                if name is not None:
                    self._values[node] = self.tensors[name]
                    self._tensor_of[node] = name
                else:
                    if counting and node.name in capture.constants:
                        self.findings.constants.append(fingerprint([capture.constants[node.name]]))
                    self._values[node] = self._constants(
                        node,
                        "it enters the model" if node.name in capture.inputs else "a constant of the code",
                    )
            else:
                self._evaluate(node)
        for node in capture.outputs:
            self._fix_all(self._values[node], OUTPUT)

    def _evaluate(self, node: Node) -> None:
        if node.op == "call_function":
            self._values[node] = self._apply(node)
        elif node.op == "get_attr":
            self._values[node] = self._constants(node, "a constant of the code")

    def _inline(self, node: Node) -> Any:
        """A region run under another setting (autocast, no_grad) is captured as a call of a graph of its own: go through it."""
        region = next(
            (i for i, arg in enumerate(node.args) if isinstance(arg, Node) and _graph_of(arg) is not None),
            None,
        )
        if region is None:
            return None
        called = node.args[region]
        assert isinstance(called, Node)
        graph = _graph_of(called)
        assert graph is not None
        given = iter(node.args[region + 1 :])
        result: Any = None
        for inner in graph.nodes:
            if inner.op == "placeholder":
                arg = next(given)
                self._values[inner] = self._read(arg)
                if isinstance(arg, Node) and arg in self._tensor_of:
                    self._tensor_of[inner] = self._tensor_of[arg]
            elif inner.op == "output":
                result = tuple(self._values[item] for item in inner.args[0])
            else:
                self._evaluate(inner)
        return result

    def _constants(self, node: Node, reason: str) -> Any:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return tuple(constant(size, reason) for size in value.shape)
        return value

    def _apply(self, node: Node) -> Any:
        if node.target is operator.getitem:
            collection, index = node.args
            assert isinstance(collection, Node)
            return self._values[collection][index]
        name = _rule_name(node.target)
        if name in _IGNORED:
            return None
        if (result := self._inline(node)) is not None:
            return result
        if self._counting:
            self.findings.operators.append(operator_name(node.target))
            self.findings.constants.append(_constants_of(node))
        rule = self.rules.get(name)
        args = [self._read(arg) for arg in node.args]
        options = {key: self._read(arg) for key, arg in node.kwargs.items()}
        if rule is not None:
            try:
                result = rule(self, node, *args, **options)
                self._check(node, result)
                return result
            except (NotImplementedError, TypeError, IndexError, ValueError):
                pass  # A form of the operator that the rule does not know: as safe as no rule at all.
        return self._refuse(node, name, [*args, *options.values()])

    def _refuse(self, node: Node, name: str, args: list[Any]) -> Any:
        self.findings.unknown_operators.setdefault(name, module_of(node) or "the model")
        reason = f"{self.describe(node)} has no channel rule"
        for arg in args:
            self._fix_all(arg, reason)
        value = node.meta.get("val")
        if isinstance(value, list | tuple):
            return tuple(
                tuple(constant(size, reason) for size in item.shape) if isinstance(item, Tensor) else item
                for item in value
            )
        return self._constants(node, reason)

    def _check(self, node: Node, result: Any) -> None:
        """A rule must account for every axis of what the operator returned."""
        value = node.meta.get("val")
        pairs = zip(value, result, strict=True) if isinstance(value, list | tuple) else [(value, result)]
        for tensor, axes in pairs:
            if isinstance(tensor, Tensor) and tuple(axis_size(axis) for axis in axes) != tuple(tensor.shape):
                raise ValueError(f"{node.target}: the rule gives another shape")

    def _read(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            return self._values[arg]
        if isinstance(arg, list | tuple):
            return [self._read(item) for item in arg]
        return arg

    def _fix_all(self, value: Any, reason: str) -> None:
        if isinstance(value, list):
            for item in value:
                self._fix_all(item, reason)
        elif isinstance(value, tuple):
            for item in value:
                if (
                    isinstance(item, tuple)
                    and item
                    and isinstance(item[0], tuple)
                    and isinstance(item[0][0], tuple)
                ):
                    self._fix_all(item, reason)  # a tuple of values
                elif isinstance(item, tuple):
                    self.solver.fix(item, reason)

    # What rules call

    def shape(self, node: Node) -> tuple[int, ...]:
        value = node.meta["val"]
        return tuple((value[0] if isinstance(value, list | tuple) else value).shape)

    def has_many_results(self, node: Node) -> bool:
        return isinstance(node.meta["val"], list | tuple)

    def describe(self, node: Node) -> str:
        where = module_of(node)
        name = _rule_name(node.target).split("::")[-1].rstrip("_")
        return f"{name} in {where}" if where else name

    def layer(self, node: Node, place: int = 1) -> str:
        """The layer an operator belongs to: by its weight, or the parameter this was computed from, else by its module."""
        weight = node.args[place] if len(node.args) > place else None
        while isinstance(weight, Node):
            if weight in self._tensor_of:
                return _WEIGHT_SUFFIX.sub("", self._tensor_of[weight])
            weight = next(iter(weight.all_input_nodes), None) if weight.op == "call_function" else None
        return module_of(node) or node.name

    def produce(self, node: Node, axis: Axis) -> None:
        """The operator is where these channels come from."""
        value = self.shape(node)
        last = _rule_name(node.target) == "aten::linear"
        spatial = value[1:-1] if last else value[2:]
        self.findings.producers.append(Producer(self.layer(node), axis, node, spatial))

    def charge(self, node: Node, axes: Value) -> None:
        """The operator does one multiply-add for each element of the product of these axes."""
        output = (
            self.findings.producers[-1].axis
            if self.findings.producers and self.findings.producers[-1].node is node
            else ()
        )
        if self._counting:
            self.findings.mac_terms.append(MacTerm(self.layer(node), axes, output))

    def contract(self, node: Node, weight: Value, place: int) -> None:
        """The operator sums over this axis of its weight: a channel whose slice is zero there has no effect."""
        source = node.args[1]
        if isinstance(source, Node) and source in self._tensor_of:
            self.findings.consumers.setdefault(self._tensor_of[source], set()).add(place)
        else:
            self.solver.mark_inexact(
                weight[place], f"the weight of {self.describe(node)} is computed from parameters"
            )

    def scale(self, node: Node, place: int) -> None:
        """The argument at this place scales each channel."""
        source = node.args[place] if len(node.args) > place else None
        if isinstance(source, Node) and source in self._tensor_of:
            self.findings.scales[self._tensor_of[source]] = None

    def mirror(self, node: Node, **axes: Axis) -> None:
        """Attributes that layers of this kind have, with the axis each must agree with."""
        self.findings.mirrors.setdefault(module_of(node), {}).update(axes)

    def literal(self, node: Node, number: int, axis: Axis) -> None:
        """The operator was called with this length for this axis."""
        if number > 1 and is_free(axis):
            self.findings.literals.append((module_of(node), number, axis))

    def literals(self, node: Node, numbers: Sequence[int], axes: Value) -> None:
        """The operator was called with these lengths for these axes, one by one or as a list."""
        for number, axis in zip(numbers, axes, strict=True):
            self.literal(node, number, axis)
        if any(is_free(axis) for axis in axes):
            self.findings.lists.append((module_of(node), tuple(numbers), axes))

    def values(self) -> dict[Node, Any]:
        return self._values

"""`Call`: one operator call as its channel rule sees it. `Findings`: what the rules report."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor
from torch.fx import Node

from . import axes as ax
from .axes import Axis, Segment, Value, axis_size, constant, is_free

Rule = Callable[..., Any]
"""(call, arguments of the operator) -> value of the result; see `peel.graph.register_rule`."""

AnyRule = TypeVar("AnyRule", bound=Rule)

RULES: dict[str, Rule] = {}
"""Operator -> built-in rule. The modules in `rules/` fill it."""


def rule(operators: str) -> Callable[[AnyRule], AnyRule]:
    """Make a function the rule of these operators, of torch where no other library is named."""

    def enter(function: AnyRule) -> AnyRule:
        names = (name if "::" in name else f"aten::{name}" for name in operators.split())
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


#: How a layer names its weight, or the parameters that its weight is computed from.
_WEIGHT_SUFFIX = re.compile(r"\.(weight(_[vg]|_orig)?|parametrizations\.weight\.original\d*)$")


@dataclass(frozen=True)
class Producer:
    """A layer that produces channels."""

    layer: str
    axis: Axis
    node: Node
    spatial: tuple[int, ...]


@dataclass(frozen=True)
class MacTerm:
    """The cost of a layer: one multiply-add for each element of the product of these axes."""

    layer: str
    axes: Value
    output: Axis
    """The channels that the layer produces; empty for a product of computed tensors."""


@dataclass
class Findings:
    """What the rules report beside equalities."""

    producers: list[Producer] = field(default_factory=list)
    mac_terms: list[MacTerm] = field(default_factory=list)
    consumers: dict[str, set[int]] = field(default_factory=dict)
    """Weight -> the axes over which it sums its input."""
    scales: dict[str, None] = field(default_factory=dict)
    """Weights of norm layers, in order."""
    lengths: list[tuple[str, int | tuple[int, ...], Value]] = field(default_factory=list)
    """(module, number or numbers, axes): lengths that an operator was called with, perhaps attributes."""
    attributes: dict[str, dict[str, Axis]] = field(default_factory=dict)
    """Module -> attribute that layers of its kind have -> the axis whose length it must hold."""
    operators: list[str] = field(default_factory=list)
    """Every operator that runs, in order, without namespace and overload."""
    constants: list[str] = field(default_factory=list)
    """Numbers and strings that operators are called with, and fingerprints of constant tensors."""
    unknown_operators: dict[str, str] = field(default_factory=dict)
    """Operator without a working rule -> the first module that called it."""
    failed_rules: dict[str, str] = field(default_factory=dict)
    """Operator whose rule failed -> the line of the rule, and its error."""


def module_of(node: Node) -> str:
    """The name of the innermost module whose forward called the operator; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {"": ("",)}
    name: str = list(stack.values())[-1][0]
    return name.split("@")[0]


def operator_of(node: Node) -> str:
    """`aten::add_` for `aten.add_.Tensor`: the name of the operator without its overload."""
    name = getattr(node.target, "name", None)
    if callable(name):
        return str(name()).partition(".")[0]
    return str(getattr(node.target, "__name__", node.target))


def results_of(node: Node) -> list[Tensor]:
    """The example tensors that the operator returned: one, or several."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, Tensor)]


def constants_like(value: Any, reason: str) -> Any:
    """Constant axes for a tensor, or for each of a list of tensors; anything else stays as it is."""
    if isinstance(value, list | tuple):
        return tuple(constants_like(item, reason) for item in value)
    return tuple(constant(size, reason) for size in value.shape) if isinstance(value, Tensor) else value


def values_in(item: Any) -> list[Value]:
    """The tensors in an argument or result of an operator: one, or a list or tuple of them."""
    if not isinstance(item, list | tuple):
        return []
    is_axis = [isinstance(axis, tuple) and any(isinstance(part, Segment) for part in axis) for axis in item]
    if isinstance(item, tuple) and all(is_axis):
        return [item]
    return [value for part in item for value in values_in(part)]


def places_of(dims: Any, value: Value) -> set[int]:
    """The places of axes that an operator is called with: a number, a list, or nothing for all of them."""
    if dims is None or dims == []:
        return set(range(len(value)))
    return {dim % len(value) for dim in (dims if isinstance(dims, list) else [dims])}


def fix_all(item: Any, reason: str) -> None:
    """Fix every axis of every tensor in an argument or result."""
    for value in values_in(item):
        for axis in value:
            ax.fix(axis, reason)


@dataclass(frozen=True)
class Call:
    """One call of an operator: what a channel rule works with. As a string it reads `conv2d in layer1.0`."""

    node: Node
    args: tuple[Any, ...]
    findings: Findings
    tensor_of: Mapping[Node, str]
    """Node -> the parameter or buffer that it stands for."""
    weights: Collection[Node]
    """Nodes that are parameters, or are computed from nothing else."""
    counting: bool
    """Whether the costs of this capture count."""

    def __str__(self) -> str:
        name = operator_of(self.node).split("::")[-1].rstrip("_")
        return f"{name} in {self.module}" if self.module else name

    @property
    def module(self) -> str:
        """The module whose forward called the operator; empty for the model itself."""
        return module_of(self.node)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result, or of the first one."""
        return tuple(results_of(self.node)[0].shape)

    def result(self, value: Value) -> Any:
        """The result of an operator that returns one tensor or two of one shape (`max` with indices)."""
        return (value, value) if isinstance(self.node.meta["val"], list | tuple) else value

    # What must be equal, and what is fixed

    def unify(self, first: Axis, second: Axis, kind: str = "") -> None:
        """The two axes hold the same channels in the same order."""
        ax.unify(first, second, f"{kind} {self}".lstrip())

    def same_size(self, axes: Sequence[Axis], kind: str = "") -> None:
        """The axes keep the same length, but need not keep the same channels."""
        for axis in axes[1:]:
            ax.same_size(axes[0], axis, f"{kind} {self}".lstrip())

    fix = staticmethod(ax.fix)
    mark_inexact = staticmethod(ax.mark_inexact)

    def refuse(self, reason: str) -> Any:
        """Fix every axis of every argument. Returns a result whose axes are all constant."""
        fix_all(self.args, reason)
        return constants_like(self.node.meta.get("val"), reason)

    # Shapes

    def cut(self, axis: Axis, lengths: Sequence[int]) -> list[Axis]:
        """Cut an axis into pieces of the given lengths."""
        return ax.cut(axis, lengths, str(self))

    def cut_evenly(self, axis: Axis, pieces: int) -> list[Axis]:
        return self.cut(axis, [axis_size(axis) // pieces] * pieces)

    def merge(self, axes: Sequence[Axis]) -> Axis:
        """Flatten neighboring axes into one."""
        return ax.merge(axes, str(self))

    def unmerge(self, axis: Axis, lengths: Sequence[int]) -> list[Axis]:
        """See one axis as several: the reverse of `merge`."""
        return ax.unmerge(axis, lengths, str(self))

    # What the graph needs to know about layers

    def named(self, name: str, default: Any = None) -> Any:
        """An argument that is no tensor by its name in torch, however the code passes it."""
        if name in self.node.kwargs:
            return self.node.kwargs[name]
        schema = self.node.target._schema  # type: ignore[union-attr]  # torch has no public access to it
        names = [argument.name for argument in schema.arguments]
        place = names.index(name) if name in names else len(names)
        return self.node.args[place] if place < len(self.node.args) else default

    def layer(self, weight: Any = None) -> str:
        """The layer of the operator: the owner of its weight (its second argument), or else its module."""
        if weight is None and len(self.node.args) > 1:
            weight = self.node.args[1]
        while isinstance(weight, Node):
            if weight in self.tensor_of:
                return _WEIGHT_SUFFIX.sub("", self.tensor_of[weight])
            weight = next(iter(weight.all_input_nodes), None) if weight.op == "call_function" else None
        return self.module or self.node.name

    def produces(self, axis: Axis, place: int, weight: Any = None) -> None:
        """The channels of this axis come from this layer. `place` is where they are in the result."""
        place %= len(self.shape)
        spatial = tuple(size for i, size in enumerate(self.shape) if i not in (0, place))
        self.findings.producers.append(Producer(self.layer(weight), axis, self.node, spatial))

    def costs(self, axes: Value, output: Axis = (), weight: Any = None) -> None:
        """The operator does one multiply-add for each element of the product of these axes."""
        if self.counting:
            self.findings.mac_terms.append(MacTerm(self.layer(weight), axes, output))

    def sums_over(self, weight: Value, place: int, source: Any = None) -> None:
        """The operator sums over this axis of its weight: a channel whose slice is zero has no effect.

        `source` is the node of the weight, by default that of the second argument.
        """
        name = self.tensor_of.get(source) if source is not None else self._parameter(1)
        if name is None:
            self.mark_inexact(weight[place], f"the weight of {self} is computed from parameters")
        else:
            self.findings.consumers.setdefault(name, set()).add(place)

    def scales(self, place: int) -> None:
        """The argument at this place scales each channel (the weight of a norm layer)."""
        name = self._parameter(place)
        if name is not None:
            self.findings.scales[name] = None

    def _parameter(self, place: int) -> str | None:
        """The parameter or buffer that is the argument at this place; None if it is anything else."""
        source = self.node.args[place] if place < len(self.node.args) else None
        return self.tensor_of.get(source) if isinstance(source, Node) else None

    def has_attributes(self, **axes: Axis) -> None:
        """Attributes of the layer (`out_channels=...`) that hold the length of an axis."""
        self.findings.attributes.setdefault(self.module, {}).update(axes)

    def has_lengths(self, numbers: Sequence[int], axes: Value) -> None:
        """The operator was called with these lengths for these axes, one by one or as a list."""
        for number, axis in zip(numbers, axes, strict=True):
            if number > 1 and is_free(axis):
                self.findings.lengths.append((self.module, number, (axis,)))
        if any(is_free(axis) for axis in axes):
            self.findings.lengths.append((self.module, tuple(numbers), axes))

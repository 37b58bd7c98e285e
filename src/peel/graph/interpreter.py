"""Abstract interpretation: every tensor of a captured forward pass as a tuple of axes, one rule per operator.

Parameters and buffers are tensors like any other. Their axes start unknown and are the same unknowns in every
capture of the model, so a second capture (in training mode, for heads that only exist there) adds to the
first.
"""

import inspect
import operator
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch._ops import OpOverload  # has no public name
from torch.fx import GraphModule, Node

from ..errors import TraceError
from ..utils.fingerprint import fingerprint
from .axes import Value, axis_size, constant, fix, unknown
from .call import Call, Findings, Rule, constants_like, fix_all, operator_of, results_of, values_in
from .capture import Capture
from .channel_graph import INPUT, OUTPUT
from .rules import RULES

#: Checks of sizes that export leaves in the graph. They read no values.
_IGNORED = {
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::sym_constrain_range_for_size",
    "aten::sym_size",
    "aten::sym_numel",
}

_CONSTANT = "a constant of the code"


class Interpreter:
    """Runs the rules over captures. Equalities go into the axes, the rest into `findings`."""

    def __init__(self, model: nn.Module, user_rules: Mapping[str, Rule]) -> None:
        self.findings = Findings()
        self.user_rules = user_rules
        self.tensors: dict[str, Value] = {}
        """Name of a parameter or buffer -> its axes."""
        self.values: dict[Node, Any] = {}
        self._first_name: dict[str, str] = {}
        self._tensor_of: dict[Node, str] = {}
        self._weights: set[Node] = set()
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        # A tensor with two names (tied weights) is known by its first name. torch.export may use either.
        first: dict[int, str] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            self._first_name[name] = first.setdefault(id(tensor), name)
            axes = (unknown(size) if size > 1 else constant(1, "a single channel") for size in tensor.shape)
            self.tensors[name] = self.tensors.get(first[id(tensor)]) or tuple(axes)
        # Fix kernel axes before anything is computed from a weight: weight standardization flattens them.
        for name, module in model.named_modules():
            if hasattr(module, "kernel_size"):
                for axis in self.tensors.get(f"{name}.weight" if name else "weight", ())[2:]:
                    fix(axis, "kernel size")

    def run(self, capture: Capture, *, counting: bool = True) -> None:
        """Apply the rules to every operator. Costs and operators are recorded if `counting`."""
        for node in capture.nodes:
            if node.op == "placeholder":
                self._enter(node, capture, counting)
            else:
                self._evaluate(node, counting)
        for node in capture.outputs:
            fix_all(self.values[node], OUTPUT)

    def _enter(self, node: Node, capture: Capture, counting: bool) -> None:
        """Give a placeholder its value: a parameter or buffer, a constant of the code, or an input."""
        name = self._first_name.get(capture.tensors.get(node.name, ""))
        if name is not None:
            self.values[node] = self.tensors[name]
            self._tensor_of[node] = name
            if name in self._parameters:
                self._weights.add(node)
            return
        if counting and node.name in capture.constants:
            self.findings.constants.append(fingerprint([capture.constants[node.name]]))
        # Channels of the input and of constant tensors are given: they fix what they meet.
        reason = INPUT if node.name in capture.inputs else _CONSTANT
        self.values[node] = constants_like(node.meta.get("val"), reason)

    def _evaluate(self, node: Node, counting: bool) -> None:
        if node.op == "get_attr":
            target = getattr(node.graph.owning_module, str(node.target), None)
            is_graph = isinstance(target, GraphModule)
            self.values[node] = target if is_graph else constants_like(node.meta.get("val"), _CONSTANT)
        elif node.target is operator.getitem:
            collection, index = map(self._read, node.args)
            self.values[node] = collection[index]
            self._weights.update([node] if node.args[0] in self._weights else [])
        elif node.op == "call_function":
            args = map(self._read, node.args)
            region = next((i for i, arg in enumerate(args) if isinstance(arg, GraphModule)), None)
            if region is not None:
                self.values[node] = self._inline(node, region, counting)
            elif operator_of(node) in _IGNORED or not isinstance(node.target, OpOverload):
                self.values[node] = None  # also arithmetic of Python on sizes
            else:
                self.values[node] = self._apply(node, counting)

    def _inline(self, node: Node, region: int, counting: bool) -> Any:
        """Run through a region under autocast or no_grad, which is captured as a graph of its own."""
        args = iter(node.args[region + 1 :])
        for inner in self._read(node.args[region]).graph.nodes:
            if inner.op == "placeholder":
                arg = next(args)
                self.values[inner] = self._read(arg)
                if isinstance(arg, Node) and arg in self._tensor_of:
                    self._tensor_of[inner] = self._tensor_of[arg]
                if arg in self._weights:
                    self._weights.add(inner)
            elif inner.op == "output":
                return tuple(self.values[item] for item in inner.args[0])
            else:
                self._evaluate(inner, counting)
        return None

    def _apply(self, node: Node, counting: bool) -> Any:
        name = operator_of(node)
        if counting:
            self.findings.operators.append(name.removeprefix("aten::").rstrip("_"))
            self.findings.constants.append(_constants_of(node))
        args = [self._read(arg) for arg in node.args]
        options = {key: self._read(arg) for key, arg in node.kwargs.items()}
        inputs = node.all_input_nodes
        # Computed from parameters only, as by weight normalization: it still acts as a weight.
        if inputs and self._weights.issuperset(inputs):
            self._weights.add(node)
        call = Call(
            node=node,
            args=(*args, *options.values()),
            findings=self.findings,
            tensor_of=self._tensor_of,
            weights=self._weights,
            counting=counting,
        )
        rule = self.user_rules.get(name) or RULES.get(name)
        reason = f"{call} has no channel rule"
        try:
            if rule is not None:
                result = rule(call, *args, **options)
                _check(node, result)
                return result
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if name in self.user_rules:
                place = _place(self.user_rules[name])
                raise TraceError(f"your rule for {name} ({place}) failed on {call}: {problem}") from error
            # A form of the operator that our rule does not know. Fixing all its channels is safe.
            failure = f"{_line_of(error)}: {problem}"
            self.findings.failed_rules.setdefault(name, failure)
            reason = f"the channel rule of {call} failed ({failure})"
        self.findings.unknown_operators.setdefault(name, call.module or "the model")
        return call.refuse(reason)

    def _read(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            return self.values[arg]
        if isinstance(arg, list | tuple):
            return [self._read(item) for item in arg]
        return arg


def _constants_of(node: Node) -> str:
    """`[1, 1], 0.5`: the numbers and strings that an operator is called with."""
    found = []
    for arg in (*node.args, *node.kwargs.values()):
        parts = list(arg) if isinstance(arg, list | tuple) else [arg]
        if all(isinstance(part, int | float | str) for part in parts):
            found.append(str(arg if parts == [arg] else parts))
    return ", ".join(found)


def _check(node: Node, result: Any) -> None:
    """A rule must account for every axis of what the operator returned."""
    if not values_in(result) and results_of(node):
        raise TypeError(f"it returned {result!r}, not a tuple of axes")
    shapes = [tuple(tensor.shape) for tensor in results_of(node)]
    sizes = [tuple(axis_size(axis) for axis in value) for value in values_in(result)]
    if sizes != shapes:
        raise ValueError(f"it returned axes of lengths {sizes} for a result of shape {shapes}")


def _line_of(error: Exception) -> str:
    """`rules/reduction.py:20 in _reduce`: where a rule failed."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}:{frame.lineno} in {frame.name}"


def _place(rule: Rule) -> str:
    """`file:line` of a rule."""
    code = getattr(inspect.unwrap(getattr(rule, "func", rule)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(rule)

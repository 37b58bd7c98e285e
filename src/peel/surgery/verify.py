"""`verify`: check on the user's own model that cutting channels is correct, before any training.

Channels are zeroed in the full network and cut in the slim one, and the outputs are compared. Costs are
counted on built models, and the output shape must stay. All checks use a copy in double precision, with
random scales in norm layers so that a zero hides nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map  # there is no public name for these

from ..cost.count import count_macs
from ..graph.capture import untouched, with_batch
from ..graph.channel_graph import ChannelGraph
from ..graph.copying import deep_copy, structural_copy
from ..graph.probe import find_difference, output_shapes
from ..graph.rebuild import empty_as, rebuild
from ..graph.submodules import as_calls, record_modules
from ..graph.trace import trace
from .selection import KeptChannels, select_channels
from .slim import copy_weights, initialize

#: Whether a check passed (None: skipped), and the detail.
Outcome = tuple[bool | None, str]

#: Largest relative difference of outputs that counts as equal, in double and in single precision.
TOLERANCE, SINGLE_TOLERANCE = 1e-6, 1e-4


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None
    """None: skipped, because the time was up or there was nothing to check."""
    detail: str


@dataclass(frozen=True)
class Verification:
    """The result of `peel.verify`."""

    graph: ChannelGraph
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether at least one check passed and none failed."""
        results = [check.passed for check in self.checks]
        return True in results and False not in results

    def __str__(self) -> str:
        words = {True: "passed", False: "FAILED", None: "skipped"}
        return "\n".join(f"{words[check.passed]:8}{check.name}: {check.detail}" for check in self.checks)


def verify(
    model: nn.Module,
    example_input: Any,
    *,
    graph: ChannelGraph | None = None,
    seconds: float = 120.0,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Verification:
    """Check on this model that cutting channels is correct. The model is not changed.

    Where the graph was traced through submodules, these are checked, with the inputs that the model gives
    them.
    After `seconds` no further check starts; the rest is reported as skipped. `progress` is called with the
    name of the next check, the number of checks done and their total.

    >>> print(peel.verify(model, torch.randn(1, 3, 224, 224)))
    passed  full width: relative difference of the outputs 0.0e+00 ...
    """
    deadline = time.monotonic() + seconds
    report = progress or (lambda name, done, total: None)
    report("trace", 0, 5)
    graph = trace(model, example_input) if graph is None else graph
    checks: list[Check] = []
    with untouched():
        torch.manual_seed(seed)
        if graph.modules:
            model, example_input = as_calls(model, record_modules(model, example_input, graph.modules))
        checker = _Checker(model, graph, example_input)
        planned: dict[str, Callable[[], Outcome]] = {
            "full width": checker.full_width,
            "cut equals zeroed": lambda: checker.cut_equals_zeroed(deadline),
            "smaller network": lambda: checker.built(0.3, 0.9),
            "larger network": lambda: checker.built(1.1, 1.4),
        }
        for name, check in planned.items():
            report(name, len(checks) + 1, 5)
            outcome = check() if time.monotonic() < deadline else (None, "the time was up")
            checks.append(Check(name, *outcome))
    report("done", 5, 5)
    return Verification(graph, tuple(checks))


class _Checker:
    """The checks, on a copy of the model in double precision."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, example_input: Any) -> None:
        self.graph = graph
        self.given = model
        self.model = _randomized(deep_copy(model).double().eval())
        self.tolerance = TOLERANCE
        self.one_sample = tree_map(_double, with_batch(example_input, 1))
        self.args, self.kwargs = tree_map(_double, with_batch(example_input, 2))
        try:
            self.run(self.model)
        except RuntimeError:
            # The model creates single-precision tensors, so it runs in single precision only.
            self.model = self.model.float()
            self.tolerance = SINGLE_TOLERANCE
            self.one_sample = with_batch(example_input, 1)
            self.args, self.kwargs = with_batch(example_input, 2)

    @torch.no_grad()
    def run(self, model: nn.Module, weights: dict[str, Tensor] | None = None) -> list[Tensor]:
        """The outputs of a model, with some of its weights replaced. What its code keeps is forgotten."""
        output = functional_call(structural_copy(model), weights or {}, self.args, self.kwargs)
        return [value for value in tree_leaves(output) if isinstance(value, Tensor)]

    def full_width(self) -> Outcome:
        difference = self._cut([])
        return difference < self.tolerance, f"relative difference of the outputs {difference:.1e}"

    def cut_equals_zeroed(self, deadline: float) -> Outcome:
        ties = list(self.graph.widths)
        # Where statistics are taken over channels, a zero channel still counts: the outputs differ rightly.
        exact = [i for i, tie in enumerate(ties) if tie not in self.graph.inexact]
        if not exact:
            return None, "all ties pass statistics over channels" if ties else "nothing can be cut"
        difference = max(self._cut(exact) for _ in range(2))
        detail = f"{len(exact)} of {len(ties)} ties, relative difference {difference:.1e}"
        if difference < self.tolerance:
            return True, detail
        # All at once is fast. Only to name the wrong ones, each tie is cut by itself.
        wrong = [ties[i] for i in exact if time.monotonic() < deadline and self._cut([i]) >= self.tolerance]
        return False, f"{detail}; wrong by themselves: {', '.join(wrong) or 'none'}"

    def _cut(self, ties: list[int]) -> float:
        """Cut random channels of these ties; the difference of the outputs to those of the zeroed network."""
        units = self.graph.units()
        for tie in ties:
            # Between a fifth and nine tenths: both small cuts and large ones show errors.
            units[tie] = max(1, round(units[tie] * float(0.2 + 0.7 * torch.rand(()))))
        scores = torch.rand(self.graph.num_atoms, max(self.graph.widths.values(), default=1))
        kept = select_channels(self.graph, units, dict(enumerate(scores)))
        small = rebuild(self.model, self.graph, units, empty_as)
        copy_weights(self.model, small, self.graph, kept, set())
        zeroed = self.run(self.model, _zeroed_weights(self.model, self.graph, kept))
        return _difference(zeroed, self.run(small))

    def built(self, low: float, high: float) -> Outcome:
        """Build a network at other widths: it runs, keeps its output shape and costs what was predicted."""
        factors = low + (high - low) * torch.rand(len(self.graph.widths))
        units = [max(1, round(u * float(f))) for u, f in zip(self.graph.units(), factors, strict=True)]
        small = rebuild(self.model, self.graph, units, empty_as)
        copy_weights(self.model, small, self.graph, None, initialize(small))
        try:
            macs, outputs = count_macs(small, *self.one_sample), self.run(small)
        except Exception as error:
            return False, f"it does not run: {str(error).splitlines()[0]}"
        params = sum(parameter.numel() for parameter in small.parameters())
        # Whether torch counts a recurrent layer depends on its kernel. The difference must be constant.
        uncounted = count_macs(structural_copy(self.model), *self.one_sample) - self.graph.macs()
        predicted = self.graph.mac_cost.total(units) + uncounted, self.graph.param_cost.total(units)
        counted = f"{macs:,} MACs and {params:,} parameters"
        if not all(bool(torch.isfinite(output).all()) for output in outputs if output.is_floating_point()):
            return False, "its outputs are not finite"
        if output_shapes(outputs) != output_shapes(self.run(self.model)):
            return False, f"the output shape changed to {output_shapes(outputs)}"
        if (macs, params) != predicted:
            return False, f"{counted} counted, {predicted[0]:,} and {predicted[1]:,} predicted"
        network = rebuild(self.given, self.graph, units, empty_as)
        if difference := find_difference(network, self.graph, units, self.given):
            return False, f"its code does something else: {difference}"
        return True, f"runs, output shape kept, {counted} as predicted"


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@torch.no_grad()
def _randomized(model: nn.Module) -> nn.Module:
    """Draw scales, shifts and statistics: a parameter initialized at zero hides errors."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and sum(size > 1 for size in tensor.shape) <= 1:
            if name.endswith(("bias", "running_mean")):
                tensor.normal_(0.0, 0.1)
            else:
                tensor.uniform_(0.5, 1.5)
    return model


def _zeroed_weights(model: nn.Module, graph: ChannelGraph, kept: KeptChannels) -> dict[str, Tensor]:
    """The weights that read channels, with zeros where they read channels that are not kept."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: tensors[name].detach().clone() for name in graph.consumers}
    for name, axes in graph.consumers.items():
        for axis in axes:
            is_gone = torch.ones(weights[name].shape[axis], dtype=torch.bool)
            is_gone[kept.positions(graph.layouts[name][axis])] = False
            weights[name].index_fill_(axis, is_gone.nonzero().flatten().to(weights[name].device), 0.0)
    return weights


def _difference(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest difference relative to the largest output; infinite for other shapes and for NaN."""
    if [a.shape for a in first] != [b.shape for b in second]:
        return float("inf")
    # A mask has no difference, and an empty tensor no largest value.
    pairs = [
        tuple(x.double() if x.dtype == torch.bool else x for x in pair)
        for pair in zip(first, second, strict=True)
        if pair[0].numel()
    ]
    relative = [float((a - b).abs().max()) / (float(a.abs().max()) or 1.0) for a, b in pairs]
    return max((value if value == value else float("inf") for value in relative), default=0.0)

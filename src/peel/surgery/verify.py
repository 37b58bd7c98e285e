"""`verify`: proof on the user's own model, before anyone trains.

Channels are zeroed in the full network (the weights that read them), cut in the slim one, and the outputs compared; costs are counted
on built models; the output shape must stay. All on copies, in double precision, with random scales in norm layers so that nothing is
hidden behind a zero.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..cost.count import count_macs
from ..graph.capture import computed_tensors, untouched, with_batch
from ..graph.channel_graph import ChannelGraph
from ..graph.probe import output_shapes
from ..graph.rebuild import empty_as, rebuild
from ..graph.trace import trace
from .selection import Kept, keep
from .slim import copy_weights, initialise

__all__ = ["Check", "Verification", "verify"]

Progress = Callable[[str, int, int], None]
"""(what is being checked, how many checks are done, how many there are)"""

#: Relative difference of outputs, in double precision, above which two networks are not the same.
TOLERANCE = 1e-6
SINGLE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    passed: bool | None
    """None: not checked, the time was up or there was nothing to check."""
    detail: str


@dataclass(frozen=True)
class Verification:
    """What `peel.verify` found out."""

    graph: ChannelGraph
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
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
    progress: Progress | None = None,
) -> Verification:
    """Prove on this model that cutting channels does what it should. The model is left as it was.

    After `seconds` no further check is started; those left out are reported as skipped.

    >>> print(peel.verify(model, torch.randn(1, 3, 224, 224)))
    passed  full width: outputs are the same (difference 0)
    passed  cut equals zeroed: ...
    """
    deadline = time.monotonic() + seconds
    report = progress or (lambda name, done, total: None)
    report("trace", 0, 5)
    graph = trace(model, example_input) if graph is None else graph
    with untouched():
        torch.manual_seed(seed)
        workbench = _Workbench(model, graph, example_input)
        steps: list[tuple[str, Callable[[], Check]]] = [
            ("full width", workbench.full_width),
            ("cut equals zeroed", lambda: workbench.cut_equals_zeroed(deadline)),
            ("smaller network", lambda: workbench.built("smaller network", 0.3, 0.9)),
            ("larger network", lambda: workbench.built("larger network", 1.1, 1.4)),
        ]
        checks = []
        for i, (name, step) in enumerate(steps):
            report(name, i + 1, len(steps) + 1)
            checks.append(step() if time.monotonic() < deadline else Check(name, None, "the time was up"))
    report("done", len(steps) + 1, len(steps) + 1)
    return Verification(graph, tuple(checks))


class _Workbench:
    """A copy of the model in double precision with its graph and input, on which the checks run."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, example_input: Any) -> None:
        self.graph = graph
        self.model = _randomised(copy.deepcopy(model, computed_tensors(model)).double().eval())
        self.tolerance = TOLERANCE
        self.one_sample = tree_map(_double, with_batch(example_input, 1))
        self.args, self.kwargs = tree_map(_double, with_batch(example_input, 2))
        try:
            self.run(self.model)
        except RuntimeError:
            # Code that makes single-precision tensors of its own runs in single precision only, where rounding takes its part.
            self.model = self.model.float()
            self.tolerance = SINGLE_TOLERANCE
            self.one_sample = with_batch(example_input, 1)
            self.args, self.kwargs = with_batch(example_input, 2)

    def run(self, model: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return [
                value for value in tree_leaves(model(*self.args, **self.kwargs)) if isinstance(value, Tensor)
            ]

    def sliced(self, kept: Kept, units: list[int]) -> nn.Module:
        small = rebuild(self.model, self.graph, units, empty_as)
        copy_weights(self.model, small, self.graph, kept, set())
        return small

    def full_width(self) -> Check:
        units = self.graph.units()
        kept = keep(self.graph, units, _random_scores(self.graph))
        difference = _difference(self.run(self.model), self.run(self.sliced(kept, units)))
        return Check(
            "full width", difference < self.tolerance, f"outputs are the same (difference {difference:.1e})"
        )

    def cut_equals_zeroed(self, deadline: float) -> Check:
        name = "cut equals zeroed"
        exact = [i for i, tie in enumerate(self.graph.widths) if tie not in self.graph.inexact]
        if not self.graph.widths:
            return Check(name, None, "nothing can be cut")
        if not exact:
            return Check(
                name,
                None,
                "no tie can be checked this way: all pass layers that take statistics over channels",
            )
        difference = max(self._cut(exact) for _ in range(2))
        about = f"{len(exact)} of {len(self.graph.widths)} ties, relative difference {difference:.1e}"
        if difference < self.tolerance:
            return Check(name, True, about)
        wrong = [tie for tie in exact if time.monotonic() < deadline and self._cut([tie]) >= self.tolerance]
        names = [list(self.graph.widths)[tie] for tie in wrong]
        return Check(name, False, f"{about}; wrong by themselves: {', '.join(names) or 'none'}")

    def _cut(self, ties: list[int]) -> float:
        """Cut some of the channels of these ties; how far the outputs are from those of the zeroed network."""
        units = self.graph.units()
        for tie in ties:
            units[tie] = max(1, round(units[tie] * float(0.2 + 0.7 * torch.rand(()))))
        kept = keep(self.graph, units, _random_scores(self.graph))
        with _zeroed(self.model, self.graph, kept):
            expected = self.run(self.model)
        return _difference(expected, self.run(self.sliced(kept, units)))

    def built(self, name: str, low: float, high: float) -> Check:
        """Other widths: the network runs, keeps its output shape and costs what was predicted."""
        factors = low + (high - low) * torch.rand(len(self.graph.widths))
        units = [max(1, round(u * float(f))) for u, f in zip(self.graph.units(), factors, strict=True)]
        small = rebuild(self.model, self.graph, units, empty_as)
        copy_weights(self.model, small, self.graph, None, initialise(small))
        try:
            macs = count_macs(small, *self.one_sample)
            outputs = self.run(small)
            shapes = output_shapes(outputs)
        except Exception as error:
            return Check(name, False, f"it does not run: {str(error).splitlines()[0]}")
        params = sum(parameter.numel() for parameter in small.parameters())
        # What operators without a rule cost is in no prediction: it must be the same at any widths.
        uncounted = count_macs(self.model, *self.one_sample) - self.graph.macs()
        predicted = self.graph.mac_cost.total(units) + uncounted, self.graph.param_cost.total(units)
        if not all(bool(torch.isfinite(output).all()) for output in outputs if output.is_floating_point()):
            return Check(name, False, "its outputs are not finite")
        if shapes != output_shapes(self.run(self.model)):
            return Check(name, False, f"the output shape changed to {shapes}")
        if (macs, params) != predicted:
            found = f"{macs:,} MACs and {params:,} parameters counted, {predicted[0]:,} and {predicted[1]:,} predicted"
            return Check(name, False, found)
        note = f" ({uncounted:,} MACs of operators without a rule are in no prediction)" if uncounted else ""
        return Check(
            name, True, f"runs, output shape kept, {macs:,} MACs and {params:,} parameters as predicted{note}"
        )


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _randomised(model: nn.Module) -> nn.Module:
    """Scales, shifts and statistics of ordinary size: what was initialised at zero hides mistakes."""
    with torch.no_grad():
        tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or sum(size > 1 for size in tensor.shape) > 1:
                continue
            if name.endswith(("bias", "running_mean")):
                tensor.normal_(0.0, 0.1)
            else:
                tensor.uniform_(0.5, 1.5)
    return model


def _random_scores(graph: ChannelGraph) -> list[Tensor]:
    size = max((run.size for layout in graph.layouts.values() for runs in layout for run in runs), default=1)
    return [torch.rand(size) for _ in range(graph.num_atoms)]


@contextmanager
def _zeroed(model: nn.Module, graph: ChannelGraph, kept: Kept) -> Iterator[None]:
    """Weights that read channels which are not kept are zero while this lasts."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    saved: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for name, places in graph.consumers.items():
            tensor = tensors[name]
            saved.append((tensor, tensor.clone()))
            for place in places:
                gone = torch.ones(tensor.shape[place], dtype=torch.bool)
                gone[kept.positions(graph.layouts[name][place])] = False
                tensor.index_fill_(place, gone.nonzero().flatten().to(tensor.device), 0.0)
        try:
            yield
        finally:
            for weight, old in saved:
                weight.copy_(old)


def _difference(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest difference relative to the largest output."""
    if [a.shape for a in first] != [b.shape for b in second]:
        return float("inf")
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        scale = float(a.abs().max()) or 1.0
        difference = float((a - b).abs().max()) / scale
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst

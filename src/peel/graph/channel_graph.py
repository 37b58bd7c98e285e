"""`ChannelGraph`: which channels are tied, what they cost, and where they lie in the tensors of the model. Numbers and names only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost.polynomial import CostModel, Form, IntArray, Term
from ..cost.widths import Widths
from ..errors import WidthsError, did_you_mean

#: Why channels that leave the model are fixed.
OUTPUT = "it leaves the model (its output)"

__all__ = ["OUTPUT", "Buffered", "ChannelGraph", "Layout", "Member", "Run", "Tie"]


@dataclass(frozen=True)
class Member:
    """A stretch of an axis of a parameter or buffer that follows the width of a tie."""

    tensor: str
    axis: int
    offset: int
    size: int
    """Length of the stretch in the original network."""
    multiplicity: str
    """The length in terms of the width: `1`, `49` (a flattened 7x7 map) or `1/32` (one group of a grouped convolution)."""


@dataclass(frozen=True)
class Tie:
    """Channel axes that must keep the same size: one integer of the architecture."""

    name: str
    width: int
    step: int
    """The width must stay a multiple of this."""
    fixed: str | None
    """Why the width must not change; None where it may."""
    inexact: str | None
    """Why slicing it is not the same as masking it (a layer norm over the channels, say); None where it is the same."""
    members: tuple[Member, ...]
    causes: tuple[str, ...]
    """The operators that tie the members together."""
    spatial: tuple[int, ...]
    """Spatial size of the feature maps that count for grouping."""
    layers: tuple[str, ...]
    """The layers that produce these channels, in order."""


class Run(NamedTuple):
    """Part of an axis: the channels of an atom, each repeated `inner` times; or, with `tie` -1, a constant stretch."""

    tie: int
    atom: int
    inner: int
    size: int
    """Units of the tie in the original network (the length of the stretch where constant)."""

    @property
    def length(self) -> int:
        return self.size * self.inner


Layout = tuple[tuple[Run, ...], ...]
"""The axes of one tensor, each as runs."""


class Buffered(NamedTuple):
    """A tensor of the forward pass: elements, and from which operator to which it is alive."""

    forms: tuple[Form, ...]
    element_bytes: int
    born: int
    dies: int


@dataclass(frozen=True)
class ChannelGraph:
    """What `peel.trace` finds. Widths may be given in part: ties that are not named keep their original width."""

    ties: Mapping[str, Tie]
    """Every tie, free and fixed, from the input to the output of the network."""
    groups: Mapping[str, tuple[str, ...]]
    """Step 3 of the paper: group name -> free ties, input side first."""
    layouts: Mapping[str, Layout]
    """Parameter or buffer name -> how its axes are made of ties."""
    attributes: Mapping[str, Mapping[str, Any]]
    """Module -> attribute -> `Form` (or a list of them) that it mirrors."""
    consumers: Mapping[str, tuple[int, ...]]
    """Weight -> axes over which it sums what comes in."""
    scales: tuple[str, ...]
    """Weights of norm layers."""
    num_atoms: int
    input_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the example input, one sample."""
    operators: tuple[str, ...]
    """What the forward pass runs, in order: `conv2d`, `batch_norm`, `relu` and so on."""
    constants: tuple[str, ...]
    """Fingerprints of tensors that the code brings along, and what each operator is called with that is no tensor: strides, slopes,
    factors; lengths are those of the network that was traced."""
    unknown_operators: Mapping[str, str]
    """Operators without a channel rule -> where they were met."""
    mac_terms: tuple[Term, ...]
    param_terms: tuple[Term, ...]
    buffered: tuple[Buffered, ...]

    @cached_property
    def widths(self) -> Widths:
        """The original widths of the free ties, from the input to the output of the network."""
        return Widths({name: tie.width for name, tie in self.ties.items() if tie.fixed is None})

    @cached_property
    def fixed(self) -> dict[str, str]:
        """Ties that must not change, with the reason."""
        return {name: tie.fixed for name, tie in self.ties.items() if tie.fixed is not None}

    @cached_property
    def steps(self) -> dict[str, int]:
        """The multiple that each width must keep."""
        return {name: self.ties[name].step for name in self.widths}

    @cached_property
    def inexact(self) -> dict[str, str]:
        """Free ties for which slicing is not exactly masking, with the reason."""
        return {name: tie.inexact for name in self.widths if (tie := self.ties[name]).inexact is not None}

    @cached_property
    def free_share(self) -> float:
        """The part of all channels that can change; those that leave the model (class scores) are not counted."""
        total = sum(tie.width for tie in self.ties.values() if tie.fixed != OUTPUT)
        return sum(self.widths.values()) / total if total else 0.0

    def __repr__(self) -> str:
        return (
            f"ChannelGraph({len(self.widths)} free ties in {len(self.groups)} groups, {len(self.fixed)} fixed, "
            f"{self.macs():,} MACs, {self.params():,} params)"
        )

    # Widths

    def check(self, widths: Mapping[str, int] | None = None) -> Widths:
        """Complete widths for all free ties, or an error that names what is wrong with those given."""
        if widths is None:
            return self.widths
        given = Widths(widths)
        for name, width in given.items():
            tie = self.ties.get(name)
            if tie is None:
                raise WidthsError(
                    f"no tie is called {name!r}.{did_you_mean(name, self.ties)} graph.widths lists them all."
                )
            if tie.fixed is not None and width != tie.width:
                raise WidthsError(
                    f"{name} is fixed at {tie.width} channels and cannot become {width}: {tie.fixed}."
                )
            if tie.fixed is None and width % tie.step:
                low, high = width // tie.step * tie.step, -(-width // tie.step) * tie.step
                near = f"{low} or {high}" if low else f"{high}"
                raise WidthsError(
                    f"{name}: the width must be a multiple of {tie.step}, not {width}; {near} would do."
                )
        return Widths({name: given.get(name, width) for name, width in self.widths.items()})

    def units(self, widths: Mapping[str, int] | None = None) -> list[int]:
        """Widths in units of each tie's step, in the order of `graph.widths`."""
        checked = self.check(widths)
        return [checked[name] // step for name, step in self.steps.items()]

    def at(self, widths: Mapping[str, int]) -> ChannelGraph:
        """The graph of the network that `peel.slim` builds at these widths: what tracing it anew would give."""
        checked = self.check(widths)
        units = self.units(checked)

        def resized(runs: tuple[Run, ...]) -> tuple[Run, ...]:
            return tuple(run if run.tie < 0 else run._replace(size=units[run.tie]) for run in runs)

        layouts = {name: tuple(resized(runs) for runs in layout) for name, layout in self.layouts.items()}
        ties = dict(self.ties)
        for index, (name, width) in enumerate(checked.items()):
            members = tuple(
                _moved(member, layouts[member.tensor][member.axis], index) for member in ties[name].members
            )
            ties[name] = replace(ties[name], width=width, members=members)
        return replace(self, ties=ties, layouts=layouts)

    # Costs

    @cached_property
    def mac_cost(self) -> CostModel:
        return CostModel(len(self.widths), self.mac_terms)

    @cached_property
    def param_cost(self) -> CostModel:
        return CostModel(len(self.widths), self.param_terms)

    def cost(self, resource: str) -> Callable[[Sequence[float]], float]:
        """The cost function of a resource, in units of the ties: exact on whole units, continuous between them."""
        if resource == "macs":
            return self.mac_cost.total
        return self.param_cost.total if resource == "params" else self.peak_bytes

    def macs(self, widths: Mapping[str, int] | None = None) -> int:
        """Multiply-adds of one sample: convolutions, linear layers and matrix products."""
        return self.mac_cost.total(self.units(widths))

    def params(self, widths: Mapping[str, int] | None = None) -> int:
        """Number of parameters (buffers not counted, shared ones counted once)."""
        return self.param_cost.total(self.units(widths))

    def macs_many(self, widths: Sequence[Mapping[str, int]] | npt.NDArray[np.integer]) -> IntArray:
        """MACs of many candidates at once: a list of widths, or an array with a row each, columns as in `graph.widths`."""
        return self.mac_cost.many(self._unit_rows(widths))

    def params_many(self, widths: Sequence[Mapping[str, int]] | npt.NDArray[np.integer]) -> IntArray:
        """Parameters of many candidates at once, as `macs_many`."""
        return self.param_cost.many(self._unit_rows(widths))

    def _unit_rows(self, widths: Sequence[Mapping[str, int]] | npt.NDArray[np.integer]) -> IntArray:
        if not isinstance(widths, np.ndarray):
            return np.array([self.units(row) for row in widths], dtype=np.int64).reshape(
                len(widths), len(self.widths)
            )
        steps = np.array(list(self.steps.values()), dtype=np.int64)
        if widths.ndim != 2 or widths.shape[1] != len(steps):
            raise WidthsError(
                f"an array of widths has one row per candidate and {len(steps)} columns, not shape {widths.shape}."
            )
        wrong = (widths < 1) | (widths % steps != 0)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            name = list(self.steps)[column]
            raise WidthsError(
                f"row {row}: the width of {name} must be a positive multiple of {steps[column]}, not {widths[row, column]}."
            )
        rows: IntArray = widths.astype(np.int64) // steps
        return rows

    def macs_by_layer(self, widths: Mapping[str, int] | None = None) -> dict[str, int]:
        return self.mac_cost.by_layer(self.units(widths))

    def params_by_layer(self, widths: Mapping[str, int] | None = None) -> dict[str, int]:
        return self.param_cost.by_layer(self.units(widths))

    def macs_by_group(self, widths: Mapping[str, int] | None = None) -> dict[str, int]:
        """MACs of each group: a layer counts where its output channels are, or, with a fixed output, where its input channels are.

        What no group can change is counted under `(fixed)`.
        """
        return self._by_group(self.mac_cost, widths)

    def params_by_group(self, widths: Mapping[str, int] | None = None) -> dict[str, int]:
        """Parameters of each group, as `macs_by_group`."""
        return self._by_group(self.param_cost, widths)

    def _by_group(self, cost: CostModel, widths: Mapping[str, int] | None) -> dict[str, int]:
        by_tie = cost.by_tie(self.units(widths))
        index = {name: i for i, name in enumerate(self.widths)}
        costs = {group: sum(by_tie.get(index[tie], 0) for tie in ties) for group, ties in self.groups.items()}
        if by_tie.get(-1):
            costs["(fixed)"] = by_tie[-1]
        return costs

    def activation_bytes(self, widths: Mapping[str, int] | None = None) -> int:
        """An estimate of the peak of activation memory of one sample's forward pass without gradients.

        It adds up what is alive between operators: the input, intermediate results and nothing else. Workspaces of kernels, the
        allocator's rounding and fused operators are not in it, so a measured peak differs; ratios between widths are what it is good for.
        """
        return int(self.peak_bytes(self.units(widths)))

    def peak_bytes(self, units: Sequence[float]) -> float:
        """`activation_bytes` in units of the ties, which may be fractions of a channel."""
        last = max((tensor.dies for tensor in self.buffered), default=0)
        change: list[float] = [0] * (last + 2)
        for forms, element_bytes, born, dies in self.buffered:
            size: float = element_bytes
            for form in forms:
                size *= form.value(units)
            change[born] += size
            change[dies + 1] -= size
        peak = alive = 0.0
        for delta in change:
            alive += delta
            peak = max(peak, alive)
        return peak

    # Groups

    def regroup(self, groups: Mapping[str, Iterable[str]]) -> ChannelGraph:
        """The same graph with groups of the caller's own. Every free tie belongs to exactly one."""
        chosen = {name: tuple(ties) for name, ties in groups.items()}
        listed = [tie for ties in chosen.values() for tie in ties]
        for tie in listed:
            if tie not in self.widths:
                hint = (
                    f"it is fixed: {self.fixed[tie]}."
                    if tie in self.fixed
                    else f"no tie has that name.{did_you_mean(tie, self.widths)}"
                )
                raise WidthsError(f"cannot put {tie!r} into a group: {hint}")
        if len(set(listed)) != len(listed):
            raise WidthsError(
                f"{next(tie for tie in listed if listed.count(tie) > 1)} is in more than one group."
            )
        missing = [tie for tie in self.widths if tie not in set(listed)]
        if missing:
            raise WidthsError(
                f"no group holds {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}."
            )
        order = {name: i for i, name in enumerate(self.widths)}
        chosen = {name: tuple(sorted(ties, key=order.__getitem__)) for name, ties in chosen.items()}
        return replace(self, groups=chosen)


def _moved(member: Member, runs: tuple[Run, ...], tie: int) -> Member:
    """The member where the runs of its tie now lie."""
    before = itertools.takewhile(lambda run: run.tie != tie, runs)
    return replace(
        member,
        offset=sum(run.length for run in before),
        size=sum(run.length for run in runs if run.tie == tie),
    )

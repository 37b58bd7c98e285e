"""`ChannelGraph`: which channels are tied, what they cost, and where they lie in the tensors of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from ..cost.activations import ActivationCost
from ..cost.latency import LatencyModel
from ..cost.polynomial import CostModel
from ..cost.widths import Widths
from ..errors import BudgetError, WidthsError, did_you_mean
from .program import Program
from .submodules import ModuleCalls

#: Why channels that enter or leave the model are fixed.
INPUT = "it enters the model"
OUTPUT = "it leaves the model (its output)"

#: The same for a model of which only some submodules were captured.
OUTPUT_OF_MODULES = "it leaves the captured modules (other code reads it)"
OF_MODULES = {
    INPUT: "it enters the captured modules (other code makes it)",
    OUTPUT: OUTPUT_OF_MODULES,
}


@dataclass(frozen=True)
class Member:
    """A part of an axis of a parameter or buffer that follows the width of a tie."""

    tensor: str
    axis: int
    offset: int
    size: int
    """Length in the original network."""
    multiplicity: str
    """Length per channel of the tie: `1`, `49` (a flattened 7x7 map), `1/32` (a grouped convolution)."""


@dataclass(frozen=True)
class Tie:
    """Channel axes that must keep the same size: one integer of the architecture."""

    name: str
    width: int
    step: int
    """The width must stay a multiple of this."""
    fixed: str | None
    """Why the width must not change; None if it may."""
    inexact: str | None
    """Why cutting is not exactly zeroing (say, a layer norm over the channels); None if it is."""
    members: tuple[Member, ...]
    causes: tuple[str, ...]
    """The operators that tie the members together."""
    spatial: tuple[int, ...]
    """Spatial size of the feature maps, as used for grouping."""
    layers: tuple[str, ...]
    """The layers that produce these channels, in order."""


class Run(NamedTuple):
    """Part of an axis: channels of an atom, each repeated `inner` times. `tie` is -1 for a constant part."""

    tie: int
    atom: int
    inner: int
    size: int
    """Units of the tie in the original network, or the length of a constant part."""

    @property
    def length(self) -> int:
        return self.size * self.inner


Layout = tuple[tuple[Run, ...], ...]
"""The axes of one tensor, each as runs."""

Key = TypeVar("Key")


@dataclass(frozen=True)
class ChannelGraph:
    """The result of `peel.trace`. In its methods, ties that are not named keep their original width."""

    ties: Mapping[str, Tie]
    """Every tie, free and fixed, from the input to the output of the network."""
    groups: Mapping[str, tuple[str, ...]]
    """Step 3 of the paper: group name -> free ties, input side first."""
    layouts: Mapping[str, Layout]
    """Parameter or buffer name -> how its axes are made of ties."""
    attributes: Mapping[str, Mapping[str, Any]]
    """Module -> attribute -> the `Form` (or list of them) that it holds."""
    consumers: Mapping[str, tuple[int, ...]]
    """Weight -> axes over which it sums its input."""
    scales: tuple[str, ...]
    """Weights of norm layers."""
    gates: frozenset[str]
    """Parameters of layers that compute gates, as squeeze-excite does. They carry no importance."""
    num_atoms: int
    input_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the example input, one sample."""
    operators: tuple[str, ...]
    """The operators of the forward pass in order: `conv2d`, `batch_norm`, `relu` and so on."""
    constants: tuple[str, ...]
    """Numbers and strings that operators are called with, and fingerprints of constant tensors."""
    unknown_operators: Mapping[str, str]
    """Operators without a working channel rule -> the first module that called them."""
    failed_rules: Mapping[str, str]
    """Operators whose built-in rule failed on a call -> where in the rule, and its error."""
    mac_cost: CostModel
    param_cost: CostModel
    activation_cost: ActivationCost
    program: Program | None = None
    """What the code does at any widths; None if no tie is free."""
    module_calls: ModuleCalls | None = field(default=None, compare=False)
    """The calls of submodules that were captured, where the whole model was not."""
    latency_model: LatencyModel | None = field(default=None, compare=False)
    """Measured; see `with_latency`."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The submodules that were captured, and whose MACs and memory these are. Empty: the whole model."""
        return self.module_calls.modules if self.module_calls is not None else ()

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
        """The number that each width must be a multiple of."""
        return {name: self.ties[name].step for name in self.widths}

    @cached_property
    def inexact(self) -> dict[str, str]:
        """Free ties for which cutting is not exactly zeroing, with the reason."""
        return {name: tie.inexact for name in self.widths if (tie := self.ties[name]).inexact is not None}

    @cached_property
    def free_fraction(self) -> float:
        """The fraction of all channels that can change. Outputs of the model are not counted."""
        # The classes of a classifier are no channels that anyone wants to cut.
        outputs = (OUTPUT, OUTPUT_OF_MODULES)
        total = sum(tie.width for tie in self.ties.values() if tie.fixed not in outputs)
        return sum(self.widths.values()) / total if total else 0.0

    def __repr__(self) -> str:
        of = f" of {', '.join(self.modules)}" if self.modules else ""
        return (
            f"ChannelGraph({len(self.widths)} free ties in {len(self.groups)} groups, "
            f"{len(self.fixed)} fixed, {self.macs():,} MACs{of}, {self.params():,} params)"
        )

    # Widths

    def check(self, widths: Mapping[str, int] | None = None) -> Widths:
        """The widths of all free ties, or an error that says what is wrong with those given."""
        if widths is None:
            return self.widths
        given = Widths(widths)
        for name, width in given.items():
            tie = self.ties.get(name)
            if tie is None:
                hint = did_you_mean(name, self.ties)
                raise WidthsError(f"no tie is called {name!r}.{hint} graph.widths lists them all.")
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
        """The graph of the network that `peel.slim` builds at these widths, as tracing it would give."""
        checked = self.check(widths)
        units = self.units(checked)

        def resized(runs: tuple[Run, ...]) -> tuple[Run, ...]:
            return tuple(run if run.tie < 0 else run._replace(size=units[run.tie]) for run in runs)

        def moved(member: Member, tie: int) -> Member:
            runs = layouts[member.tensor][member.axis]
            offset, size = stretches((run.tie, run.length) for run in runs)[tie]
            return replace(member, offset=offset, size=size)

        # Widths, layouts and offsets change. Costs are polynomials of the units, and stay.
        layouts = {name: tuple(resized(runs) for runs in layout) for name, layout in self.layouts.items()}
        ties = dict(self.ties)
        for index, (name, width) in enumerate(checked.items()):
            members = tuple(moved(member, index) for member in ties[name].members)
            ties[name] = replace(ties[name], width=width, members=members)
        return replace(self, ties=ties, layouts=layouts)

    # Costs

    def cost(self, resource: str) -> Callable[[Sequence[float]], float]:
        """The cost function of a resource (`macs`, `params`, `memory`, `latency`), in units of the ties."""
        if resource == "memory":
            return self.activation_cost.total
        if resource == "latency":
            if self.latency_model is None:
                raise BudgetError(
                    "no latency is known: measure it with `peel latency MODEL --output FILE`, and give it as "
                    "--latency FILE, or as graph.with_latency(model)."
                )
            return self.latency_model.total
        return {"macs": self.mac_cost, "params": self.param_cost}[resource].total

    @property
    def resources(self) -> tuple[str, ...]:
        """The resources whose costs are known."""
        known = ("macs", "params", "memory")
        return known if self.latency_model is None else (*known, "latency")

    def with_latency(self, model: LatencyModel) -> ChannelGraph:
        """The same graph with measured latency as a resource. A model of another network is refused."""
        model.check(self)
        return replace(self, latency_model=model)

    def latency(self, widths: Mapping[str, int] | None = None) -> float:
        """Predicted seconds of a batch; needs `with_latency`."""
        return float(self.cost("latency")(self.units(widths))) / 1e9

    def macs(self, widths: Mapping[str, int] | None = None) -> int:
        """Multiply-adds of one sample: convolutions, linear layers and matrix products."""
        return self.mac_cost.total(self.units(widths))

    def params(self, widths: Mapping[str, int] | None = None) -> int:
        """Number of parameters. Buffers are not counted, shared parameters are counted once."""
        return self.param_cost.total(self.units(widths))

    def activation_bytes(self, widths: Mapping[str, int] | None = None) -> int:
        """Estimated peak activation memory of one sample without gradients (`cost/activations.py`)."""
        return int(self.activation_cost.total(self.units(widths)))

    def macs_by_group(self, widths: Mapping[str, int] | None = None) -> dict[str, int]:
        """MACs of each group.

        A layer counts for the group of its output channels or, if those are fixed, of its input channels.
        Layers that no group can change are counted under `(fixed)`.
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

    # Groups

    def regroup(self, groups: Mapping[str, Iterable[str]]) -> ChannelGraph:
        """The same graph with other groups. Every free tie belongs to exactly one."""
        members = {group: list(ties) for group, ties in groups.items()}
        listed = [tie for ties in members.values() for tie in ties]
        for tie in listed:
            if tie in self.fixed:
                raise WidthsError(f"cannot put {tie!r} into a group: it is fixed: {self.fixed[tie]}.")
            if tie not in self.widths:
                hint = did_you_mean(tie, self.widths)
                raise WidthsError(
                    f"cannot put {tie!r} into a group: no tie has that name.{hint} "
                    "peel inspect lists the ties."
                )
            if listed.count(tie) > 1:
                raise WidthsError(f"{tie} is in more than one group.")
        missing = [tie for tie in self.widths if tie not in listed]
        if missing:
            others = " and others" if len(missing) > 5 else ""
            raise WidthsError(f"no group holds {', '.join(missing[:5])}{others}.")
        ordered = {group: tuple(sorted(ties, key=list(self.widths).index)) for group, ties in members.items()}
        return replace(self, groups=ordered)


def stretches(parts: Iterable[tuple[Key, int]]) -> dict[Key, tuple[int, int]]:
    """From the parts of an axis (key, length): key -> (offset of its first part, total length)."""
    found: dict[Key, tuple[int, int]] = {}
    offset = 0
    for key, length in parts:
        first, size = found.get(key, (offset, 0))
        found[key] = (first, size + length)
        offset += length
    return found

"""`Plan`: what a method decided, as plain numbers. It goes to `plan.json` and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from ..cost.widths import Widths
from ..errors import ConfigError, CorruptFileError
from ..steps.reallocation import Round
from ..utils.text import name_of_key, short
from ..utils.validation import Channels, Seconds, Value, Whole
from .config import MethodConfig
from .problem import Problem


@dataclass(frozen=True)
class Architecture:
    """The widths of a network and what they cost."""

    widths: dict[str, Channels]
    macs: Whole
    params: Whole
    memory: Whole
    """Bytes of activations of one image, without gradients (an estimate)."""
    cost: Whole
    """In units of the budget's resource."""
    macs_by_group: dict[str, Whole]
    latency: Seconds | None = None
    """Predicted nanoseconds of a batch, where a latency model is given."""


@dataclass(frozen=True)
class Plan:
    """The widths of the slim network, and how the method came to them."""

    resource: str
    budget: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    groups: dict[str, tuple[str, ...]]
    original: Architecture
    uniform: Architecture
    slim: Architecture
    backbone: Architecture | None = None
    rounds: tuple[Round, ...] = ()
    l1_coefficient: Value | None = None
    """As it was used, also where it follows from `l1_strength`."""
    method: MethodConfig | None = None
    limits: dict[str, Whole] = field(default_factory=dict)
    """What the network may cost in other resources."""
    repaired_losses: dict[str, Value] = field(default_factory=dict)
    """Where weights are inherited: the losses of `uniform` and of the method's network after the repair, on
    held-out training images."""
    yields_to_uniform: bool = False
    """Whether these losses made the uniform network the plan."""
    name: str = "peel"
    """The method, as the row of its network is called."""
    format: str = "peel-plan"
    version: int = 3

    @property
    def widths(self) -> Widths:
        return Widths(self.slim.widths)

    @property
    def pool(self) -> int | None:
        """What the backbone leaves of the budget."""
        return None if self.backbone is None else self.budget - self.backbone.cost

    @property
    def networks(self) -> dict[str, Architecture]:
        """The rows of the table, and the backbone where there is one."""
        backbone = {} if self.backbone is None else {"backbone": self.backbone}
        return {"original": self.original, **backbone, "uniform": self.uniform, self.name: self.slim}

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> Plan:
        try:
            plan = msgspec.json.decode(data, type=cls)
        except RecursionError as error:
            raise CorruptFileError("not a plan: it is nested too deeply.") from error
        except (msgspec.MsgspecError, ValueError, ConfigError) as error:
            raise CorruptFileError(f"not a plan: {str(error).rstrip('.')}.") from error
        if (plan.format, plan.version) != ("peel-plan", 3):
            raise CorruptFileError(
                f"not a plan of this version: format {short(plan.format)}, version {short(plan.version)}."
            )
        ties = [tie for of_group in plan.groups.values() for tie in of_group]
        known = plan.original.widths.keys()
        for name, network in plan.networks.items():
            wrong = sorted((network.widths.keys() ^ known) | (set(ties) - network.widths.keys()))
            if wrong or not ties:
                which = f": {name_of_key(wrong[0])}" if wrong else ""
                raise CorruptFileError(
                    f"not a plan: the widths of {name!r} are not those of the ties in its groups{which}."
                )
        return plan


def assemble_plan(
    problem: Problem,
    widths: Mapping[str, int],
    *,
    backbone: Mapping[str, int] | None = None,
    rounds: tuple[Round, ...] = (),
    l1_coefficient: float | None = None,
    config: MethodConfig | None = None,
) -> Plan:
    """The plan of these widths, with the original and the uniform network beside them."""
    graph, constraint = problem.graph, problem.constraint

    def architecture(chosen: Mapping[str, int]) -> Architecture:
        costs = (
            graph.macs(chosen),
            graph.params(chosen),
            graph.activation_bytes(chosen),
            constraint.cost(chosen),
        )
        latency = graph.latency(chosen) * 1e9 if graph.latency_model is not None else None
        return Architecture(dict(chosen), *costs, graph.macs_by_group(chosen), latency)

    return Plan(
        constraint.resource,
        constraint.budget,
        {group: tuple(ties) for group, ties in graph.groups.items()},
        original=architecture(graph.widths),
        uniform=architecture(constraint.uniform),
        slim=architecture(widths),
        backbone=architecture(backbone) if backbone is not None else None,
        rounds=rounds,
        l1_coefficient=l1_coefficient,
        limits=constraint.other_limits,
        method=config.method_config() if config is not None else None,
        name=config.method_name if config is not None else "peel",
    )

"""`Plan`: what a method decided, as plain numbers. It goes to `plan.json` and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..cost.widths import Widths
from ..errors import ConfigError, CorruptFileError
from ..graph import ChannelGraph
from ..utils.tables import Table
from ..utils.text import name_of_key, short
from ..utils.validation import Channels, Seconds, Whole
from .method import Answer, Problem


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
    name: str
    """The method, as the row of its network is called."""
    method: dict[str, Any] = field(default_factory=dict)
    """The settings of the method."""
    others: dict[str, Architecture] = field(default_factory=dict)
    """Networks on the way to the plan, such as a backbone."""
    limits: dict[str, Whole] = field(default_factory=dict)
    """What the network may cost in other resources."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the method says of its work, as plain numbers."""
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    format: str = "peel-plan"
    version: int = 4

    @property
    def widths(self) -> Widths:
        return Widths(self.slim.widths)

    @property
    def networks(self) -> dict[str, Architecture]:
        """The rows of the table, and networks on the way."""
        return {"original": self.original, **self.others, "uniform": self.uniform, self.name: self.slim}

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> Plan:
        try:
            found = msgspec.json.decode(data, type=_Version)
            if (found.format, found.version) == ("peel-plan", 3):
                return _from_version_3(data)
            if (found.format, found.version) != ("peel-plan", cls.version):
                given = f"format {short(found.format)}, version {short(found.version)}"
                raise CorruptFileError(f"not a plan of this version: {given}.")
            plan = msgspec.json.decode(data, type=cls)
        except RecursionError as error:
            raise CorruptFileError("not a plan: it is nested too deeply.") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise CorruptFileError(f"not a plan: {str(error).rstrip('.')}.") from error
        ties = [tie for of_group in plan.groups.values() for tie in of_group]
        known = plan.original.widths.keys()
        for name, network in plan.networks.items():
            wrong = sorted((network.widths.keys() ^ known) | (set(ties) - network.widths.keys()))
            if wrong or not ties:
                which = f": {name_of_key(wrong[0])}" if wrong else ""
                raise CorruptFileError(
                    f"not a plan: the widths of {name!r} are not those of the ties in its groups{which}."
                )
        for table in plan.tables:
            if any(len(row) != len(table.columns) for row in table.rows):
                raise CorruptFileError(f"not a plan: rows of {short(table.title)} have other lengths.")
        return plan


def _from_version_3(data: bytes) -> Plan:
    """A plan of peel 0.1, in which PEEL had fields of its own."""
    given = msgspec.json.decode(data, type=dict[str, Any])
    backbone, method = given.pop("backbone", None), given.pop("method", None) or {}
    values = {name: given.pop(name, None) for name in ("rounds", "l1_coefficient", "repaired_losses")}
    given.pop("yields_to_uniform", None)
    others = {} if backbone is None else {"backbone": backbone}
    given |= {"version": Plan.version, "others": others, "values": values, "method": method}
    return Plan.from_json(msgspec.json.encode({"name": "peel", **given}))


class _Version(msgspec.Struct):
    format: Any = None
    version: Any = None


def assemble_plan(problem: Problem, answer: Answer, name: str, settings: Mapping[str, Any]) -> Plan:
    """The plan of an answer, with the original and the uniform network beside it."""
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
        slim=architecture(answer.widths),
        name=name,
        method=dict(settings),
        others={other: architecture(widths) for other, widths in answer.others.items()},
        limits=constraint.other_limits,
        values=msgspec.to_builtins(dict(answer.values)),
        tables=answer.tables,
        notes=answer.notes,
    )


def read_widths(given: Mapping[str, Any] | str, graph: ChannelGraph, setting: str) -> Widths:
    """Widths from a mapping, or from a JSON file that holds one or is a plan.json."""
    if isinstance(given, str):
        try:
            data = Path(given).read_bytes()
            found = json.loads(data)
            given = Plan.from_json(data).widths if isinstance(found, dict) and "format" in found else found
        except OSError as error:
            raise ConfigError(f"{setting}: cannot read {name_of_key(given)}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{setting}: {given} is not JSON: {error}.") from error
        except CorruptFileError as error:
            raise ConfigError(f"{setting}: {given}: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{setting} is a plan.json or a mapping from tie names to channels.")
    return graph.check(given)

"""What a run consists of: jobs. A job is a frozen value that holds the jobs it needs as fields.

Equal values are one job. The key of a job is the hash of its value, so a job whose record has this key is
done: that is all of resuming. What is not in a job (device, threads, workers) does not change its result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import msgspec

from ..cost.constraint import Constraint
from ..methods.registry import MethodSpec
from ..steps.distillation import Terms
from ..train.recipe import Recipe


class Job:
    """A part of a run. Its subclasses are frozen dataclasses of plain values and other jobs."""

    def plain(self) -> dict[str, Any]:
        """The value, with the keys of the jobs that it needs."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return {
            "kind": type(self).__name__,
            **{
                name: value.key if isinstance(value, Job) else msgspec.to_builtins(value)
                for name, value in values.items()
            },
        }

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.plain(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def needs(self) -> Iterator[Job]:
        for item in fields(self):  # type: ignore[arg-type]
            if isinstance(value := getattr(self, item.name), Job):
                yield value

    def settings(self) -> dict[str, Any]:
        """The value in the words of a user's settings, for the refusal of other ones."""
        raise NotImplementedError


@dataclass(frozen=True)
class Original(Job):
    """The trained original. It is the teacher, and what networks are cut from."""

    source: str
    """train, or the hash of the given weights."""
    recipe: Recipe | None
    seed: int | None
    """None for given weights: nothing of them is random."""

    def settings(self) -> dict[str, Any]:
        if self.recipe is None:
            return {"weights": "given", "hash of the weights": self.source}
        return {"weights": "train", "train": msgspec.to_builtins(self.recipe), "seed": self.seed}


@dataclass(frozen=True)
class Limits:
    """A constraint as plain values."""

    limits: Mapping[str, int]
    resource: str
    divisor: int | str
    freeze: tuple[str, ...]
    grow: bool

    @classmethod
    def of(cls, constraint: Constraint) -> Limits:
        freeze = tuple(sorted(constraint.freeze))
        return cls(dict(constraint.limits), constraint.resource, constraint.divisor, freeze, constraint.grow)


@dataclass(frozen=True)
class Solve(Job):
    """A method's answer."""

    method: MethodSpec
    limits: Limits
    search: Recipe | None
    """The recipe of networks that the method trains; None where it trains none."""
    seed: int
    inherits: bool
    repairs: bool
    original: Original | None
    """Where the method needs it."""

    def settings(self) -> dict[str, Any]:
        limits = msgspec.to_builtins(self.limits)
        return {
            "method": self.method.name,
            **{f"{self.method.name}.{name}": value for name, value in self.method.settings.items()},
            "file of the method": self.method.file,
            **{name: value for name, value in limits.items() if name != "limits"},
            "budget": limits["limits"],
            "backbone": None if self.search is None else msgspec.to_builtins(self.search),
            "seed": self.seed,
            "inherits": self.inherits,
            "repairs": self.repairs,
        }


@dataclass(frozen=True)
class Start(Job):
    """A network as its training begins, where weights are inherited: cut, and repaired."""

    solve: Solve
    original: Original

    def settings(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Train(Job):
    """A slim network, trained by the recipe that all share. It starts from fresh weights without `start`."""

    solve: Solve
    start: Start | None
    recipe: Recipe
    distill: str
    terms: Terms | None
    seed: int
    teacher: Original | None

    def settings(self) -> dict[str, Any]:
        terms = {} if self.terms is None else self.terms._asdict()
        return {
            "train": msgspec.to_builtins(self.recipe),
            "distill": self.distill,
            **terms,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Arm:
    """A method with its settings, as a row of the table."""

    label: str
    method: MethodSpec
    needs_original: bool
    trains: bool
    """Whether the method trains networks."""


@dataclass(frozen=True)
class Setup:
    """What all arms share, beside the seed and the budget."""

    source: str
    original_recipe: Recipe | None
    recipe: Recipe
    search: Recipe
    distill: str
    terms: Terms | None
    inherits: bool
    repairs: bool


@dataclass(frozen=True)
class Cell:
    """The jobs of one row of a table: of an arm, a budget and a seed."""

    arm: Arm
    solve: Solve
    start: Start | None
    train: Train


def cells_of(arms: Sequence[Arm], limits: Sequence[Limits], seeds: Sequence[int], setup: Setup) -> list[Cell]:
    """The only place that makes jobs. Equal jobs of several cells are one job."""
    cells = []
    for seed in seeds:
        original = original_of(setup, seed)
        for some in limits:
            for arm in arms:
                needs_original = arm.needs_original or (arm.trains and setup.inherits)
                solve = Solve(
                    arm.method,
                    some,
                    setup.search if arm.trains else None,
                    seed,
                    setup.inherits,
                    setup.repairs,
                    original if needs_original else None,
                )
                start = Start(solve, original) if setup.inherits else None
                teacher = original if setup.distill == "teacher" and setup.recipe.epochs else None
                train = Train(solve, start, setup.recipe, setup.distill, setup.terms, seed, teacher)
                cells.append(Cell(arm, solve, start, train))
    return cells


def original_of(setup: Setup, seed: int) -> Original:
    is_given = setup.source != "train"
    return Original(setup.source, None if is_given else setup.original_recipe, None if is_given else seed)

"""`Method`: what PEEL, the uniform network and its peers have in common. A method answers a `Problem`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..cost.constraint import Constraint
from ..data.datasets import Split
from ..errors import BudgetError
from ..graph import ChannelGraph
from ..surgery.selection import ChannelScores
from ..train.recipe import Recipe
from ..train.task import Task
from ..utils.tables import Table

if TYPE_CHECKING:
    from .work import Work

Scores = Mapping[str, Tensor] | ChannelScores
"""Which channels of the original stay: tie -> one score per channel, or the same by atoms of the graph."""


@dataclass(frozen=True)
class Needs:
    """What a method cannot do without. It is checked before anything is computed."""

    original: bool = False
    """The trained original."""
    held_out: bool = False
    """Training images that neither the original nor a network of the method has seen."""
    training: Literal["", "loss", "step"] = ""
    """Whether it trains networks: with an objective (`loss`), or with steps of its own, which a training
    function of the user's own cannot do.
    """


@dataclass(frozen=True)
class Recipes:
    final: Recipe
    search: Recipe
    """For the networks that a method trains."""


@dataclass(frozen=True)
class Problem:
    """The question, the same in every process. The test images are not in it: no method can look at them."""

    model: nn.Module
    graph: ChannelGraph
    constraint: Constraint
    """What the slim network may cost."""
    train: Split
    recipes: Recipes
    seed: int
    original: nn.Module | None = None
    """The trained original, where the method needs it."""
    inherits: bool = False
    """Whether networks are cut from the trained original; else they start from fresh weights."""
    repairs: bool = True
    """Whether those that are cut are repaired too."""
    task: Task = field(default_factory=Task)
    """Loss, metric, optimizer and training function of the user's own."""
    held_out: Split | None = None
    """Training images that no network is trained or repaired with. None where none are left out."""


@dataclass(frozen=True)
class Answer:
    """What a method has found. It is checked, stored, and not asked for again."""

    widths: Mapping[str, int]
    scores: Scores | None = None
    """Which channels stay, where weights are inherited. None: those that explain the others."""
    network: nn.Module | None = None
    """Trained weights of the method's own, at these widths: the final training starts from them."""
    others: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Widths of networks on the way, such as a backbone: shown beside the slim network."""
    tables: tuple[Table, ...] = ()
    """How the method came to the widths."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same as plain numbers, for plan.json."""
    notes: tuple[str, ...] = ()


class Method(ABC):
    """Finds the widths of a slim network and, if it likes, which channels stay, or their weights.

    A frozen dataclass: its fields are its settings, and the texts below them their help. Who calls what:

    1. `needs` is read before anything is computed. It depends on the settings alone.
    2. `solve(problem, rehearsal)` is called once per start, before anything is trained. The images are few
       and the original may be untrained; `train` runs one step, `evaluate` gives a constant, `steps` yields
       once. Raise a `PeelError` for what cannot work. The answer is the preview of a dry run; what was asked
       of the rehearsal tells how long the method will take.
    3. `solve(problem, work)` is called once, in every process of several; the main process's answer counts.
    4. The answer is checked: all ties, whole steps, frozen ties, all limits, finite weights of the right
       shapes. Then it is stored, and the method is not asked again.

    After a kill, 3 begins anew. `train`, `once` and `steps` return what is finished, so reach them in the
    same order by the same names. Draw random numbers inside of `once` and `steps`, which seed, or from
    `work.seed`. Do not change `problem.model` or `problem.original`. Write no files.
    """

    @property
    def needs(self) -> Needs:
        return Needs()

    @abstractmethod
    def solve(self, problem: Problem, work: Work) -> Answer: ...


@dataclass(frozen=True)
class Uniform(Method):
    """One factor for all layers."""

    def solve(self, problem: Problem, work: Work) -> Answer:
        return Answer(problem.constraint.uniform)


@dataclass(frozen=True)
class Given(Method):
    """Widths of the user's own, from anywhere."""

    widths: Mapping[str, int]

    def solve(self, problem: Problem, work: Work) -> Answer:
        constraint, widths = problem.constraint, problem.graph.check(self.widths)
        if excess := constraint.excess(widths):
            cost = constraint.cost(widths)
            way_out = f"Set budget={cost}" if cost > constraint.budget else "Raise it"
            raise BudgetError(f"the given plan {excess}. {way_out}.")
        return Answer(widths)

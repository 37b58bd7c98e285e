"""What every method receives: a network, its graph and costs, a budget, data and the means to train."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..cost.rounding import Divisor, cost_of, uniform
from ..cost.widths import Widths
from ..data.datasets import Data
from ..graph import ChannelGraph
from ..train.engine import Engine
from ..train.recipe import Recipe


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    graph: ChannelGraph
    budget: int
    """In units of the resource."""
    resource: str
    divisor: Divisor
    freeze: tuple[str, ...]
    data: Data
    backbone_recipe: Recipe
    """The recipe for training the backbone."""
    engine: Engine
    seed: int
    grow: bool = False
    """Whether the slim network may cost more than the original."""
    trained: nn.Module | None = None
    """The trained original, once it is known."""
    inherits: bool = False
    """Whether networks are cut from the trained original; else they start from fresh weights."""

    def cost(self, widths: Mapping[str, int]) -> int:
        return int(cost_of(self.graph, self.resource)(self.graph.units(widths)))

    def uniform(self) -> Widths:
        """The baseline of every result: one factor for all layers, the same budget."""
        return uniform(
            self.graph,
            self.budget,
            resource=self.resource,
            divisor=self.divisor,
            freeze=self.freeze,
            grow=self.grow and self.budget > self.cost(self.graph.widths),
        )

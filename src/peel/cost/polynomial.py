"""MACs and parameters of any widths, as exact integers, without building a model.

A cost is a polynomial: a sum of terms. Each term is a coefficient times a product of linear forms in the
units of the ties. (A tie of width 64 whose width must stay a multiple of 32 has 2 units.) A convolution is
one term with two forms: its output channels and its input channels.

MACs are multiply-adds of convolutions, linear layers and matrix products. Norms, activations and pooling are
not counted. One MAC is what much of the pruning literature calls one FLOP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", int, float)
IntArray = npt.NDArray[np.int64]


class Form(NamedTuple):
    """`constant` plus, for each `(tie, times)`, `times` units of the tie with that index."""

    constant: int
    units: tuple[tuple[int, int], ...] = ()

    def value(self, units: Sequence[Number]) -> Number:
        total: Any = self.constant
        for tie, times in self.units:
            total += units[tie] * times
        return total  # type: ignore[no-any-return]


class Term(NamedTuple):
    """The cost of one layer."""

    layer: str
    tie: int
    """Index of the tie that the layer is charged to; -1 if none of its channels can change."""
    coefficient: int
    factors: tuple[Form, ...]

    def value(self, units: Sequence[int]) -> int:
        return self.coefficient * prod(form.value(units) for form in self.factors)


def product(layer: str, tie: int, forms: Sequence[Form]) -> Term:
    """The term of a layer from the forms of all its axes. Constant forms go into the coefficient."""
    coefficient = prod(form.constant for form in forms if not form.units)
    return Term(layer, tie, coefficient, tuple(sorted(form for form in forms if form.units)))


@dataclass(frozen=True)
class CostModel:
    """The cost of one resource: the total and by tie, for one assignment of units or for many."""

    terms: tuple[Term, ...]

    @cached_property
    def _merged(self) -> tuple[int, list[Form], list[tuple[int, list[int]]]]:
        """The constant, the distinct forms, and for each distinct product its coefficient and its forms."""
        # Layers with the same factors are one product: rounding and bisection ask for totals thousands of
        # times.
        products: dict[tuple[Form, ...], int] = {}
        for term in self.terms:
            products[term.factors] = products.get(term.factors, 0) + term.coefficient
        constant = products.pop((), 0)
        index = {form: i for i, form in enumerate(dict.fromkeys(f for factors in products for f in factors))}
        return constant, list(index), [(n, [index[f] for f in factors]) for factors, n in products.items()]

    def total(self, units: Sequence[Number]) -> Number:
        """Exact for whole units; for fractions, the value of the polynomial."""
        constant, forms, products = self._merged
        values = [form.value(units) for form in forms]
        total: Any = constant
        for coefficient, factors in products:
            product: Any = coefficient
            for i in factors:
                product *= values[i]
            total += product
        return total  # type: ignore[no-any-return]

    def by_tie(self, units: Sequence[int]) -> dict[int, int]:
        costs: dict[int, int] = {}
        for term in self.terms:
            costs[term.tie] = costs.get(term.tie, 0) + term.value(units)
        return costs

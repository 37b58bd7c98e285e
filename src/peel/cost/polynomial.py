"""What any widths cost, as exact integers, without building a model.

The cost is a polynomial: a sum of terms, each a coefficient times a product of linear forms in the units of the ties (a tie of width
64 that must stay a multiple of 32 counts 2 units). A convolution is one term of two forms, its outputs and its inputs.

MACs are multiply-adds of convolutions, linear layers and matrix products; norms, activations and pooling are not counted.
One MAC is what much of the pruning literature calls one FLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["CostModel", "Form", "Term"]

Number = TypeVar("Number", int, float)
IntArray = npt.NDArray[np.int64]


class Form(NamedTuple):
    """`constant` plus the sum of `times` units of each tie."""

    constant: int
    units: tuple[tuple[int, int], ...] = ()
    """(index of the tie, times)"""

    def value(self, units: Sequence[Number]) -> Number:
        total: Any = self.constant
        for tie, times in self.units:
            total += units[tie] * times
        return total  # type: ignore[no-any-return]


class Term(NamedTuple):
    """What one layer adds to the cost."""

    layer: str
    tie: int
    """Index of the tie that the layer is charged to; -1 where none of its channels can change."""
    coefficient: int
    factors: tuple[Form, ...]

    def value(self, units: Sequence[int]) -> int:
        total = self.coefficient
        for form in self.factors:
            total *= form.value(units)
        return total


def product(layer: str, tie: int, forms: Sequence[Form]) -> Term:
    """A term from the forms of all axes: constant ones go into the coefficient."""
    coefficient = 1
    factors: list[Form] = []
    for form in forms:
        if form.units:
            factors.append(form)
        else:
            coefficient *= form.constant
    return Term(layer, tie, coefficient, tuple(sorted(factors)))


@dataclass(frozen=True)
class _Compiled:
    constant: int
    forms: npt.NDArray[np.float64]
    """One row per distinct form, one column per tie."""
    form_constants: npt.NDArray[np.float64]
    coefficients: IntArray
    factors: tuple[npt.NDArray[np.intp], ...]
    """For each place in a product, the form of each term; the last form is the constant 1."""


class CostModel:
    """Costs of one resource: the total, by layer and by tie, for one assignment of units or for many."""

    def __init__(self, num_ties: int, terms: Sequence[Term]) -> None:
        self.num_ties = num_ties
        self.terms = tuple(terms)
        merged: dict[tuple[Form, ...], int] = {}
        for term in terms:
            merged[term.factors] = merged.get(term.factors, 0) + term.coefficient
        self._constant = merged.pop((), 0)
        self._products = list(merged.items())
        forms = dict.fromkeys(form for factors in merged for form in factors)
        self._forms = list(forms)
        index = {form: i for i, form in enumerate(forms)}
        self._indexed = [(times, [index[form] for form in factors]) for factors, times in self._products]
        self._compiled: _Compiled | None = None

    def total(self, units: Sequence[Number]) -> Number:
        """Exact on whole units; on fractions of them, the polynomial between."""
        values = [form.value(units) for form in self._forms]
        total: Any = self._constant
        for times, factors in self._indexed:
            product: Any = times
            for i in factors:
                product *= values[i]
            total += product
        return total  # type: ignore[no-any-return]

    def many(self, units: npt.NDArray[np.integer]) -> IntArray:
        """The total of each row of units. Exact while the cost stays below 2**63."""
        c = self._compile()
        sizes = (np.asarray(units, dtype=np.float64) @ c.forms.T + c.form_constants).astype(np.int64)
        sizes = np.concatenate([sizes, np.ones((len(sizes), 1), dtype=np.int64)], axis=1)
        terms = np.broadcast_to(c.coefficients, (len(sizes), len(c.coefficients)))
        for place in c.factors:
            terms = terms * sizes[:, place]
        result: IntArray = terms.sum(axis=1) + c.constant
        return result

    def _compile(self) -> _Compiled:
        if self._compiled is None:
            matrix = np.zeros((len(self._forms), self.num_ties))
            for i, form in enumerate(self._forms):
                for tie, times in form.units:
                    matrix[i, tie] += times
            degree = max((len(factors) for _, factors in self._indexed), default=0)
            one = len(self._forms)
            padded = [factors + [one] * (degree - len(factors)) for _, factors in self._indexed]
            self._compiled = _Compiled(
                self._constant,
                matrix,
                np.array([form.constant for form in self._forms], dtype=np.float64),
                np.array([times for times, _ in self._indexed], dtype=np.int64),
                tuple(np.array([factors[k] for factors in padded], dtype=np.intp) for k in range(degree)),
            )
        return self._compiled

    def by_layer(self, units: Sequence[int]) -> dict[str, int]:
        costs: dict[str, int] = {}
        for term in self.terms:
            costs[term.layer] = costs.get(term.layer, 0) + term.value(units)
        return costs

    def by_tie(self, units: Sequence[int]) -> dict[int, int]:
        costs: dict[int, int] = {}
        for term in self.terms:
            costs[term.tie] = costs.get(term.tie, 0) + term.value(units)
        return costs

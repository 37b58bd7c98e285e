"""Fits a latency model to the measured times of whole networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..cost.latency import Accuracy, Array, Factors, LatencyModel, LatencyTerm, NetworkKey, round_up
from ..cost.polynomial import product
from ..errors import ConfigError
from ..graph import ChannelGraph
from ..utils.least_squares import nonnegative_least_squares

#: Kernels compute channels in blocks of these sizes. A network uses several kernels; the fit finds how much
#: of the time goes by each size.
KERNEL_STEPS = (1, 8, 16, 32, 64)

#: How strongly the times of single terms are held near those that the totals of the network explain.
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)

#: Parts of the cross-validation, and the fraction of the networks that only judge.
FOLDS, HELD_OUT = 5, 0.25

#: The original counts as so many networks: budgets are fractions of its latency, and it is timed most often,
#: beside every eight networks. 32 was chosen on the networks of docs/latency.md.
ORIGINAL_WEIGHT = 32.0

#: Fewer networks cannot be fitted and judged.
MIN_NETWORKS = 16


def fit_latency(
    graph: ChannelGraph,
    networks: Sequence[Mapping[str, int]],
    nanoseconds: Sequence[float],
    conditions: Mapping[str, Any] | None = None,
) -> LatencyModel:
    """The model of these measured networks. Its accuracy is that on the last quarter, fitted without it."""
    if len(networks) < MIN_NETWORKS:
        raise ConfigError(f"a latency model needs at least {MIN_NETWORKS} networks, not {len(networks)}.")
    measured = np.array(nanoseconds, dtype=np.float64)
    if not (np.isfinite(measured).all() and (measured > 0).all()):
        raise ConfigError("a measured latency is zero or not finite. Measure again on an idle machine.")
    units = np.array([graph.units(widths) for widths in networks], dtype=np.float64)
    judged = max(4, round(HELD_OUT * len(units)))
    fit = _Fit.of(graph, units)
    penalty = _choose_penalty(fit, measured, len(units) - judged)
    # The accuracy is that of a fit without the networks that judge; the model uses all.
    unseen = fit.predict(fit.solve(measured, slice(0, -judged), penalty))[-judged:]
    constant, terms = fit.terms(fit.solve(measured, slice(None), penalty))
    accuracy = Accuracy.of(unseen, measured[-judged:])
    return LatencyModel(NetworkKey.of(graph), constant, terms, accuracy, dict(conditions or {}))


def _choose_penalty(fit: _Fit, measured: Array, count: int) -> float:
    """The penalty with the smallest error in cross-validation on the first `count` networks."""
    errors: dict[float, float] = {}
    parts = np.arange(count) % FOLDS
    for penalty in PENALTIES:
        errors[penalty] = 0.0
        for part in range(FOLDS):
            left_out = np.flatnonzero(parts == part)
            predicted = fit.predict(fit.solve(measured, np.flatnonzero(parts != part), penalty))
            errors[penalty] += float(((predicted / measured - 1)[left_out] ** 2).sum())
    # Where penalties do as well, the stronger one.
    return min(errors, key=lambda penalty: (round(np.log(errors[penalty] + 1e-12), 2), -penalty))


@dataclass(frozen=True)
class _Fit:
    """The linear regression. Rows are networks, columns are what time may depend on.

    Columns: a constant, then for every kernel step totals of the whole network (MACs, MACs of layers with one
    free axis, bytes of activations, parameters), then for every kernel step each distinct product of
    channels. The penalty holds the last ones small: they correct the totals, layer by layer, as far as the
    measurements ask for it.
    """

    products: list[tuple[int, Factors]]
    """Kernel steps and factors."""
    totals: Array
    """Per total, the coefficient of each product."""
    values: Array
    """Per network, the value of each product."""
    weights: Array
    """Per network, how much its error counts."""

    @classmethod
    def of(cls, graph: ChannelGraph, units: Array) -> _Fit:
        products, totals = _products(graph)
        columns = list(units.T)
        widest = max(graph.widths.values(), default=1)
        steps = [step for step in KERNEL_STEPS if step <= widest]
        forms = {form: form.value(columns) for factors in products for form in factors}
        values = [
            np.prod([round_up(forms[form], step) for form in factors], axis=0)
            for step in steps
            for factors in products
        ]
        is_original = (units == graph.units(graph.widths)).all(axis=1)
        return cls(
            [(step, factors) for step in steps for factors in products],
            # Block-diagonal: products are listed kernel step by kernel step, and each step has totals of its
            # own, with the same coefficients.
            np.kron(np.eye(len(steps)), totals).astype(np.float64),
            np.array(values).T,
            np.where(is_original, ORIGINAL_WEIGHT, 1.0),
        )

    @cached_property
    def columns(self) -> Array:
        return np.hstack([np.ones((len(self.values), 1)), self.values @ self.totals.T, self.values])

    def solve(self, measured: Array, rows: Any, penalty: float) -> Array:
        """The time of each column. Squares of relative errors are minimized."""
        # Divided by the measured time, the target is 1 for each network, and errors are relative. Divided by
        # its mean, a column's coefficient is the fraction of the time that it explains: so one penalty fits
        # all.
        relative = self.columns[rows] / measured[rows][:, None]
        scale = relative.mean(axis=0)
        scale[scale == 0] = 1.0
        penalties = np.full(len(scale), penalty * len(relative))
        penalties[: len(scale) - len(self.products)] = 0.0
        roots = np.sqrt(self.weights[rows])
        fractions = nonnegative_least_squares(relative / scale * roots[:, None], roots, penalties)
        return np.asarray(fractions / scale)

    def predict(self, times: Array) -> Array:
        return np.asarray(self.columns @ times)

    def terms(self, times: Array) -> tuple[float, tuple[LatencyTerm, ...]]:
        """The constant, and the time of each product: its own and its part of the totals."""
        count = len(self.totals)
        of_products = times[1 + count :] + times[1 : 1 + count] @ self.totals
        pairs = zip(of_products, self.products, strict=True)
        return float(times[0]), tuple(
            LatencyTerm(float(time), step, factors) for time, (step, factors) in pairs if time > 0
        )


def _products(graph: ChannelGraph) -> tuple[list[Factors], Array]:
    """Every distinct product of channels, and its coefficient in each total of the network."""
    macs = [(term.factors, term.coefficient) for term in graph.mac_cost.terms]
    single = [item for item in macs if len(item[0]) == 1]
    params = [(term.factors, term.coefficient) for term in graph.param_cost.terms]
    traffic: list[tuple[Factors, int]] = []
    for forms, element_bytes, _, _ in graph.activation_cost.activations:
        term = product("", -1, forms)
        traffic.append((term.factors, term.coefficient * element_bytes))
    sources: list[list[tuple[Factors, int]]] = [macs, single, traffic, params]
    index: dict[Factors, int] = {}
    for factors, _ in (item for source in sources for item in source):
        if factors:
            index.setdefault(factors, len(index))
    totals = np.zeros((len(sources), len(index)))
    for row, source in enumerate(sources):
        for factors, coefficient in source:
            if factors:
                totals[row, index[factors]] += coefficient
    return list(index), totals

"""Latency as a function of widths, fitted to the measured times of whole networks.

The model is a constant plus a sum of terms, each a time that is not negative times a product of numbers of
channels: those of the input and the output of a layer (its arithmetic), or those of one tensor (its memory
traffic). Numbers of channels are first rounded up to the kernel step of the term. So the latency never falls
as a width grows, and a budget is met by bisection as for MACs.

Times are in nanoseconds, so that a budget is a whole number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..errors import ConfigError, StoreError
from ..utils.files import check_name, write_bytes
from ..utils.least_squares import nonnegative_least_squares
from ..utils.text import name_of_key, short
from ..utils.validation import Channels, Value, Whole
from .activations import ActivationCost
from .polynomial import CostModel, Form, product
from .widths import Widths

Array = npt.NDArray[np.float64]
Factors = tuple[Form, ...]

#: Kernels compute channels in blocks of these sizes. A network uses several kernels; the fit finds how much
#: of the time goes by each size.
KERNEL_STEPS = (1, 8, 16, 32, 64)

#: How strongly the times of single terms are held near those that the totals of the network explain.
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)

#: Parts of the cross-validation, and the fraction of the networks that only judge.
FOLDS, HELD_OUT = 5, 0.25

#: The original counts as so many networks: budgets are fractions of its latency, and it is timed most often.
ORIGINAL_WEIGHT = 32.0

#: Fewer networks cannot be fitted and judged.
MIN_NETWORKS = 16


#: 11 days.
LONGEST = 1e15

Nanoseconds = Annotated[float, Meta(ge=0, le=LONGEST)]


class Costs(Protocol):
    """The part of a `ChannelGraph` that a latency model needs."""

    @property
    def widths(self) -> Widths: ...
    @property
    def steps(self) -> Mapping[str, int]: ...
    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def mac_cost(self) -> CostModel: ...
    @property
    def param_cost(self) -> CostModel: ...
    @property
    def activation_cost(self) -> ActivationCost: ...
    def units(self, widths: Mapping[str, int] | None = None) -> list[int]: ...


class LatencyTerm(NamedTuple):
    """`nanoseconds` times the product of the forms, rounded up to multiples of `kernel_step`."""

    nanoseconds: Nanoseconds
    kernel_step: Annotated[int, Meta(ge=1, le=2**16)]
    factors: Factors


@dataclass(frozen=True)
class NetworkKey:
    """What a network must have in common with the one that was measured."""

    widths: dict[str, Channels]
    steps: dict[str, Channels]
    input_shapes: tuple[tuple[Channels, ...], ...]
    """Of one sample."""
    macs: Whole
    params: Whole

    @classmethod
    def of(cls, graph: Costs) -> NetworkKey:
        units = graph.units(graph.widths)
        shapes = tuple(shape[1:] for shape in graph.input_shapes)
        macs, params = graph.mac_cost.total(units), graph.param_cost.total(units)
        return cls(dict(graph.widths), dict(graph.steps), shapes, macs, params)


@dataclass(frozen=True)
class Accuracy:
    """Relative errors on measured networks that took no part in the fit."""

    median: Value
    p95: Value
    networks: Whole

    @classmethod
    def of(cls, predicted: Iterable[float], measured: Iterable[float]) -> Accuracy:
        errors = np.abs(np.array([*predicted]) / np.array([*measured]) - 1)
        return cls(float(np.median(errors)), float(np.percentile(errors, 95)), len(errors))


@dataclass(frozen=True)
class LatencyModel:
    """The latency of one network at any widths, on one machine.

    >>> model = peel.LatencyModel.load("latency.json")
    >>> peel.uniform(graph.with_latency(model), "8ms", resource="latency")
    """

    network: NetworkKey
    constant: Nanoseconds
    """Nanoseconds that no width changes."""
    terms: tuple[LatencyTerm, ...]
    accuracy: Accuracy
    conditions: dict[str, str | int | float | None]
    """Machine, backend, batch, threads, versions."""
    format: str = "peel-latency"
    version: int = 2

    @cached_property
    def _forms(self) -> tuple[list[tuple[Form, int]], list[tuple[float, list[int]]]]:
        """The distinct forms with their kernel steps, and for each term its time and its forms."""
        keys = [[(form, term.kernel_step) for form in term.factors] for term in self.terms]
        index = {key: i for i, key in enumerate(dict.fromkeys(key for several in keys for key in several))}
        times = [term.nanoseconds for term in self.terms]
        return list(index), [
            (time, [index[key] for key in several]) for time, several in zip(times, keys, strict=True)
        ]

    def total(self, units: Sequence[Any]) -> Any:
        """Nanoseconds. Units may be fractions, and arrays of many candidates."""
        forms, terms = self._forms
        values = [round_up(form.value(units), step) for form, step in forms]
        total: Any = self.constant
        for nanoseconds, factors in terms:
            value: Any = nanoseconds
            for i in factors:
                value = value * values[i]
            total = total + value
        return total if isinstance(total, np.ndarray) else float(total)

    def check(self, graph: Costs) -> None:
        """Refuse a graph of another network."""
        mine, other = self.network, NetworkKey.of(graph)
        if mine == other:
            return
        names = [
            name for name in {**mine.widths, **other.widths} if name not in mine.widths.keys() & other.widths
        ]
        text = "another number of MACs or parameters"
        if names:
            text = f"only one of them has the tie {names[0]}"
        elif mine.widths != other.widths:
            name = next(name for name, width in mine.widths.items() if other.widths[name] != width)
            text = f"{name} has {mine.widths[name]} channels there and {other.widths[name]} here"
        elif mine.input_shapes != other.input_shapes:
            text = f"its input is {mine.input_shapes} there and {other.input_shapes} here"
        elif mine.macs != other.macs:
            text = f"{mine.macs:,} MACs there and {other.macs:,} here (another number of classes?)"
        raise StoreError(
            f"the latency model was measured on another network: {text}. Measure this one: peel latency "
            "MODEL, with --input and --num-classes as here."
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a JSON file."""
        target = Path(path)
        try:
            check_name(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(target, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise StoreError(f"cannot write {target}: {error.strerror}.") from error
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyModel:
        try:
            model = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as error:
            raise StoreError(
                f"cannot read the latency file {name_of_key(str(path))}: {error.strerror}."
            ) from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise StoreError(
                f"{path} is not a latency file: {error}. Write one with peel latency."
            ) from error
        if (model.format, model.version) != (cls.format, cls.version):
            found = f"format {short(model.format)}, version {short(model.version)}"
            raise StoreError(f"{path} is not a latency file of this version: {found}.")
        return model._sound(path)

    def _sound(self, path: str | os.PathLike[str]) -> LatencyModel:
        """Refuse terms with which the latency would fall as a width grows, or could not be computed."""
        forms, network = self._forms[0], self.network
        numbers = [
            number for form, _ in forms for number in (form.constant, *(times for _, times in form.units))
        ]
        ties = {tie for form, _ in forms for tie, _ in form.units}
        is_sound = (
            network.steps.keys() == network.widths.keys()
            and ties <= set(range(len(network.widths)))
            and all(0 <= number < 2**31 for number in numbers)
        )
        if is_sound:
            units = [width / network.steps[name] for name, width in network.widths.items()]
            with np.errstate(over="ignore"):
                is_sound = bool(self.total(units) <= LONGEST)
        if not is_sound:
            raise StoreError(
                f"{path} is corrupt: a time or a term is impossible. Measure again: peel latency."
            )
        return self


def round_up(channels: Any, step: int) -> Any:
    """Multiples of `step`: exact for whole numbers of channels, linear between them."""
    if step == 1:
        return channels
    whole = np.floor(channels)
    low, high = np.ceil(whole / step) * step, np.ceil((whole + 1) / step) * step
    return low + (channels - whole) * (high - low)


def fit_latency(
    graph: Costs,
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
    def of(cls, graph: Costs, units: Array) -> _Fit:
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
            np.kron(np.eye(len(steps)), totals).astype(np.float64),
            np.array(values).T,
            np.where(is_original, ORIGINAL_WEIGHT, 1.0),
        )

    @cached_property
    def columns(self) -> Array:
        return np.hstack([np.ones((len(self.values), 1)), self.values @ self.totals.T, self.values])

    def solve(self, measured: Array, rows: Any, penalty: float) -> Array:
        """The time of each column. Squares of relative errors are minimized."""
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


def _products(graph: Costs) -> tuple[list[Factors], Array]:
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

"""Latency as a function of widths, fitted to the measured times of whole networks.

The model is a constant plus a sum of terms, each a time that is not negative times a product of numbers of
channels: those of the input and the output of a layer (its arithmetic), or those of one tensor (its memory
traffic). Numbers of channels are first rounded up to the kernel step of the term. So the latency never falls
as a width grows, and a budget is met by bisection as for MACs.

Times are in nanoseconds, so that a budget is a whole number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..errors import StoreError
from ..utils.files import check_name, write_bytes
from ..utils.text import name_of_key, short
from ..utils.validation import Channels, Value, Whole
from .polynomial import Form

if TYPE_CHECKING:
    from ..graph.channel_graph import ChannelGraph

Array = npt.NDArray[np.float64]
Factors = tuple[Form, ...]

#: 11 days.
LONGEST = 1e15

Nanoseconds = Annotated[float, Meta(ge=0, le=LONGEST)]


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
    def of(cls, graph: ChannelGraph) -> NetworkKey:
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

    def check(self, graph: ChannelGraph) -> None:
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

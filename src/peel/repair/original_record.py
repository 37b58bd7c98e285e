"""What the original computes on some images, recorded once: outputs of its layers at sampled places.

Any number of networks that are cut from it are fitted to this (`fit_targets.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..utils.rng import derive_seed
from .calibration import count_images, run_model
from .layer_calls import CallWatcher, LayerCall, NormCall, Visitor, places_shape, rows_at, version_of

#: Places of each image at which a layer is fitted, and rows per feature. The larger number counts.
PLACES, ROWS_PER_FEATURE = 16, 8

#: Layer, batch, number of the call of this layer in the forward pass.
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Addend:
    """What is added to the output of a layer, or to that of the batch norm behind it."""

    number: int
    """Of the call that made it."""
    rows: Tensor
    """As those of the output."""
    norm: str
    """The batch norm behind the layer; empty if there is none."""
    scale: Tensor | None
    """What this batch norm multiplies each channel by."""
    is_stream: bool
    """Whether it was there before the input of the layer, or is that input."""


@dataclass(frozen=True)
class Output:
    """The output of one call of a layer, at sampled places. `FitTargets` selects from it for a network."""

    places: Tensor
    """On the CPU, until they are selected."""
    fitted: int
    """So many rows come first that are not held out: all of them, until they are selected."""
    rows: Tensor
    """Places x channels."""
    shape: tuple[int, ...]
    """Of the whole output, without the channels."""
    axes: int
    """The number of spatial axes."""
    input_shape: tuple[int, ...]
    addend: Addend | None = None
    """What the output is added to, if it was there before the layer was called."""


@dataclass(frozen=True)
class Filters:
    """The form of the weight of a layer."""

    shape: tuple[int, ...]
    groups: int
    is_transposed: bool

    @property
    def features(self) -> int:
        outputs = self.shape[1] * self.groups if self.is_transposed else self.shape[0]
        return prod(self.shape) // max(1, outputs)


@dataclass
class Sums:
    """Sums over the input of a batch norm, for each channel."""

    count: int = 0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0

    def add(self, inputs: Tensor) -> None:
        others = [axis for axis in range(inputs.ndim) if axis != 1]
        count = inputs.numel() // inputs.shape[1]
        # Moments around a mean that is nearly right: as exact as torch.var_mean, which on a CPU takes twice
        # as long, and 3 to 60 times as long in channels-last memory.
        center = inputs[:1].mean(others, keepdim=True)
        moved = inputs - center
        offset = moved.mean(others).double()
        variance = moved.square_().mean(others).double() - offset.square()
        mean = center.flatten().double() + offset
        self.count += count
        self.first = self.first + count * mean
        self.second = self.second + count * (variance + mean.square())

    def at(self, channels: Tensor) -> Sums:
        first, second = (torch.as_tensor(value)[channels] for value in (self.first, self.second))
        return Sums(self.count, first, second)

    def to(self, device: torch.device) -> Sums:
        first, second = (torch.as_tensor(value).to(device) for value in (self.first, self.second))
        return Sums(self.count, first, second)

    def mean(self) -> Tensor:
        return torch.as_tensor(self.first) / self.count

    def variance(self) -> Tensor:
        return (torch.as_tensor(self.second) / self.count - self.mean().square()).clamp_min(0.0)


@dataclass
class OriginalRecord:
    images: list[int]
    """Of each batch."""
    filters: dict[str, Filters] = field(default_factory=dict)
    """Layer -> its form."""
    mixed: set[str] = field(default_factory=set)
    """Layers whose weight is used in several forms, as by a convolution and a transposed one."""
    outputs: dict[Key, Output] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    """Batch norm -> its input."""
    order: list[str] = field(default_factory=list)
    """Every call of a layer or batch norm in the first batch."""
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(layer or batch norm, batch) -> number of calls."""
    read_by_norm: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(layer, batch norm) -> calls of the layer whose output is the input of the batch norm."""

    def absorbers(self, layer: str) -> tuple[str, ...]:
        """The batch norms that can take an intercept of the layer: they read all of it, and nothing else."""
        if layer in self.mixed:
            return ()
        norms = [norm for name, norm in self.read_by_norm if name == layer]
        # All calls of the layer go to these batch norms, and they read no other layer: a shift of their means
        # is then a shift of this layer alone.
        reads = sum(self.read_by_norm[layer, norm] for norm in norms)
        is_alone = all(self.read_by_norm[layer, norm] == self.calls[norm, 0] for norm in norms)
        return tuple(norms) if is_alone and reads == self.calls[layer, 0] else ()

    def free_norms(self) -> set[str]:
        """Batch norms that are no absorbers."""
        taken = {norm for layer in set(self.order) for norm in self.absorbers(layer)}
        return self.sums.keys() - taken

    def sample(self, key: Key, shape: tuple[int, ...], features: int) -> Tensor | None:
        """Random places to fit a layer with so many features at; None for all of an output of this shape.

        With more features, further places are added at the end.
        """
        name, batch, index = key
        count, images = prod(shape), sum(self.images)
        # Places are shared among the batches by their images, rounded up.
        wanted = -(-max(PLACES * images, ROWS_PER_FEATURE * features) * self.images[batch] // images)
        if count <= wanted:
            return None
        rng = torch.Generator().manual_seed(derive_seed("places", name, index, batch))
        # Drawn with repetition: the first places of a longer draw are those of a shorter one.
        return torch.randint(count, (wanted,), generator=rng)

    def rows_for(self, key: Key, features: int) -> Tensor:
        """The numbers of the recorded rows that a layer is fitted to that has so many features."""
        output = self.outputs[key]
        places = self.sample(key, output.shape, features)
        if places is None:
            return torch.arange(len(output.places))
        # Of a whole output, any rows can be taken. Sampled places are in the order of the draw.
        is_whole = len(output.places) == prod(output.shape)
        return places if is_whole else torch.arange(len(places))


CountFeatures = Callable[[str, Filters], int]
"""Layer and its form -> the number of features that a network to be fitted has there."""


def record_original(
    original: nn.Module, batches: Sequence[Any], count_features: CountFeatures | None = None
) -> OriginalRecord:
    """Run the original on all batches. By default it is recorded for networks with as many features."""
    recorder = _Recorder(list(map(count_images, batches)), count_features or (lambda _, own: own.features))
    for number, batch in enumerate(batches):
        recorder.batch, recorder.last = number, 0
        with CallWatcher(original, recorder):
            run_model(original, batch)
    return recorder.record


@dataclass(frozen=True)
class _Branch:
    """Where a tensor comes from: a call of a layer, and perhaps a batch norm."""

    key: Key
    start: int
    """The last call before that of the layer."""
    input: int
    """The call that made the input of the layer."""
    norm: str = ""
    scale: Tensor | None = None


class _Recorder(Visitor):
    """Records during forward passes of the original."""

    def __init__(self, images: list[int], count_features: CountFeatures) -> None:
        self.record, self.count_features = OriginalRecord(images), count_features
        self.batch = self.last = 0

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[[], Tensor]) -> Tensor:
        output, record = run(), self.record
        key = name, self.batch, index
        filters = Filters(tuple(call.weight.shape), call.groups, call.is_transposed)
        if record.filters.setdefault(name, filters) != filters:
            record.mixed.add(name)
        shape = places_shape(output, call.axes)
        places = record.sample(key, shape, self.count_features(name, filters))
        places = torch.arange(prod(shape)) if places is None else places
        rows = rows_at(output, call.axes, places.to(output.device))
        inputs = places_shape(call.inputs, call.axes)
        record.outputs[key] = Output(places, len(places), rows, shape, call.axes, inputs)
        self._note(name)
        _mark(output, "peel_branch", _Branch(key, self.last, _mark_of(call.inputs, "peel_number") or 0))
        return output

    def at_norm(self, name: str, index: int, call: NormCall, run: Callable[[], Tensor]) -> Tensor:
        self.record.sums.setdefault(name, Sums()).add(call.inputs)
        branch = _mark_of(call.inputs, "peel_branch")
        if self.batch == 0 and branch and not branch.norm:
            self.record.read_by_norm[branch.key[0], name] += 1
        self._note(name)
        output = run()
        if branch and not branch.norm:
            _mark(output, "peel_branch", replace(branch, norm=name, scale=call.scale()))
        return output

    def after(self, number: int, output: Tensor) -> None:
        self.last = number
        _mark(output, "peel_number", number)

    def at_addition(self, first: Tensor, second: Tensor) -> None:
        for sum_part, other in ((first, second), (second, first)):
            branch, number = _mark_of(sum_part, "peel_branch"), _mark_of(other, "peel_number")
            # It was there before the layer ran: a repair can compute what is missing in it before the fit.
            if branch and number and number <= branch.start:
                output = self.record.outputs[branch.key]
                rows = rows_at(other, output.axes, output.places.to(other.device))
                addend = Addend(number, rows, branch.norm, branch.scale, number <= branch.input)
                self.record.outputs[branch.key] = replace(output, addend=addend)

    def _note(self, name: str) -> None:
        self.record.calls[name, self.batch] += 1
        if self.batch == 0:
            self.record.order.append(name)


def _mark(tensor: Tensor, name: str, value: Any) -> None:
    setattr(tensor, name, (value, version_of(tensor)))


def _mark_of(tensor: Tensor, name: str) -> Any:
    """What a tensor was marked with; None if it has changed since."""
    value, version = getattr(tensor, name, (None, -1))
    return value if version == version_of(tensor) else None

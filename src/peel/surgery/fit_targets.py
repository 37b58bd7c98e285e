"""What a slim network is fitted to: the outputs of the original at sampled places and kept channels.

Where the output is added to another tensor, the sum counts: the layer that runs last corrects what is wrong
in the other tensor already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError
from ..graph.channel_graph import ChannelGraph
from ..graph.rebuild import tensors_of
from ..utils.rng import derive_seed
from .calibration import count_images, device_of, run_model
from .layer_calls import CallWatcher, LayerCall, NormCall, Visitor, places_shape, rows_at, version_of
from .regression import TINY
from .selection import KeptChannels

#: Places of each image at which a layer is fitted, and rows per feature. The larger number counts.
PLACES, ROWS_PER_FEATURE = 16, 8

#: A batch norm that lets through less of a layer than this fraction of the sum gets less of the correction.
MIN_SCALE = 0.02


#: Layer, batch, number of the call of this layer in the forward pass.
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Partner:
    """What is added to the output of a layer, or to that of the batch norm behind it."""

    number: int
    """Of the call that made it."""
    rows: Tensor
    """As those of the target."""
    norm: str
    """The batch norm behind the layer; empty if there is none."""
    is_stream: bool
    """Whether it was there before the input of the layer, or is that input."""
    gain: Tensor
    """Change of the layer's output for a change of the sum, for each channel."""


@dataclass(frozen=True)
class Target:
    """The output of the original in one call of a layer, at sampled places."""

    places: Tensor
    images: Tensor
    """The image of each place."""
    rows: Tensor
    """Places x channels of the slim network; zero for new channels."""
    shape: tuple[int, ...]
    """Of the whole output, without the channels."""
    axes: int
    """The number of spatial axes."""
    input_shape: tuple[int, ...]
    partner: Partner | None = None
    """What the output is added to, if it was there before the layer was called."""


@dataclass(frozen=True)
class Branch:
    """Where a tensor comes from: a call of a layer, and perhaps a batch norm."""

    key: Key
    start: int
    """The last call before that of the layer."""
    input: int
    """The call that made the input of the layer."""
    norm: str = ""
    scale: Tensor | None = None


@dataclass
class Sums:
    """Sums over the input of a batch norm, for each channel."""

    count: int = 0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0

    def add(self, inputs: Tensor) -> None:
        others = [axis for axis in range(inputs.ndim) if axis != 1]
        count = inputs.numel() // inputs.shape[1]
        variance, mean = (value.double() for value in torch.var_mean(inputs, others, correction=0))
        self.count += count
        self.first = self.first + count * mean
        self.second = self.second + count * (variance + mean.square())

    def mean(self) -> Tensor:
        return torch.as_tensor(self.first) / self.count

    def variance(self) -> Tensor:
        return (torch.as_tensor(self.second) / self.count - self.mean().square()).clamp_min(0.0)


@dataclass
class FitTargets:
    """What the original computes, at the channels that the slim network has."""

    channels: dict[str, Tensor] = field(default_factory=dict)
    """Layer or batch norm -> for each channel of the slim network that of the original; -1 if it is new."""
    targets: dict[Key, Target] = field(default_factory=dict)
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
        norms = [norm for name, norm in self.read_by_norm if name == layer]
        reads = sum(self.read_by_norm[layer, norm] for norm in norms)
        is_alone = all(self.read_by_norm[layer, norm] == self.calls[norm, 0] for norm in norms)
        return tuple(norms) if is_alone and reads == self.calls[layer, 0] else ()

    def targets_of(self, layer: str) -> list[Target]:
        return [target for key, target in self.targets.items() if key[0] == layer]

    def drop_partners(self) -> None:
        """Forget the partners of layers whose batch norm reads something else too: its scale will change."""
        for key, target in self.targets.items():
            if target.partner and target.partner.norm not in ("", *self.absorbers(key[0])):
                self.targets[key] = replace(target, partner=None)

    def uses(self) -> dict[tuple[int, int], list[Key]]:
        """Batch and number of a call -> the targets that its output is the partner of."""
        found: dict[tuple[int, int], list[Key]] = {}
        for key, target in self.targets.items():
            if target.partner:
                found.setdefault((key[1], target.partner.number), []).append(key)
        return found

    def free_norms(self) -> set[str]:
        """Batch norms that are no absorbers."""
        taken = {norm for layer in set(self.order) for norm in self.absorbers(layer)}
        return self.sums.keys() - taken


def collect_targets(
    original: nn.Module, slim: nn.Module, graph: ChannelGraph, kept: KeptChannels, batches: Sequence[Any]
) -> FitTargets:
    """Run the original on all batches."""
    recorder = _Recorder(original, slim, graph, kept, sum(map(count_images, batches)))
    for number, batch in enumerate(batches):
        recorder.batch, recorder.batch_images, recorder.last = number, count_images(batch), 0
        with CallWatcher(original, recorder):
            try:
                run_model(original, batch)
            except (RuntimeError, ValueError, TypeError) as error:
                raise DataError(f"the original cannot take these images: {error}") from error
    recorder.recorded.drop_partners()
    return recorder.recorded


class _Recorder(Visitor):
    """Collects the targets during forward passes of the original."""

    def __init__(
        self, original: nn.Module, slim: nn.Module, graph: ChannelGraph, kept: KeptChannels, images: int
    ) -> None:
        self.graph, self.kept, self.images = graph, kept, images
        self.device = device_of(slim)
        self.sizes = {name: tensor.numel() for name, tensor in tensors_of(slim).items()}
        self.recorded = FitTargets()
        self.batch = self.batch_images = 0
        self.last = 0

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[[], Tensor]) -> Tensor:
        output = run()
        channels = self.recorded.channels.setdefault(name, self._output_channels(name, call))
        shape = places_shape(output, call.axes)
        count = prod(shape)
        features = self.sizes[name] // max(1, len(channels))
        wanted = max(PLACES * self.images, ROWS_PER_FEATURE * features)
        places = self._sample(name, index, count, -(-wanted * self.batch_images // self.images))
        key = name, self.batch, index
        self.recorded.targets[key] = Target(
            places=places.to(self.device),
            images=(places * self.batch_images // count).to(self.device),
            rows=self._rows(name, output, call.axes, places),
            shape=shape,
            axes=call.axes,
            input_shape=places_shape(call.inputs, call.axes),
        )
        self._note(name)
        _mark(output, "peel_branch", Branch(key, self.last, _mark_of(call.inputs, "peel_number") or 0))
        return output

    def at_norm(self, name: str, index: int, call: NormCall, run: Callable[[], Tensor]) -> Tensor:
        inputs = call.inputs
        channels = self.kept.positions(self.graph.layouts[name][0])
        self.recorded.channels[name] = channels
        rows = inputs[:, channels.clamp_min(0).to(inputs.device)]
        self.recorded.sums.setdefault(name, Sums()).add(rows.to(self.device))
        branch = _mark_of(inputs, "peel_branch")
        if self.batch == 0 and branch and not branch.norm:
            self.recorded.read_by_norm[branch.key[0], name] += 1
        self._note(name)
        output = run()
        if branch and not branch.norm:
            scale = call.scale()[channels.clamp_min(0).to(inputs.device)].to(self.device)
            _mark(output, "peel_branch", replace(branch, norm=name, scale=scale))
        return output

    def after(self, number: int, output: Tensor) -> None:
        self.last = number
        _mark(output, "peel_number", number)

    def at_addition(self, first: Tensor, second: Tensor) -> None:
        for output, other in ((first, second), (second, first)):
            branch, number = _mark_of(output, "peel_branch"), _mark_of(other, "peel_number")
            if branch and number and number <= branch.start:
                target = self.recorded.targets[branch.key]
                rows = self._rows(branch.key[0], other, target.axes, target.places)
                gain = _gain(branch.scale, rows, target.rows)
                partner = Partner(number, rows, branch.norm, number <= branch.input, gain)
                self.recorded.targets[branch.key] = replace(target, partner=partner)

    def _rows(self, name: str, values: Tensor, axes: int, places: Tensor) -> Tensor:
        """Values of the original at some places and the kept outputs of a layer."""
        rows = rows_at(values, axes, places.to(values.device))
        return rows[:, self.recorded.channels[name].clamp_min(0).to(rows.device)].to(self.device)

    def _note(self, name: str) -> None:
        self.recorded.calls[name, self.batch] += 1
        if self.batch == 0:
            self.recorded.order.append(name)

    def _sample(self, name: str, index: int, count: int, wanted: int) -> Tensor:
        """Random places of an output; all of them where there are no more than wanted."""
        if count <= wanted:
            return torch.arange(count)
        rng = torch.Generator().manual_seed(derive_seed("places", name, index, self.batch))
        return torch.randint(count, (wanted,), generator=rng)

    def _output_channels(self, name: str, call: LayerCall) -> Tensor:
        """For each output of the slim network that of the original, or -1."""
        layout = self.graph.layouts[name]
        if not call.is_transposed:
            return self.kept.positions(layout[0])
        # The weight has its inputs in axis 0 and the outputs of one group in axis 1.
        inputs, outputs = (self.kept.positions(runs) for runs in layout[:2])
        per_group = len(call.weight) // call.groups
        numbers = torch.div(inputs, per_group, rounding_mode="floor")
        groups = torch.unique_consecutive(numbers)[:, None]
        found = groups * call.weight.shape[1] + outputs
        return torch.where((groups >= 0) & (outputs >= 0), found, -1).flatten()


def _gain(scale: Tensor | None, partner: Tensor, output: Tensor) -> Tensor:
    """One over the scale of a batch norm, and no more than the output can bear."""
    if scale is None:
        return torch.ones(partner.shape[1], dtype=torch.float64, device=partner.device)
    spread, own = partner.double().std(0, correction=0), output.double().std(0, correction=0)
    floor = MIN_SCALE * spread / own.clamp_min(TINY)
    return scale / (scale.square() + floor.square()).clamp_min(TINY)


def _mark(tensor: Tensor, name: str, value: Any) -> None:
    setattr(tensor, name, (value, version_of(tensor)))


def _mark_of(tensor: Tensor, name: str) -> Any:
    """What a tensor was marked with; None if it has changed since."""
    value, version = getattr(tensor, name, (None, -1))
    return value if version == version_of(tensor) else None

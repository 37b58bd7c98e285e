"""What a slim network is fitted to: the outputs of the original at sampled places and kept channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError
from ..graph.channel_graph import ChannelGraph
from ..graph.rebuild import tensors_of
from ..utils.rng import derive_seed
from .calibration import count_images, device_of, run_model
from .layer_calls import CallWatcher, LayerCall
from .selection import KeptChannels

#: Places of each image at which a layer is fitted, and rows per feature. The larger number counts.
PLACES, ROWS_PER_FEATURE = 16, 8


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
    input_shape: tuple[int, ...]


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
class Lesson:
    """What the original computes, at the channels that the slim network has."""

    channels: dict[str, Tensor] = field(default_factory=dict)
    """Layer or batch norm -> for each channel of the slim network that of the original; -1 if it is new."""
    targets: dict[tuple[str, int, int], Target] = field(default_factory=dict)
    """Layer, batch, call -> output."""
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

    def free_norms(self) -> set[str]:
        """Batch norms that are no absorbers."""
        taken = {norm for layer in set(self.order) for norm in self.absorbers(layer)}
        return self.sums.keys() - taken


def teach(
    original: nn.Module, slim: nn.Module, graph: ChannelGraph, kept: KeptChannels, batches: Sequence[Any]
) -> Lesson:
    """Run the original on all batches."""
    teacher = _Teacher(original, slim, graph, kept, sum(map(count_images, batches)))
    for number, batch in enumerate(batches):
        teacher.batch, teacher.batch_images = number, count_images(batch)
        with CallWatcher(original, teacher):
            try:
                run_model(original, batch)
            except (RuntimeError, ValueError, TypeError) as error:
                raise DataError(f"the original cannot take these images: {error}") from error
    return teacher.lesson


class _Teacher:
    """Collects the lesson during forward passes of the original."""

    def __init__(
        self, original: nn.Module, slim: nn.Module, graph: ChannelGraph, kept: KeptChannels, images: int
    ) -> None:
        self.graph, self.kept, self.images = graph, kept, images
        self.device = device_of(slim)
        self.sizes = {name: tensor.numel() for name, tensor in tensors_of(slim).items()}
        self.lesson = Lesson()
        self.batch = self.batch_images = 0

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[[], Tensor]) -> Tensor:
        output = run()
        channels = self.lesson.channels.setdefault(name, self._output_channels(name, call))
        shape = call.places_shape(output)
        count = prod(shape)
        features = self.sizes[name] // max(1, len(channels))
        wanted = max(PLACES * self.images, ROWS_PER_FEATURE * features)
        places = self._sample(name, index, count, -(-wanted * self.batch_images // self.images))
        rows = call.output_rows(output, places.to(output.device))
        self.lesson.targets[name, self.batch, index] = Target(
            places=places.to(self.device),
            images=(places * self.batch_images // count).to(self.device),
            rows=rows[:, channels.clamp_min(0).to(rows.device)].to(self.device),
            shape=shape,
            input_shape=call.places_shape(call.inputs),
        )
        self._note(name)
        output.peel_layer = name, output._version  # type: ignore[attr-defined]
        return output

    def at_norm(self, name: str, index: int, inputs: Tensor, run: Callable[[], Tensor]) -> Tensor:
        channels = self.kept.positions(self.graph.layouts[name][0])
        self.lesson.channels[name] = channels
        rows = inputs.index_select(1, channels.clamp_min(0).to(inputs.device))
        self.lesson.sums.setdefault(name, Sums()).add(rows.to(self.device))
        layer, version = getattr(inputs, "peel_layer", ("", -1))
        if self.batch == 0 and version == inputs._version:
            self.lesson.read_by_norm[layer, name] += 1
        self._note(name)
        return run()

    def _note(self, name: str) -> None:
        self.lesson.calls[name, self.batch] += 1
        if self.batch == 0:
            self.lesson.order.append(name)

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

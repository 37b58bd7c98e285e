"""What a slim network is fitted to: the outputs of the original at sampled places and kept channels.

Where the output is added to another tensor, the sum counts: the layer that runs last corrects what is wrong
in the other tensor already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from ..graph.channel_graph import ChannelGraph, Layout
from ..graph.rebuild import tensors_of
from ..surgery.selection import KeptChannels
from .calibration import device_of
from .original_record import Addend, CountFeatures, Filters, Key, OriginalRecord, Sums
from .regression import HOLD_OUT, TINY

#: A batch norm that lets through less of a layer than this fraction of the sum gets less of the correction.
MIN_SCALE = 0.02


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
    """Those of held-out images come last."""
    fitted: int
    """The number of places that are not held out."""
    rows: Tensor
    """Places x channels of the slim network; meaningless for new channels."""
    shape: tuple[int, ...]
    """Of the whole output, without the channels."""
    axes: int
    """The number of spatial axes."""
    input_shape: tuple[int, ...]
    partner: Partner | None = None
    """What the output is added to, if it was there before the layer was called."""


@dataclass(frozen=True)
class FitTargets:
    """What the original computes, at the channels that the slim network has."""

    record: OriginalRecord
    channels: Mapping[str, Tensor]
    """Layer or batch norm -> for each channel of the slim network that of the original; -1 if it is new."""
    targets: Mapping[Key, Target]
    sums: Mapping[str, Sums]
    """Batch norm -> its input."""

    def targets_of(self, layer: str) -> list[Target]:
        return [target for key, target in self.targets.items() if key[0] == layer]

    def at_known(self, name: str, new: Tensor, old: Tensor) -> Tensor:
        """The new values at channels that the original has, the old ones at others: channels, and perhaps
        features behind them.
        """
        is_known = self.channels[name] >= 0
        if is_known.all():
            return new
        is_known = is_known.to(new.device)
        return torch.where(
            is_known if new.ndim == 1 else is_known.view(*new.shape[:-1], 1), new, old.double()
        )

    def uses(self) -> dict[tuple[int, int], list[Key]]:
        """Batch and number of a call -> the targets that its output is the partner of."""
        found: dict[tuple[int, int], list[Key]] = {}
        for key, target in self.targets.items():
            if target.partner:
                found.setdefault((key[1], target.partner.number), []).append(key)
        return found


def select_targets(
    record: OriginalRecord, slim: nn.Module, graph: ChannelGraph, kept: KeptChannels
) -> FitTargets:
    """What was recorded of the original, at the channels and as many places as the slim network needs."""
    device, count_features = device_of(slim), feature_counter(slim, graph, kept)
    channels = {
        name: _output_channels(form, graph.layouts[name], kept) for name, form in record.filters.items()
    }
    channels |= {name: kept.positions(graph.layouts[name][0]) for name in record.sums}
    sums = {name: some.at(channels[name].clamp_min(0)).to(device) for name, some in record.sums.items()}
    targets = {}
    for key in (key for key in record.outputs if key[0] not in record.mixed):
        features = count_features(key[0], record.filters[key[0]])
        targets[key] = _target(record, key, channels[key[0]], features, device)
    return FitTargets(record, channels, targets, sums)


def feature_counter(slim: nn.Module, graph: ChannelGraph, kept: KeptChannels) -> CountFeatures:
    """Counts the features of the layers of a slim network."""
    sizes = {name: tensor.numel() for name, tensor in tensors_of(slim).items()}

    def count(name: str, filters: Filters) -> int:
        return sizes[name] // max(1, len(_output_channels(filters, graph.layouts[name], kept)))

    return count


def _target(
    record: OriginalRecord, key: Key, channels: Tensor, features: int, device: torch.device
) -> Target:
    output, numbers = record.outputs[key], record.rows_for(key, features)
    places = output.places[numbers]
    is_held_out = places * record.images[key[1]] // prod(output.shape) % HOLD_OUT == HOLD_OUT - 1
    order = is_held_out.to(torch.uint8).argsort(stable=True)
    some, index = (values.to(output.rows.device) for values in (numbers[order], channels.clamp_min(0)))

    def select(rows: Tensor) -> Tensor:
        return rows.index_select(0, some).index_select(1, index).to(device)

    rows, addend, partner = select(output.rows), output.addend, None
    # Where the batch norm behind the layer reads something else too, its scale will change.
    if addend is not None and addend.norm in ("", *record.absorbers(key[0])):
        scale = None if addend.scale is None else addend.scale[index].to(device)
        partner = _partner(addend, select(addend.rows), scale, rows)
    return Target(
        places=places[order].to(device),
        fitted=len(places) - int(is_held_out.sum()),
        rows=rows,
        shape=output.shape,
        axes=output.axes,
        input_shape=output.input_shape,
        partner=partner,
    )


def _partner(addend: Addend, rows: Tensor, scale: Tensor | None, output: Tensor) -> Partner:
    return Partner(addend.number, rows, addend.norm, addend.is_stream, _gain(scale, rows, output))


def _output_channels(filters: Filters, layout: Layout, kept: KeptChannels) -> Tensor:
    """For each output of the slim network that of the original, or -1."""
    if not filters.is_transposed:
        return kept.positions(layout[0])
    # The weight has its inputs in axis 0 and the outputs of one group in axis 1.
    inputs, outputs = (kept.positions(runs) for runs in layout[:2])
    per_group = filters.shape[0] // filters.groups
    numbers = torch.div(inputs, per_group, rounding_mode="floor")
    groups = torch.unique_consecutive(numbers)[:, None]
    found = groups * filters.shape[1] + outputs
    return torch.where((groups >= 0) & (outputs >= 0), found, -1).flatten()


def _gain(scale: Tensor | None, partner: Tensor, output: Tensor) -> Tensor:
    """One over the scale of a batch norm, and no more than the output can bear."""
    if scale is None:
        return torch.ones(partner.shape[1], dtype=torch.float64, device=partner.device)
    spread, own = partner.double().std(0, correction=0), output.double().std(0, correction=0)
    floor = MIN_SCALE * spread / own.clamp_min(TINY)
    return scale / (scale.square() + floor.square()).clamp_min(TINY)

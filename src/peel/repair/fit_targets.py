"""What a slim network is fitted to: the outputs of the original at sampled places and kept channels.

Where the output is added to another tensor, the sum counts: the layer that runs last corrects what is wrong
in the other tensor already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn

from ..graph.channel_graph import ChannelGraph, Layout
from ..graph.rebuild import tensors_of
from ..surgery.selection import KeptChannels
from .calibration import device_of
from .original_record import Addend, CountFeatures, Filters, Key, OriginalRecord, Output, Sums
from .regression import HOLD_OUT, TINY

#: A batch norm that lets through less of a layer than this fraction of the sum gets less of the correction:
#: at a scale of .02, the layer would have to change by 50 times of what is missing in the sum.
MIN_SCALE = 0.02


@dataclass(frozen=True)
class FitTargets:
    """What the original computed, selected for a slim network."""

    record: OriginalRecord
    channels: Mapping[str, Tensor]
    """Layer or batch norm -> for each channel of the slim network that of the original; -1 if it is new."""
    sums: Mapping[str, Sums]
    """Batch norm -> its input."""
    count_features: CountFeatures
    device: torch.device
    selected: dict[Key, Output] = field(default_factory=dict)

    def keys_of(self, layer: str) -> list[Key]:
        return [key for key in self.record.outputs if key[0] == layer]

    def addend(self, key: Key) -> Addend | None:
        """What is added to an output, as recorded, if the layer can correct the sum.

        It cannot where the batch norm behind it reads something else too: the scale of that will change.
        """
        addend = self.record.outputs[key].addend
        is_fit = addend is not None and addend.norm in ("", *self.record.absorbers(key[0]))
        return addend if is_fit else None

    def output(self, key: Key) -> Output:
        """An output at the channels and as many places as the slim network needs, held-out images last.

        At new channels its values mean nothing.
        """
        if key not in self.selected:
            self.selected[key] = self._select(key)
        return self.selected[key]

    def _select(self, key: Key) -> Output:
        record, output, addend = self.record, self.record.outputs[key], self.addend(key)
        numbers = record.rows_for(key, self.count_features(key[0], record.filters[key[0]]))
        places = output.places[numbers]
        is_held_out = places * record.images[key[1]] // prod(output.shape) % HOLD_OUT == HOLD_OUT - 1
        order = is_held_out.to(torch.uint8).argsort(stable=True)
        channels = self.channels[key[0]].clamp_min(0)
        some, index = (values.to(output.rows.device) for values in (numbers[order], channels))

        def select(rows: Tensor) -> Tensor:
            return rows.index_select(0, some).index_select(1, index).to(self.device)

        if addend is not None:
            scale = None if addend.scale is None else addend.scale[index].to(self.device)
            addend = replace(addend, rows=select(addend.rows), scale=scale)
        return replace(
            output,
            places=places[order].to(self.device),
            fitted=len(places) - int(is_held_out.sum()),
            rows=select(output.rows),
            addend=addend,
        )

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
        """Batch and number of a call -> the outputs that its result is added to."""
        found: dict[tuple[int, int], list[Key]] = {}
        for key in self.record.outputs:
            if (addend := self.addend(key)) is not None:
                found.setdefault((key[1], addend.number), []).append(key)
        return found


def select_targets(
    record: OriginalRecord, slim: nn.Module, graph: ChannelGraph, kept: KeptChannels
) -> FitTargets:
    """What was recorded of the original, for a slim network."""
    device = device_of(slim)
    channels = {
        name: _output_channels(form, graph.layouts[name], kept) for name, form in record.filters.items()
    }
    channels |= {name: kept.positions(graph.layouts[name][0]) for name in record.sums}
    sums = {name: some.at(channels[name].clamp_min(0)).to(device) for name, some in record.sums.items()}
    targets = FitTargets(record, channels, sums, feature_counter(slim, graph, kept), device)
    # Before the pass: a copy to a GPU waits for it, and a layer that is refitted must not.
    for key in record.outputs:
        if key[0] not in record.mixed:
            targets.output(key)
    return targets


def feature_counter(slim: nn.Module, graph: ChannelGraph, kept: KeptChannels) -> CountFeatures:
    """Counts the features of the layers of a slim network."""
    sizes = {name: tensor.numel() for name, tensor in tensors_of(slim).items()}

    def count(name: str, filters: Filters) -> int:
        return sizes[name] // max(1, len(_output_channels(filters, graph.layouts[name], kept)))

    return count


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


def gain(addend: Addend, output: Output) -> Tensor | float:
    """Change of the layer's output for a change of the sum, for each channel: one over the scale of its norm.

    The reciprocal is damped, as in Tikhonov regularization: s / (s^2 + f^2) is nearly 1 / s for a scale above
    the floor f, at most 1 / 2f, and goes to zero with s. A batch norm that nearly shuts a channel off would
    otherwise ask for a huge output of the layer. The floor compares what passes with what it is added to.
    """
    if addend.scale is None:
        return 1.0
    spread, own = (rows.double().std(0, correction=0) for rows in (addend.rows, output.rows))
    floor = MIN_SCALE * spread / own.clamp_min(TINY)
    return addend.scale / (addend.scale.square() + floor.square()).clamp_min(TINY)

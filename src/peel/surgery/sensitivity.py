"""What cutting channels does to the output of a trained network whose layers are refitted afterwards.

To first order, a reading layer that loses channels changes the output by the part of its input that the kept
channels do not explain, times its weights, times the gradient of the output. That gives the order of the
channels and the shape of the curve over widths. Its height is measured: each reading layer gets, once, an
input in which half of the channels are predicted from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # has no public name

from ..errors import DataError
from ..graph.channel_graph import ChannelGraph
from .calibration import Images, evaluating, make_batches, run_model
from .explain import Reading, collect_readings
from .layer_calls import CallWatcher, LayerCall, Visitor
from .regression import TINY

#: Images that gradients are computed for, and the output is compared on; how many run together.
IMAGES, BATCH = 256, 32

#: Keeps the prediction of channels from others stable, as a fraction of their mean variance.
RIDGE = 1e-6


@dataclass(frozen=True)
class TieSensitivity:
    """How much a network needs the channels of a tie."""

    scores: Tensor
    """One per channel; those with the highest are kept."""
    change: Tensor
    """Change of the output with 0, 1, ... all channels kept: mean square, as a fraction of the variance."""


def measure_sensitivities(model: nn.Module, graph: ChannelGraph, images: Images) -> dict[str, TieSensitivity]:
    """Tie -> what its channels are worth to a trained network, from unlabeled images.

    A tie whose readers are all depthwise or grouped, or not seen, is left out.
    """
    readings = collect_readings(model, graph, images)
    by_layer: dict[str, list[Reading]] = {}
    for reading in (reading for some in readings.values() for reading in some):
        by_layer.setdefault(reading.layer, []).append(reading)
    few = _first(make_batches(images, BATCH))
    with evaluating(model):
        gradients = _squared_gradients(model, few)
        weights = {key: _pull_back(reading, gradients) for key, reading in _keyed(readings)}
        first = {
            tie: _greedy(some, [weights[tie, one.layer] for one in some]) for tie, some in readings.items()
        }
        names = list(graph.widths)
        kept = {names.index(tie): _best_half(found.scores) for tie, found in first.items()}
        left = {key: _left_at(reading, weights[key], kept[reading.tie]) for key, reading in _keyed(readings)}
        outputs = [_flat(run_model(model, batch)) for batch in few]
        for layer, some in by_layer.items():
            expected = sum(left[names[one.tie], layer] for one in some)
            measured = _change(model, few, outputs, _Predicted(layer, some, kept))
            for one in some:
                weights[names[one.tie], layer] *= measured / max(expected, TINY)
    return {tie: _greedy(some, [weights[tie, one.layer] for one in some]) for tie, some in readings.items()}


def _keyed(readings: Mapping[str, Sequence[Reading]]) -> Iterator[tuple[tuple[str, str], Reading]]:
    for tie, some in readings.items():
        for reading in some:
            yield (tie, reading.layer), reading


def _first(batches: Sequence[Any]) -> list[Any]:
    """Batches with about as many images as are needed."""
    return list(batches[: -(-IMAGES // BATCH)])


def _flat(output: Any) -> list[Tensor]:
    return [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.is_floating_point()]


def _squared_gradients(model: nn.Module, batches: Sequence[Any]) -> dict[str, Tensor]:
    """Layer -> mean over images of the squared gradient of a random sum of the outputs, for each channel."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    recorder = _GradientRecorder()
    try:
        model.requires_grad_(False)
        for batch in batches:
            recorder.starts = []
            with torch.enable_grad():
                with CallWatcher(model, recorder):
                    outputs = [value for value in _flat(run_model(model, batch)) if value.requires_grad]
                if not outputs:
                    raise DataError("the network has no floating-point output that its layers lead to.")
                random = [
                    torch.randn_like(value) / value.detach().std().clamp_min(1e-12) for value in outputs
                ]
                pairs = zip(outputs, random, strict=True)
                total = torch.stack([(value * some).sum() for value, some in pairs]).sum()
                torch.autograd.grad(total, recorder.starts, allow_unused=True)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    return recorder.squares


@dataclass
class _GradientRecorder(Visitor):
    squares: dict[str, Tensor] = field(default_factory=dict)
    starts: list[Tensor] = field(default_factory=list)
    """Outputs of the first layers, from which on gradients are computed."""

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[..., Tensor]) -> Tensor:
        output = run()
        if not output.requires_grad:
            self.starts.append(output.detach().requires_grad_())
            output = self.starts[-1].clone()

        def add(gradient: Tensor) -> None:
            channels = 1 if call.kernel and gradient.ndim == call.axes + 2 else 0 if call.kernel else -1
            others = [axis for axis in range(gradient.ndim) if axis != channels % gradient.ndim]
            self.squares[name] = self.squares.get(name, 0.0) + gradient.double().square().sum(others)

        output.register_hook(add)  # type: ignore[no-untyped-call]
        return output


def _pull_back(reading: Reading, gradients: Mapping[str, Tensor]) -> Tensor:
    """What a change of the channels that are read is worth: channels x channels."""
    weight = reading.weight
    squares = gradients.get(reading.layer, torch.zeros(len(weight), dtype=weight.dtype, device=weight.device))
    scaled = weight * squares.sqrt()[:, None, None]
    flat = scaled.movedim(1, 0).flatten(1)
    return flat @ flat.T


def _greedy(readings: Sequence[Reading], weights: Sequence[Tensor]) -> TieSensitivity:
    """Take, one after the other, the channel that leaves the least change."""
    left = torch.stack([reading.covariance() for reading in readings])
    weight = torch.stack(list(weights))
    count = left.shape[1]
    floor = 1e-9 * left.diagonal(dim1=1, dim2=2).amax(1).clamp_min(TINY)
    gains = ((left @ weight) * left).sum(2)
    scores = torch.zeros(count)
    change = [float((left * weight).sum())]
    is_taken = torch.zeros(count, dtype=torch.bool, device=left.device)
    for place in range(count):
        variance = left.diagonal(dim1=1, dim2=2).clamp_min(floor[:, None])
        best = int((gains / variance).sum(0).masked_fill(is_taken, -1.0).argmax())
        is_taken[best] = True
        scores[best] = count - place
        column, scale = left[:, :, best].clone(), variance[:, best, None].clone()
        weighted = weight @ column[:, :, None]
        moved = (left @ weighted).squeeze(2)
        worth = (column * weighted.squeeze(2)).sum(1, keepdim=True)
        gains += column.square() * worth / scale.square() - 2 * column * moved / scale
        change.append(max(0.0, change[-1] - float((worth / scale).sum())))
        left -= column[:, :, None] * (column / scale)[:, None]
    return TieSensitivity(scores, torch.tensor(change, dtype=torch.float64))


def _best_half(scores: Tensor) -> Tensor:
    return torch.topk(scores, max(1, len(scores) // 2)).indices.sort().values


def _coefficients(reading: Reading, kept: Tensor) -> Tensor:
    """The regression of all channels on the kept ones: channels x kept."""
    covariance = reading.covariance()
    kept = kept.to(covariance.device)
    among = covariance[kept][:, kept]
    ridge = RIDGE * covariance.diagonal().mean().clamp_min(TINY)
    penalized = among + ridge * torch.eye(len(kept), dtype=among.dtype, device=among.device)
    found: Tensor = torch.linalg.solve(penalized, covariance[kept])
    return found.T


def _left_at(reading: Reading, weight: Tensor, kept: Tensor) -> float:
    """The expected change with these channels kept."""
    covariance, coefficients = reading.covariance(), _coefficients(reading, kept)
    left = covariance - coefficients @ covariance[kept.to(covariance.device)]
    return max(0.0, float((left * weight).sum()))


class _Predicted(Visitor):
    """Gives one layer an input in which some channels are predicted from the kept ones."""

    def __init__(self, layer: str, readings: Sequence[Reading], kept: Mapping[int, Tensor]) -> None:
        self.layer = layer
        self.parts = [
            (one.span, one.mean().float(), _coefficients(one, kept[one.tie]).float(), kept[one.tie])
            for one in readings
        ]

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[..., Tensor]) -> Tensor:
        if name != self.layer:
            return run()
        axis = 1 if call.kernel else -1
        inputs = call.inputs.movedim(axis, -1).clone()
        for span, mean, coefficients, kept in self.parts:
            some = inputs[..., span]
            own = some.reshape(*some.shape[:-1], len(mean), -1).movedim(-2, -1)
            centered = own - mean.to(own.dtype)
            predicted = centered[..., kept.to(own.device)] @ coefficients.T.to(own.dtype)
            predicted[..., kept.to(own.device)] = centered[..., kept.to(own.device)]
            inputs[..., span] = (predicted + mean.to(own.dtype)).movedim(-1, -2).flatten(-2)
        return run(inputs.movedim(-1, axis).contiguous())


def _change(
    model: nn.Module, batches: Sequence[Any], outputs: Sequence[list[Tensor]], visitor: Visitor
) -> float:
    """Mean square change of the output, as a fraction of its variance."""
    changes = []
    for batch, before in zip(batches, outputs, strict=True):
        with CallWatcher(model, visitor):
            after = _flat(run_model(model, batch))
        pairs = zip(before, after, strict=True)
        changes.append(sum(_relative(old, new) for old, new in pairs) / max(1, len(before)))
    return sum(changes) / len(changes)


def _relative(old: Tensor, new: Tensor) -> float:
    old, new = old.double(), new.double()
    return float((new - old).square().mean() / old.var(correction=0).clamp_min(TINY))

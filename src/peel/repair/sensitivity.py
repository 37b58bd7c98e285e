"""What cutting channels does to the output of a trained network whose layers are refitted afterwards.

To first order, a reading layer that loses channels changes the output by the part of its input that the kept
channels do not explain, times its weights, times the gradient of the output. That gives the order of the
channels and the shape of the curve over widths. Its height is measured: each reading layer gets, once, an
input in which half of the channels are predicted from the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..cost.budget import Budget
from ..cost.constraint import Constraint
from ..cost.cutting import cut_to_budget
from ..cost.rounding import Divisor
from ..cost.widths import Widths
from ..errors import DataError
from ..graph.channel_graph import ChannelGraph
from ..graph.layers import refuse_inference_tensors
from ..surgery.selection import per_channel
from ..utils.rng import derive_seed
from .calibration import (
    MAX_IMAGES,
    Images,
    evaluating,
    images_in_memory,
    make_batches,
    merge,
    run_model,
)
from .explain import Reading, collect_readings, greedy_order
from .layer_calls import CallWatcher, LayerCall, Use, Visitor
from .outputs import output_change, output_tensors
from .regression import TINY

#: Images that gradients are computed for, and the output is compared on; at least how many run together.
#: With 64 the repaired networks are as good as with 256 (experiments/fewer_images.py).
IMAGES, BATCH = 64, 32

#: Activations that a backward pass keeps, over the most that a forward pass without gradients holds.
KEPT_FOR_GRADIENTS = 32

#: Keeps the prediction of channels from others stable, as a fraction of their mean variance.
RIDGE = 1e-6


Readings = Mapping[int, Sequence[Reading]]
"""Atom -> what each layer reads of it."""


@dataclass(frozen=True)
class Sensitivity:
    """How much a trained network needs the channels of each tie."""

    graph: ChannelGraph
    scores: Mapping[str, Tensor]
    """Tie -> one score per channel; those with the highest are kept."""
    change: Mapping[str, Tensor]
    """Tie -> change of the output with 0, 1, ... all of its units kept: mean square over variance."""

    def widths(
        self,
        budget: Budget,
        *,
        resource: str = "macs",
        limits: Mapping[str, Budget] | None = None,
        divisor: Divisor = "auto",
        freeze: Iterable[str] = (),
    ) -> Widths:
        """Widths that meet the budget with the least change of the output; options as in `peel.uniform`."""
        return self.widths_within(
            Constraint.of(
                self.graph, budget, resource=resource, limits=limits, divisor=divisor, freeze=freeze
            )
        )

    def widths_within(self, constraint: Constraint) -> Widths:
        """`widths`, of a constraint that is resolved already."""
        return cut_to_budget(constraint, {tie: values.tolist() for tie, values in self.change.items()})


def measure_sensitivity(model: nn.Module, graph: ChannelGraph, images: Images) -> Sensitivity:
    """Measure on unlabeled images how much the output of a trained network needs the channels of each tie.

    One backward pass, and one forward pass for each layer, over 256 images. A tie whose readers are all
    depthwise or grouped, or not seen, is left out.

    >>> sensitivity = peel.measure_sensitivity(model, graph, images)
    >>> widths = sensitivity.widths("50%")
    >>> small = peel.slim(model, widths, graph=graph, weights="inherit", scores=sensitivity.scores)
    """
    refuse_inference_tensors(model)
    batches = make_batches(images, BATCH)
    # The change of the output is measured on other images than the channels are predicted with.
    held_out = min(-(-IMAGES // BATCH), len(batches) // 4)
    together = max(BATCH, images_in_memory(graph, KEPT_FOR_GRADIENTS * IMAGES) // KEPT_FOR_GRADIENTS)
    few, others = (merge(some, together) for some in (batches[:held_out], batches[held_out:]))
    readings = collect_readings(model, graph, others)
    if not readings:
        raise DataError("no layer reads channels that vary and are finite on these images.")
    # Too few batches to hold some out.
    few = few or others
    with evaluating(model):
        torch.manual_seed(derive_seed("sensitivity"))
        gradients = _squared_gradients(model, few)
        values = {atom: [_pull_back(one, gradients) for one in some] for atom, some in readings.items()}
        kept = {atom: _best_half(some, values[atom]) for atom, some in readings.items()}
        outputs = [output_tensors(run_model(model, batch)) for batch in few]
        factors = _factors(model, few, outputs, _parts(readings, values, kept))
        for atom, some in readings.items():
            # First order and reality differ by about a factor per layer: half of its channels are predicted
            # once, and the measured change over the expected one scales its values.
            values[atom] = [value * factors[one.use] for one, value in zip(some, values[atom], strict=True)]
    found = {
        atom: greedy_order([_covariance(one) for one in some], values[atom])
        for atom, some in readings.items()
    }
    scores = per_channel(graph, {atom: scores for atom, (scores, _) in found.items()})
    change = _sum_by_tie(graph, {atom: change for atom, (_, change) in found.items()})
    if not all(values.isfinite().all() for values in change.values()):
        raise DataError(
            "the outputs of the network, or of its layers, are not finite on these images (or too large), so "
            "their change cannot be measured. Check the normalization of the images."
        )
    return Sensitivity(graph, scores, {tie: change[tie] for tie in scores})


def sensitivity_passes(graph: ChannelGraph) -> int:
    """About how many images pass through the network in `measure_sensitivity`."""
    return MAX_IMAGES + IMAGES * (3 + len(graph.consumers))


def _sum_by_tie(graph: ChannelGraph, by_atom: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Tie -> the sum over its atoms."""
    names = list(graph.widths)
    runs = (run for layout in graph.layouts.values() for axis in layout for run in axis if run.tie >= 0)
    ties = {run.atom: names[run.tie] for run in runs}
    found: dict[str, Tensor] = {}
    for atom, values in by_atom.items():
        found[ties[atom]] = found[ties[atom]] + values if ties[atom] in found else values
    return found


def _parts(
    readings: Readings, values: Mapping[int, Sequence[Tensor]], kept: Mapping[int, Tensor]
) -> dict[Use, list[_Prediction]]:
    """Use of a layer -> its input, half of whose channels are predicted."""
    found: dict[Use, list[_Prediction]] = {}
    for atom, some in readings.items():
        for reading, value in zip(some, values[atom], strict=True):
            found.setdefault(reading.use, []).append(_Prediction.of(reading, value, kept[atom]))
    return found


def _factors(
    model: nn.Module,
    batches: Sequence[Any],
    outputs: Sequence[list[Tensor]],
    parts: Mapping[Use, Sequence[_Prediction]],
) -> dict[Use, float]:
    """Use of a layer -> the measured change of the output over the expected one."""
    factors = {}
    for use, some in parts.items():
        expected = sum(part.expected for part in some)
        measured = _change(model, batches, outputs, _Predictor(use, some))
        if expected > 0 and 0 < measured < math.inf:
            factors[use] = measured / expected
    # A layer for which half of its channels are enough has no factor of its own.
    usual = statistics.median(factors.values()) if factors else 1.0
    return {use: factors.get(use, usual) for use in parts}


def _squared_gradients(model: nn.Module, batches: Sequence[Any]) -> dict[Use, Tensor]:
    """Use of a layer -> mean over images of the squared gradient of a random sum of the outputs, for each
    channel.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    recorder = _GradientRecorder()
    try:
        model.requires_grad_(False)
        for batch in batches:
            recorder.starts = []
            with torch.enable_grad():
                with CallWatcher(model, recorder):
                    outputs = [
                        value for value in output_tensors(run_model(model, batch)) if value.requires_grad
                    ]
                if not outputs:
                    raise DataError("the network has no floating-point output that its layers lead to.")
                # The gradient of a random sum has the squared norm of the whole Jacobian as its mean. Outputs
                # count by their standard deviation, so that the change is a fraction of their variance.
                random = [
                    torch.randn_like(value) / value.detach().std(correction=0).clamp_min(1e-12)
                    for value in outputs
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
    squares: dict[Use, Tensor] = field(default_factory=dict)
    starts: list[Tensor] = field(default_factory=list)
    """Outputs of the first layers, from which on gradients are computed."""

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[..., Tensor]) -> Tensor:
        output = run()
        if not output.requires_grad:
            self.starts.append(output.detach().requires_grad_())
            output = self.starts[-1].clone()

        use = name, call.input_axis

        def add(gradient: Tensor) -> None:
            channels = 1 if call.kernel and gradient.ndim == call.axes + 2 else 0 if call.kernel else -1
            others = [axis for axis in range(gradient.ndim) if axis != channels % gradient.ndim]
            self.squares[use] = self.squares.get(use, 0.0) + gradient.double().square().sum(others)

        output.register_hook(add)  # type: ignore[no-untyped-call]
        return output


def _pull_back(reading: Reading, gradients: Mapping[Use, Tensor]) -> Tensor:
    """What a change of the channels that are read is worth: channels x channels."""
    weight = reading.weight
    squares = gradients.get(reading.use, torch.zeros(len(weight), dtype=weight.dtype, device=weight.device))
    # A change d of the channels changes output o by w_o d, which is worth the squared gradient there: the
    # value matrix is the sum over outputs and taps of g_o^2 w_o w_o'.
    scaled = weight * squares.sqrt()[:, None, None]
    flat = scaled.movedim(1, 0).flatten(1)
    return flat @ flat.T


def _covariance(reading: Reading) -> Tensor:
    """The covariance of the channels, with correlations shrunk as far as there are too few rows.

    Otherwise as many channels as rows would explain all others. The strength is the oracle approximating
    shrinkage of Chen et al. (2010), applied to the correlations.
    """
    covariance = reading.covariance()
    diagonal = covariance.diagonal().clamp_min(0.0)
    scale = diagonal.clamp_min(TINY).sqrt()
    squares, size = float((covariance / scale / scale[:, None]).square().sum()), len(diagonal)
    excess = (reading.count + 1 - 2 / size) * (squares - size)
    strength = min(1.0, ((1 - 2 / size) * squares + size**2) / excess) if excess > 0 else 1.0
    return (1 - strength) * covariance + strength * diagonal.diag()


def _best_half(readings: Sequence[Reading], values: Sequence[Tensor]) -> Tensor:
    """The half of the channels whose removal alone would change the output most."""
    pairs = zip(readings, values, strict=True)
    worth = torch.stack([one.covariance().diagonal() * value.diagonal() for one, value in pairs]).sum(0)
    return torch.topk(worth, max(1, len(worth) // 2)).indices.sort().values


@dataclass(frozen=True)
class _Prediction:
    """The channels that a layer reads, predicted from the kept ones by regression."""

    span: slice
    mean: Tensor
    kept: Tensor
    coefficients: Tensor
    """Channels x kept."""
    expected: float
    """Change of the output, to first order."""

    @classmethod
    def of(cls, reading: Reading, value: Tensor, kept: Tensor) -> _Prediction:
        covariance = _covariance(reading)
        kept = kept.to(covariance.device)
        ridge = RIDGE * covariance.diagonal().mean().clamp_min(TINY)
        # Regression of all channels on the kept ones: C_all,kept (C_kept,kept + ridge)^-1.
        among = covariance[kept][:, kept] + ridge * torch.eye(len(kept)).to(covariance)
        coefficients: Tensor = torch.linalg.solve(among, covariance[kept]).T
        left = covariance - coefficients @ covariance[kept]
        return cls(reading.span, reading.mean(), kept, coefficients, max(0.0, float((left * value).sum())))

    def replace(self, inputs: Tensor) -> None:
        """Predict the channels, the last axis of the inputs, in place."""
        some = inputs[..., self.span]
        own = some.reshape(*some.shape[:-1], len(self.mean), -1).movedim(-2, -1)
        mean, coefficients = self.mean.to(own.dtype), self.coefficients.to(own.dtype)
        kept = own[..., self.kept]
        predicted = (kept - mean[self.kept]) @ coefficients.T + mean
        predicted[..., self.kept] = kept
        inputs[..., self.span] = predicted.movedim(-1, -2).flatten(-2)


@dataclass(frozen=True)
class _Predictor(Visitor):
    """Gives one layer predicted channels."""

    use: Use
    parts: Sequence[_Prediction]

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[..., Tensor]) -> Tensor:
        if self.use != (name, call.input_axis):
            return run()
        axis = 1 if call.kernel else -1
        inputs = call.inputs.movedim(axis, -1).clone()
        for part in self.parts:
            part.replace(inputs)
        return run(inputs.movedim(-1, axis).contiguous())


def _change(
    model: nn.Module, batches: Sequence[Any], outputs: Sequence[list[Tensor]], visitor: Visitor
) -> float:
    """Mean square change of the output, as a fraction of its variance."""
    changes = []
    for batch, before in zip(batches, outputs, strict=True):
        with CallWatcher(model, visitor):
            after = output_tensors(run_model(model, batch))
        changes.append(output_change(before, after))
    return sum(changes) / len(changes)

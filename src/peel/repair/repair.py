"""Repair without training: the layers of a cut network are refitted, one after the other, in closed form.

Each convolution and linear layer is fitted by ridge regression: from its input in the slim network, whose
earlier layers are repaired already, to its output in the original at the kept channels. Where that is added
to another tensor (the stream of a residual block), it is fitted so that the sum is right. A batch norm behind
the layer takes the intercept that it cannot have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DataError, WidthsError
from ..graph.channel_graph import ChannelGraph, Layout
from ..graph.layers import refuse_inference_tensors, refuse_meta_tensors
from ..graph.rebuild import check_graph, new_shapes, tensors_of
from ..graph.trace import trace
from ..surgery.info import info_of, weights_fingerprint
from ..surgery.selection import KeptChannels
from ..surgery.slim import copy_weights
from .calibration import (
    MEMORY,
    Images,
    count_images,
    evaluating,
    make_batches,
    merge,
    recalibrate,
    run_model,
)
from .fit_targets import FitTargets, feature_counter, gain, select_targets
from .layer_calls import CallWatcher, LayerCall, NormCall, Visitor, places_shape, rows_at
from .original_record import PLACES, Key, OriginalRecord, Output, Sums, record_original
from .original_shapes import Shapes, original_shapes
from .outputs import output_change, output_tensors
from .regression import CHUNK_BYTES, HOLD_OUT, TINY, Regression

NOT_FINITE = "its inputs or outputs on these images are not finite, or too large"

#: Why a layer was left alone that no watched call was made with.
UNSEEN = "its weight is computed, or no convolution or linear layer uses it"


MIXED = "layers of several kinds share its weight, and no fit serves all of them"

#: With fewer images, a repair is compared with a recalibration on a quarter of them. With fewer than
#: `UNSURE`, these are too few to judge: the report says so (`benchmarks/repair_images.py`).
FEW, UNSURE = 64, 16

MORE = "Give more images, a few hundred say"

CHANGED = (
    "the network was changed after peel.slim; the repair started from the weights of the original again. "
    "Repair before training"
)


@dataclass(frozen=True)
class RepairReport:
    """What `peel.repair` did."""

    images: int
    errors: Mapping[str, tuple[float, float]]
    """Refitted layer -> error of its output before and after, as a fraction of the variance."""
    norms: tuple[str, ...]
    """Batch norms whose statistics were changed."""
    left_alone: Mapping[str, str]
    """Layer that reads or writes cut channels and was not refitted -> the reason."""
    notes: tuple[str, ...] = ()
    """What the caller should know about the result."""

    @property
    def refitted(self) -> tuple[str, ...]:
        return tuple(self.errors)

    def __str__(self) -> str:
        text = f"{len(self.errors)} layers refitted on {self.images} images"
        left = "".join(f"\n  left alone: {name}: {reason}" for name, reason in self.left_alone.items())
        return text + left + "".join(f"\n  note: {note}" for note in self.notes)


def repair(
    slim: nn.Module,
    original: nn.Module,
    images: Images,
    *,
    graph: ChannelGraph | None = None,
    memory: int = MEMORY,
) -> RepairReport:
    """Refit the layers of a network that `peel.slim` cut from `original` with inherited weights, in place.

    Args:
        slim: the cut network. Layers, biases and batch-norm statistics are changed.
        original: the trained network it was cut from. It is not changed.
        images: unlabeled images as the networks take them, normalized: a tensor, or an iterable of batches
            (of a tuple, the first element), from which 1,024 images are taken. A few hundred are enough.
            With 16 to 63, a repair is compared with a recalibration on a quarter of them, and the better is
            kept. With fewer, the report notes that nothing can tell which is better.
        graph: the graph of the original; traced where it is not given.
        memory: bytes of activations that may be held. Where the images need more, they run in several
            batches, and each layer costs a pass of its own.

    >>> small = peel.slim(model, widths, graph=graph, weights="inherit")
    >>> print(peel.repair(small, model, images, graph=graph))
    20 layers refitted on 1000 images
    """
    for model in (slim, original):
        refuse_meta_tensors(model)
    refuse_inference_tensors(slim)
    if graph is None:
        graph = trace(original, _example(images))
    _check_fits(slim, original, graph)
    kept = _kept_channels(slim, graph)
    repairer = Repairer(original, images, graph, memory, only=slim)
    before = _copies(slim)
    try:
        with evaluating(slim, original):
            # So that the result depends on the cut alone, and not on how often this was called.
            copy_weights(original, slim, graph, kept, {id(tensor) for tensor in tensors_of(slim).values()})
            was_cut = not _changed(slim, before)
        report = repairer.repair(slim)
        # A second repair ends where the first one did: nothing of the network's is lost.
        is_lost = not was_cut and bool(_changed(slim, before))
        return replace(report, notes=(CHANGED, *report.notes)) if is_lost else report
    except BaseException:
        _restore(slim, before)
        raise


class Repairer:
    """Repairs networks that `peel.slim` cut from one original, on the same images. The original runs once."""

    def __init__(
        self,
        original: nn.Module,
        images: Images,
        graph: ChannelGraph,
        memory: int = MEMORY,
        only: nn.Module | None = None,
    ) -> None:
        """`only`: the one network to be repaired. Less of the original is held then."""
        at_once = images_at_once(original, graph, memory)
        batches = make_batches(images, at_once)
        self.images = sum(map(count_images, batches))
        self.whole = _Fitter(original, batches, graph, only)
        is_judged = UNSURE <= self.images < FEW
        self.trial = _Trial.of(original, batches, graph, at_once) if is_judged else None

    def repair(self, slim: nn.Module) -> RepairReport:
        """Refit the layers of a cut network in place. After an error it is of no use."""
        if self.images == 1:
            return self._unfitted((), "one image is too few for a repair: the network is as it was cut")
        if self.trial is not None and not self.trial.is_better_repaired(slim):
            norms = _recalibrate(slim, self.whole.batches)
            held_out = f"on {self.trial.images} of the {self.images} images, which were held out"
            worse, kept = "the network as it was cut", "nothing was changed"
            if norms:
                worse, kept = "new batch-norm statistics", "only these were changed"
            return self._unfitted(
                norms, f"{held_out}, a repair with the others is worse than {worse}: {kept}"
            )
        report = self.whole.fit(slim)
        if self.images >= FEW or self.trial is not None:
            return report
        note = f"{self.images} images are too few to tell whether the repair is better than a recalibration"
        return replace(report, notes=(f"{note}. {MORE}",))

    def _unfitted(self, norms: tuple[str, ...], note: str) -> RepairReport:
        return RepairReport(self.images, {}, norms, {}, (f"{note}. {MORE}",))


class _Fitter:
    """Fits networks to one original on the same batches. The original runs once."""

    def __init__(
        self, original: nn.Module, batches: list[Any], graph: ChannelGraph, only: nn.Module | None = None
    ) -> None:
        self.original, self.batches, self.graph, self.only = original, batches, graph, only
        self.record: OriginalRecord | None = None

    def fit(self, slim: nn.Module) -> RepairReport:
        graph, kept = self.graph, _kept_channels(slim, self.graph)
        is_cut = {name: _is_cut(layout, kept) for name, layout in graph.layouts.items()}
        with evaluating(slim, self.original):
            if self.record is None:
                counts = None if self.only is None else feature_counter(self.only, graph, kept)
                self.record = record_original(self.original, self.batches, counts)
            targets = select_targets(self.record, slim, graph, kept)
            refit = _Refit(slim, targets, self.batches, is_cut, original_shapes(slim, self.original))
            refit.run()
        weights = [(name, tensor) for name, tensor in slim.named_parameters() if is_cut[name]]
        filters = [name for name, tensor in weights if sum(size > 1 for size in tensor.shape) > 1]
        left_alone = {
            **refit.left_alone,
            **{name: UNSEEN for name in filters if name not in self.record.order},
            **{name: MIXED for name in filters if name in self.record.mixed},
        }
        return RepairReport(
            images=sum(map(count_images, self.batches)),
            errors={_layer(name): errors for name, errors in refit.errors.items()},
            norms=tuple(map(_layer, refit.norms)),
            left_alone={_layer(name): reason for name, reason in left_alone.items()},
        )


@dataclass(frozen=True)
class _Trial:
    """A repair with some of the images against new batch-norm statistics, judged by the others."""

    fitter: _Fitter
    held_out: list[Any]

    @classmethod
    def of(cls, original: nn.Module, batches: list[Any], graph: ChannelGraph, at_once: int) -> _Trial | None:
        """None where the images come in so few batches of their own that none can be held out."""
        pieces = merge(batches, 1)
        held_out = merge(pieces[HOLD_OUT - 1 :: HOLD_OUT], at_once)
        fitted = merge([one for place, one in enumerate(pieces, 1) if place % HOLD_OUT], at_once)
        return cls(_Fitter(original, fitted, graph), held_out) if held_out else None

    @property
    def images(self) -> int:
        return sum(map(count_images, self.held_out))

    def is_better_repaired(self, slim: nn.Module) -> bool:
        before = _copies(slim)
        # Both start from the network as it was cut, and are compared on images that neither has seen.
        self.fitter.fit(slim)
        repaired = self._error(slim)
        _restore(slim, before)
        _recalibrate(slim, self.fitter.batches)
        recalibrated = self._error(slim)
        _restore(slim, before)
        return repaired < recalibrated

    def _error(self, slim: nn.Module) -> float:
        original, changes = self.fitter.original, []
        with evaluating(slim, original):
            for batch in self.held_out:
                outputs = [output_tensors(run_model(model, batch)) for model in (original, slim)]
                changes.append(output_change(*outputs))
        return sum(changes)


def _recalibrate(slim: nn.Module, batches: list[Any]) -> tuple[str, ...]:
    """Measure batch-norm statistics on prepared batches. Returns the batch norms that changed."""
    before = _copies(slim)
    recalibrate(slim, [(batch, None) for batch in batches])
    return tuple(_layer(name) for name in _changed(slim, before) if name.endswith("running_mean"))


def _copies(slim: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(slim).items()}


def _restore(slim: nn.Module, before: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors_of(slim).items():
            tensor.copy_(before[name])


def _kept_channels(slim: nn.Module, graph: ChannelGraph) -> KeptChannels:
    info = info_of(slim)
    if info.kept is None:
        raise WidthsError(
            "repair needs a network that peel.slim made with weights='inherit': the channels that this one "
            "kept are not known. Cut the original again."
        )
    try:
        units = graph.units({tie: info.widths[tie] for tie in graph.widths})
        kept = KeptChannels.from_axes(graph, units, info.kept)
    except (KeyError, ValueError, WidthsError) as error:
        raise _not_cut_from(str(error)) from error
    # A tensor that is registered twice is in the graph under both names.
    tensors = {
        **dict(slim.named_parameters(remove_duplicate=False)),
        **dict(slim.named_buffers(remove_duplicate=False)),
    }
    for name, shape in new_shapes(graph, units).items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise _not_cut_from(f"{name} does not fit")
    return kept


def _not_cut_from(reason: str) -> WidthsError:
    return WidthsError(
        f"the slim network was not cut from this original: {reason}. Give repair the model and the graph "
        "that peel.slim was called with."
    )


def _changed(slim: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """The weights and statistics that differ from what they were."""
    tensors = tensors_of(slim).items()
    return [name for name, now in tensors if now.is_floating_point() and not torch.equal(now, before[name])]


def _layer(tensor: str) -> str:
    return tensor.rpartition(".")[0] or tensor


def _is_cut(layout: Layout, kept: KeptChannels) -> bool:
    """Whether a tensor has lost or gained channels."""
    return any(kept.index(runs, torch.device("cpu")) is not None for runs in layout)


def _example(images: Images) -> Any:
    if not isinstance(images, Tensor):
        raise DataError("give repair the graph of the original (peel.trace) where images is no tensor.")
    return images[:1]


def _check_fits(slim: nn.Module, original: nn.Module, graph: ChannelGraph) -> None:
    check_graph(original, graph)
    if info_of(slim).original not in ("", weights_fingerprint(original)):
        raise WidthsError(
            "the slim network was not cut from this original: its weights are others, or have been trained "
            "since. Give repair the model that peel.slim was called with, or cut this one."
        )


def images_at_once(original: nn.Module, graph: ChannelGraph, memory: int = MEMORY) -> int:
    """How many images a repair takes in one pass. With more, each layer costs a pass of its own.

    They need the activations of the original, its outputs at the sampled places, and what these are added to.
    """
    # Rows and what is added to them, in float32: 8 bytes for each place and channel.
    outputs = sum(max(weight.shape[:2]) for weight in original.parameters() if weight.ndim > 1)
    return max(1, memory // (graph.activation_bytes() + 8 * PLACES * outputs))


class _Outcome(NamedTuple):
    """What came of a layer or a batch norm."""

    name: str
    norms: tuple[str, ...]
    """Batch norms whose statistics were changed."""
    is_layer: bool
    numbers: Tensor
    """Whether all values were finite, and the errors of a layer before and after."""


class _StopPassError(BaseException):
    """The rest of a forward pass is not needed. The model's own `except Exception` does not catch it."""


class _Refit(Visitor):
    """Refits the layers of the slim network while it runs."""

    def __init__(
        self,
        slim: nn.Module,
        recorded: FitTargets,
        batches: list[Any],
        is_cut: Mapping[str, bool],
        shapes: Shapes,
    ) -> None:
        self.slim, self.recorded, self.batches, self.shapes = slim, recorded, batches, shapes
        self.tensors = tensors_of(slim)
        self.pending = self._sites(is_cut)
        self.active: set[str] = set()
        self.batch = 0
        self.regressions: dict[str, Regression] = {}
        self.sums: dict[str, Sums] = {}
        self.uses = recorded.uses()
        self.addend_rows: dict[Key, Tensor] = {}
        self.outcomes: list[_Outcome] = []
        self.errors: dict[str, tuple[float, float]] = {}
        self.norms: list[str] = []
        self.left_alone: dict[str, str] = {}

    def _sites(self, is_cut: Mapping[str, bool]) -> list[str]:
        """Layers and free batch norms behind the first cut, in the order of their last calls."""
        order, free = self.recorded.record.order, self.recorded.record.free_norms()
        # Nothing before the first cut has changed, so nothing there is to be fitted.
        first = next((place for place, name in enumerate(order) if is_cut[name]), len(order))
        # A layer that is called several times is fitted once, to all of its calls.
        last = {name: place for place, name in enumerate(order)}
        is_layer = self.recorded.record.filters.keys() - self.recorded.record.mixed
        wanted = set(order[first:]) & (is_layer | free)
        return sorted(wanted, key=last.__getitem__)

    def run(self) -> None:
        """One pass refits all layers as they are called, up to one that is called several times.

        With several batches, each layer needs a pass: it is refitted when all batches have reached it.
        """
        while self.pending:
            before = len(self.pending)
            # One batch holds all images: each layer can be refitted when it is called, and those behind it
            # see its new output.
            self.active = set(self.pending if len(self.batches) == 1 else self.pending[:1])
            self.regressions, self.sums, self.addend_rows = {}, {}, {}
            for number, batch in enumerate(self.batches):
                self.batch = number
                with contextlib.suppress(_StopPassError), CallWatcher(self.slim, self, self.shapes):
                    run_model(self.slim, batch)
                if not self.active:
                    break
            if len(self.pending) == before:
                self.left_alone[self.pending.pop(0)] = "it is called otherwise than in the original"
        self._read_outcomes()

    def _read_outcomes(self) -> None:
        """Errors, batch norms and what was left alone. A GPU is waited for here, and not before."""
        if not self.outcomes:
            return
        numbers = torch.stack([one.numbers for one in self.outcomes]).tolist()
        for one, (is_finite, before, after) in zip(self.outcomes, numbers, strict=True):
            if not is_finite:
                self.left_alone[one.name] = NOT_FINITE
                continue
            self.norms += one.norms
            if one.is_layer:
                self.errors[one.name] = before, after

    def at_layer(self, name: str, index: int, call: LayerCall, run: Callable[[], Tensor]) -> Tensor:
        if name in self.active:
            key = name, self.batch, index
            output = self.recorded.record.outputs.get(key)
            is_same = output is not None and output.input_shape == places_shape(call.inputs, call.axes)
            if not is_same or len(self.recorded.channels[name]) != call.outputs:
                self._leave(name, "it is called otherwise than in the original")
            elif call.bias is not None and not any(call.bias is own for own in self.tensors.values()):
                self._leave(name, "its bias is computed")
            else:
                self._add(key, call)
                if self._is_complete(name, index):
                    self._refit(name, call)
                    self._finish(name)
        return run()

    def at_norm(self, name: str, index: int, call: NormCall, run: Callable[[], Tensor]) -> Tensor:
        if name in self.active:
            self.sums.setdefault(name, Sums()).add(call.inputs)
            if self._is_complete(name, index):
                self._set_statistics(name)
                self._finish(name)
        return run()

    def after(self, number: int, output: Tensor) -> None:
        """Keep what the output of a layer will be added to."""
        for key in self.uses.get((self.batch, number), ()):
            recorded = self.recorded.record.outputs[key]
            if key[0] in self.active and places_shape(output, recorded.axes) == recorded.shape:
                target = self.recorded.output(key)
                rows = rows_at(output, target.axes, target.places)
                if rows.shape == target.rows.shape:
                    self.addend_rows[key] = rows

    def _is_complete(self, name: str, index: int) -> bool:
        """Whether this is the last call of the layer in the last batch."""
        if index + 1 < self.recorded.record.calls[name, self.batch]:
            return False
        if self.batch + 1 < len(self.batches):
            raise _StopPassError
        return True

    def _leave(self, name: str, reason: str) -> None:
        self.left_alone[name] = reason
        self._finish(name)

    def _finish(self, name: str) -> None:
        """Go on with this pass only if nothing was computed with the old weights."""
        self.pending.remove(name)
        self.active.remove(name)
        self.regressions.pop(name, None)
        # Later batches, and earlier calls of this layer, were computed with the old weights.
        if len(self.batches) > 1 or self.recorded.record.calls[name, self.batch] > 1 or not self.active:
            raise _StopPassError

    def _add(self, key: Key, call: LayerCall) -> None:
        name, target = key[0], self.recorded.output(key)
        regression = self.regressions.get(name)
        if regression is None:
            rows = sum(len(self.recorded.output(other).places) for other in self.recorded.keys_of(name))
            regression = self.regressions[name] = Regression(call.matrix(), rows)
        wanted = self._wanted(target, self.addend_rows.pop(key, None))
        # Windows hold each input as often as the kernel has taps: they are made in pieces.
        size = max(1, CHUNK_BYTES // (4 * max(1, call.weight[0].numel() * call.groups)))
        for start in range(0, len(target.places), size):
            some = slice(start, start + size)
            x = call.input_rows(target.shape, target.places[some])
            y = wanted[some].reshape(x.shape[1], call.groups, -1).transpose(0, 1)
            regression.add(x, y, max(0, target.fitted - start))

    def _wanted(self, target: Output, own: Tensor | None) -> Tensor:
        """The output of the original, and what makes the sum right that it goes into."""
        if target.addend is None or own is None:
            return target.rows
        # The slim network adds `own` where the original added `addend.rows`. The layer makes up for the
        # difference, through the batch norm behind it.
        missing = target.addend.rows.double() - own
        return target.rows + missing * gain(target.addend, target)

    def _refit(self, name: str, call: LayerCall) -> None:
        norms, at_known = self.recorded.record.absorbers(name), partial(self.recorded.at_known, name)
        solution = self.regressions[name].solve(intercept=call.bias is not None or bool(norms))
        intercept, ratio = solution.intercept.flatten(), solution.variance_ratio.flatten()
        changes = [(call.weight, call.from_matrix(at_known(solution.weight, call.matrix())))]
        if call.bias is not None:
            changes.append((call.bias, at_known(intercept, call.bias)))
        addends = map(self.recorded.addend, self.recorded.keys_of(name))
        is_branch = any(addend is not None and addend.is_stream for addend in addends)
        for norm in norms:
            # The batch norm takes the intercept: to subtract a mean that is smaller by b adds b.
            mean, variance = self.tensors[norm], self.tensors[_variance(norm)]
            if call.bias is None:
                changes.append((mean, at_known(mean - intercept, mean)))
            if not is_branch:
                # A fit has less variance than its target. The batch norm restores it for the layers behind,
                # but not in a stream, where that part of the fit would add up.
                changes.append((variance, at_known(variance * ratio, variance)))
        is_finite = _write(changes, solution.before)
        numbers = torch.stack([is_finite.double(), solution.before, solution.after])
        self.outcomes.append(_Outcome(name, norms, True, numbers))

    def _set_statistics(self, name: str) -> None:
        """Move the statistics of a batch norm as its input moved on these images."""
        own, original = self.sums[name], self.recorded.sums[name]
        mean, variance = self.tensors[name], self.tensors[_variance(name)]
        # Relative to the statistics that it has: these are of the training images, not of the few here.
        ratio = own.variance() / original.variance().clamp_min(TINY)
        moved = mean + own.mean() - original.mean(), variance * ratio
        changes = [
            (mean, self.recorded.at_known(name, moved[0], own.mean())),
            (variance, self.recorded.at_known(name, moved[1], own.variance())),
        ]
        self.outcomes.append(_Outcome(name, (name,), False, _write(changes).double().expand(3)))


def _variance(running_mean: str) -> str:
    return running_mean.removesuffix("mean") + "var"


def _write(changes: list[tuple[Tensor, Tensor]], *also_finite: Tensor) -> Tensor:
    """Write all values, or none if one of them, or of the others, is not finite. Returns whether all are."""
    values = [new.to(old.dtype) for old, new in changes]
    is_finite = torch.stack([value.isfinite().all() for value in (*values, *also_finite)]).all()
    for (old, _), value in zip(changes, values, strict=True):
        old.copy_(torch.where(is_finite, value, old))
    return is_finite

"""Repair without training: a network cut from a trained one is refitted, layer by layer, in closed form.

    slim = peel.slim(original, widths, graph=graph, weights="inherit", scores=scores)
    repair(slim, original, graph, images, scores=scores)

Each convolution and linear layer is fitted by ridge regression: from its input in the slim network, whose
earlier layers are repaired already, to its output in the original network at the kept channels. A batch norm
takes its mean and variance from the slim network. One forward pass does all of it: a layer is refitted when
it is called, so that the order is that of the computation. Many cuts of one original share its outputs:
`teach` once, then `refit` each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peel.graph import ChannelGraph
from peel.graph.parameters import values_by_tie
from peel.surgery.info import info_of
from peel.surgery.selection import KeptChannels, select_best
from peel.utils.rng import derive_seed

Layer = nn.Conv2d | nn.Linear

#: Places of each image at which a convolution is fitted.
PLACES = 16

#: Ridge penalty, as a part of the mean square of an input.
RIDGE = 1e-3

#: Rows that are converted to float64 at a time.
CHUNK = 8192


@dataclass(frozen=True)
class Lesson:
    """What the slim network is fitted to. It depends on the original only, so many cuts share it."""

    images: Tensor
    places: dict[str, Tensor]
    """Layer -> sampled places of its output: image, row, column."""
    outputs: dict[str, Tensor]
    """Layer -> output of the original at these places, places x channels."""


@torch.no_grad()
def teach(original: nn.Module, images: Tensor, places: int = PLACES) -> Lesson:
    """Run the original on unlabeled images and keep the outputs of its layers at sampled places."""
    images = images.contiguous()  # depthwise convolutions in float32 are slow with channels last
    lesson = Lesson(images, {}, {})

    def keep(name: str, output: Tensor) -> None:
        if output.ndim == 4:
            lesson.places[name] = sample_places(output, places, name)
            image, row, column = lesson.places[name]
            output = output[image, :, row, column]
        lesson.outputs[name] = output

    with hooks(original, lambda name, layer: layer.register_forward_hook(lambda *call: keep(name, call[2]))):
        original.eval()(images)
    return lesson


def sample_places(output: Tensor, count: int, name: str) -> Tensor:
    """Image, row and column of `count` random places of each image; all places of a small map."""
    images, _, height, width = output.shape
    rng = torch.Generator().manual_seed(derive_seed("places", name))
    if height * width <= count:
        flat = torch.arange(height * width).repeat(images, 1)
    else:
        flat = torch.randint(height * width, (images, count), generator=rng)
    image = torch.arange(images)[:, None].expand_as(flat)
    return torch.stack([image, flat // width, flat % width]).flatten(1).to(output.device)


@contextmanager
def hooks(model: nn.Module, register: Any, kinds: Any = Layer) -> Iterator[None]:
    """Hooks on all layers of some kinds, removed at the end."""
    handles = [register(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def repair(
    slim: nn.Module,
    original: nn.Module,
    graph: ChannelGraph,
    images: Tensor,
    *,
    scores: Mapping[str, Tensor] | None = None,
) -> None:
    """Refit a network that `peel.slim` cut from `original` with inherited weights and these scores."""
    kept = select_best(original, graph, graph.units(info_of(slim).widths), scores)
    refit(slim, teach(original, images), graph, kept)


@torch.no_grad()
def refit(
    slim: nn.Module,
    lesson: Lesson,
    graph: ChannelGraph,
    kept: KeptChannels,
    *,
    ridge: float = RIDGE,
    only_norms: bool = False,
) -> None:
    """Refit all layers and set the statistics of batch norms, in place.

    With `only_norms`, only the batch norms are recalibrated.
    """

    def at_layer(name: str, layer: Layer, inputs: Tensor) -> None:
        channels = kept.positions(graph.layouts[f"{name}.weight"][0]).clamp_min(0).to(inputs.device)
        refit_layer(layer, inputs, lesson.outputs[name][:, channels], lesson.places.get(name), ridge)

    def at_norm(norm: nn.BatchNorm2d, inputs: Tensor) -> None:
        assert norm.running_mean is not None and norm.running_var is not None
        variance, mean = torch.var_mean(inputs, (0, 2, 3))
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)

    def on_layer(name: str, layer: Layer) -> Any:
        return layer.register_forward_pre_hook(lambda _, inputs: at_layer(name, layer, inputs[0]))

    def on_norm(_: str, norm: nn.BatchNorm2d) -> Any:
        return norm.register_forward_pre_hook(lambda _, inputs: at_norm(norm, inputs[0]))

    with hooks(slim, on_layer, () if only_norms else Layer), hooks(slim, on_norm, nn.BatchNorm2d):
        slim.eval()(lesson.images)


def refit_layer(layer: Layer, inputs: Tensor, target: Tensor, places: Tensor | None, ridge: float) -> None:
    """Ridge regression with an intercept. The penalty draws the weights to those that the layer has.

    Without a bias, the intercept is left to the batch norm that follows.
    """
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    weight = layer.weight.reshape(groups, len(layer.weight) // groups, -1).double()
    solver = NormalEquations(weight.shape[0], weight.shape[2], weight.shape[1], weight)
    for rows in range(0, len(target), CHUNK):
        some = slice(rows, rows + CHUNK)
        if places is None:
            windows = inputs[some]
        else:
            assert isinstance(layer, nn.Conv2d)
            windows = windows_at(layer, inputs, places[:, some])
        solver.add(windows.double(), target[some].double())
    fitted, intercept = solver.solve(ridge)
    layer.weight.copy_(fitted.reshape(layer.weight.shape))
    if layer.bias is not None:
        layer.bias.copy_(intercept)


def windows_at(layer: nn.Conv2d, inputs: Tensor, places: Tensor) -> Tensor:
    """The inputs that a convolution reads at some places of its output: places x (channels * kernel)."""
    (height, width), (up, left) = layer.kernel_size, layer.padding
    assert not isinstance(up, str) and not isinstance(left, str)
    padded = F.pad(inputs, [left, left, up, up])
    image, row, column = places
    row, column = row * layer.stride[0], column * layer.stride[1]
    taps = [
        padded[image, :, row + i * layer.dilation[0], column + j * layer.dilation[1]]
        for i, j in itertools.product(range(height), range(width))
    ]
    return torch.stack(taps, 2).flatten(1)


class NormalEquations:
    """Normal equations of a regression in each group, accumulated in float64."""

    def __init__(self, groups: int, inputs: int, outputs: int, weight: Tensor) -> None:
        self.weight = weight
        self.count = 0
        self.sum_x = weight.new_zeros(groups, inputs)
        self.sum_y = weight.new_zeros(groups, outputs)
        self.xx = weight.new_zeros(groups, inputs, inputs)
        self.xy = weight.new_zeros(groups, inputs, outputs)

    def add(self, inputs: Tensor, target: Tensor) -> None:
        groups = len(self.weight)
        x = inputs.reshape(len(inputs), groups, -1).transpose(0, 1)
        y = target.reshape(len(target), groups, -1).transpose(0, 1)
        self.count += len(inputs)
        self.sum_x += x.sum(1)
        self.sum_y += y.sum(1)
        self.xx += x.transpose(1, 2) @ x
        self.xy += x.transpose(1, 2) @ y

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Weights (groups x outputs x inputs) and intercepts."""
        mean_x, mean_y = self.sum_x / self.count, self.sum_y / self.count
        xx = self.xx / self.count - mean_x[:, :, None] * mean_x[:, None]
        xy = self.xy / self.count - mean_x[:, :, None] * mean_y[:, None]
        before = self.weight.transpose(1, 2)
        scale = xx.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
        penalty = ridge * scale[:, None, None] * torch.eye(xx.shape[1], dtype=xx.dtype, device=xx.device)
        change = torch.linalg.solve(xx + penalty, xy - xx @ before)
        fitted = (before + change).transpose(1, 2)
        return fitted, (mean_y - (fitted @ mean_x[:, :, None]).squeeze(2)).flatten()


# Which channels are kept


@torch.no_grad()
def principal_channels(original: nn.Module, graph: ChannelGraph, lesson: Lesson) -> dict[str, Tensor]:
    """Tie -> scores of its channels: the channels that best explain all others come first.

    Greedy: next is the channel from which, with those before it, regression explains the most of the input of
    the layers that read the tie. Each channel counts as much as the weights that read it. So the first
    channels of the order are good for every width, and one order serves all cuts.
    """
    covariances: dict[str, Tensor] = {}

    def add(name: str, layer: Layer, inputs: Tensor) -> None:
        if 1 not in graph.consumers.get(f"{name}.weight", ()) or getattr(layer, "groups", 1) > 1:
            return
        rows = inputs if inputs.ndim == 2 else sample_rows(inputs, name)
        norms = (
            layer.weight.flatten(2).norm(dim=(0, 2)) if layer.weight.ndim == 4 else layer.weight.norm(dim=0)
        )
        rows = (rows - rows.mean(0)).double() * norms
        scale = rows.square().sum()
        for tie, some in values_by_tie(graph, f"{name}.weight", 1, torch.arange(rows.shape[1])).items():
            part = rows[:, some.to(rows.device)] / scale.sqrt()
            covariances[tie] = covariances.get(tie, 0) + part.T @ part

    def register(name: str, layer: Layer) -> Any:
        return layer.register_forward_pre_hook(lambda _, inputs: add(name, layer, inputs[0]))

    with hooks(original, register):
        original.eval()(lesson.images)
    return {tie: greedy_scores(covariance) for tie, covariance in covariances.items()}


def sample_rows(inputs: Tensor, name: str) -> Tensor:
    image, row, column = sample_places(inputs, PLACES, name)
    return inputs[image, :, row, column]


def greedy_scores(covariance: Tensor) -> Tensor:
    """The first chosen channel has the highest score."""
    left = covariance.clone()
    scores = torch.zeros(len(left))
    floor = 1e-9 * left.diagonal().max()
    taken = torch.zeros(len(left), dtype=torch.bool, device=left.device)
    for place in range(len(left)):
        gains = left.square().sum(0) / left.diagonal().clamp_min(floor)
        best = int(gains.masked_fill(taken, -1).argmax())
        taken[best] = True
        scores[best] = len(left) - place
        left -= left[:, best : best + 1] * left[best : best + 1] / left[best, best].clamp_min(floor)
    return scores

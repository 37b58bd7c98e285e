"""The reconstruction error (ThiNet): how much the next layers' outputs change without half of the channels.

At random entries of its output (rows), a layer sums one contribution per input channel. Channels of a tie are
removed greedily, always the one that changes the outputs of all layers that read the tie least, until half
are gone. The importance is the relative error on rows of other images. On the rows that chose the channels,
it would be too small, and the smaller the more channels there are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.batch import call_model
from ...graph.parameters import spans
from ...utils.rng import derive_seed
from ..importance import CriterionInput, LayerScores

Reader = nn.Conv2d | nn.Linear

Statistic = Callable[[int, Tensor], Tensor]
"""(tie, contributions of its channels to the rows) -> a sum over the rows."""


@dataclass(frozen=True)
class Reconstruction:
    """The error of the next layers' outputs when half of the channels are removed: one value per tie."""

    each_epoch: ClassVar[bool] = False

    images: int = 1024
    """Half of them choose the channels to remove, the others score the choice."""
    places: int = 20
    """Sampled entries of each output per image."""
    batch_size: int = 128

    @torch.no_grad()
    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        names, rng = list(inputs.graph.widths), torch.Generator()
        rng.manual_seed(derive_seed("reconstruction", inputs.seed))
        products = self._means(inputs, rng, 0, lambda tie, channels: channels.T @ channels)
        removed = {tie: _least_half(product) for tie, product in products.items()}

        def error(tie: int, channels: Tensor) -> Tensor:
            return channels[:, removed[tie]].sum(1).square().sum()

        errors = self._means(inputs, rng, 1, error)
        return [LayerScores(names[tie], names[tie], errors[tie][None]) for tie in sorted(errors)]

    def _means(
        self, inputs: CriterionInput, rng: torch.Generator, half: int, statistic: Statistic
    ) -> dict[int, Tensor]:
        """Per tie, the statistic relative to the squared outputs, as a mean over the layers that read it."""
        readers = _readers(inputs)
        columns = _columns(inputs, readers)
        sums: dict[tuple[int, str], Tensor] = {}
        outputs: dict[str, Tensor] = {}

        def add(name: str, layer: Reader, given: Tensor) -> None:
            # An output entry is the sum of the contributions of the channels: removing some leaves out
            # theirs.
            rows = _contributions(layer, given.float(), self.places, rng)
            outputs[name] = rows.sum(1).square().sum() + outputs.get(name, 0)
            for tie, channels in _by_tie(inputs, name, rows, columns).items():
                sums[tie, name] = statistic(tie, channels) + sums.get((tie, name), 0)

        def hook_of(name: str) -> Callable[..., None]:
            return lambda layer, args, kwargs: add(name, layer, (*args, *kwargs.values())[0])

        hooks = [
            layer.register_forward_pre_hook(hook_of(name), with_kwargs=True)
            for name, layer in readers.items()
        ]
        count = min(self.images, inputs.train.size)
        size = max(1, count // 2)
        try:
            for batch in inputs.batches(size, self.batch_size, start=half * (count - size)):
                call_model(inputs.model, batch.inputs)
        finally:
            for hook in hooks:
                hook.remove()
        found: dict[int, list[Tensor]] = {}
        for (tie, name), total in sums.items():
            found.setdefault(tie, []).append(total / outputs[name].clamp_min(1e-30))
        return {tie: torch.stack(relative).mean(0) for tie, relative in found.items()}


def _readers(inputs: CriterionInput) -> dict[str, Reader]:
    """Layers that sum over all channels of a free tie, so no grouped convolutions; and no layers of gates."""
    graph = inputs.graph
    layers: dict[str, Reader] = {}
    for name, module in inputs.model.named_modules():
        weight = f"{name}.weight"
        is_dense = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        sums_over_input = is_dense and 1 in graph.consumers.get(weight, ()) and weight not in graph.gates
        if sums_over_input and any(run.tie >= 0 for run in graph.layouts[weight][1]):
            layers[name] = module
    return layers


def _columns(inputs: CriterionInput, readers: dict[str, Reader]) -> dict[int, dict[int, slice]]:
    """Tie -> atom -> the columns of its channels: the same ones for every layer that reads them."""
    columns: dict[int, dict[int, slice]] = {}
    for name in readers:
        for run in inputs.graph.layouts[f"{name}.weight"][1]:
            if run.tie >= 0:
                places = columns.setdefault(run.tie, {})
                start = len(places) * run.size
                places.setdefault(run.atom, slice(start, start + run.size))
    return columns


def _by_tie(
    inputs: CriterionInput, layer: str, rows: Tensor, columns: dict[int, dict[int, slice]]
) -> dict[int, Tensor]:
    """The contributions of the channels of each tie."""
    found: dict[int, Tensor] = {}
    for run, span in spans(inputs.graph.layouts[f"{layer}.weight"][1]):
        if run.tie >= 0:
            places = columns[run.tie]
            channels = found.setdefault(run.tie, rows.new_zeros(len(rows), len(places) * run.size))
            channels[:, places[run.atom]] += rows[:, span].reshape(-1, run.size, run.inner).sum(2)
    return found


def _contributions(layer: Reader, given: Tensor, places: int, rng: torch.Generator) -> Tensor:
    """For random entries of the output (rows), what each entry of the input's channel axis contributes."""
    weight = layer.weight.detach().float()
    image = torch.arange(len(given), device=given.device).repeat(places)

    def draw(high: int) -> Tensor:
        return torch.randint(high, (len(image),), generator=rng).to(given.device)

    chosen = weight[draw(len(weight))]
    if isinstance(layer, nn.Linear):
        positions = given.reshape(len(given), -1, given.shape[-1])
        return positions[image, draw(positions.shape[1])] * chosen
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    windows = F.pad(given, _padding(layer), mode)
    # Views of all windows, of which only the drawn ones are copied.
    for axis, (kernel, dilation) in enumerate(zip(layer.kernel_size, layer.dilation, strict=True)):
        windows = windows.unfold(axis + 2, dilation * (kernel - 1) + 1, layer.stride[axis])[..., ::dilation]
    top, left = (draw(size) for size in windows.shape[2:4])
    return (windows[image, :, top, left] * chosen).sum((2, 3))


def _padding(layer: nn.Conv2d) -> list[int]:
    """Left, right, top and bottom. With `same` and even kernels, the sides differ by one."""
    if not isinstance(layer.padding, str):
        top, left = layer.padding
        return [left, left, top, top]
    is_same, pairs = layer.padding == "same", zip(layer.dilation, layer.kernel_size, strict=True)
    reach = [is_same * dilation * (kernel - 1) for dilation, kernel in pairs]
    return [side for total in reversed(reach) for side in (total // 2, total - total // 2)]


def _least_half(products: Tensor) -> Tensor:
    """Which half of the channels changes the output least, greedily. `products`: of their contributions."""
    products = products.double()
    alone = products.diagonal()
    moved = torch.zeros_like(alone)
    removed = torch.zeros_like(alone, dtype=torch.bool)
    for _ in range(len(alone) // 2):
        # Removing channel j beside the set S adds p_jj + 2 sum over i in S of p_ij to the squared error, with
        # products p of the contributions: `moved` holds the sum.
        channel = int((alone + 2 * moved).masked_fill(removed, math.inf).argmin())
        moved += products[channel]
        removed[channel] = True
    return removed

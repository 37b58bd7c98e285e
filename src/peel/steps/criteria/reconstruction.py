"""The reconstruction error (ThiNet): how much the next layer's output changes without half of the channels.

At random places of its output, a layer sums one contribution per input channel. Channels are removed
greedily, always the one that changes the sum least, until half are gone. The relative error that remains is
the importance.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...graph.parameters import spans
from ...utils.rng import derive_seed
from ..importance import CriterionInput, LayerScores

Reader = nn.Conv2d | nn.Linear


@dataclass(frozen=True)
class Reconstruction:
    """The error of the next layer's output when half of the channels are removed."""

    each_epoch: ClassVar[bool] = False

    images: int = 128
    places: int = 10
    """Sampled places of the output per image."""

    @torch.no_grad()
    def measure(self, inputs: CriterionInput) -> list[LayerScores]:
        names = list(inputs.graph.widths)
        rng = torch.Generator().manual_seed(derive_seed("reconstruction", inputs.seed))
        found = []
        for name, (layer, layer_input) in self._read(inputs).items():
            contributions = _contributions(layer, layer_input, self.places, rng)
            columns: dict[int, list[Tensor]] = {}
            for run, span in spans(inputs.graph.layouts[f"{name}.weight"][1]):
                if run.tie >= 0:
                    channels = contributions[:, span].reshape(len(contributions), run.size, run.inner).sum(2)
                    columns.setdefault(run.tie, []).append(channels)
            for tie, pieces in columns.items():
                error = _error_without_half(torch.cat(pieces, 1), contributions.sum(1))
                found.append(LayerScores(names[tie], name, error[None]))
        return found

    def _read(self, inputs: CriterionInput) -> dict[str, tuple[Reader, Tensor]]:
        """The layers that read free ties, and their inputs for some training images."""
        readers = _readers(inputs)
        caught: dict[nn.Module, Tensor] = {}

        def catch(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            caught[layer] = arguments[0].detach().float()

        hooks = [layer.register_forward_pre_hook(catch) for layer in readers.values()]
        try:
            for batch in inputs.batches(self.images, self.images):
                inputs.model(batch.images)
        finally:
            for hook in hooks:
                hook.remove()
        return {name: (layer, caught[layer]) for name, layer in readers.items() if layer in caught}


def _readers(inputs: CriterionInput) -> dict[str, Reader]:
    """Layers that sum over all channels of a free tie, so no grouped convolutions."""
    layers: dict[str, Reader] = {}
    for name, module in inputs.model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            sums_over_input = 1 in inputs.graph.consumers.get(weight, ())
            if sums_over_input and any(run.tie >= 0 for run in inputs.graph.layouts[weight][1]):
                layers[name] = module
    return layers


def _contributions(layer: Reader, inputs: Tensor, places: int, rng: torch.Generator) -> Tensor:
    """For random entries of the output (rows), what each input channel contributes."""
    weight = layer.weight.detach().float()

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=rng).to(inputs.device)

    if isinstance(layer, nn.Linear):
        rows = inputs.flatten(0, -2)
        rows = rows.repeat(max(1, math.ceil(places / max(1, len(rows) // len(inputs)))), 1)
        return rows * weight[draw(len(weight), len(rows))]
    kernel, stride, dilation, padding = layer.kernel_size, layer.stride, layer.dilation, layer.padding
    if isinstance(padding, str):
        is_valid = padding == "valid"
        padding = tuple(0 if is_valid else d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    windows = F.pad(inputs, [padding[1], padding[1], padding[0], padding[0]])
    for axis in (0, 1):
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        windows = windows.unfold(axis + 2, reach, stride[axis])[..., :: dilation[axis]]
    image = torch.arange(len(inputs), device=inputs.device).repeat(places)
    top, left = (draw(size, len(image)) for size in windows.shape[2:4])
    chosen = weight[draw(len(weight), len(image))]
    return (windows[image, :, top, left] * chosen).sum((2, 3))


def _error_without_half(contributions: Tensor, output: Tensor) -> Tensor:
    """The squared contribution of the half of the channels that matters least, relative to the output."""
    products = (contributions.T @ contributions).double()
    alone = products.diagonal().clone()
    moved = torch.zeros_like(alone)
    removed = torch.zeros_like(alone, dtype=torch.bool)
    error = torch.zeros((), dtype=torch.float64, device=contributions.device)
    for _ in range(len(alone) // 2):
        change = (alone + 2 * moved).masked_fill(removed, math.inf)
        channel = int(change.argmin())
        error = error + change[channel]
        moved += products[channel]
        removed[channel] = True
    return (error / output.double().square().sum().clamp_min(1e-30)).clamp_min(0).float()

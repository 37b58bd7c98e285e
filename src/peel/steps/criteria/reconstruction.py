"""The reconstruction error (ThiNet): how far the output of the next layer moves when half of a tie's channels are taken away.

Each layer that reads a tie is sampled at random places of its output; there the output is a sum of one part per input channel. Channels
are taken away greedily, always the one that moves the sum least, until half are gone; the importance of the tie is the relative error
that remains, averaged over the layers that read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.augmentation import EVAL
from ...errors import ConfigError
from ...utils.rng import derive_seed, epoch_order
from ..importance import CriterionInput, LayerScores

__all__ = ["Reconstruction"]


@dataclass(frozen=True)
class Reconstruction:
    images: int = 128
    places: int = 10
    """Places of the output looked at in each image."""

    def __post_init__(self) -> None:
        if self.images < 1 or self.places < 1:
            raise ConfigError(
                f"the reconstruction criterion needs at least one image and one place, not {self.images} and {self.places}."
            )

    @torch.no_grad()
    def measure(self, subject: CriterionInput) -> list[LayerScores]:
        readers = _readers(subject)
        inputs = self._inputs(subject, readers)
        names = list(subject.graph.widths)
        chance = torch.Generator().manual_seed(derive_seed("reconstruction", subject.seed))
        found = []
        for name, layer in readers.items():
            if name not in inputs:
                continue
            parts = _parts(layer, inputs[name], self.places, chance)
            offset = 0
            columns: dict[int, list[Tensor]] = {}
            for run in subject.graph.layouts[f"{name}.weight"][1]:
                if run.tie >= 0:
                    stretch = parts[:, offset : offset + run.length]
                    columns.setdefault(run.tie, []).append(
                        stretch.reshape(len(stretch), run.size, run.inner).sum(2)
                    )
                offset += run.length
            for tie, pieces in columns.items():
                found.append(
                    LayerScores(
                        names[tie], name, _error_without_half(torch.cat(pieces, 1), parts.sum(1))[None]
                    )
                )
        return found

    def _inputs(
        self, subject: CriterionInput, readers: dict[str, nn.Conv2d | nn.Linear]
    ) -> dict[str, Tensor]:
        """What comes into each layer, for a few training images."""
        caught: dict[str, Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, arguments, name=name: caught.update({name: arguments[0].detach().float()})
            )
            for name, layer in readers.items()
        ]
        was_training = subject.model.training
        subject.model.eval()
        try:
            order = epoch_order(subject.train.size, subject.seed, -1)[: self.images]
            for batch in subject.train.batches(
                order, self.images, EVAL, subject.engine.device, subject.engine.workers
            ):
                subject.model(batch.images)
        finally:
            for hook in hooks:
                hook.remove()
            subject.model.train(was_training)
        return caught


def _readers(subject: CriterionInput) -> dict[str, nn.Conv2d | nn.Linear]:
    """Layers that sum over channels of a free tie. Grouped convolutions read only parts of it and are left out."""
    layers: dict[str, nn.Conv2d | nn.Linear] = {}
    for name, module in subject.model.named_modules():
        weight = f"{name}.weight"
        reads = 1 in subject.graph.consumers.get(weight, ()) and any(
            run.tie >= 0 for run in subject.graph.layouts[weight][1]
        )
        if reads and (
            isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        ):
            layers[name] = module
    return layers


def _parts(layer: nn.Conv2d | nn.Linear, inputs: Tensor, places: int, chance: torch.Generator) -> Tensor:
    """For random entries of the output (rows), the part that each input channel contributes."""
    weight = layer.weight.detach().float()

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=chance).to(inputs.device)

    if isinstance(layer, nn.Linear):
        rows = inputs.flatten(0, -2)
        rows = rows.repeat(max(1, math.ceil(places / max(1, len(rows) // len(inputs)))), 1)
        return rows * weight[draw(len(weight), len(rows))]
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    padding = layer.padding
    if isinstance(padding, str):
        padding = tuple(
            0 if padding == "valid" else d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)
        )
    padded = F.pad(inputs, [padding[1], padding[1], padding[0], padding[0]])
    height, width = (
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(padded.shape[2:], kernel, stride, dilation, strict=True)
    )
    image = torch.arange(len(inputs), device=inputs.device).repeat(places)
    top, left = draw(height, len(image)) * stride[0], draw(width, len(image)) * stride[1]
    rows = top[:, None] + torch.arange(kernel[0], device=inputs.device) * dilation[0]
    columns = left[:, None] + torch.arange(kernel[1], device=inputs.device) * dilation[1]
    windows = padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    chosen = weight[draw(len(weight), len(image))].permute(0, 2, 3, 1)
    return (windows * chosen).sum((1, 2))


def _error_without_half(parts: Tensor, output: Tensor) -> Tensor:
    """The squared size of what half of the channels contributed, chosen greedily to be small, over that of the output."""
    products = (parts.T @ parts).double()
    alone = products.diagonal().clone()
    moved = torch.zeros_like(alone)
    gone = torch.zeros_like(alone, dtype=torch.bool)
    error = torch.zeros((), dtype=torch.float64, device=parts.device)
    for _ in range(len(alone) // 2):
        change = (alone + 2 * moved).masked_fill(gone, math.inf)
        channel = int(change.argmin())
        error = error + change[channel]
        moved += products[channel]
        gone[channel] = True
    return (error / output.double().square().sum().clamp_min(1e-30)).clamp_min(0).float()

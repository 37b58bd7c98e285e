"""Audio: which of four sounds is in a waveform? A network of 1-D convolutions.

Class numbers as targets: loss (cross entropy) and metric (top-1) need no code.
"""

import argparse
import itertools
import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import peel

SOUNDS = ("tone", "rising", "falling", "pulses")
LENGTH = 2048


def waveforms(count: int, seed: int) -> TensorDataset:
    """Sounds of random pitch and phase in noise: count x 1 x LENGTH, and the number of each sound."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SOUNDS), (count,), generator=rng)
    pitch, phase = (torch.rand(count, 1, generator=rng) for _ in range(2))
    time = torch.linspace(0, 1, LENGTH)
    slope = torch.tensor([0.0, 60.0, -60.0, 0.0])[labels][:, None]
    wave = torch.sin(2 * math.pi * ((100 + 60 * pitch) * time + slope * time**2 + phase))
    is_on = (12 * time + phase) % 1 < 0.4
    wave = torch.where((labels == SOUNDS.index("pulses"))[:, None], wave * is_on, wave)
    wave = wave + 3 * torch.randn(count, LENGTH, generator=rng)
    return TensorDataset(wave[:, None], labels)


class SoundNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        sizes = [1, width, 2 * width, 4 * width, 4 * width]
        for inputs, outputs in itertools.pairwise(sizes):
            convolution = nn.Conv1d(inputs, outputs, 9, stride=4, padding=4, bias=False)
            layers += [convolution, nn.BatchNorm1d(outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(sizes[-1], len(SOUNDS))

    def forward(self, wave: Tensor) -> Tensor:
        return self.classifier(self.features(wave).mean(2))


def main(samples: int = 4000, epochs: int = 10, output: str | None = None) -> peel.Result:
    return peel.prune(
        SoundNet(),
        (
            DataLoader(waveforms(samples, seed=0), 64, shuffle=True),
            DataLoader(waveforms(samples // 4, seed=1), 256),
        ),
        weights="train",  # the model is not trained yet; leave this out for one that is
        budget="30%",
        train={"epochs": epochs, "lr": 0.05},
        output=output,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output")
    for row in main(**vars(parser.parse_args())).rows:
        print(f"{row.name:10} top-1 {row.top1:.2%}, {row.macs / 1e3:8.0f} k multiply-adds")

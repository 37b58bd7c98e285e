"""Repair against recalibration on few images: is the repair ever worse, and says nothing?

    python benchmarks/repair_images.py                 all, about 10 minutes on one core
    python benchmarks/repair_images.py --half choose   the networks that the rule was chosen on

Fifty small networks of ten families learn the digits of scikit-learn. Each is cut to 50 and 30 % of its MACs
(uniform widths, inherited weights, channels by `explain_scores`), repaired and recalibrated on 1, 4, 16, 64
and 512 training images. The error of a network is the mean square difference of its logits to those of the
original on images that nobody has seen, over their variance. A cell counts as worse if the difference is more
than two standard errors of the pairs. Results are in results/repair_images.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from peel.data.datasets import load_data

RESULTS = Path(__file__).parent / "results" / "repair_images.jsonl"
BUDGETS, COUNTS = ("50%", "30%"), (1, 4, 16, 64, 512)
VARIANTS, TRAINED, EPOCHS, BATCH = 5, 1024, 8, 64


def conv(inputs: int, outputs: int, norm: str, **options: Any) -> nn.Sequential:
    """A convolution, a norm layer and an activation."""
    options = {"padding": 1, "bias": norm == "none", **options}
    norms: dict[str, Callable[[], nn.Module]] = {
        "batch": lambda: nn.BatchNorm2d(outputs),
        "group": lambda: nn.GroupNorm(4, outputs),
        "layer": lambda: LayerNorm(outputs),
        "none": nn.Identity,
    }
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, **options), norms[norm](), nn.ReLU())


class LayerNorm(nn.Module):
    """Over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class Head(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def plain(norm: str, width: int, depth: int) -> nn.Module:
    layers = [conv(width, width * (2 if i == depth - 1 else 1), norm) for i in range(depth)]
    return nn.Sequential(conv(1, width, norm), nn.MaxPool2d(2), *layers, Head(2 * width))


class Residual(nn.Module):
    def __init__(self, width: int, depth: int, gate: bool = False) -> None:
        super().__init__()
        self.stem, self.head = conv(1, width, "batch"), Head(width)
        self.first = nn.ModuleList(conv(width, width, "batch") for _ in range(depth))
        self.second = nn.ModuleList(conv(width, width, "batch")[:2] for _ in range(depth))
        self.gates = nn.ModuleList(Gate(width) if gate else nn.Identity() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        for first, second, gate in zip(self.first, self.second, self.gates, strict=True):
            x = F.relu(x + gate(second(first(x))))
        return self.head(x)


class Gate(nn.Module):
    """Squeeze-excite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = (
            nn.Conv2d(width, max(4, width // 4), 1),
            nn.Conv2d(max(4, width // 4), width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


def grouped(width: int, depth: int) -> nn.Module:
    """Dense and grouped or depthwise layers in turn."""
    groups = 4 if depth % 2 else width
    layers = [
        nn.Sequential(conv(width, width, "batch", groups=groups), conv(width, width, "batch"))
        for _ in range(depth)
    ]
    return nn.Sequential(conv(1, width, "batch"), nn.MaxPool2d(2), *layers, Head(width))


class Transposed(nn.Module):
    """Down and up again."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.Sequential(conv(1, width, "batch"), conv(width, 2 * width, "batch", stride=2))
        self.middle = nn.Sequential(*(conv(2 * width, 2 * width, "batch") for _ in range(depth - 1)))
        norm = nn.BatchNorm2d(width) if depth % 2 else nn.Identity()
        self.up = nn.Sequential(nn.ConvTranspose2d(2 * width, width, 2, 2), norm, nn.ReLU())
        self.last, self.head = conv(width, width, "batch"), Head(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.up(self.middle(self.down(x)))))


class Shared(nn.Module):
    """A layer that is called several times, with one norm, or one for each call."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem, self.head = conv(1, width, "batch"), Head(width)
        self.layer = nn.Conv2d(width, width, 3, padding=1, bias=False)
        norm = nn.BatchNorm2d(width)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) if depth % 2 else norm for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        for norm in self.norms:
            x = F.relu(norm(self.layer(x)))
        return self.head(x)


class Concatenated(nn.Module):
    """Norms in front of the layers, as in DenseNet."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * (1 + i) for i in range(depth + 1)]
        self.stem, self.head = conv(1, width, "batch"), Head(sizes[-1])
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(size), nn.ReLU(), nn.Conv2d(size, width, 3, padding=1, bias=False))
            for size in sizes[:-1]
        )
        self.norm = nn.BatchNorm2d(sizes[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(F.relu(self.norm(x)))


FAMILIES: dict[str, Callable[[int, int], nn.Module]] = {
    "batch norm": lambda width, depth: plain("batch", width, depth),
    "group norm": lambda width, depth: plain("group", width, depth),
    "layer norm": lambda width, depth: plain("layer", width, depth),
    "no norm": lambda width, depth: plain("none", width, depth),
    "residual": Residual,
    "squeeze-excite": lambda width, depth: Residual(width, depth, gate=True),
    "grouped": grouped,
    "transposed": Transposed,
    "shared": Shared,
    "concatenated": Concatenated,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--half", choices=["choose", "confirm"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with options.output.open("w") as file:
        for row in measure_all(options.half):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    print_summary(rows)


def measure_all(half: str | None) -> Iterator[dict[str, Any]]:
    for number, family in enumerate(FAMILIES):
        for variant in range(VARIANTS):
            own_half = "choose" if (number + variant) % 2 else "confirm"
            if half in (None, own_half):
                began = time.perf_counter()
                yield from measure(family, variant, own_half)
                print(f"{family} {variant}: {time.perf_counter() - began:.1f} s", flush=True)


def digits() -> tuple[Tensor, Tensor]:
    train = load_data("digits").train
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))
    return train.pixels[..., :1].movedim(3, 1).float()[order] / 128 - 1, train.labels[order]


def trained(family: str, variant: int) -> nn.Module:
    torch.manual_seed(variant)
    network = FAMILIES[family](16 + 4 * variant, 2 + variant % 3)
    images, labels = digits()
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(EPOCHS):
        for index in torch.randperm(TRAINED).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(network(images[index]), labels[index]).backward()
            optimizer.step()
    return network.eval()


def measure(family: str, variant: int, half: str) -> Iterator[dict[str, Any]]:
    """A row for each budget and number of images."""
    network, (images, labels) = trained(family, variant), digits()
    judged = images[TRAINED:]
    graph = peel.trace(network, images[:1])
    with torch.no_grad():
        wanted = network(judged)
    accuracy = float((wanted.argmax(1) == labels[TRAINED:]).float().mean())

    def errors(model: nn.Module) -> Tensor:
        """For each image."""
        with torch.no_grad():
            return (model.eval()(judged) - wanted).square().mean(1) / wanted.var()

    for count in COUNTS:
        some = draw(images, variant, count)
        scores = peel.explain_scores(network, graph, some)
        for budget in BUDGETS:
            widths = peel.uniform(graph, budget, divisor=1)
            cut = peel.slim(network, widths, graph=graph, weights="inherit", scores=scores)
            recalibrated, repaired = copy.deepcopy(cut), copy.deepcopy(cut)
            peel.recalibrate(recalibrated, some)
            report = peel.repair(repaired, network, some, graph=graph)
            found = {"cut": errors(cut), "recalibrated": errors(recalibrated), "repaired": errors(repaired)}
            yield {
                "family": family,
                "variant": variant,
                "half": half,
                "top1": round(accuracy, 4),
                "budget": budget,
                "images": count,
                **{name: float(f"{float(error.mean()):.4g}") for name, error in found.items()},
                **{
                    f"t_{name}": round(t_value(found["repaired"] - found[name]), 2)
                    for name in found
                    if name != "repaired"
                },
                "notes": list(getattr(report, "notes", ())),
            }


def draw(images: Tensor, seed: int, count: int) -> Tensor:
    order = torch.randperm(TRAINED, generator=torch.Generator().manual_seed(seed))
    return images[order[:count]]


def t_value(differences: Tensor) -> float:
    """How many standard errors the mean is above zero."""
    spread = float(differences.std()) / math.sqrt(len(differences))
    return float(differences.mean()) / max(spread, 1e-12)


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Errors are geometric means over the cells."""
    for count in COUNTS:
        some = [row for row in rows if row["images"] == count]
        if not some:
            continue
        by_recalibrated, by_cut = (_mean_ratio(some, name) for name in ("recalibrated", "cut"))
        worse = [row for row in some if row["t_recalibrated"] > 2]
        silent = [row for row in worse if not row["notes"]]
        noted = sum(bool(row["notes"]) for row in some)
        print(
            f"{count} images, {len(some)} cells: error {by_recalibrated:.3f} of recalibrated, {by_cut:.3f} "
            f"of cut; worse than recalibrated in {len(worse)}, silently in {len(silent)}; {noted} with a note"
        )
        for row in silent:
            errors = f"{row['repaired']} instead of {row['recalibrated']}"
            print(f"  {row['family']} {row['variant']} at {row['budget']}: {errors}")


def _mean_ratio(rows: list[dict[str, Any]], name: str) -> float:
    tiny = 1e-9
    return math.exp(statistics.fmean(math.log((row["repaired"] + tiny) / (row[name] + tiny)) for row in rows))


if __name__ == "__main__":
    main()

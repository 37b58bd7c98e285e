"""Are fewer images enough for a repair and for sensitivity? Against the spread of three draws of more images.

    python -m experiments.fewer_images --data FOLDER --originals runs/peel_on_trained/original-0 ...

The originals are the run folders of `experiments.peel_on_trained`, `--data` is its folder. A run of ResNet-50
at 224 pixels repairs with the 296 images that one pass holds, instead of 1,024. `measure_sensitivity`
compares outputs on 64 images, instead of 256. Both are done here with three draws of images each: top-1 on
the test images after the repair at half of the MACs; of sensitivity also how far the widths differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import peel
from peel.data.augmentation import EVAL
from peel.data.datasets import Split, load_data
from peel.repair import sensitivity as module

RESULTS = Path(__file__).parent / "results" / "fewer_images.jsonl"
DRAWS, REPAIR_IMAGES, SENSITIVITY_IMAGES = 3, (296, 1024), (64, 256)
CPU = torch.device("cpu")


def draw(split: Split, count: int, seed: int) -> Tensor:
    order = torch.randperm(split.size, generator=torch.Generator().manual_seed(seed))[:count]
    return torch.cat([batch.inputs for batch in split.batches(order, 128, EVAL, CPU)]).contiguous()


@torch.no_grad()
def top1(net: nn.Module, split: Split) -> float:
    batches = split.batches(torch.arange(split.size), 500, EVAL, CPU)
    right = sum(int((net.eval()(batch.inputs).argmax(1) == batch.targets).sum()) for batch in batches)
    return round(100 * right / split.size, 2)


def repaired(net: nn.Module, graph: peel.ChannelGraph, images: Tensor) -> nn.Module:
    scores = peel.explain_scores(net, graph, images)
    small = peel.slim(net, peel.uniform(graph, "50%"), graph=graph, weights="inherit", scores=scores)
    peel.repair(small, net, images, graph=graph)
    return small


def by_sensitivity(
    net: nn.Module, graph: peel.ChannelGraph, images: Tensor, compared: int
) -> tuple[peel.Widths, nn.Module]:
    module.IMAGES = compared
    measured = peel.measure_sensitivity(net, graph, images)
    widths = measured.widths("50%", divisor=1)
    small = peel.slim(net, widths, graph=graph, weights="inherit", scores=measured.scores)
    peel.repair(small, net, images, graph=graph)
    return widths, small


def difference(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Mean difference of the widths of a tie, in percent."""
    return round(100 * statistics.fmean(abs(a[tie] - b[tie]) / max(a[tie], b[tie]) for tie in a), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--originals", type=Path, nargs="+", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    data = load_data(options.data)
    for folder in options.originals:
        net = peel.load(folder / "stages" / "original")
        graph = peel.trace(net, torch.zeros(1, 3, 32, 32))
        line: dict[str, Any] = {"original": folder.name, "top1": top1(net, data.test)}
        for count in REPAIR_IMAGES:
            several = (repaired(net, graph, draw(data.train, count, seed)) for seed in range(DRAWS))
            line[f"repaired_with_{count}"] = [top1(small, data.test) for small in several]
        draws = [draw(data.train, 1024, seed) for seed in range(DRAWS)]
        widths: dict[int, list[peel.Widths]] = {}
        for count in SENSITIVITY_IMAGES:
            found = [by_sensitivity(net, graph, images, count) for images in draws]
            widths[count] = [some for some, _ in found]
            line[f"sensitivity_with_{count}"] = [top1(small, data.test) for _, small in found]
        few, many = (widths[count] for count in SENSITIVITY_IMAGES)
        pairs = zip(few, many, strict=True)
        line["widths_64_against_256_percent"] = [difference(a, b) for a, b in pairs]
        line["widths_of_two_draws_of_256_percent"] = [difference(a, b) for a, b in combinations(many, 2)]
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""Are fewer images enough for a repair and for sensitivity? Against the spread of three draws of more images.

    python -m experiments.fewer_images --images cifar10.pt --work FOLDER

The networks are those of `experiments.recipes` (same `--images` and `--work`; its command `product` trains
them). A run of ResNet-50 at 224 pixels repairs with the 296 images that one pass holds, instead of 1,024.
`measure_sensitivity` compares outputs on 64 images, instead of 256. Both are done here with three draws of
images each: top-1 on the test images after the repair at half of the MACs, and how far widths differ.
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
from peel.surgery import sensitivity as module

from .recipes import Images, judge, load_images, original

RESULTS = Path(__file__).parent / "results" / "fewer_images.jsonl"
NETWORKS, SEED, DRAWS = ("mobile", "gated"), 2, 3
REPAIR_IMAGES, SENSITIVITY_IMAGES = (296, 1024), (64, 256)


def draw(data: Images, count: int, seed: int) -> Tensor:
    some = data.first(count, 100 + seed)
    return some.inputs(torch.arange(count)).contiguous()


def repaired_top1(net: nn.Module, graph: peel.ChannelGraph, images: Tensor, test: Images) -> float:
    scores = peel.explain_scores(net, graph, images)
    widths = peel.uniform(graph, "50%")
    small = peel.slim(net, widths, graph=graph, weights="inherit", scores=scores)
    peel.repair(small, net, images, graph=graph)
    return judge(small, test)[0]


def sensitive_widths(net: nn.Module, graph: peel.ChannelGraph, images: Tensor, compared: int) -> peel.Widths:
    module.IMAGES = compared
    return peel.measure_sensitivity(net, graph, images).widths("50%", divisor=1)


def difference(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Mean difference of the widths of a tie, in percent."""
    return 100 * statistics.fmean(abs(a[tie] - b[tie]) / max(a[tie], b[tie]) for tie in a)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=Path("cifar10.pt"))
    parser.add_argument("--work", type=Path, default=Path("recipes"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    data, test = load_images(options)
    for name in NETWORKS:
        net = original(name, SEED, data, options.work)
        graph = peel.trace(net, torch.zeros(1, 3, 32, 32))
        line: dict[str, Any] = {"network": name, "original": judge(net, test)[0]}
        for count in REPAIR_IMAGES:
            line[f"repaired_with_{count}"] = [
                repaired_top1(net, graph, draw(data, count, seed), test) for seed in range(DRAWS)
            ]
        draws = [draw(data, 1024, seed) for seed in range(DRAWS)]
        few, many = (
            [sensitive_widths(net, graph, images, count) for images in draws] for count in SENSITIVITY_IMAGES
        )
        line["widths_64_against_256_percent"] = [
            round(difference(a, b), 2) for a, b in zip(few, many, strict=True)
        ]
        line["widths_of_two_draws_of_256_percent"] = [
            round(difference(a, b), 2) for a, b in combinations(many, 2)
        ]
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()

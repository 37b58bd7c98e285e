"""Sensitivity and repair on networks of ImageNet size, side by side with another version of peel.

    git archive 9eafa0a src | tar x --one-top-level=before
    python benchmarks/repair_speed.py --before before/src/peel

Both versions run in one process, on one thread, on images of noise and fresh weights: only time counts, and
whether the widths are the same. `sensitivity` is `measure_sensitivity` on 8 images; `repair` that of a run,
after a cut to half of the MACs. The version before this change takes 1,024 images, more than fit into memory,
so that each layer costs a pass of its own: three of its passes are timed (the first layer, the middle one
and the last), and their mean stands for all of them. Results are in results/repair_speed.jsonl.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import peel

RESULTS = Path(__file__).parent / "results" / "repair_speed.jsonl"
SENSITIVITY_IMAGES, IMAGES_BEFORE, BATCH = 8, 1024, 128


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "resnet50":
        import torchvision

        return torchvision.models.resnet50().eval()
    import timm

    return timm.create_model(name).eval()


def noise(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(seed))


def other_version(folder: Path) -> ModuleType:
    """Another version of peel under another name; within the package all imports are relative."""
    parent = Path(tempfile.mkdtemp())
    shutil.copytree(folder, parent / "peel_before")
    sys.path.insert(0, str(parent))
    return importlib.import_module("peel_before")


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def sensitivity(version: ModuleType, name: str) -> tuple[float, dict[str, int]]:
    model, images = network(name), noise(SENSITIVITY_IMAGES)
    graph = version.trace(model, images[:1])
    seconds, found = timed(lambda: version.measure_sensitivity(model, graph, images))
    return seconds, dict(found.widths("50%"))


def repair_now(name: str) -> tuple[float, dict[str, int]]:
    from peel.repair.repair import Repairer, images_at_once

    model = network(name)
    graph = peel.trace(model, noise(1))
    count = min(IMAGES_BEFORE, images_at_once(model, graph))
    small = peel.slim(model, peel.uniform(graph, "50%"), graph=graph, weights="inherit")
    images = [(batch, None) for batch in noise(count).split(BATCH)]
    seconds, report = timed(lambda: Repairer(model, images, graph).repair(small))
    return seconds, {"images": report.images, "layers": len(report.errors)}


def repair_before(version: ModuleType, name: str) -> tuple[float, dict[str, int]]:
    module = importlib.import_module(f"{version.__name__}.repair.repair")
    model = network(name)
    graph = version.trace(model, noise(1))
    small = version.slim(model, version.uniform(graph, "50%"), graph=graph, weights="inherit")
    images = [(batch, None) for batch in noise(IMAGES_BEFORE).split(BATCH)]
    all_sites, found = module._Refit._sites, {}

    def some_sites(self: Any, is_cut: Any) -> list[str]:
        found["sites"] = sites = all_sites(self, is_cut)
        found["began"] = time.perf_counter()
        return [sites[0], sites[len(sites) // 2], sites[-1]]

    module._Refit._sites = some_sites
    try:
        seconds, _ = timed(lambda: module.Repairer(model, images, graph).repair(small))
        passes = time.perf_counter() - found["began"]
    finally:
        module._Refit._sites = all_sites
    count = len(found["sites"])
    return seconds - passes + passes * count / 3, {"images": IMAGES_BEFORE, "layers": count}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the folder of the other peel package")
    parser.add_argument("--commit", default="9eafa0a", help="what it is, for the record")
    parser.add_argument("--networks", nargs="+", default=["resnet50", "efficientnet_lite0"])
    parser.add_argument("--parts", nargs="+", default=["sensitivity", "repair"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = other_version(options.before)
    for name in options.networks:
        for part in options.parts:
            is_repair = part == "repair"
            new = repair_now(name) if is_repair else sensitivity(peel, name)
            old = repair_before(before, name) if is_repair else sensitivity(before, name)
            row: dict[str, Any] = {
                "network": name,
                "part": part,
                "before": options.commit,
                "ratio": round(old[0] / new[0], 2),
            }
            if is_repair:
                row |= {"now": new[1], "then": old[1]}
            else:
                row["ties_with_other_widths"] = sum(old[1][tie] != width for tie, width in new[1].items())
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, f"{old[0]:.0f} s before, {new[0]:.0f} s now", flush=True)


if __name__ == "__main__":
    main()

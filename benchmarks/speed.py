"""Speed of tracing, costing and slimming, as ratios measured side by side in one process.

    python benchmarks/speed.py            about five minutes on two cores
    python benchmarks/speed.py --peer     also Torch-Pruning (pip install torch-pruning==1.6.1)

1. Time that the analysis adds to `torch.export` (aim: at most 40 %).
2. Width assignments costed per second on one core (aim: 10,000), and the ratio to building and counting
   networks (aim: 1,000).
3. `slim` of ResNet-50 (aim: 0.5 s).
4. Reaching 50 % of the MACs: peel (trace, uniform, slim) against Torch-Pruning's iterative pruning.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import peel
from peel import zoo
from peel.cost.count import count_macs
from peel.graph.capture import capture

NETWORKS = ["resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121"]


def seconds(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def analysis(example: torch.Tensor) -> None:
    # `trace` turns garbage collection off, so the export is timed without it too.
    print("1. analysis over torch.export (medians of 5, interleaved, without garbage collection)")
    for name in NETWORKS:
        model = zoo.create(name).eval()
        peel.trace(model, example)
        exports, traces = [], []
        for _ in range(5):
            gc.collect()
            gc.disable()
            exports.append(seconds(lambda model=model: capture(model, example), 1))
            gc.enable()
            gc.collect()
            traces.append(seconds(lambda model=model: peel.trace(model, example), 1))
        export, whole = statistics.median(exports), statistics.median(traces)
        added = (whole - export) / export
        print(f"   {name:18} export {export:5.2f} s   trace {whole:5.2f} s   added {added:+.0%}")


def costing(example: torch.Tensor) -> None:
    torch.set_num_threads(1)
    model = zoo.create("resnet50").eval()
    graph = peel.trace(model, example)
    rows = np.random.default_rng(0).integers(8, 512, size=(20_000, len(graph.widths)))
    units = np.ascontiguousarray(rows.T)  # every step is 1
    batched = len(rows) / seconds(lambda: graph.mac_cost.total(units), 5)
    widths = dict(zip(graph.widths, map(int, rows[0]), strict=True))
    single = 1 / seconds(lambda: [graph.macs(widths) for _ in range(200)], 5) * 200

    def build_and_count() -> None:
        count_macs(peel.slim(model, peel.uniform(graph, "50%"), graph=graph).eval(), (example,), {})

    built = 1 / seconds(build_and_count, 3)
    print("2. width assignments of ResNet-50 costed per second, one core")
    print(f"   batched {batched:,.0f}   one by one {single:,.0f}", end="   ")
    print(f"built and counted {built:.1f}   ratio {batched / built:,.0f}")
    torch.set_num_threads(2)


def surgery(example: torch.Tensor) -> None:
    model = zoo.create("resnet50").eval()
    graph = peel.trace(model, example)
    widths = peel.uniform(graph, "50%")
    print("3. slim(ResNet-50) at 50 % of the MACs")
    for weights in ("fresh", "inherit"):
        took = seconds(lambda weights=weights: peel.slim(model, widths, graph=graph, weights=weights), 5)
        print(f"   {weights:8} {took:.2f} s")


def to_budget(example: torch.Tensor, peer: bool) -> None:
    print("4. reaching 50 % of the MACs, keeping the channels of largest norm")
    for name in NETWORKS:
        model = zoo.create(name).eval()

        def ours(model: torch.nn.Module = model) -> torch.nn.Module:
            graph = peel.trace(model, example)
            return peel.slim(model, peel.uniform(graph, "50%"), graph=graph, weights="inherit")

        before = count_macs(model, (example,), {})
        small = ours()
        took = seconds(ours, 3)
        share = count_macs(small.eval(), (example,), {}) / before
        line = f"   {name:18} peel {took:6.2f} s ({share:.3%})"
        if peer:
            peer_took, peer_share = torch_pruning_to(model, example, before)
            line += f"   Torch-Pruning {peer_took:6.2f} s ({peer_share:.3%})   ratio {peer_took / took:.1f}"
        print(line)


def torch_pruning_to(model: torch.nn.Module, example: torch.Tensor, before: int) -> tuple[float, float]:
    """Seconds and remaining MACs of Torch-Pruning: small steps until it counts half of the MACs."""
    import copy

    import torch_pruning as tp

    model = copy.deepcopy(model)
    ignored = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1000]
    began = time.perf_counter()
    pruner = tp.pruner.MagnitudePruner(
        model,
        example,
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        iterative_steps=50,
        ignored_layers=ignored,
    )
    base, _ = tp.utils.count_ops_and_params(model, example)
    for _ in range(50):
        pruner.step()
        if tp.utils.count_ops_and_params(model, example)[0] <= base / 2:
            break
    took = time.perf_counter() - began
    return took, count_macs(model.eval(), (example,), {}) / before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="store_true", help="also time Torch-Pruning")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    example = torch.randn(1, 3, 224, 224)
    analysis(example)
    costing(example)
    surgery(example)
    to_budget(example, options.peer)


if __name__ == "__main__":
    main()

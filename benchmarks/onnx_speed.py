"""How much faster networks at 50 % of the MACs are in ONNX Runtime, by the divisor of their widths.

    pip install "peel-pruning[deploy]"
    python benchmarks/onnx_speed.py [NETWORK ...] [--divisors 1 auto 8] [--budget 50%]

One thread, one image of 224 pixels, timed by `peel.bench`: networks interleaved in one process, medians. The
last column is the speed-up over the reduction of MACs.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import peel
from peel import zoo

NETWORKS = ["mobilenet_v2", "resnet18", "resnet50", "efficientnet_b0", "mobilenet_v3_small"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--divisors", nargs="+", default=["1", "auto"])
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each network")
    options = parser.parse_args()
    torch.manual_seed(0)
    example = torch.randn(1, 3, 224, 224)
    print("| network | divisor | MACs | reduction | speed-up | 95 % interval | speed-up / reduction |")
    print("|---|---|---|---|---|---|---|")
    for name in options.networks:
        model = zoo.create(name).eval()
        graph = peel.trace(model, example)
        networks: dict[str, nn.Module] = {"original": model}
        for divisor in options.divisors:
            number = divisor if divisor == "auto" else int(divisor)
            widths = peel.uniform(graph, options.budget, divisor=number)
            networks[divisor] = peel.slim(model, widths, graph=graph)
        result = peel.bench(networks, example, threads=1, backends=["onnxruntime"], seconds=options.seconds)
        for entry in result.entries[1:]:
            speed = entry.speedup
            cells = [name, entry.network, f"{entry.macs:,}", f"{entry.mac_reduction:.2f}"]
            cells += [
                f"{speed.median:.2f}",
                f"{speed.low:.2f} to {speed.high:.2f}",
                f"{entry.efficiency:.2f}",
            ]
            print("|", " | ".join(cells), "|", flush=True)
        for note in result.notes:
            print(f"note: {name}: {note}", flush=True)


if __name__ == "__main__":
    main()

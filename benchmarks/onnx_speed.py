"""How much faster networks at 50 % of the MACs are in ONNX Runtime, by the divisor of their widths.

    pip install onnx onnxruntime onnxscript
    python benchmarks/onnx_speed.py [NETWORK ...] [--divisors 1 auto 8] [--budget 50%]

One thread, one image of 224 pixels. The sessions run interleaved in one process, and each time is the median
over the rounds. The last column is the speed-up over the reduction of MACs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

import peel
from peel import zoo

NETWORKS = ["mobilenet_v2", "resnet18", "resnet50", "efficientnet_b0", "mobilenet_v3_small"]


def session(model: nn.Module, example: torch.Tensor, folder: Path) -> Any:
    file = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), (example,), file, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def medians(sessions: dict[str, Any], example: torch.Tensor, rounds: int) -> dict[str, float]:
    """Name -> median seconds of one image. In every round each session runs several times in a row."""
    image = example.numpy().astype(np.float32)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(rounds + 3):
        for name, one in sessions.items():
            feed = {one.get_inputs()[0].name: image}
            one.run(None, feed)  # warms the caches for this network
            for _ in range(3):
                began = time.perf_counter()
                one.run(None, feed)
                if number >= 3:
                    times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--divisors", nargs="+", default=["1", "auto"])
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    example = torch.randn(1, 3, 224, 224)
    print("| network | divisor | MACs | reduction | speed-up | speed-up / reduction |")
    print("|---|---|---|---|---|---|")
    for name in options.networks:
        model = zoo.create(name).eval()
        graph = peel.trace(model, example)
        with tempfile.TemporaryDirectory() as folder:
            sessions = {"original": session(model, example, Path(folder))}
            macs = {"original": graph.macs()}
            for divisor in options.divisors:
                number = divisor if divisor == "auto" else int(divisor)
                widths = peel.uniform(graph, options.budget, divisor=number)
                macs[divisor] = graph.macs(widths)
                sessions[divisor] = session(peel.slim(model, widths, graph=graph), example, Path(folder))
            seconds = medians(sessions, example, options.rounds)
        for divisor in options.divisors:
            reduction = macs["original"] / macs[divisor]
            faster = seconds["original"] / seconds[divisor]
            cells = [name, divisor, f"{macs[divisor]:,}", f"{reduction:.2f}", f"{faster:.2f}"]
            print("|", " | ".join([*cells, f"{faster / reduction:.2f}"]), "|", flush=True)


if __name__ == "__main__":
    main()

"""Latency in ONNX Runtime of the networks of `finetune`: batch 1, one thread, interleaved with the original.

A latency depends on widths and not on weights, so networks of the same widths are timed once.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import peel
from peel.deploy.bench import bench
from peel.utils.fingerprint import fingerprint

from ..allocation.results import Line, read, write
from .networks import NETWORKS, graph_of, latency_path

#: Networks that are interleaved with their original at a time.
TOGETHER = 6

ORIGINAL = "original"

#: Of timing for each network of a latency model.
SECONDS = 0.3


def latency(trained: Path, results: Path, networks: Sequence[str], seconds: float) -> None:
    """Time what is missing in the results."""
    lines = [line for line in read(trained) if "widths" in line]
    for name in networks:
        known = {line["architecture"] for line in read(results) if line["network"] == name}
        wanted = {architecture(line): line["widths"] for line in lines if line["network"] == name}
        missing = [item for item in wanted.items() if item[0] not in known]
        for first in range(0, len(missing), TOGETHER):
            for line in measure(name, dict(missing[first : first + TOGETHER]), seconds):
                write(results, line)
                print(f"{name} {line['architecture']}: {line['milliseconds']:.3f} ms", flush=True)


def latency_models(networks: Sequence[str]) -> None:
    """Measure the latency models that are missing. They take minutes, on an idle machine."""
    for name in networks:
        if not latency_path(name).exists():
            model, example = NETWORKS[name]().eval(), torch.zeros(1, 3, 32, 32)
            found = peel.measure_latency(
                model, example, graph=graph_of(name), backend="onnxruntime", threads=1, seconds=SECONDS
            )
            found.save(latency_path(name))
            print(f"{name}: error {found.accuracy.median:.1%}, p95 {found.accuracy.p95:.1%}", flush=True)


def architecture(line: Line) -> str:
    """The same for networks of the same widths."""
    return fingerprint([json.dumps(line["widths"], sort_keys=True)])


def measure(name: str, several: dict[str, dict[str, int]], seconds: float) -> Iterator[dict[str, Any]]:
    """A line for each network, timed together with the original."""
    model, graph = NETWORKS[name]().eval(), graph_of(name)
    networks = {ORIGINAL: model}
    networks |= {key: peel.slim(model, widths, graph=graph).eval() for key, widths in several.items()}
    example = torch.zeros(1, 3, 32, 32)
    result = bench(networks, example, batch=1, threads=1, backends=["onnxruntime"], seconds=seconds)
    entries = {entry.network: entry for entry in result.entries}
    for key in several:
        entry = entries[key]
        assert entry.speedup is not None
        yield {
            "network": name,
            "architecture": key,
            "milliseconds": 1000 * entry.seconds.median,
            "original_milliseconds": 1000 * entries[ORIGINAL].seconds.median,
            "speedup": entry.speedup.median,
            "low": entry.speedup.low,
            "high": entry.speedup.high,
            "macs": entry.macs,
            "conditions": dict(result.conditions),
            "notes": list(result.notes),
        }
    gc.collect()

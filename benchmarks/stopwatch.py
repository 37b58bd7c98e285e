"""Timing on a device, with and without kernel launches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def replayed(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step as a replayed CUDA graph, without the time of kernel launches; unchanged on a CPU."""
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(function: Callable[[], None], warm: int, steps: int, device: torch.device) -> float:
    """Seconds per call, after `warm` calls."""
    for _ in range(warm):
        function()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        function()
    synchronize(device)
    return (time.perf_counter() - began) / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

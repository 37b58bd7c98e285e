"""Seconds of work on a device, and work without the cost of launching it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def replayed(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step recorded as a CUDA graph, so that launches do not count; on a CPU, as it is."""
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
    """Seconds per call."""
    for _ in range(warm):
        function()
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        function()
    wait(device)
    return (time.perf_counter() - began) / steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

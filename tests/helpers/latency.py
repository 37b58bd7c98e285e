"""A planted latency in the place of a stopwatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from torch import nn

import peel
from peel.deploy.latency import design, measure_latency

#: Kernels compute blocks of this many channels.
STEP = 16


def planted(
    graph: peel.ChannelGraph, *, step: int = STEP, fixed: float = 2e5
) -> Callable[[Mapping[str, int]], float]:
    """Nanoseconds as on a simple machine: layers are bound by arithmetic or memory, and work in blocks."""

    def latency(widths: Mapping[str, int]) -> float:
        units, total = graph.units(widths), fixed
        for term in graph.mac_cost.terms:
            channels = [-(-form.value(units) // step) * step for form in term.factors]
            arithmetic = term.coefficient * prod(channels) / 50 * (1 + 20 / min(channels, default=1000))
            total += 3000 + max(arithmetic, 200 * sum(channels))
        for activation in graph.activation_cost.activations:
            total += activation.element_bytes * prod(form.value(units) for form in activation.forms) / 20
        return total

    return latency


def planted_model(
    graph: peel.ChannelGraph, networks: int = 64, noise: float = 0.0, **machine: Any
) -> peel.LatencyModel:
    """The latency model that is fitted to it."""
    latency, rng = planted(graph, **machine), np.random.default_rng(7)

    def measure(several: Sequence[Mapping[str, int]]) -> list[float]:
        return [latency(widths) * float(np.exp(rng.normal(0, noise))) for widths in several]

    return measure_latency(nn.Module(), None, graph=graph, networks=networks, measure=measure)


def unseen(graph: peel.ChannelGraph, count: int = 30) -> list[peel.Widths]:
    """Networks that no fit has seen."""
    return design(graph, count + 4, seed=12345)[4:]

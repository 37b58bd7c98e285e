"""`check_method`: does a method keep its promises, on every kind of network and budget?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..cost.latency import Accuracy, LatencyModel, LatencyTerm, NetworkKey
from ..data.datasets import Data
from ..errors import PeelError
from ..graph import ChannelGraph, trace
from ..methods.method import Method
from ..methods.registry import METHODS, reference_of
from ..run.config import make_config
from ..run.loading import load_all
from ..run.prune import prune
from ..run.single import Run
from ..train.task import Task
from ..utils.process_state import preserve_process_state
from .networks import Concatenating, Depthwise, Plain, Residual, SqueezeExcite

NETWORKS: Mapping[str, type[nn.Module]] = {
    "plain": Plain,
    "residual": Residual,
    "depthwise": Depthwise,
    "squeeze-excite": SqueezeExcite,
    "concatenating": Concatenating,
}

#: Name -> settings of a run.
BUDGETS: Mapping[str, dict[str, Any]] = {
    "macs": {"budget": "50%"},
    "params": {"budget": "50%", "resource": "params"},
    "memory": {"budget": "80%", "resource": "memory"},
    "latency": {"budget": "60%", "resource": "latency"},
    "several": {"budget": "macs<=60%, params<=50%"},
}

#: Training images, test images, and their side.
IMAGES, TEST_IMAGES, SIDE = 256, 64, 12


def check_method(
    method: Method,
    *,
    networks: Iterable[str] = tuple(NETWORKS),
    budgets: Iterable[str] = tuple(BUDGETS),
    solve: bool = False,
) -> None:
    """Let a method rehearse on each network with each budget; with `solve`, also answer there, twice.

    An answer must keep all limits, name all ties and have finite weights. The same seed must give the same
    answer. What fails is an AssertionError that names the network and the budget.

    >>> def test_my_method():
    ...     peel.testing.check_method(MyMethod(), solve=True)
    """
    for network in networks:
        for budget in budgets:
            try:
                _check(method, NETWORKS[network](), BUDGETS[budget], solve=solve)
            except PeelError as error:
                raise AssertionError(f"{network} network, budget of {budget}: {error}") from error


def _check(method: Method, network: nn.Module, budget: Mapping[str, Any], *, solve: bool) -> None:
    data = _data()
    graph = trace(network, data.example())
    graph = graph.with_latency(_latency_of(graph))
    short = {"epochs": 1, "batch_size": 64}
    settings = {**budget, "weights": "train", "train": short, "backbone": short, "bench_seconds": 0}
    name = next((known for known, kind in METHODS.items() if type(method) is kind), reference_of(method))
    config = make_config({**settings, "model": reference_of(network), "data": data.name, "method": name})
    with preserve_process_state():
        loaded = load_all(
            network, data, "train", config, method=method, task=Task(), graph=graph, callbacks=()
        )
        Run(loaded, None, config, "").check()
    if not solve:
        return
    plans = []
    for _ in range(2):
        result = prune(network, data, method=method, graph=graph, stages=["original", "plan"], **settings)
        assert result.plan is not None
        plans.append(result.plan)
    assert plans[0].widths == plans[1].widths, "the same seed gives other widths"


def _data() -> Data:
    """Images of two classes that a network can tell apart."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(IMAGES + TEST_IMAGES) % 2
    pixels = torch.randint(0, 128, (len(labels), SIDE, SIDE, 3), generator=rng)
    pixels[labels == 1, : SIDE // 2] += 100
    train, test = ((pixels[part].to(torch.uint8), labels[part]) for part in _parts())
    data = Data.from_tensors("patterns", tuple(map(str, range(10))), train, test, "none")
    return replace(data, name="patterns")


def _parts() -> tuple[slice, slice]:
    return slice(0, IMAGES), slice(IMAGES, None)


def _latency_of(graph: ChannelGraph) -> LatencyModel:
    """A latency that grows with the MACs of each layer, and has a constant part."""
    terms = tuple(LatencyTerm(1.0, 8, term.factors) for term in graph.mac_cost.terms if term.factors)
    return LatencyModel(
        NetworkKey.of(graph), 1000.0, terms, Accuracy(0.0, 0.0, 1), {"measured_by": "no clock"}
    )

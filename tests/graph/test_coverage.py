"""A few of the networks in docs/coverage.md. benchmarks/coverage.py checks all of them."""

from __future__ import annotations

import pytest
import torch

import peel
from helpers.graphs import traced_zoo

CORE = [
    ("mobilenet_v3_small", 96),
    ("shufflenet_v2_x0_5", 96),
    pytest.param("regnet_x_400mf", 64, marks=pytest.mark.slow),
    pytest.param("googlenet", 96, marks=pytest.mark.slow),
    ("squeezenet1_1", 96),
    ("convnext_atto", 64),
    pytest.param("res2net50_26w_4s", 64, marks=pytest.mark.slow),
    pytest.param("dpn68", 64, marks=pytest.mark.slow),
    pytest.param("ghostnet_100", 64, marks=pytest.mark.slow),
    pytest.param("skresnet18", 64, marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "size"), CORE)
def test_network_is_traced_slimmed_and_verified(name: str, size: int) -> None:
    model, graph = traced_zoo(name, size)
    x = torch.randn(1, 3, size, size)
    assert graph.free_fraction > 0.99
    small = peel.slim(model, peel.uniform(graph, "50%"), graph=graph)
    output = small.train()(torch.randn(2, 3, size, size))
    output = getattr(output, "logits", output)
    assert output.shape == (2, 1000)
    output.sum().backward()
    assert not graph.unknown_operators
    verification = peel.verify(model, x, graph=graph, seconds=240)
    assert verification.passed, str(verification)

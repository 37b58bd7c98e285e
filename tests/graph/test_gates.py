"""Layers that compute gates."""

from __future__ import annotations

import pytest

from helpers.graphs import traced_net, traced_zoo
from helpers.nets import NETS, Net

OWN = {"squeeze.weight", "squeeze.bias", "excite.weight", "excite.bias"}


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_gates_of_small_networks(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    assert graph.gates == (OWN if hasattr(net, "excite") else set())


@pytest.mark.parametrize("size", [224, 32])
def test_gates_of_a_network_with_squeeze_excite(size: int) -> None:
    """At 32 pixels the last maps are 1x1, as their gates are."""
    model, graph = traced_zoo("mobilenet_v3_small", size)
    layers = {name for name, module in model.named_modules() if type(module).__name__ == "SqueezeExcitation"}
    parameters = {name for name, _ in model.named_parameters() if name.rsplit(".", 2)[0] in layers}
    assert len(parameters) == 9 * 4
    assert graph.gates == parameters

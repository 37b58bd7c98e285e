"""Zero channels that make widths even: the same network, trained the same way."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import peel
from conftest import traced_net, traced_zoo
from nets import Chain, ChannelsLast, Depthwise, GroupNormed, Residual
from peel.graph.count import count_macs
from peel.graph.padding import pad


def train(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int = 5) -> list[float]:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    losses = []
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_mobilenet_v2"])
def test_a_padded_network_trains_as_the_network_itself(name: str) -> None:
    model, graph = traced_zoo(name, 16)
    widths = peel.uniform(graph, "40%")
    torch.manual_seed(0)
    small = peel.slim(model, widths, graph=graph).double()
    for module in small.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    padded = pad(small, graph.at(widths), 8)
    assert padded is not None
    assert all(width % 8 == 0 for width in padded.graph.widths.values())
    assert graph.macs(padded.graph.widths) == count_macs(padded.model.eval(), (torch.zeros(1, 3, 16, 16).double(),), {})
    images, labels = torch.randn(16, 3, 16, 16).double(), torch.randint(10, (16,))
    assert train(padded.model, images, labels) == pytest.approx(train(small, images, labels), rel=1e-9)
    back = padded.unpadded()
    assert {name: tuple(p.shape) for name, p in back.named_parameters()} == {name: tuple(p.shape) for name, p in small.named_parameters()}
    with torch.no_grad():
        assert torch.allclose(back.eval()(images), small.eval()(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Chain, Residual, Depthwise])
def test_padding_and_taking_it_away_gives_back_the_same_bits_and_leaves_the_network_alone(kind: type) -> None:
    net, graph = traced_net(kind)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    padded = pad(net, graph, 5)
    assert padded is not None
    back = padded.unpadded().state_dict()
    assert all(torch.equal(value, back[name]) for name, value in before.items())
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [ChannelsLast, GroupNormed])
def test_networks_that_zero_channels_would_change_are_not_padded(kind: type) -> None:
    net, graph = traced_net(kind)
    assert pad(net, graph, 7) is None


def test_nothing_is_padded_where_widths_fit_already() -> None:
    model, graph = traced_zoo("cifar_resnet20")
    assert pad(model, graph, 8) is None

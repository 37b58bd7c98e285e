"""Convolutions of a cut network that run at the shapes of the original's: the outputs stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import peel
from helpers.graphs import traced_net
from helpers.nets import NETS, Net
from peel.repair.original_shapes import PadConvolutions


def padded(small: nn.Module, net: nn.Module) -> PadConvolutions:
    """As on a GPU."""
    shapes = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    return PadConvolutions({id(parameter): shapes[name] for name, parameter in small.named_parameters()})


class Shapes(TorchFunctionMode):
    """Notes the shapes of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.Size, torch.Size]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            given = {**dict(zip(("input", "weight"), args)), **(kwargs or {})}
            self.seen.add((given["input"].shape, given["weight"].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_outputs_stay_the_same(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    half = {
        tie: max(width // 2 // graph.steps[tie], 1) * graph.steps[tie] for tie, width in graph.widths.items()
    }
    small = peel.slim(net, half, graph=graph, weights="inherit").eval()
    torch.manual_seed(0)
    inputs = [torch.randn(3, *shape[1:]) for shape in graph.input_shapes]
    with torch.no_grad():
        expected = small(*inputs)
        with padded(small, net):
            output = small(*inputs)
    for given, wanted in zip(_tensors(output), _tensors(expected)):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
        assert given.stride() == wanted.stride()


def test_all_cuts_have_the_convolutions_of_the_original() -> None:
    """Full and depthwise ones, in the channels-last format that networks on a GPU have."""
    net = peel.zoo.create("cifar_mobilenet_v2", num_classes=10).eval().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    graph = peel.trace(net, images)
    with torch.no_grad(), Shapes() as original:
        net(images)
    for budget in ("50%", "20%"):
        small = peel.slim(net, peel.uniform(graph, budget), graph=graph, weights="inherit").eval()
        with torch.no_grad(), Shapes() as shapes, padded(small, net):
            output = small(images)
        torch.testing.assert_close(output, small(images), rtol=1e-4, atol=1e-5)
        assert shapes.seen == original.seen


def _tensors(output: Any) -> list[Tensor]:
    leaves: list[Tensor] = torch.utils._pytree.tree_leaves(output)
    return leaves


def test_a_network_that_is_wider_than_the_original_runs_as_it_is() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    graph = peel.trace(net, torch.zeros(1, 3, 8, 8))
    wide = peel.slim(net, {"0": 12}, graph=graph, weights="inherit").eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad(), Shapes() as shapes, padded(wide, net):
        wide(images)
    assert {weight[0] for _, weight in shapes.seen} == {12, 4}

"""`slim`: the right channels, the user's own class, matching attributes, and an unchanged original."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import (
    NETS,
    Chain,
    Depthwise,
    Grouped,
    Net,
    NumbersThatAreNoWidths,
    Residual,
    SplitByAttribute,
)
from peel.surgery import info_of


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_full_width_with_inherited_weights_gives_the_same_outputs(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    twin = peel.slim(net, graph.widths, graph=graph, weights="inherit")
    x = torch.randn(2, *kind.shape)
    assert torch.equal(net.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("factor", [0.5, 1.25])
def test_smaller_and_larger_networks_train(kind: type[Net], factor: float) -> None:
    net, graph = traced_net(kind)
    widths = {
        name: max(1, round(width * factor / graph.steps[name])) * graph.steps[name]
        for name, width in graph.widths.items()
    }
    for weights in ("fresh", "inherit"):
        small = peel.slim(net, widths, graph=graph, weights=weights).train()
        output = small(torch.randn(4, *kind.shape))
        loss = sum(
            F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
            for logits in (output if isinstance(output, tuple) else (output,))
        )
        loss.backward()
        assert all(parameter.grad is not None for parameter in small.parameters())
        assert torch.isfinite(loss)
        assert type(small) is kind


def test_the_given_model_is_not_changed() -> None:
    net, graph = traced_net(Chain)
    before = copy.deepcopy(net.state_dict())
    attributes = {name: dict(vars(module)) for name, module in net.named_modules()}
    small = peel.slim(net, {"conv1": 3}, graph=graph, weights="inherit")
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert {name: dict(vars(module)) for name, module in net.named_modules()} == attributes
    assert not set(map(id, small.modules())) & set(map(id, net.modules()))


def test_attributes_match_the_weights() -> None:
    net, graph = traced_net(Depthwise)
    small = peel.slim(net, {"expand": 5, "squeeze": 3}, graph=graph)
    assert (
        small.expand.out_channels,
        small.depthwise.in_channels,
        small.depthwise.groups,
        small.depthwise.out_channels,
    ) == (5, 5, 5, 10)
    assert (small.squeeze.in_channels, small.squeeze.out_channels, small.fc.in_features) == (10, 3, 10)
    net, graph = traced_net(Grouped)
    small = peel.slim(net, {"reduce": 8}, graph=graph)
    assert (small.grouped.in_channels, small.grouped.groups, small.grouped.weight.shape[1]) == (8, 4, 2)
    net, graph = traced_net(SplitByAttribute)
    small = peel.slim(net, {"conv[0:4]": 3, "conv[4:12]": 5}, graph=graph)
    assert (small.sizes, small.first) == ([3, 5], 3)


def test_attributes_that_are_not_widths_stay() -> None:
    net, graph = traced_net(NumbersThatAreNoWidths)
    small = peel.slim(net, {"conv": 4, "features": 3}, graph=graph)
    assert (small.temperature, small.image_size) == (16, 8)


@pytest.mark.parametrize("name", [pytest.param("nf_regnet_b0", marks=pytest.mark.slow), "convnext_atto"])
@pytest.mark.parametrize(("weights", "factor"), [("fresh", 0.5), ("inherit", 1.25)])
def test_no_tensor_is_left_uninitialized(name: str, weights: str, factor: float) -> None:
    model, graph = traced_zoo(name, 64)
    widths = {
        tie: max(1, round(width * factor / graph.steps[tie])) * graph.steps[tie]
        for tie, width in graph.widths.items()
    }
    small = peel.slim(model, widths, graph=graph, weights=weights)
    for parameter in (*small.parameters(), *small.buffers()):
        assert torch.isfinite(parameter).all()
        assert parameter.abs().max() < 1e3
    assert torch.isfinite(small(torch.randn(1, 3, 64, 64))).all()


@pytest.mark.parametrize("groups", [1, 8, 512])
def test_fresh_convolutions_start_as_torch_s_own_fan_out_initialization(groups: int) -> None:
    """It ignores groups, and so do torchvision's networks and the published training recipes."""
    net = nn.Sequential(nn.Conv2d(3, 512, 1), nn.Conv2d(512, 512, 3, groups=groups), nn.Conv2d(512, 4, 1))
    small = peel.slim(net, {}, graph=peel.trace(net, torch.randn(1, 3, 8, 8)))
    expected = nn.init.kaiming_normal_(torch.empty_like(net[1].weight), mode="fan_out", nonlinearity="relu")
    assert float(small[1].weight.detach().std()) == pytest.approx(float(expected.std()), rel=0.05)
    assert float(expected.std()) == pytest.approx((2 / 9 / 512) ** 0.5, rel=0.05)


def test_inherit_keeps_the_channels_with_the_largest_norm_scales() -> None:
    net = Chain().eval()
    with torch.no_grad():
        net.bn.weight.copy_(torch.tensor([0.1, -3.0, 0.2, 2.0, 0.3, 1.0, 0.0, 0.4]))
    graph = peel.trace(net, torch.randn(1, 3, 8, 8))
    small = peel.slim(net, {"conv1": 3}, graph=graph, weights="inherit")
    assert torch.equal(small.conv1.weight, net.conv1.weight[[1, 3, 5]])
    assert torch.equal(small.bn.weight, net.bn.weight[[1, 3, 5]])
    assert torch.equal(small.conv2.weight, net.conv2.weight[:, [1, 3, 5]])


def test_inherit_uses_filter_norms_of_all_layers_where_there_are_no_scales() -> None:
    net = Residual().eval()
    with torch.no_grad():
        for layer in (net.stem, net.outer):
            layer.weight.fill_(0.01)
        net.stem.weight[2] = 5.0
        net.outer.weight[6] = 9.0
    graph = peel.trace(net, torch.randn(1, 3, 8, 8))
    small = peel.slim(net, {"stem": 2}, graph=graph, weights="inherit")
    assert torch.equal(small.stem.weight, net.stem.weight[[2, 6]])
    assert torch.equal(small.scale, net.scale[[2, 6]])


def test_given_scores_select_the_channels() -> None:
    net, graph = traced_net(Chain)
    small = peel.slim(
        net, {"conv2": 2}, graph=graph, weights="inherit", scores={"conv2": torch.arange(12.0) % 7}
    )
    assert torch.equal(small.conv2.weight, net.conv2.weight[[5, 6]])
    for wrong, message in (
        ({"conv9": torch.ones(3)}, "no free tie is called 'conv9'"),
        ({"conv2": torch.ones(3)}, "12 numbers"),
        ({"conv2": torch.full((12,), float("nan"))}, "finite"),
    ):
        with pytest.raises(peel.WidthsError, match=message):
            peel.slim(net, {"conv2": 2}, graph=graph, weights="inherit", scores=wrong)


def test_widening_keeps_old_channels_and_initializes_new_ones() -> None:
    net, graph = traced_net(Chain)
    large = peel.slim(net, {"conv1": 10}, graph=graph, weights="inherit")
    assert torch.equal(large.conv1.weight[:8], net.conv1.weight)
    assert torch.equal(large.conv2.weight[:, :8], net.conv2.weight)
    assert large.conv1.weight[8:].std() > 0.05
    assert large.bn.weight[8:].tolist() == [1.0, 1.0]
    assert large.bn.running_var[8:].tolist() == [1.0, 1.0]


def test_fresh_weights_are_initialized_as_in_recipes_and_follow_the_seed() -> None:
    model, graph = traced_zoo("resnet18")
    torch.manual_seed(5)
    first = peel.slim(model, graph.widths, graph=graph)
    torch.manual_seed(5)
    second = peel.slim(model, graph.widths, graph=graph)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=False))
    weight = first.layer3[0].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert not torch.equal(weight, model.layer3[0].conv2.weight)
    assert first.bn1.weight.unique().tolist() == [1.0]
    assert first.bn1.running_mean.unique().tolist() == [0.0]


def test_a_slim_model_can_be_slimmed_again() -> None:
    net, graph = traced_net(Residual)
    once = peel.slim(net, {"stem": 4, "inner": 3}, graph=graph)
    again = peel.slim(once, {"stem": 2}, graph=peel.trace(once, torch.randn(1, 3, 8, 8)))
    assert again.stem.out_channels == 2
    assert again.inner.weight.shape == (3, 2, 1, 1)
    record = info_of(again)
    assert record.source == {"class": "helpers.nets:Residual"}
    assert record.widths == {"stem": 2, "inner": 3}
    assert record.modules["inner"]["out_channels"] == 3
    assert record.costs["params"] == sum(parameter.numel() for parameter in again.parameters())
    assert info_of(net).widths == {}


def test_mode_device_dtype_and_trainability_are_kept() -> None:
    net = Chain().double().train()
    net.conv1.weight.requires_grad_(False)
    small = peel.slim(net, {"conv1": 4}, graph=peel.trace(net, torch.randn(1, 3, 8, 8, dtype=torch.double)))
    assert small.training
    assert small.conv2.weight.dtype is torch.double
    assert not small.conv1.weight.requires_grad
    assert small.conv2.weight.requires_grad


def test_a_graph_of_another_model_is_refused() -> None:
    _, graph = traced_net(Chain)
    with pytest.raises(peel.WidthsError, match="not traced from this model"):
        peel.slim(Residual(), graph.widths, graph=graph)


@pytest.mark.parametrize("weights", ["random", None])
def test_an_unknown_value_of_weights_is_refused(weights: object) -> None:
    net, graph = traced_net(Chain)
    with pytest.raises(peel.WidthsError, match="weights is one of fresh, inherit"):
        peel.slim(net, graph.widths, graph=graph, weights=weights)  # type: ignore[arg-type]


def test_tied_parameters_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.fc = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 1), nn.Linear(6, 5)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc((self.a(x) + self.b(x)).mean((2, 3)))

    model = Tied()
    graph = peel.trace(model, torch.randn(1, 3, 4, 4))
    small = peel.slim(model, {"a": 4}, graph=graph)
    assert small.a.weight is small.b.weight
    assert sum(parameter.numel() for parameter in small.parameters()) == graph.params({"a": 4})

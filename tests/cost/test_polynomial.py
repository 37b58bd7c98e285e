"""Predicted costs against counts on built models, and against the recounted networks of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import peel
from helpers.graphs import by_layer, make_divisible, scaled, traced_net, traced_zoo
from helpers.nets import NETS, Attention, Chain, Depthwise, Flattened, Net
from peel.cost.count import count_macs, plain_attention


@st.composite
def net_and_widths(draw: st.DrawFn) -> tuple[type[Net], dict[str, int]]:
    kind = draw(st.sampled_from(NETS))
    _, graph = traced_net(kind)
    widths = {
        name: step * draw(st.integers(1, 2 * width // step))
        for (name, width), step in zip(graph.widths.items(), graph.steps.values(), strict=False)
    }
    return kind, widths


@given(net_and_widths())
def test_predicted_costs_equal_counted_costs(case: tuple[type[Net], dict[str, int]]) -> None:
    kind, widths = case
    net, graph = traced_net(kind)
    small = peel.slim(net, widths, graph=graph).eval()
    assert count_macs(small, (torch.randn(1, *kind.shape),), {}) == graph.macs(widths)
    assert sum(parameter.numel() for parameter in small.parameters()) == graph.params(widths)


@pytest.mark.parametrize("kind", [Chain, Depthwise, Attention], ids=lambda kind: kind.__name__)
def test_count_macs_agrees_with_the_flop_counter_of_torch(kind: type[Net]) -> None:
    net, x = traced_net(kind)[0], torch.randn(1, *kind.shape)
    with torch.no_grad(), plain_attention(), FlopCounterMode(display=False) as counter:
        net(x)
    assert 2 * count_macs(net, (x,), {}) == counter.get_total_flops() > 0


def test_costs_worked_out_by_hand() -> None:
    _, graph = traced_net(Chain)
    # conv1: 8 filters of 3x3x3 at 8x8; conv2: 12 of 8x3x3 at 3x3; fc: 12 x 5
    assert by_layer(graph.mac_cost, graph.units()) == {"conv1": 8 * 27 * 64, "conv2": 12 * 72 * 9, "fc": 60}
    assert graph.params() == (8 * 27 + 8) + 16 + (12 * 72 + 12) + 12 + (60 + 5)
    _, graph = traced_net(Flattened)
    assert by_layer(graph.mac_cost, graph.units({"conv": 2, "hidden": 3})) == {
        "conv": 2 * 27 * 16,
        "hidden": 32 * 3,
        "fc": 15,
    }


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_costs_by_layer_and_group_add_up_to_the_total(kind: type[Net]) -> None:
    _, graph = traced_net(kind)
    for total, layers, by_group in (
        (graph.macs(), by_layer(graph.mac_cost, graph.units()), graph.macs_by_group()),
        (graph.params(), by_layer(graph.param_cost, graph.units()), graph.params_by_group()),
    ):
        assert sum(layers.values()) == total
        assert sum(by_group.values()) == total


def test_many_candidates_cost_the_same_as_one_by_one() -> None:
    _, graph = traced_zoo("mobilenet_v2")
    rows = np.random.default_rng(0).integers(100, 2000, size=(50, len(graph.widths)))
    steps = np.array(list(graph.steps.values()))
    assert graph.mac_cost.total((rows // steps).T).tolist() == [
        graph.macs(dict(zip(graph.widths, map(int, row // steps * steps), strict=True))) for row in rows
    ]


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"conv": 4}, "no tie is called 'conv'. Did you mean conv"),
        ({"conv1": 0}, "conv1: the width must be at least 1, not 0"),
        ({"conv1": -3}, "at least 1, not -3"),
        ({"conv1": 2.5}, "whole number, not 2.5"),
        ({"fc": 4}, "fc is fixed at 5 channels and cannot become 4"),
    ],
)
def test_invalid_widths_are_refused(widths: dict[str, int], message: str) -> None:
    net, graph = traced_net(Chain)
    for use in (graph.macs, graph.params, lambda w: peel.slim(net, w, graph=graph)):
        with pytest.raises(peel.WidthsError, match=message):
            use(widths)


def test_fixed_tie_may_be_given_at_its_own_width() -> None:
    _, graph = traced_net(Chain)
    assert graph.macs({"fc": 5}) == graph.macs()


# Section "FLOPs of the paper": multiply-adds of convolutions and classifier at 224x224


@pytest.mark.parametrize(
    ("name", "conv", "classifier"),
    [
        ("resnet18", 1813.56, 0.51),
        ("resnet50", 4087.14, 2.05),
        ("mobilenet_v2", 299.49, 1.28),
        ("mobilenet_v3_small", 54.90, 1.61),
        ("efficientnet_b0", 384.53, 1.28),
    ],
)
def test_networks_of_the_paper_cost_what_was_recounted(name: str, conv: float, classifier: float) -> None:
    model, graph = traced_zoo(name)
    linear = {layer for layer, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    layers = by_layer(graph.mac_cost, graph.units())
    assert round(sum(macs for layer, macs in layers.items() if layer not in linear) / 1e6, 2) == conv
    assert round(sum(macs for layer, macs in layers.items() if layer in linear) / 1e6, 2) == classifier


@pytest.mark.parametrize(
    ("name", "factor", "divisor", "millions"),
    [
        ("resnet18", 0.85, 8, 1359),
        ("resnet18", 0.85, 1, 1322),
        ("resnet18", 0.75, 8, 1042.6),
        ("resnet50", 0.85, 8, 3003),
        ("resnet50", 0.85, 1, 2968),
        ("resnet50", 0.75, 8, 2323),
        ("resnet50", 0.5, 8, 1052),
        ("resnet50", 0.25, 8, 278),
    ],
)
def test_uniform_resnets_of_the_paper(name: str, factor: float, divisor: int, millions: float) -> None:
    _, graph = traced_zoo(name)
    macs = graph.macs(scaled(graph.widths, factor, divisor=divisor)) / 1e6
    assert round(macs, 1 if millions % 1 else 0) == millions


def test_frozen_stem_of_resnet50_costs_more() -> None:
    _, graph = traced_zoo("resnet50")
    assert round(graph.macs(scaled(graph.widths, 0.25, divisor=8, freeze="conv1")) / 1e6) == 379


@pytest.mark.parametrize(
    ("factor", "divisor", "freeze_last", "millions"),
    [
        (0.75, 8, True, 209.07),
        (0.5, 8, True, 97.13),
        (0.5, 8, False, 91.5),
        (0.35, 8, True, 59.29),
        (0.35, 8, False, 53.9),
        (0.75, 1, True, 179),
        (0.5, 1, True, 89),
        (0.35, 1, True, 49),
    ],
)
def test_uniform_mobilenets_of_the_paper(
    factor: float, divisor: int, freeze_last: bool, millions: float
) -> None:
    """Hidden layers are six times what they expand; the last convolution stays at 1280 if it is frozen."""
    _, graph = traced_zoo("mobilenet_v2")
    widths: dict[str, int] = {}
    stream = 0
    for name, width in graph.widths.items():
        new = make_divisible(width * factor, divisor) if divisor > 1 else round(width * factor)
        if name == "features.18.0":
            widths[name] = width if freeze_last else new
        elif name.endswith(".conv.0.0"):
            widths[name] = 6 * stream
        else:
            widths[name] = stream = new
    digits = len(str(millions).partition(".")[2]) if isinstance(millions, float) else 0
    assert round(graph.macs(widths) / 1e6, digits) == millions


@pytest.mark.parametrize(
    ("name", "freeze", "square", "linear"),
    [
        ("resnet18", (), 1695.55, 118.53),
        ("resnet50", (), 3969.12, 120.06),
        ("mobilenet_v2", ("features.18.0",), 247.87, 51.62),
        ("mobilenet_v2", (), 267.94, 32.83),
    ],
)
def test_quadratic_and_linear_part_of_the_cost(
    name: str, freeze: tuple[str, ...], square: float, linear: float
) -> None:
    _, graph = traced_zoo(name)

    def cost(factor: float) -> float:
        units = [
            u if tie in freeze else u * factor for tie, u in zip(graph.widths, graph.units(), strict=False)
        ]
        return graph.mac_cost.total(units) / 1e6

    # Fit a w^2 + b w + c through three points.
    a = (cost(2) - 2 * cost(1) + cost(0)) / 2
    assert round(a, 2) == square
    assert round(cost(1) - cost(0) - a, 2) == linear


def test_activation_memory_follows_the_widths() -> None:
    _, graph = traced_zoo("resnet18")
    assert graph.activation_bytes() >= 64 * 112 * 112 * 4
    assert graph.activation_bytes(scaled(graph.widths, 0.5)) == pytest.approx(
        graph.activation_bytes() / 2, rel=0.2
    )

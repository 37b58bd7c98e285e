"""Step 1: the backbone costs its part of the budget with every init."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import Decoder, Grouped

backbone = partial(peel.backbone, divisor=1)


@given(
    st.sampled_from(["resnet18", "mobilenet_v2"]),
    st.floats(0.2, 1.0),
    st.floats(0.2, 1.0),
    st.sampled_from(["macs", "params"]),
)
def test_the_backbone_costs_its_part_of_the_budget(
    name: str, part: float, ratio: float, resource: str
) -> None:
    _, graph = traced_zoo(name)
    count = getattr(graph, resource)
    budget = int(part * count())
    for init in ("uniform", "equal"):
        spent = count(backbone(graph, budget, ratio, resource=resource, init=init, grow=True))
        assert 0.997 * ratio * budget <= spent <= ratio * budget


def test_the_default_ratio_is_0_8() -> None:
    _, graph = traced_zoo("resnet18")
    assert backbone(graph, "50%") == peel.uniform(graph, "40%", divisor=1)
    assert backbone(graph, "50%", 1.0) == peel.uniform(graph, "50%", divisor=1)


@pytest.mark.parametrize(("ratio", "channels"), [(1.0, 77), (0.8, 68)])
def test_equal_channels_of_resnet18(ratio: float, channels: int) -> None:
    _, graph = traced_zoo("resnet18")
    widths = backbone(graph, "1.04G", ratio, init="equal", grow=True)
    # As many channels in every tie as fit; rounding adds one here and there.
    assert set(widths.values()) == {channels, channels + 1}
    assert (
        graph.macs(dict.fromkeys(graph.widths, channels))
        <= ratio * 1.04e9
        < graph.macs(dict.fromkeys(graph.widths, channels + 1))
    )


@pytest.mark.parametrize("resource", ["macs", "params"])
def test_equal_init_ignores_the_original_widths(resource: str) -> None:
    _, graph = traced_zoo("resnet18")
    widths = backbone(graph, "57%", init="equal", resource=resource, grow=True)
    assert max(widths.values()) - min(widths.values()) <= 1
    assert widths["conv1"] > graph.widths["conv1"]
    assert widths["layer4.0.conv1"] < graph.widths["layer4.0.conv1"] / 2


@pytest.mark.parametrize("init", ["uniform", "equal"])
def test_frozen_ties_keep_their_width_and_the_others_become_narrower(init: str) -> None:
    _, graph = traced_zoo("mobilenet_v2")
    free = backbone(graph, "150M", init=init, grow=True)
    for freeze in ("features.18.0", ["features.18.0"], iter(["features.18.0"])):
        widths = backbone(graph, "150M", init=init, freeze=freeze, grow=True)
        assert widths["features.18.0"] == 1280
        others = [tie for tie in widths if tie != "features.18.0"]
        assert sum(widths[tie] for tie in others) < sum(free[tie] for tie in others)
        assert 0.999 * 120e6 <= graph.macs(widths) <= 120e6
        if init == "equal":
            assert max(widths[tie] for tie in others) - min(widths[tie] for tie in others) <= 1


@pytest.mark.parametrize("init", ["uniform", "equal"])
def test_widths_are_multiples_of_the_divisor_and_of_the_steps(init: str) -> None:
    _, graph = traced_zoo("resnet18")
    assert all(width % 8 == 0 for width in backbone(graph, "50%", init=init, divisor=8).values())
    _, graph = traced_net(Grouped)
    widths = backbone(graph, "80%", init=init)  # type: ignore[arg-type]
    assert all(width % 4 == 0 for width in widths.values())
    assert graph.macs(widths) <= 0.64 * graph.macs()


def test_equal_channels_with_different_steps() -> None:
    _, graph = traced_net(Decoder)  # steps of 2, 2 and 1
    widths = backbone(graph, 4 * graph.macs(), init="equal", grow=True)
    assert max(widths.values()) - min(widths.values()) <= 2
    assert min(widths.values()) > 8


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_equal_channels_stop_where_another_resource_reaches_the_original(name: str) -> None:
    _, graph = traced_zoo(name)
    widths = backbone(graph, "90%", init="equal")
    assert all(count(widths) <= count() for count in (graph.macs, graph.params, graph.activation_bytes))
    assert graph.activation_bytes(widths) > 0.95 * graph.activation_bytes()


def test_a_budget_above_the_original_makes_the_backbone_wider() -> None:
    _, graph = traced_zoo("resnet18")
    widths = backbone(graph, "3G", grow=True)
    assert 0.999 * 2.4e9 <= graph.macs(widths) <= 2.4e9
    assert all(widths[tie] > graph.widths[tie] for tie in widths)


def test_given_widths_are_used_unchanged() -> None:
    _, graph = traced_zoo("resnet18")
    widths = backbone(graph, "90%", 0.5, init={"layer4.0.conv1": 100, "layer4.1.conv1": 100})
    assert widths == {**graph.widths, "layer4.0.conv1": 100, "layer4.1.conv1": 100}
    assert graph.macs(widths) > 0.5 * 0.9 * graph.macs()


def test_given_widths_above_the_budget_are_refused() -> None:
    _, graph = traced_zoo("resnet18")
    assert backbone(graph, graph.macs(), init=graph.widths) == graph.widths
    with pytest.raises(
        peel.BudgetError,
        match=r"backbone costs 1\.81G MACs \(1,814,073,344\), more than the budget of 1\.81G",
    ):
        backbone(graph, graph.macs() - 1, init=graph.widths)
    wide = {**dict.fromkeys(graph.widths, 32), "layer4.1.conv1": 20_000}
    with pytest.raises(peel.BudgetError, match=r"exceeds the original in another resource.*grow=True"):
        backbone(graph, "90%", init=wide)
    assert backbone(graph, "90%", init=wide, grow=True) == wide
    with pytest.raises(peel.WidthsError, match="layer9"):
        backbone(graph, "50%", init={"layer9": 3})


@pytest.mark.parametrize("ratio", [0, -0.5, 1.01, float("nan"), float("inf"), True, "0.8", None])
def test_a_wrong_ratio_is_refused(ratio: object) -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(peel.PeelError, match=r"lambda.*above 0 and at most 1"):
        backbone(graph, "50%", ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "same"}, "init is one of uniform, equal, not 'same'"),
        ({"resource": "flops"}, "macs, params, memory"),
        ({"freeze": ["conv"]}, "Did you mean conv1"),
        ({"init": "equal", "freeze": ["conv"]}, "Did you mean conv1"),
        ({"init": "equal", "divisor": 0}, "divisor"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(peel.PeelError, match=message):
        backbone(graph, "50%", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("init", ["uniform", "equal"])
def test_an_unreachable_budget_names_the_smallest_network(init: str) -> None:
    _, graph = traced_zoo("resnet18")
    smallest = graph.macs(graph.steps)
    assert backbone(graph, smallest, 1.0, init=init) == dict.fromkeys(graph.widths, 1)
    with pytest.raises(peel.BudgetError, match=f"{smallest:,}"):
        backbone(graph, smallest, 0.8, init=init)  # type: ignore[arg-type]

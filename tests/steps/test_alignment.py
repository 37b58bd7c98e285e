"""Alignment of widths: multiples of 8 must not undo what the shares gave to one group and not to another."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from statistics import correlation, fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import peel
from helpers.graphs import traced_zoo
from helpers.rounding import assert_rounded, growing, step_of
from peel.steps.reallocation import Round, grow_by_shares

NETWORKS = [
    "cifar_resnet20",
    "cifar_resnet56",
    "cifar_vgg16_bn",
    "cifar_mobilenet_v2",
    "resnet18",
    "resnet50",
]


def reallocated(
    graph: peel.ChannelGraph,
    budget: str,
    shares: list[float],
    ratio: float = 0.8,
    divisor: int | str = "auto",
) -> Round:
    growth = growing(graph, peel.backbone(graph, budget, ratio), budget, divisor=divisor)
    return grow_by_shares(growth, dict(zip(graph.groups, shares)))


def group_levels(graph: peel.ChannelGraph, widths: Mapping[str, float], budget: str) -> list[float]:
    """The mean logarithm of each group's widths over those of the exact uniform network."""
    low, high = 0.0, 1.0
    for _ in range(50):
        factor = (low + high) / 2
        cost = graph.mac_cost.total(
            [factor * width / graph.steps[tie] for tie, width in graph.widths.items()]
        )
        low, high = (factor, high) if cost <= int(graph.macs() * float(budget[:-1]) / 100) else (low, factor)
    return [
        fmean(log(widths[tie] / graph.widths[tie] / low) for tie in ties) for ties in graph.groups.values()
    ]


@settings(max_examples=25)
@given(
    st.sampled_from(NETWORKS),
    st.sampled_from(["10%", "25%", "40%", "50%", "70%"]),
    st.sampled_from([0.5, 0.8]),
    st.lists(st.floats(0, 1), min_size=5, max_size=5).filter(lambda shares: sum(shares[:3]) > 0.1),
)
def test_aligned_groups_keep_the_order_and_the_ratio_of_their_factors(
    name: str, budget: str, ratio: float, shares: list[float]
) -> None:
    _, graph = traced_zoo(name)
    found = reallocated(graph, budget, shares, ratio)
    assert graph.macs(found.widths) <= int(graph.macs() * float(budget[:-1]) / 100)
    assert found.cost >= 0.98 * found.ideal_cost
    ideal, aligned = (group_levels(graph, widths, budget) for widths in (found.ideal_widths, found.widths))
    if max(ideal) - min(ideal) >= log(1.05):
        assert correlation(ideal, aligned) >= 0.9


@pytest.mark.parametrize(
    ("name", "budget", "shares"),
    [
        ("cifar_resnet18", "25%", [1, 1, 1, 1]),
        ("cifar_resnet56", "50%", [3, 2, 1]),
        ("cifar_resnet56", "50%", [1, 1, 2]),
        ("resnet50", "44%", [1, 1, 1, 1]),
    ],
)
def test_the_plan_differs_from_uniform_where_the_arithmetic_does(
    name: str, budget: str, shares: list[float]
) -> None:
    _, graph = traced_zoo(name)
    found = reallocated(graph, budget, shares)
    assert found.widths != peel.uniform(graph, budget)
    ideal, aligned = (group_levels(graph, widths, budget) for widths in (found.ideal_widths, found.widths))
    assert correlation(ideal, aligned) >= 0.95
    assert list(found.rounded_factors.values()) == pytest.approx(list(found.factors.values()), rel=0.03)
    budget_macs = int(graph.macs() * float(budget[:-1]) / 100)
    assert sum(width % 8 == 0 for width in found.widths.values()) > len(found.widths) / 3
    for tie, width in found.widths.items():
        assert abs(width - found.ideal_widths[tie]) <= step_of(graph, found.ideal_widths[tie], tie, "auto")
    assert found.cost <= budget_macs


def test_smaller_multiples_are_taken_and_told_where_multiples_of_8_would_undo_the_plan() -> None:
    _, graph = traced_zoo("cifar_resnet20")
    found = reallocated(graph, "10%", [3, 2, 1])
    assert "Multiples of 8 would undo the reallocation" in found.rounding_note
    assert "32x32" in found.rounding_note


def in_order(values: Mapping[str, float]) -> list[str]:
    return sorted(values, key=lambda group: values[group])


@pytest.mark.parametrize("divisor", [1, 4, 8, 16])
@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_resnet18", "resnet50"])
def test_a_given_divisor_keeps_the_order_of_the_groups_or_the_note_says_why_not(
    name: str, divisor: int
) -> None:
    _, graph = traced_zoo(name)
    for shares in ([3, 2, 1, 1], [1, 2, 3, 4], [1, 1, 1, 1]):
        found = reallocated(graph, "50%", shares, divisor=divisor)
        assert all(width % divisor == 0 for width in found.widths.values())
        if in_order(found.factors) != in_order(found.rounded_factors):
            spread = max(found.factors.values()) / min(found.factors.values())
            nearest = min(
                abs(log(a / b)) for a in found.factors.values() for b in found.factors.values() if a != b
            )
            assert "moves the groups" in found.rounding_note or nearest < log(spread) / 4


def test_without_alignment_equal_shares_give_the_arithmetic_of_the_paper() -> None:
    _, graph = traced_zoo("cifar_resnet18")
    found = reallocated(graph, "25%", [1, 1, 1, 1], divisor=1)
    assert_rounded(graph, found.widths, found.ideal_widths, graph.macs() // 4)
    uniform = peel.uniform(graph, "25%", divisor=1)
    assert sum(found.widths[tie] != uniform[tie] for tie in uniform) >= 7


def test_reallocate_logs_what_a_divisor_does_to_the_groups(caplog: pytest.LogCaptureFixture) -> None:
    _, graph = traced_zoo("cifar_resnet20")
    shares = dict(zip(graph.groups, [3, 2, 1]))
    peel.reallocate(graph, peel.backbone(graph, "25%"), shares, "25%", divisor=8)
    assert "Rounding to multiples of 8 moves the groups" in caplog.text


def test_the_backbone_has_whole_widths_that_are_not_aligned() -> None:
    _, graph = traced_zoo("cifar_resnet18")
    base = peel.backbone(graph, "25%")
    assert base == peel.backbone(graph, "25%", divisor=1)
    assert any(width % 2 for width in base.values())

"""Budgets are parsed, never exceeded, and used up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import Chain, Grouped
from helpers.rounding import step_of
from peel.cost.constraint import round_to_budget
from peel.cost.costed import cost_of


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1.1G", 1_100_000_000),
        ("1.1g", 1_100_000_000),
        ("87M", 87_000_000),
        ("87 M", 87_000_000),
        ("50%", 500),
        ("50 %", 500),
        ("12.5%", 125),
        (0.5, 500),
        ("0.5", 500),
        ("100%", 1000),
        ("150%", 1500),
        ("5m", 5_000_000),
        (1e9, 1_000_000_000),
        ("1e9", 1_000_000_000),
        ("1G", 1_000_000_000),
        ("1B", 1_000_000_000),
        (2, 2),
        ("2", 2),
        ("2.0", 2),
        (300, 300),
        ("300", 300),
        ("3k", 3000),
        ("1_500", 1500),
        ("1,500", 1500),
        (2e9, 2_000_000_000),
        ("1e3", 1000),
        ("33.3333%", 333),
        (np.int64(300), 300),
        (np.float32(0.5), 500),
    ],
)
def test_budgets_are_parsed(written: str | float, meant: int) -> None:
    assert peel.parse_budget(written, original=1000) == meant


@pytest.mark.parametrize(
    "written",
    [
        "",
        "half",
        "5X",
        "-5M",
        "0%",
        0,
        -1,
        0.0,
        -0.5,
        1,
        "1",
        1.0,
        1.5,
        "1.5",
        "8MB",
        float("nan"),
        float("inf"),
        None,
        True,
        "1.1GG",
        [5],
        "1,5G",
    ],
)
def test_invalid_budgets_are_refused(written: object) -> None:
    with pytest.raises(peel.BudgetError):
        peel.parse_budget(written, original=1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("8MB", 8_000_000),
        ("8M", 8_000_000),
        ("8MiB", 8 * 2**20),
        ("50%", 500),
        ("512kib", 2**19),
        ("900B", 900),
    ],
)
def test_bytes_have_units(written: str, meant: int) -> None:
    assert peel.parse_budget(written, original=1000, resource="memory") == meant


@pytest.mark.parametrize("written", [1, "1", 1.5, "1.5"])
def test_what_could_be_two_things_is_refused_with_both(written: str | float) -> None:
    with pytest.raises(peel.BudgetError, match=r"neither a fraction .* nor a whole number .*150%.*1\.5M"):
        peel.parse_budget(written, original=1000)


NETWORKS = ["resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0"]


@given(st.sampled_from(NETWORKS), st.floats(0.05, 1.0), st.sampled_from(["macs", "params"]))
def test_uniform_is_within_a_thousandth_below_the_budget(name: str, share: float, resource: str) -> None:
    _, graph = traced_zoo(name)
    count = getattr(graph, resource)
    budget = int(count() * share)
    cost = count(peel.uniform(graph, budget, resource=resource, divisor=1))
    assert 0.999 * budget <= cost <= budget


@given(st.sampled_from(NETWORKS), st.floats(0.1, 1.0), st.sampled_from(["macs", "params"]))
def test_aligned_widths_are_within_a_hundredth_below_the_budget(
    name: str, share: float, resource: str
) -> None:
    _, graph = traced_zoo(name)
    count = getattr(graph, resource)
    budget = int(count() * share)
    widths = peel.uniform(graph, budget, resource=resource)
    assert 0.99 * budget <= count(widths) <= budget
    for tie, width in widths.items():
        # A multiple of 8 is always within an eighth of 64 and more; of 4 and 2 by the same rule.
        alignment = 8 if width >= 64 else 4 if width >= 32 else 2 if width >= 16 else 1
        assert width % alignment == 0 or width == graph.widths[tie]


def test_narrow_layers_are_aligned_as_well_as_an_eighth_allows() -> None:
    _, graph = traced_zoo("mobilenet_v2")
    widths = peel.uniform(graph, "50%")  # ideal widths: 22.1, 11.0, 16.6, 22.1, 44.2
    ties = [
        "features.0.0",
        "features.1.conv.1",
        "features.2.conv.2",
        "features.4.conv.2",
        "features.7.conv.2",
    ]
    assert [widths[tie] for tie in ties] in ([24, 12, 16, 24, 40], [24, 12, 16, 24, 48])


SMALL = ["cifar_resnet20", "cifar_resnet56", "mobilenet_v3_small"]


@given(
    st.sampled_from([*NETWORKS, *SMALL]),
    st.floats(0.1, 0.95),
    st.sampled_from(["auto", 1, 4, 8, 16, 32]),
    st.sampled_from(["macs", "params"]),
)
@example("mobilenet_v3_small", 0.5, 1, "macs")
@example("cifar_resnet20", 0.5, 8, "macs")
def test_uniform_is_one_factor_rounded_by_less_than_a_step(
    name: str, fraction: float, divisor: int | str, resource: str
) -> None:
    _, graph = traced_zoo(name)
    budget = int(getattr(graph, resource)() * fraction)
    try:
        widths = peel.uniform(graph, budget, resource=resource, divisor=divisor)
    except peel.BudgetError as error:
        assert divisor != 1
        assert "smallest network" in str(error)
        return
    assert getattr(graph, resource)(widths) <= budget
    smallest = 1 if divisor == "auto" else divisor

    def is_near(factor: float) -> bool:
        ideal = {tie: max(min(smallest, w), factor * w) for tie, w in graph.widths.items()}
        return all(
            abs(widths[tie] - ideal[tie]) <= step_of(graph, ideal[tie], tie, divisor) + 1e-6 for tie in widths
        )

    assert any(is_near(factor) for factor in np.linspace(0.01, 1.0, 2000))


@pytest.mark.parametrize("divisor", [8, 32])
def test_uniform_and_reallocate_agree_on_the_smallest_network(divisor: int) -> None:
    _, graph = traced_zoo("mobilenet_v2")
    smallest = {tie: min(divisor, width) for tie, width in graph.widths.items()}
    budget = graph.macs(smallest)
    assert peel.uniform(graph, budget, divisor=divisor) == smallest
    shares = dict.fromkeys(graph.groups, 1.0)
    assert peel.reallocate(graph, smallest, shares, budget, divisor=divisor) == smallest
    with pytest.raises(peel.BudgetError, match=f"smallest network has .*{budget:,}"):
        peel.uniform(graph, budget - 1, divisor=divisor)


def test_whole_ideals_are_aligned_too_but_for_original_widths() -> None:
    """Methods that rank channels ask for 47 or 363 of them."""
    _, graph = traced_zoo("mobilenet_v2")
    rng = np.random.default_rng(0)
    ideal = {tie: int(rng.integers(width // 3, width)) for tie, width in graph.widths.items()}
    ideal |= {tie: 144 for tie, width in graph.widths.items() if width == 144}
    widths = round_to_budget(graph, ideal, graph.macs(ideal))
    assert graph.macs(widths) <= graph.macs(ideal)
    assert all(widths[tie] == 144 for tie in graph.widths if graph.widths[tie] == 144)
    assert all(width % 8 == 0 for width in widths.values() if width >= 64)
    assert all(abs(widths[tie] - ideal[tie]) <= ideal[tie] / 8 + 1 for tie in widths)


def test_widths_are_less_aligned_where_much_of_the_budget_would_be_left() -> None:
    """The stem alone sets the peak of ResNet-18: at 40 channels a tenth of a budget of 70 % is left."""
    _, graph = traced_zoo("resnet18")
    widths = peel.uniform(graph, "70%", resource="memory")
    assert widths["conv1"] == 44
    assert graph.activation_bytes(widths) > 0.98 * 0.7 * graph.activation_bytes()


def test_uniform_meets_a_memory_budget() -> None:
    _, graph = traced_zoo("resnet18")
    widths = peel.uniform(graph, "60%", resource="memory")
    assert (
        0.9 * 0.6 * graph.activation_bytes()
        < graph.activation_bytes(widths)
        <= 0.6 * graph.activation_bytes()
    )


def test_whole_budget_gives_the_original_widths() -> None:
    _, graph = traced_zoo("resnet18")
    assert peel.uniform(graph, "100%") == graph.widths


def test_frozen_ties_keep_their_width() -> None:
    _, graph = traced_zoo("mobilenet_v2")
    widths = peel.uniform(graph, "87M", freeze=["features.18.0"])
    assert widths["features.18.0"] == 1280
    assert 0.99 * 87e6 <= graph.macs(widths) <= 87e6


def test_widths_keep_the_steps_of_grouped_convolutions() -> None:
    _, graph = traced_net(Grouped)
    for share in (0.3, 0.5, 0.8):
        assert all(width % 4 == 0 for width in peel.uniform(graph, share).values())


def test_layers_grow_when_asked() -> None:
    _, graph = traced_net(Chain)
    widths = peel.uniform(graph, 2 * graph.macs(), divisor=1, grow=True)
    assert widths["conv1"] > 8
    assert 1.9 * graph.macs() < graph.macs(widths) <= 2 * graph.macs()


def test_rounding_keeps_the_lower_limit_and_does_not_spend_more_than_the_ideal() -> None:
    _, graph = traced_zoo("resnet18")
    floor = peel.uniform(graph, "40%", divisor=1)
    ideal = {tie: width * 1.2 if tie.startswith("layer4") else float(width) for tie, width in floor.items()}
    widths = round_to_budget(graph, ideal, "50%", at_least=floor, divisor=1)
    assert all(floor[tie] <= widths[tie] < ideal[tie] + 1 for tie in floor)


def test_an_ideal_that_costs_too_much_is_scaled_down() -> None:
    _, graph = traced_zoo("resnet18")
    widths = round_to_budget(graph, {tie: 2.0 * width for tie, width in graph.widths.items()}, "50%")
    assert widths == peel.uniform(graph, "50%")


@pytest.mark.parametrize("budget", ["0.0001%", 10])
def test_budget_below_the_smallest_network_is_refused(budget: str | int) -> None:
    _, graph = traced_zoo("resnet18")
    smallest = graph.macs(graph.steps)
    with pytest.raises(peel.BudgetError, match=f"{smallest:,}"):
        peel.uniform(graph, budget)


def test_a_small_whole_number_may_be_meant_as_a_percentage() -> None:
    graph = traced_net(Chain)[1]
    with pytest.raises(peel.BudgetError, match=r'50 MACs cannot be reached: .* Did you mean "50%"\?'):
        peel.uniform(graph, 50)
    with pytest.raises(peel.BudgetError, match=r"101 MACs cannot be reached: .*\.$"):
        peel.uniform(graph, 101)


def test_a_refused_budget_has_its_unit() -> None:
    graph = traced_net(Chain)[1]
    with pytest.raises(
        peel.BudgetError, match=r"budget of 5B of memory cannot be reached: .* has \S+B of memory"
    ):
        peel.uniform(graph, 5, resource="memory")
    with pytest.raises(peel.BudgetError, match=r"budget of 1\.00T MACs is above the original"):
        peel.uniform(graph, "1T")


def test_budget_above_the_largest_network_is_refused() -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(peel.BudgetError, match=r"1,814,073,344.*grow=True"):
        peel.uniform(graph, "5G")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resource": "flops"}, "macs, params, memory"),
        ({"divisor": 0}, "divisor"),
        ({"divisor": 2.5}, "divisor"),
        ({"divisor": "eight"}, "divisor"),
        ({"freeze": ["conv"]}, "Did you mean conv1"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(peel.BudgetError, match=message):
        peel.uniform(graph, "50%", **options)  # type: ignore[arg-type]


def test_every_resource_has_a_cost() -> None:
    _, graph = traced_net(Chain)
    assert all(cost_of(graph, resource)(graph.units()) > 0 for resource in graph.resources)


def test_a_network_without_a_free_tie_is_refused_with_the_reason() -> None:
    graph = peel.trace(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 8, 8))
    with pytest.raises(peel.BudgetError, match=r"no channel .* can be removed.*leaves the model"):
        peel.uniform(graph, "50%")
    with pytest.raises(peel.BudgetError, match="no channel"):
        peel.reallocate(graph, {}, {}, "50%")

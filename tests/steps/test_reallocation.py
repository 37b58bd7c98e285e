"""Step 4: known factors for the paper's networks, and properties that hold for all networks."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import NETS, AuxiliaryHead, Depthwise, Grouped, Net
from helpers.rounding import assert_rounded, growing, step_of
from peel.steps.reallocation import (
    group_factors,
    grow_at_random,
    grow_by_shares,
    grow_equally,
    reallocate,
    shares_of,
)

# The paper's form: whole widths, and no limit but the budget. The defaults have tests at the end.
PAPER = {"divisor": 1, "grow": True}
backbone = partial(peel.backbone, divisor=1)

FROZEN = {"mobilenet_v2": ("features.18.0",)}


def macs(graph: peel.ChannelGraph, widths: dict[str, float]) -> float:
    """MACs at widths that may be fractions of a channel."""
    return graph.mac_cost.total([widths[name] / step for name, step in graph.steps.items()])


def only(graph: peel.ChannelGraph, winner: str) -> dict[str, float]:
    """Shares that give everything to one group."""
    return {group: float(group == winner) for group in graph.groups}


def fractional_backbone(
    graph: peel.ChannelGraph, budget: float, freeze: tuple[str, ...]
) -> tuple[float, dict[str, float]]:
    """The uniform network at 0.8 of the budget before rounding, and its factor."""

    def scaled(factor: float) -> dict[str, float]:
        return {name: width if name in freeze else width * factor for name, width in graph.widths.items()}

    low, high = 0.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if macs(graph, scaled(middle)) < 0.8 * budget else (low, middle)
    return low, scaled(low)


# Worked out by hand. The tolerance is one unit of the last digit.
VECTORS = [
    ("resnet18", 1.04e9, 0.6664, "1 1 1 1", "1.097 1.134 1.134 1.143", ".731 .756 .755 .762"),
    ("resnet18", 1.04e9, 0.6664, "4 3 2 1", "1.1515 1.1584 1.1077 1.0596", ".7674 .7720 .7382 .7061"),
    ("resnet50", 2.2e9, 0.6509, "1 1 1 1", "1.143 1.119 1.085 1.169", ".744 .728 .706 .761"),
    ("resnet50", 1.1e9, 0.4560, "1 1 1 1", "1.140 1.121 1.086 1.172", ".520 .511 .495 .534"),
    ("resnet50", 1.1e9, 0.4560, "4 3 2 1", "1.2175 1.1431 1.0695 1.0717", ".5552 .5213 .4877 .4887"),
    ("mobilenet_v2", 300e6, 0.8827, "1 1 1 1 1",
     "1.305 1.146 1.214 1.076 1.099", "1.152 1.011 1.071 .950 .970"),
    ("mobilenet_v2", 211e6, 0.7245, "30 25 20 15 10",
     "1.4395 1.1811 1.2187 1.0596 1.0507", "1.0429 .8558 .8830 .7677 .7613"),
    ("mobilenet_v2", 59e6, 0.3387, "1 1 1 1 1",
     "1.269 1.174 1.257 1.096 1.105", ".430 .398 .426 .371 .374"),
]  # fmt: skip


def close(found: list[float], written: str) -> bool:
    """Equal up to one unit of the last written digit."""
    numbers = written.split()
    return len(found) == len(numbers) and all(
        abs(value - float(text)) <= 10.0 ** -len(text.partition(".")[2])
        for value, text in zip(found, numbers)
    )


@pytest.mark.parametrize(("name", "budget", "width", "shares", "factors", "widths"), VECTORS)
def test_the_telescoped_solver_gives_the_known_factors(
    name: str, budget: float, width: float, shares: str, factors: str, widths: str
) -> None:
    _, graph = traced_zoo(name)
    freeze = FROZEN.get(name, ())
    factor, base = fractional_backbone(graph, budget, freeze)
    assert abs(factor - width) <= 1e-4
    growth = growing(graph, base, budget, freeze=freeze, **PAPER)
    found = group_factors(growth, dict(zip(graph.groups, map(float, shares.split()))))
    assert close(list(found.values()), factors)
    assert close([factor * grown for grown in found.values()], widths)


@pytest.mark.parametrize(
    ("name", "budget", "widths"),
    [("resnet50", 1.1e9, ".682 .656 .601 .728"), ("resnet18", 1.04e9, ".901 .983 .983 1.001")],
)
def test_winner_take_all_gives_the_known_widths(name: str, budget: float, widths: str) -> None:
    _, graph = traced_zoo(name)
    factor, base = fractional_backbone(graph, budget, ())
    reached = []
    for winner in graph.groups:
        importance = {group: float(group == winner) + 1 for group in graph.groups}
        found = group_factors(growing(graph, base, budget, **PAPER), shares_of(importance, "winner-take-all"))
        assert all(grown == 1 for group, grown in found.items() if group != winner)
        reached.append(factor * found[winner])
    assert close(reached, widths)


def test_the_triangular_solver_narrows_the_group_after_a_winner() -> None:
    _, graph = traced_zoo("resnet50")
    _, base = fractional_backbone(graph, 1.1e9, ())
    found = group_factors(growing(graph, base, 1.1e9, **PAPER), only(graph, "56x56"), "triangular")
    assert close(list(found.values()), "1.541 0.942 1.004 0.999")


@given(
    st.sampled_from(["resnet18", "resnet50", "mobilenet_v2"]),
    st.floats(0.2, 1.0),
    st.floats(0.5, 0.95),
    st.lists(st.floats(0.02, 1.0), min_size=5, max_size=5),
    st.sampled_from(["macs", "params"]),
    st.sampled_from(["telescoped", "triangular"]),
)
def test_fractional_widths_spend_the_whole_budget(
    name: str, part: float, ratio: float, weights: list[float], resource: str, solver: str
) -> None:
    _, graph = traced_zoo(name)
    budget = int(getattr(graph, resource)() * part)
    base = backbone(graph, budget, ratio, resource=resource)
    found = grow_by_shares(
        growing(graph, base, budget, resource, **PAPER), dict(zip(graph.groups, weights)), solver
    )
    assert found.ideal_cost == pytest.approx(budget, rel=1e-9)
    for group, ties in graph.groups.items():
        assert [found.ideal_widths[tie] / base[tie] for tie in ties] == pytest.approx(
            [found.factors[group]] * len(ties)
        )


@given(st.lists(st.floats(0.02, 1.0), min_size=4, max_size=4), st.floats(0.2, 1.0), st.floats(0.5, 0.9))
def test_telescoped_each_group_adds_its_share_to_the_whole_network(
    weights: list[float], part: float, ratio: float
) -> None:
    _, graph = traced_zoo("resnet18")
    budget = int(graph.macs() * part)
    base = dict(backbone(graph, budget, ratio))
    found = group_factors(growing(graph, base, budget, **PAPER), dict(zip(graph.groups, weights)))
    pool = budget - graph.macs(base)
    grown: dict[str, float] = dict(base)
    for (group, ties), weight in zip(graph.groups.items(), weights):
        before = macs(graph, grown)
        grown.update({tie: base[tie] * found[group] for tie in ties})
        assert macs(graph, grown) - before == pytest.approx(pool * weight / sum(weights), rel=1e-6)


@given(
    st.sampled_from(["resnet18", "resnet50", "mobilenet_v2"]),
    st.lists(st.floats(0.1, 1.0), min_size=5, max_size=5),
    st.floats(0.2, 1.0),
    st.booleans(),
)
def test_triangular_each_group_adds_its_share_to_its_own_layers(
    name: str, weights: list[float], part: float, is_reversed: bool
) -> None:
    _, graph = traced_zoo(name)
    if is_reversed:  # each group reads channels of the group that is solved after it
        graph = graph.regroup(dict(reversed(graph.groups.items())))
    names = list(graph.widths)
    budget = int(graph.macs() * part)
    base = backbone(graph, budget)
    shares = dict(zip(graph.groups, weights))
    found = group_factors(growing(graph, base, budget, **PAPER), shares, "triangular")

    def own(group: str, factors: dict[str, float]) -> float:
        """The cost of the layers that write the group's channels (for a classifier, that it reads)."""
        units = {
            tie: base[tie] * factors[owner] / graph.steps[tie]
            for owner, ties in graph.groups.items()
            for tie in ties
        }
        by_tie = graph.mac_cost.by_tie([units[tie] for tie in names])  # type: ignore[misc]
        return sum(by_tie[names.index(tie)] for tie in graph.groups[group])

    pool = budget - graph.macs(base)
    assert sum(own(group, found) for group in graph.groups) == pytest.approx(budget, rel=1e-6)
    for group, weight in shares.items():
        added = own(group, found) - own(group, dict.fromkeys(graph.groups, 1.0))
        assert added == pytest.approx(pool * weight / sum(shares.values()), rel=1e-4)


@given(
    st.sampled_from(["resnet18", "resnet50", "mobilenet_v2"]),
    st.floats(0.1, 1.0),
    st.floats(0.3, 1.0),
    st.lists(st.floats(0.02, 1.0), min_size=5, max_size=5),
    st.sampled_from(["macs", "params"]),
    st.sampled_from(["telescoped", "triangular"]),
)
def test_the_budget_is_met_within_a_thousandth_and_never_exceeded(
    name: str, part: float, ratio: float, weights: list[float], resource: str, solver: str
) -> None:
    _, graph = traced_zoo(name)
    shares = dict(zip(graph.groups, weights))
    assume(sum(shares.values()) > 0.01)
    count = getattr(graph, resource)
    budget = int(count() * part)
    base = backbone(graph, budget, ratio, resource=resource)
    found = grow_by_shares(growing(graph, base, budget, resource, **PAPER), shares, solver)
    assert found.cost == count(found.widths)
    assert 0.999 * budget <= count(found.widths) <= budget
    if solver == "telescoped":
        assert all(found.widths[tie] >= base[tie] for tie in base)


SMALLEST = [kind for kind in NETS if len(kind.expected) > 1]


def by_tie(kind: type[Net]) -> peel.ChannelGraph:
    """The graph with a group for each tie."""
    _, graph = traced_net(kind)
    return graph.regroup({f"group {i}": [tie] for i, tie in enumerate(graph.widths)})


@given(
    st.sampled_from(SMALLEST),
    st.floats(0.3, 2.0),
    st.floats(0.3, 1.0),
    st.lists(st.floats(0.05, 1.0), min_size=8, max_size=8),
)
def test_every_tie_is_within_one_step_on_the_smallest_networks(
    kind: type[Net], part: float, ratio: float, weights: list[float]
) -> None:
    graph = by_tie(kind)
    budget = int(graph.macs() * part)
    assume(budget * ratio >= graph.macs(graph.steps))
    base = backbone(graph, budget, ratio, grow=True)
    found = grow_by_shares(growing(graph, base, budget, **PAPER), dict(zip(graph.groups, weights)))
    # In a few channels, what keeps the groups apart may leave a part of the budget.
    assert_rounded(graph, found.widths, found.ideal_widths, budget, is_spent=False)
    assert all(found.widths[tie] >= base[tie] for tie in base)


SMALL = ["cifar_resnet20", "cifar_resnet56", "cifar_mobilenet_v2", "resnet18"]


@settings(max_examples=30)
@given(
    st.sampled_from(SMALL),
    st.floats(0.15, 1.0),
    st.floats(0.3, 0.95),
    st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5),
    st.integers(0, 4),
    st.floats(1.001, 10),
)
def test_a_larger_share_makes_a_group_wider(
    name: str, part: float, ratio: float, weights: list[float], which: int, times: float
) -> None:
    _, graph = traced_zoo(name)
    budget = int(graph.macs() * part)
    base = backbone(graph, budget, ratio)
    shares = dict(zip(graph.groups, weights))
    group = list(graph.groups)[which % len(graph.groups)]
    before = grow_by_shares(growing(graph, base, budget, **PAPER), shares)
    after = grow_by_shares(growing(graph, base, budget, **PAPER), {**shares, group: shares[group] * times})
    assert after.factors[group] > before.factors[group]
    ties = graph.groups[group]
    gained = sum(after.widths[tie] for tie in ties) - sum(before.widths[tie] for tie in ties)
    # Rounding can outweigh a small change, but by less than a channel per tie.
    assert gained > -len(ties)


class Branches(nn.Module):
    """Three equal branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Conv2d(3, 16, 3, padding=1) for _ in range(3))
        self.second = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.head = nn.ModuleList(nn.Linear(16, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = zip(self.first, self.second, self.head)
        return torch.stack(
            [head(second(torch.relu(first(x))).mean((2, 3))) for first, second, head in branches]
        ).sum(0)


@pytest.fixture(scope="module")
def branches() -> peel.ChannelGraph:
    graph = peel.trace(Branches(), torch.randn(1, 3, 8, 8))
    return graph.regroup({f"branch {i}": [f"first.{i}", f"second.{i}"] for i in range(3)})


@pytest.mark.parametrize("solver", ["telescoped", "triangular"])
@pytest.mark.parametrize("grown", [9, 12, 16, 20])
def test_equal_groups_with_equal_shares_grow_equally(
    branches: peel.ChannelGraph, solver: str, grown: int
) -> None:
    base = dict.fromkeys(branches.widths, 8)
    wanted = dict.fromkeys(branches.widths, grown)
    shares = dict.fromkeys(branches.groups, 0.7)
    found = grow_by_shares(growing(branches, base, branches.macs(wanted), **PAPER), shares, solver)
    assert list(found.factors.values()) == pytest.approx([grown / 8] * 3)
    assert found.widths == wanted


@given(st.floats(0.01, 100))
def test_only_the_ratios_of_shares_count(times: float) -> None:
    _, graph = traced_zoo("cifar_resnet20")
    base = backbone(graph, "50%")
    shares = dict(zip(graph.groups, (0.5, 0.3, 0.2)))
    growth = growing(graph, base, graph.macs() // 2, **PAPER)
    scaled = {group: share * times for group, share in shares.items()}
    assert group_factors(growth, scaled) == pytest.approx(group_factors(growth, shares))


@pytest.mark.parametrize("solver", ["telescoped", "triangular"])
def test_an_empty_pool_changes_nothing(solver: str) -> None:
    _, graph = traced_zoo("cifar_resnet20")
    base = backbone(graph, "50%", 1.0)
    found = grow_by_shares(
        growing(graph, base, graph.macs(base), **PAPER), dict.fromkeys(graph.groups, 1), solver
    )
    assert found.widths == base
    assert list(found.factors.values()) == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("winner", ["56x56", "28x28", "14x14", "7x7"])
def test_winner_take_all_widens_one_group(winner: str) -> None:
    _, graph = traced_zoo("resnet50")
    base = backbone(graph, "40%")
    importance = {group: 2.0 if group == winner else 1.99 for group in graph.groups}
    widths = reallocate(graph, base, shares_of(importance, "winner-take-all"), "40%", **PAPER)
    alone = peel.Widths({**base, **{tie: widths[tie] for tie in graph.groups[winner]}})
    assert graph.macs(alone) > graph.macs(base) + 0.99 * 0.2 * 0.4 * graph.macs()
    assert all(
        widths[tie] <= base[tie] + 1
        for group, ties in graph.groups.items()
        for tie in ties
        if group != winner
    )


def test_shares_are_importance_over_its_sum() -> None:
    assert shares_of({"a": 3.0, "b": 1.0, "c": 0.0}) == {"a": 0.75, "b": 0.25, "c": 0.0}
    assert shares_of({"a": 1.0, "b": 3.0, "c": 0.0}, "winner-take-all") == {"a": 0.0, "b": 1.0, "c": 0.0}


@pytest.mark.parametrize("solver", ["telescoped", "triangular"])
def test_frozen_ties_keep_the_width_of_the_backbone(solver: str) -> None:
    _, graph = traced_zoo("mobilenet_v2")
    held = ("features.18.0", "features.0.0")
    base = backbone(graph, "150M", freeze=held)
    for freeze in (held, iter(held)):
        widths = reallocate(graph, base, dict.fromkeys(graph.groups, 1), "150M", freeze=freeze, solver=solver)
        assert (widths["features.18.0"], widths["features.0.0"]) == (1280, 32)
        assert 0.99 * 150e6 <= graph.macs(widths) <= 150e6
    widths = reallocate(
        graph, base, dict.fromkeys(graph.groups, 1), "150M", freeze="features.0.0", solver=solver
    )  # type: ignore[arg-type]
    assert widths["features.0.0"] == 32
    assert widths["features.18.0"] > 1280


@pytest.mark.parametrize("policy", [grow_equally, grow_at_random])
def test_the_other_policies_freeze_ties_too(policy: object) -> None:
    _, graph = traced_zoo("mobilenet_v2")
    base = backbone(graph, "150M", freeze="features.18.0")
    found = policy(growing(graph, base, "150M", freeze=frozenset(["features.18.0"]), **PAPER))  # type: ignore[operator]
    assert found.widths["features.18.0"] == found.ideal_widths["features.18.0"] == 1280
    assert found.ideal_cost == pytest.approx(150e6, rel=1e-9)
    assert 0.999 * 150e6 <= graph.macs(found.widths) <= 150e6


@given(
    st.floats(0.5, 1.0),
    st.floats(0.3, 0.95),
    st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    st.sampled_from([0.9, 1.0, 1.2]),
)
@example(0.8, 0.375, [1.0, 1.0, 1.0, 1.0], 0.9)
def test_other_groups_get_what_a_group_at_max_width_leaves(
    part: float, ratio: float, weights: list[float], max_width: float
) -> None:
    _, graph = traced_zoo("resnet18")
    budget = int(graph.macs() * part)
    assume(part < 0.99 * max_width**2)
    base = backbone(graph, budget, ratio)
    shares = dict(zip(graph.groups, weights))
    free = grow_by_shares(growing(graph, base, budget, **PAPER), shares)
    capped = grow_by_shares(growing(graph, base, budget, max_width=max_width, **PAPER), shares)
    assert all(
        base[tie] <= width <= max(base[tie], max_width * graph.widths[tie])
        for tie, width in capped.widths.items()
    )
    assert_rounded(graph, capped.widths, capped.ideal_widths, budget)
    assert capped.ideal_cost == pytest.approx(budget, rel=1e-9)
    reaches = {
        group: max(free.ideal_widths[tie] / graph.widths[tie] for tie in ties)
        for group, ties in graph.groups.items()
    }
    # The factor of a group at its maximum width is the smallest one that reaches it.
    most = {
        group: max(max_width * graph.widths[tie] / base[tie] for tie in ties)
        for group, ties in graph.groups.items()
    }
    assert all(1 <= factor <= max(1, most[group]) * (1 + 1e-9) for group, factor in capped.factors.items())
    if max(reaches.values()) > max_width + 0.05:
        assert any(capped.factors[group] > free.factors[group] for group in graph.groups)
    if max(reaches.values()) < max_width:
        # Rounding may still need a step beyond max_width, so only the ideal widths are the same.
        assert (capped.factors, capped.ideal_widths) == (free.factors, free.ideal_widths)


def test_what_is_left_is_divided_by_the_other_shares(branches: peel.ChannelGraph) -> None:
    base = dict.fromkeys(branches.widths, 8)
    wanted = {"first.0": 16, "second.0": 16, "first.1": 12, "second.1": 12, "first.2": 12, "second.2": 12}
    shares = {"branch 0": 0.9, "branch 1": 0.05, "branch 2": 0.05}
    found = grow_by_shares(growing(branches, base, branches.macs(wanted), max_width=1.0, **PAPER), shares)
    assert list(found.factors.values()) == pytest.approx([2, 1.5, 1.5])
    assert found.widths == wanted


def test_a_frozen_group_must_have_no_share(branches: peel.ChannelGraph) -> None:
    base = dict.fromkeys(branches.widths, 8)
    wanted = {**dict.fromkeys(branches.widths, 14), "first.1": 8, "second.1": 8}
    frozen = ["first.1", "second.1"]
    growth = growing(branches, base, branches.macs(wanted), freeze=frozen, **PAPER)
    with pytest.raises(peel.ConfigError, match="'branch 1' has a share, but all its ties are frozen"):
        grow_by_shares(growth, dict.fromkeys(branches.groups, 1))
    found = grow_by_shares(growth, {"branch 0": 1, "branch 1": 0, "branch 2": 1})
    assert list(found.factors.values()) == pytest.approx([1.75, 1, 1.75])
    assert found.widths == wanted


def test_a_tie_above_max_width_keeps_its_width() -> None:
    _, graph = traced_zoo("resnet18")
    base = backbone(
        graph, "1.04G", init="equal", grow=True
    )  # 68 channels everywhere, where the first ties had 64
    found = grow_by_shares(
        growing(graph, base, "1.04G", max_width=1.0, **PAPER), dict.fromkeys(graph.groups, 1)
    )
    above = [tie for tie in base if base[tie] > graph.widths[tie]]
    assert len(above) == 3
    assert all(found.widths[tie] == found.ideal_widths[tie] == base[tie] for tie in above)
    assert found.ideal_cost == pytest.approx(1.04e9, rel=1e-9)


def test_a_group_without_cost_does_not_grow() -> None:
    graph = by_tie(AuxiliaryHead)  # the auxiliary head runs in training only
    base = backbone(graph, "60%")
    found = grow_by_shares(growing(graph, base, "100%", **PAPER), {"group 0": 1, "group 1": 9})
    assert found.widths["conv"] == 8
    assert found.widths["aux"] == base["aux"]
    assert found.factors["group 1"] == 1
    assert all(
        max(grow_at_random(growing(graph, base, "100%", **PAPER), seed).widths.values()) <= 8
        for seed in range(5)
    )


def test_a_max_width_too_small_for_the_budget_is_refused() -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(peel.BudgetError, match=r"max_width|cap"):
        reallocate(graph, backbone(graph, "80%"), only(graph, "7x7"), "2G", max_width=1.0, grow=True)


@given(
    st.sampled_from(["resnet18", "cifar_resnet20", "mobilenet_v2"]), st.floats(0.2, 1.0), st.floats(0.4, 0.9)
)
def test_the_equal_policy_adds_the_same_number_to_every_tie(name: str, part: float, ratio: float) -> None:
    _, graph = traced_zoo(name)
    budget = int(graph.macs() * part)
    base = backbone(graph, budget, ratio)
    found = grow_equally(growing(graph, base, budget, **PAPER))
    added = [found.widths[tie] - base[tie] for tie in base]
    assert max(added) - min(added) <= 1
    assert_rounded(graph, found.widths, found.ideal_widths, budget)
    # One more everywhere would be too much, one less everywhere too little.
    assert graph.macs({tie: base[tie] + max(added) + 1 for tie in base}) > budget
    assert graph.macs({tie: base[tie] + max(0, min(added) - 1) for tie in base}) <= budget


def test_the_equal_policy_keeps_steps() -> None:
    _, graph = traced_net(Grouped)
    base = dict.fromkeys(graph.widths, 4)
    assert grow_equally(growing(graph, base, graph.macs({"reduce": 12, "grouped": 12}), **PAPER)).widths == {
        "reduce": 12,
        "grouped": 12,
    }


@given(
    st.sampled_from(["resnet18", "cifar_resnet20", "mobilenet_v2"]), st.integers(0, 1000), st.floats(0.5, 0.9)
)
def test_the_random_policy_grows_half_of_the_ties_by_one_factor(name: str, seed: int, ratio: float) -> None:
    _, graph = traced_zoo(name)
    base = backbone(graph, "50%", ratio)
    found = grow_at_random(growing(graph, base, "50%", **PAPER), seed)
    assert found == grow_at_random(growing(graph, base, "50%", **PAPER), seed)
    grown = {tie: found.ideal_widths[tie] / base[tie] for tie in base if found.ideal_widths[tie] > base[tie]}
    assert len(grown) == math.ceil(len(base) / 2)
    assert list(grown.values()) == pytest.approx([max(grown.values())] * len(grown))
    assert_rounded(graph, found.widths, found.ideal_widths, int(0.5 * graph.macs()))
    assert all(found.widths[tie] == base[tie] for tie in base if tie not in grown)


def test_other_seeds_draw_other_ties() -> None:
    _, graph = traced_zoo("resnet18")
    base = backbone(graph, "50%")
    assert (
        len(
            {
                peel.Widths(grow_at_random(growing(graph, base, "50%", **PAPER), seed).widths)
                for seed in range(10)
            }
        )
        > 5
    )


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"56x65": 1.0}, "Did you mean 56x56"),
        ({"7x7": -0.1, "14x14": 1.0}, "7x7.*-0.1"),
        ({"7x7": float("nan")}, "nan"),
        ({"7x7": float("inf")}, "inf"),
        ({"7x7": 0.0}, "not all zero"),
    ],
)
def test_wrong_shares_are_refused(shares: dict[str, float], message: str) -> None:
    _, graph = traced_zoo("resnet18")
    every_share = {**dict.fromkeys(graph.groups, 0.0), **shares}
    with pytest.raises(peel.PeelError, match=message):
        reallocate(graph, backbone(graph, "50%"), every_share, "50%")


def test_every_group_needs_a_share() -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(peel.ConfigError, match="do not name the group '56x56'"):
        reallocate(graph, backbone(graph, "50%"), {"7x7": 1.0}, "50%")


@pytest.mark.parametrize(
    "importance",
    [{}, {"a": 0.0, "b": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("nan")}, {"a": float("inf"), "b": 1.0}],
)
def test_wrong_importance_is_refused(importance: dict[str, float]) -> None:
    with pytest.raises(peel.PeelError, match="importance"):
        shares_of(importance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "telescope"}, "Did you mean telescoped"),
        ({"solver": "triangular", "max_width": 1.0}, "max_width"),
        ({"resource": "flops"}, "macs, params, memory"),
        ({"freeze": ["layer5"]}, "layer5"),
        ({"divisor": 0}, "divisor"),
        ({"max_width": 0}, "max_width"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(peel.PeelError, match=message):
        reallocate(graph, backbone(graph, "50%"), only(graph, "7x7"), "50%", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [
        grow_equally,
        grow_at_random,
        lambda growth: grow_by_shares(growth, only(growth.graph, "7x7")),
    ],
)
def test_a_backbone_above_the_budget_is_refused(policy: object) -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(
        peel.BudgetError,
        match=r"backbone costs 1.81G MACs \(1,814,073,344\), more than the budget of 900.0M",
    ):
        policy(growing(graph, graph.widths, "900M", **PAPER))  # type: ignore[operator]


def test_memory_works_with_the_telescoped_solver_only() -> None:
    _, graph = traced_net(Depthwise)
    base = backbone(graph, "60%", resource="memory")
    widths = reallocate(graph, base, dict.fromkeys(graph.groups, 1), "90%", resource="memory")
    assert all(widths[tie] >= base[tie] for tie in base)
    assert graph.activation_bytes(base) < graph.activation_bytes(widths) <= 0.9 * graph.activation_bytes()
    with pytest.raises(peel.PeelError, match="adds up over layers"):
        reallocate(graph, base, dict.fromkeys(graph.groups, 1), "90%", resource="memory", solver="triangular")


def test_widths_are_multiples_of_the_divisor() -> None:
    _, graph = traced_zoo("resnet50")
    base = backbone(graph, "50%", divisor=8)
    widths = reallocate(graph, base, dict(zip(graph.groups, (4, 3, 2, 1))), "50%", divisor=8)
    assert all(width % 8 == 0 and width >= base[tie] for tie, width in widths.items())
    assert 0.98 * 0.5 * graph.macs() <= graph.macs(widths) <= 0.5 * graph.macs()


# The defaults: aligned widths, and no plan that is larger than the original


EVERY = ["resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "cifar_resnet20"]


@settings(max_examples=30)  # one for memory takes half a second
@given(
    st.sampled_from(EVERY),
    st.sampled_from(["macs", "params", "memory"]),
    st.floats(0.2, 1.0),
    st.floats(0.4, 1.0),
    st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5),
    st.sampled_from(["auto", 1, 8]),
)
@example("resnet18", "memory", 0.5, 0.8, [1.0] * 5, "auto")
@example("mobilenet_v2", "macs", 1.0, 0.8, [1.0] * 5, "auto")
@example("resnet18", "macs", 0.9, 0.5, [0.0, 0.0, 0.0, 1.0, 0.0], "auto")
def test_no_plan_costs_more_than_the_original_in_any_resource(
    name: str, resource: str, part: float, ratio: float, weights: list[float], divisor: int | str
) -> None:
    _, graph = traced_zoo(name)
    shares = dict(zip(graph.groups, weights))
    assume(sum(shares.values()) > 0.01)
    budget = f"{100 * part}%"
    try:
        base = peel.backbone(graph, budget, ratio, resource=resource, divisor=divisor)
    except peel.BudgetError as error:
        assert "smallest network" in str(error)
        return
    found = grow_by_shares(growing(graph, base, budget, resource, divisor=divisor), shares)
    for count in (graph.macs, graph.params, graph.activation_bytes):
        assert count(found.widths) <= count()
    for tie, width in found.widths.items():
        step = step_of(graph, found.ideal_widths[tie], tie, divisor)
        assert abs(width - found.ideal_widths[tie]) <= step + 1e-6
        assert width >= base[tie]


@settings(max_examples=30)
@given(
    st.sampled_from(["resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0"]),
    st.floats(0.2, 0.9),
    st.floats(0.5, 0.95),
    st.lists(st.floats(0.2, 1.0), min_size=5, max_size=5),
)
def test_aligned_plans_are_within_a_hundredth_of_the_budget(
    name: str, part: float, ratio: float, weights: list[float]
) -> None:
    _, graph = traced_zoo(name)
    budget = int(part * graph.macs())
    base = peel.backbone(graph, budget, ratio)
    found = grow_by_shares(growing(graph, base, budget), dict(zip(graph.groups, weights)))
    assert 0.99 * min(budget, found.ideal_cost) <= graph.macs(found.widths) <= budget


def test_a_group_stops_where_another_resource_reaches_the_original() -> None:
    _, graph = traced_zoo("resnet18")
    base = backbone(graph, "90%", 0.5)
    free = grow_by_shares(growing(graph, base, "90%", **PAPER), only(graph, "7x7"))
    assert graph.params(free.widths) > graph.params()
    found = grow_by_shares(growing(graph, base, "90%"), only(graph, "7x7"))
    assert 0.98 * graph.params() < graph.params(found.widths) <= graph.params()
    assert found.unspent == int(0.9 * graph.macs()) - graph.macs(found.widths) > 0


def test_other_groups_get_what_a_group_at_a_limit_leaves() -> None:
    _, graph = traced_zoo("resnet18")
    base = backbone(graph, "95%", 0.7)
    alone = grow_by_shares(growing(graph, base, "95%"), only(graph, "56x56"))
    assert 0.98 < graph.activation_bytes(alone.widths) / graph.activation_bytes() <= 1
    assert alone.unspent > 0.05 * graph.macs()
    shared = grow_by_shares(growing(graph, base, "95%"), {**only(graph, "56x56"), "7x7": 0.001})
    assert shared.factors["7x7"] > 1.1
    assert shared.unspent < alone.unspent


def test_growth_must_be_asked_for() -> None:
    _, graph = traced_zoo("resnet18")
    shares = dict.fromkeys(graph.groups, 1.0)
    for plan in (
        lambda **options: peel.uniform(graph, "2G", **options),
        lambda **options: peel.backbone(graph, "2G", **options),
        lambda **options: peel.reallocate(graph, graph.widths, shares, "2G", **options),
    ):
        with pytest.raises(
            peel.BudgetError,
            match=r"above the original network: 1.81G .*grow=True \(--grow, with --method peel",
        ):
            plan()
        assert graph.macs(plan(grow=True)) <= 2e9
    assert graph.macs(peel.reallocate(graph, graph.widths, shares, "2G", grow=True)) > 1.98e9

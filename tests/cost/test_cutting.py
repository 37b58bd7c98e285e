"""Widths from losses: the budget is met with nearly the least loss."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import peel
from helpers.graphs import traced_zoo
from peel.cost.constraint import Constraint
from peel.cost.cutting import cut_to_budget
from peel.errors import BudgetError


def chain() -> peel.ChannelGraph:
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1))
    whole = nn.Sequential(model, nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 4, 1))
    return peel.trace(whole, torch.zeros(1, 3, 8, 8))


def curves(graph: peel.ChannelGraph, worths: tuple[float, ...]) -> dict[str, list[float]]:
    """What is lost falls as a power of the width."""
    pairs = zip(graph.widths.items(), worths, strict=True)
    return {
        tie: [worth * ((width + 1) / (count + 1) - 1) for count in range(width + 1)]
        for (tie, width), worth in pairs
    }


@pytest.mark.parametrize("worths", [(1.0, 1.0, 1.0), (0.1, 1.0, 3.0), (5.0, 0.2, 1.0)])
@pytest.mark.parametrize("budget", [0.7, 0.4])
def test_the_loss_is_near_the_least_of_all_widths(worths: tuple[float, ...], budget: float) -> None:
    graph = chain()
    losses = curves(graph, worths)

    def loss(widths: dict[str, int]) -> float:
        return sum(losses[tie][width] for tie, width in widths.items())

    ranges = [range(max(2, width // 8), width + 1, 2) for width in graph.widths.values()]
    allowed = (dict(zip(graph.widths, some, strict=True)) for some in itertools.product(*ranges))
    best = min(loss(some) for some in allowed if graph.macs(some) <= budget * graph.macs())
    found = cut_to_budget(Constraint.of(graph, budget, divisor=1), losses)
    assert graph.macs(found) <= budget * graph.macs()
    assert loss(dict(found)) <= 1.15 * best
    uniform = peel.uniform(graph, budget, divisor=1)
    assert loss(dict(found)) <= loss(dict(uniform)) + 1e-9


@pytest.mark.parametrize("budget", [0.5, 0.25, 0.1])
def test_the_budget_is_used_up(budget: float) -> None:
    """What the last block saves too much is given back."""
    _, graph = traced_zoo("resnet18")
    found = cut_to_budget(Constraint.of(graph, budget, divisor=1), curves(graph, tuple(range(1, 13))))
    assert 0.995 * budget <= graph.macs(found) / graph.macs() <= budget


def test_frozen_ties_keep_their_width_and_others_without_losses_follow_uniform() -> None:
    graph = chain()
    first, _, third = graph.widths
    losses = curves(graph, (1.0, 1.0, 1.0))
    del losses[third]
    found = cut_to_budget(Constraint.of(graph, "50%", divisor=1, freeze=[first]), losses)
    assert found[first] == graph.widths[first]
    uniform = peel.uniform(graph, "50%", divisor=1, freeze=[first])
    assert abs(found[third] - uniform[third]) <= 1


def test_several_limits_hold_at_once() -> None:
    graph = chain()
    found = cut_to_budget(
        Constraint.of(graph, "macs<=60%, params<=40%", divisor=1), curves(graph, (1.0, 2.0, 0.5))
    )
    assert graph.macs(found) <= 0.6 * graph.macs() and graph.params(found) <= 0.4 * graph.params()


def test_an_unreachable_budget_is_refused() -> None:
    graph = chain()
    with pytest.raises(BudgetError, match="cannot be reached"):
        cut_to_budget(Constraint.of(graph, 10), curves(graph, (1.0, 1.0, 1.0)))


@pytest.mark.parametrize("budget", [0.8, 0.5])
def test_memory_whose_peak_several_ties_make_is_cut_by_worth(budget: float) -> None:
    graph = chain()
    losses = curves(graph, (0.1, 5.0, 1.0))
    found = cut_to_budget(Constraint.of(graph, budget, resource="memory", divisor=1), losses)
    assert graph.activation_bytes(found) <= budget * graph.activation_bytes()
    uniform = peel.uniform(graph, budget, resource="memory", divisor=1)

    def loss(widths: peel.Widths) -> float:
        return sum(losses[tie][width] for tie, width in widths.items())

    assert loss(found) < loss(uniform)

"""No network goes wrong without a word: cut equals zeroed and costs are exact, or fixed, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import peel
from helpers.adversarial import CASES, Case

pytestmark = pytest.mark.usefixtures("one_thread")

WITH_EINSUM = ("product_with_a_parameter",)


def counted_macs(model: nn.Module, example: tuple[Any, ...]) -> int:
    """torch's own count, with attention as plain products, which is what it counts."""
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(*example)
    torch.backends.mha.set_fastpath_enabled(True)
    return int(counter.get_total_flops() // 2)


def trained_parameters(model: nn.Module, example: tuple[Any, ...]) -> set[str]:
    """The parameters that a step of training reaches."""
    batch = tree_map(lambda x: None if x is None else torch.cat([x, x]), example)
    model.train()(*batch).square().sum().backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def scaled(graph: peel.ChannelGraph, low: float, high: float) -> dict[str, int]:
    factors = low + (high - low) * torch.rand(len(graph.widths), generator=torch.Generator().manual_seed(1))
    return {
        name: max(1, round(width / graph.steps[name] * float(factor))) * graph.steps[name]
        for (name, width), factor in zip(graph.widths.items(), factors, strict=True)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_network_is_right_or_fixed_or_refused(case: Case) -> None:
    model = case.build()
    graph = peel.trace(model, case.example)
    assert set(graph.widths) == set(case.free), graph.fixed
    assert all(graph.fixed.values()), "a reason is empty"
    assert set(graph.inexact) == set(case.inexact), graph.inexact

    verification = peel.verify(model, case.example, graph=graph)
    assert verification.passed or case.computed, str(verification)

    uncounted = counted_macs(case.build(), case.example) - graph.macs()
    assert uncounted == 0 or "lstm" in str(graph.unknown_operators)  # torch does not count a fused LSTM
    reached = trained_parameters(case.build(), case.example)
    for widths in (scaled(graph, 0.3, 0.95), scaled(graph, 1.05, 1.6), dict(graph.widths)):
        try:
            small = peel.slim(model, widths, graph=graph)
        except peel.WidthsError as error:
            assert case.refused and "adversarial.py" in str(error)
            continue
        assert counted_macs(small, case.example) == graph.macs(widths) + uncounted
        assert sum(parameter.numel() for parameter in small.parameters()) == graph.params(widths)
        assert trained_parameters(small, case.example) == reached
    if case.refused:
        with pytest.raises(peel.WidthsError, match=r"adversarial\.py:\d+"):
            peel.slim(model, case.refused, graph=graph)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_costs_are_exact_or_the_network_is_refused_at_random_widths(case: Case) -> None:
    model = case.build()
    graph = peel.trace(model, case.example)
    uncounted = counted_macs(case.build(), case.example) - graph.macs()
    reached = trained_parameters(case.build(), case.example)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        draws = torch.rand(len(graph.widths), generator=generator)
        widths = {
            name: max(1, int(width / graph.steps[name] * 3 * float(draw) ** 2)) * graph.steps[name]
            for (name, width), draw in zip(graph.widths.items(), draws, strict=True)
        }
        try:
            small = peel.slim(model, widths, graph=graph)
        except peel.WidthsError as error:
            assert "adversarial.py" in str(error)
            continue
        # torch counts no product when `einsum` sums over a single channel
        if case.name not in WITH_EINSUM or 1 not in widths.values():
            assert counted_macs(small, case.example) == graph.macs(widths) + uncounted, widths
        assert sum(parameter.numel() for parameter in small.parameters()) == graph.params(widths)
        assert trained_parameters(small, case.example) == reached, widths

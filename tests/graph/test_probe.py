"""The user's code at other widths: what is recorded, what it means, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from helpers.adversarial import CASES, Case
from helpers.graphs import traced_zoo
from peel.graph.probe import check_network, find_difference, probing_units, smallest_cause
from peel.graph.rebuild import empty_as, rebuild

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = {case.name: case for case in CASES}


def traced(case: Case) -> tuple[nn.Module, peel.ChannelGraph]:
    model = case.build()
    return model, peel.trace(model, case.example)


def test_widths_are_probed_above_below_and_equal() -> None:
    _, graph = traced_zoo("cifar_resnet20")
    original = graph.units()
    larger, smaller, equal = probing_units(graph)
    assert all(new > old for new, old in zip(larger, original, strict=True))
    assert len({units * step for units, step in zip(larger, graph.steps.values(), strict=True)}) == len(
        larger
    )
    assert all(1 <= new < old for new, old in zip(smaller, original, strict=True))
    assert len({units * step for units, step in zip(equal, graph.steps.values(), strict=True)}) == 1


@pytest.mark.parametrize(
    ("causes", "found"),
    [([{3}], {3}), ([{1, 4}], {1, 4}), ([{0}, {5}], {0, 5}), ([{2, 6}, {7}], {2, 6, 7})],
)
def test_only_what_is_needed_for_a_failure_is_a_cause(causes: list[set[int]], found: set[int]) -> None:
    assert set(smallest_cause(range(8), lambda items: any(cause <= set(items) for cause in causes))) == found


def test_a_branch_on_a_width_is_a_reason_with_both_lines() -> None:
    _, graph = traced(CASE["threshold_between_the_probes"])
    assert "adversarial.py" in graph.fixed["a"]
    assert "instead of" in graph.fixed["a"]
    assert "self.b(x)) + x" in graph.fixed["a"]


def test_a_number_that_equals_a_width_by_chance_keeps_its_value() -> None:
    model, graph = traced(CASE["temperature_beside_a_width"])
    small = peel.slim(model, {"a": 16, "c": 8}, graph=graph)
    assert small.channels == 8
    assert small.temperature == 16


def test_a_scale_computed_from_a_width_follows_it() -> None:
    model, graph = traced(CASE["scale_from_the_shape"])
    half = peel.slim(model, {"a": 8}, graph=graph)
    x = CASE["scale_from_the_shape"].example[0]
    with torch.no_grad():
        wanted = half.fc((half.b(half.a(x)) * 8**-0.5).mean((2, 3)))
        assert torch.allclose(half(x), wanted, atol=1e-6)


def test_verify_reports_code_that_the_trace_did_not_see() -> None:
    """A graph from an analysis that never saw the branch: `verify` finds it at its own widths."""
    case = CASE["sum_where_shapes_are_equal"]
    model = case.build()
    blind = replace(case, body=lambda self, x: self.b(F.relu(self.a(x)))).build()
    graph = peel.trace(blind, case.example)
    units = [8, 8]
    network = rebuild(model, graph, units, empty_as)
    assert "y = y + x" in str(find_difference(network, graph, units, model))
    assert find_difference(rebuild(model, graph, [8, 9], empty_as), graph, [8, 9], model) is None


def test_a_network_of_other_widths_than_said_is_refused() -> None:
    model, graph = traced_zoo("cifar_resnet20")
    small = peel.slim(model, peel.uniform(graph, "50%"), graph=graph)
    with pytest.raises(peel.WidthsError, match=r"parameters; [\d,]+ are predicted"):
        check_network(small, graph, graph.widths, model)


class Caching(nn.Module):
    """Computes a table at its first call and keeps it in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.table = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), None
        self.position = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[-1], device=x.device)[:, None].square()
        return self.fc((x * self.position(self.table)[:, 0]).mean((2, 3)))


def test_a_model_that_ran_after_it_was_traced_and_keeps_a_cache_is_no_error() -> None:
    model, images = Caching(), torch.randn(2, 3, 8, 8)
    graph = peel.trace(model, images[:1])
    model(images)
    small = peel.slim(model, {"conv": 5}, graph=graph)
    assert small(images).shape == (2, 4)
    assert peel.trace(model, images[:1]).widths == graph.widths


def test_a_model_that_was_changed_after_it_was_traced_is_no_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 5, 1))
    graph = peel.trace(model, torch.randn(1, 3, 8, 8))
    model[2].p = 0.1
    assert peel.slim(model, {"0": 5}, graph=graph)[2].p == 0.1
    model[1] = nn.Tanh()
    assert isinstance(peel.slim(model, {"0": 5}, graph=graph)[1], nn.Tanh)


def test_the_check_leaves_the_network_and_the_random_state_alone() -> None:
    model, graph = traced_zoo("cifar_resnet20")
    widths = peel.uniform(graph, "50%")
    small = peel.slim(model, widths, graph=graph, weights="inherit")
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    state = torch.get_rng_state()
    check_network(small.train(), graph, widths, model)
    assert small.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in small.state_dict().items())

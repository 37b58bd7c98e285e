"""A latency model recovers planted times, never falls with a width, and is a resource like MACs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.latency import STEP, planted, planted_model, unseen
from helpers.nets import Chain
from peel.cost.budget import parse_limits
from peel.cost.constraint import Constraint
from peel.cost.latency import Accuracy, round_up


@functools.cache
def measured(name: str = "resnet18") -> peel.ChannelGraph:
    """A network with a latency model from noisy times."""
    _, graph = traced_zoo(name)
    return graph.with_latency(planted_model(graph, noise=0.02))


def test_planted_times_with_steps_are_recovered_on_networks_that_were_not_measured() -> None:
    graph, truth = measured(), planted(measured())
    model = graph.latency_model
    assert model is not None
    networks = unseen(graph)
    found = Accuracy.of((graph.latency(w) * 1e9 for w in networks), map(truth, networks))
    assert found.median < 0.02
    assert found.p95 < 0.05
    # What it says of itself comes from 16 noisy times.
    assert found.median / 2 < model.accuracy.median < 0.05
    assert model.accuracy.networks == 16


def test_a_channel_above_a_kernel_step_costs_more_than_those_that_fill_it() -> None:
    graph = measured()
    for name in graph.widths:
        full, one_more, filled = (
            graph.latency({**graph.widths, name: width}) for width in (3 * STEP, 3 * STEP + 1, 4 * STEP)
        )
        assert one_more - full > 2 * (filled - one_more)


def test_latency_never_falls_as_a_width_grows() -> None:
    cost, graph = measured().cost("latency"), measured()
    rng = np.random.default_rng(0)
    for _ in range(50):
        units = rng.uniform(1, 300, len(graph.widths))
        wider = units.copy()
        wider[rng.integers(len(units))] += rng.choice([0.01, 1.0, 40.0])
        assert cost(wider) >= cost(units)


def test_rounding_up_is_exact_for_whole_channels_and_continuous_between_them() -> None:
    assert [round_up(width, 16) for width in (1, 16, 17, 32)] == [16, 16, 32, 32]
    assert round_up(16.25, 16) == 20
    assert round_up(np.array([7.5, 8.0]), 1).tolist() == [7.5, 8.0]


def test_a_file_gives_the_same_times(tmp_path: Path) -> None:
    graph = measured()
    assert graph.latency_model is not None
    path = graph.latency_model.save(tmp_path / "new" / "latency.json")
    loaded = peel.LatencyModel.load(path)
    assert loaded == graph.latency_model
    widths = unseen(graph, 1)[0]
    assert graph.with_latency(loaded).latency(widths) == graph.latency(widths)


#: A network whose ties have no steps.
NO_STEPS = {"widths": {"a": 8}, "steps": {}, "input_shapes": [], "macs": 1, "params": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"constant": -5.0}, "not a latency file: Expected `float` >= 0.0"),
        ({"constant": 1e308}, "not a latency file: Expected `float` <= 1000000000000000.0"),
        (
            {"constant": 1e15, "terms": [[1e14, 8, [[9, [[0, 1]]]]]]},
            "corrupt: a time or a term is impossible",
        ),
        ({"terms": [[0.0, 8, [[10**400, [[0, 1]]]]]]}, "corrupt: a time or a term is impossible"),
        ({"network": NO_STEPS, "terms": []}, "corrupt: a time or a term is impossible"),
        ({"conditions": {"a": [[[1]]]}}, "not a latency file: Expected"),
        ({"terms": [[1.0, 8, [[0, [[99, 1]]]]]]}, "corrupt"),
        ({"terms": [[1.0, 0, [[0, [[0, 1]]]]]]}, "not a latency file: Expected `int` >= 1"),
        ({"version": 1}, "not a latency file of this version"),
        ({"terms": "none"}, "not a latency file: Expected `array`"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    model = measured().latency_model
    assert model is not None
    path = model.save(tmp_path / "latency.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(peel.StoreError, match=message):
        peel.LatencyModel.load(path)


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    path.write_text('{"network":' * 5000)
    with pytest.raises(peel.StoreError, match="is not a latency file"):
        peel.LatencyModel.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(peel.StoreError, match=r"cannot read the latency file .*none\.json"):
        peel.LatencyModel.load(tmp_path / "none.json")


def test_a_model_of_another_network_is_refused() -> None:
    model = measured().latency_model
    assert model is not None
    with pytest.raises(peel.StoreError, match=r"another network: only one of them has the tie"):
        traced_net(Chain)[1].with_latency(model)
    with pytest.raises(peel.StoreError, match=r"its input is \(\(3, 224, 224\),\) there and \(\(3, 64, 64\)"):
        traced_zoo("resnet18", 64)[1].with_latency(model)
    half = measured().at(peel.uniform(measured(), "50%"))
    with pytest.raises(peel.StoreError, match=r"conv1 has 64 channels there and \d+ here"):
        half.with_latency(model)


@pytest.mark.parametrize("budget", ["60%", "8ms", 0.4, "9500us"])
def test_every_method_meets_a_latency_budget(budget: str | float) -> None:
    graph = measured()
    target = Constraint.of(graph, budget, resource="latency").budget
    uniform = peel.uniform(graph, budget, resource="latency")
    backbone = peel.backbone(graph, budget, 0.8, resource="latency")
    shares = {"56x56": 0.1, "28x28": 0.2, "14x14": 0.3, "7x7": 0.4}
    peeled = peel.reallocate(graph, backbone, shares, budget, resource="latency")
    for widths in (uniform, peeled):
        assert 0.95 * target <= graph.latency(widths) * 1e9 <= target
    assert graph.latency(backbone) < 0.9 * target / 1e9
    assert peeled != uniform


@pytest.mark.parametrize("budget", ["75%", "50%", "35%"])
def test_widths_that_meet_a_latency_are_well_aligned(budget: str) -> None:
    """A few percent of a latency are not worth widths that no kernel likes: 26 instead of 24."""
    graph = measured("mobilenet_v2")
    widths = peel.uniform(graph, budget, resource="latency")
    assert all(width % 8 == 0 for width in widths.values() if width >= 64)
    assert all(width % 4 == 0 for width in widths.values() if width >= 16)


def test_the_fixed_part_of_a_latency_leaves_the_backbone_its_share() -> None:
    """The smallest network takes nine tenths of the budget: 0.8 of it could not be reached."""
    graph = measured()
    fixed = graph.latency(graph.steps) * 1e9
    backbone = peel.backbone(graph, int(fixed / 0.9), 0.8, resource="latency")
    assert graph.latency(backbone) * 1e9 <= fixed + 0.8 * (fixed / 0.9 - fixed)


def test_an_unreachable_latency_names_the_smallest() -> None:
    graph = measured()
    smallest = graph.latency(graph.steps) * 1e3
    with pytest.raises(peel.BudgetError, match=rf"0\.1 ms cannot be reached.* has {smallest:.3g} ms\.$"):
        peel.uniform(graph, "0.1ms", resource="latency")
    with pytest.raises(peel.BudgetError, match=rf"0\.1 ms cannot be reached.* has {smallest:.3g} ms\.$"):
        peel.uniform(graph, "macs<=60%, latency<=0.1ms")


def test_latency_needs_a_model() -> None:
    _, graph = traced_zoo("resnet18")
    with pytest.raises(peel.BudgetError, match=r"no latency is known: .*peel latency MODEL"):
        peel.uniform(graph, "8ms", resource="latency")


@pytest.mark.parametrize("budget", ["8", "8M", "8 minutes", "0ms"])
def test_a_latency_needs_a_unit_of_time(budget: str) -> None:
    with pytest.raises(peel.BudgetError):
        peel.uniform(measured(), budget, resource="latency")


@pytest.mark.parametrize(
    ("limits", "binding"),
    [
        ("macs<=1.1G, params<=3M, latency<=80%", "params"),
        ("macs<=0.4G, params <= 80%, latency<=80%", "macs"),
        ("macs<=90%,latency≤8ms,params<=11,000,000", "latency"),
    ],
)
def test_several_limits_hold_at_once_and_one_is_used_up(limits: str, binding: str) -> None:
    graph = measured()
    target = Constraint.of(graph, limits)
    assert target.resource == binding
    amounts = {**target.limits, binding: target.budget}
    assert amounts.keys() == parse_limits(limits).keys()
    backbone = peel.backbone(graph, limits)
    equal = dict.fromkeys(graph.groups, 1.0)
    for widths in (peel.uniform(graph, limits), peel.reallocate(graph, backbone, equal, limits)):
        used = {name: graph.cost(name)(graph.units(widths)) / most for name, most in amounts.items()}
        assert max(used.values()) <= 1
        assert max(used.values()) >= (0.95 if binding == "latency" else 0.97)
    assert used.keys() == amounts.keys()


def test_a_second_limit_stops_the_growth_of_groups() -> None:
    """All goes to the last group, whose layers have most of the parameters."""
    graph = measured()
    backbone, shares = peel.backbone(graph, "50%"), {**dict.fromkeys(graph.groups, 0.0), "7x7": 1.0}
    free = peel.reallocate(graph, backbone, shares, "50%")
    held = peel.reallocate(graph, backbone, shares, "50%", limits={"params": "55%"})
    assert graph.params(free) > 0.56 * graph.params()
    assert graph.params(held) <= 0.55 * graph.params()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("macs<=1G, macs<=2G", "limits macs twice"),
        ("flops<=1G", "the resource of a limit is one of macs, params, memory, latency"),
        ("macs<1G", "cannot read the limit 'macs<1G'"),
        ("macs<=1G, params", "cannot read"),
        ("macs<=200%, params<=200%", "above the original"),
    ],
)
def test_limits_that_cannot_be_read_are_refused(limits: str, message: str) -> None:
    with pytest.raises(peel.BudgetError, match=message):
        peel.uniform(measured(), limits)

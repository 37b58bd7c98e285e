"""The widths of many networks are those in golden/widths.json: rearranging code changes none of them.

`python tests/test_golden.py` writes the file anew, for a change that is meant to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import peel
from helpers import nets
from helpers.graphs import traced_net, traced_zoo
from helpers.latency import planted_model
from peel.cost.constraint import Constraint
from peel.cost.cutting import cut_to_budget
from peel.errors import PeelError

FILE = Path(__file__).parent / "golden" / "widths.json"

ZOO = {
    "cifar_resnet20": None,
    "cifar_resnet56": None,
    "cifar_resnet18": None,
    "cifar_mobilenet_v2": None,
    "cifar_vgg16_bn": None,
    "resnet18": 64,
    "resnet50": 64,
    "mobilenet_v2": 64,
    "shufflenet_v2_x0_5": 96,
    "squeezenet1_1": 96,
}
NETS = [
    "Chain",
    "Residual",
    "Depthwise",
    "Grouped",
    "Dense",
    "Flattened",
    "Split",
    "Shuffled",
    "ChannelsLast",
    "GroupNormed",
    "Shared",
    "Standardized",
    "PaddedShortcut",
    "Decoder",
    "Volume",
    "Signal",
    "SelectiveKernel",
    "Gated",
    "PixelShuffled",
    "Efficient",
    "Attention",
    "HeadSize",
    "AuxiliaryHead",
    "Subclassed",
    "Parametrized",
    "CrossStage",
    "HandLayerNorm",
    "Maxout",
    "Unfolded",
]
BUDGETS = ("10%", "25%", "50%", "75%")
RESOURCES = ("macs", "params", "memory", "latency")


def traced(name: str) -> peel.ChannelGraph:
    graph = traced_net(getattr(nets, name))[1] if name in NETS else traced_zoo(name, ZOO[name])[1]
    return graph.with_latency(planted_model(graph, networks=24))


def widths_of(graph: peel.ChannelGraph, budget: str, resource: str) -> list[list[int]] | str:
    """Uniform, backbone, reallocated and cut; of a budget that cannot be reached, the error."""
    shares: Mapping[str, float] = {group: 1 + place % 3 for place, group in enumerate(graph.groups)}
    units = dict(zip(graph.widths, graph.units()))
    losses = {
        tie: [(1 + place % 4) * (1 - kept / whole) ** 2 for kept in range(whole + 1)]
        for place, (tie, whole) in enumerate(units.items())
    }
    options: dict[str, Any] = {"resource": resource}
    try:
        base = peel.backbone(graph, budget, **options)
        found = [
            peel.uniform(graph, budget, **options),
            base,
            peel.reallocate(graph, base, shares, budget, **options),
            cut_to_budget(Constraint.of(graph, budget, **options), losses),
        ]
    except PeelError as error:
        return str(error)
    return [list(widths.values()) for widths in found]


def measured(name: str) -> dict[str, list[list[int]] | str]:
    graph = traced(name)
    return {
        f"{resource} {budget}": widths_of(graph, budget, resource)
        for resource in RESOURCES
        for budget in BUDGETS
    }


#: Most of the time of all: only in the slow tests.
LARGE = (
    "cifar_mobilenet_v2",
    "cifar_resnet18",
    "cifar_resnet56",
    "mobilenet_v2",
    "resnet50",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in (*ZOO, *NETS)],
)
def test_widths_are_those_of_before(name: str) -> None:
    assert measured(name) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    rows = [f"{json.dumps(name)}: {json.dumps(measured(name))}" for name in (*ZOO, *NETS)]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")

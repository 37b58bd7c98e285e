"""`graph.at(widths)` is the graph of the network that `slim` builds, without tracing it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import NETS, Dense, Efficient, Net


def unnamed(graph: peel.ChannelGraph) -> peel.ChannelGraph:
    """The graph with ties named by position: a name such as `conv[0:4]` depends on the traced widths."""
    names = {name: f"{i} {name.partition('[')[0]}" for i, name in enumerate(graph.ties)}
    ties = {names[name]: replace(tie, name=names[name]) for name, tie in graph.ties.items()}
    return replace(
        graph,
        ties=ties,
        groups={group: tuple(names[tie] for tie in members) for group, members in graph.groups.items()},
    )


def differences(kept: peel.ChannelGraph, traced: peel.ChannelGraph) -> list[str]:
    kept, traced = unnamed(kept), unnamed(traced)
    found = [
        field.name
        for field in fields(kept)
        if field.name not in ("ties", "constants")
        and getattr(kept, field.name) != getattr(traced, field.name)
    ]
    if list(kept.ties) != list(traced.ties):
        return [*found, f"{list(kept.ties)} and {list(traced.ties)}"]
    for name, tie in kept.ties.items():
        found += [
            f"{name}: {field.name}"
            for field in fields(tie)
            if getattr(tie, field.name) != getattr(traced.ties[name], field.name)
        ]
    return found


def stretched(graph: peel.ChannelGraph, factors: tuple[float, ...]) -> dict[str, int]:
    """Some ties narrower, others wider. At least two steps, since a tie of one channel is fixed."""
    return {
        name: max(2, int(width * factors[i % len(factors)] / graph.steps[name])) * graph.steps[name]
        for i, (name, width) in enumerate(graph.widths.items())
    }


def check(
    model: torch.nn.Module, graph: peel.ChannelGraph, shape: tuple[int, ...], widths: dict[str, int]
) -> list[str]:
    kept = graph.at(widths)
    traced = peel.trace(peel.slim(model, widths, graph=graph), torch.randn(1, *shape))
    further = stretched(kept, (1.6, 0.7))
    renamed = dict(zip(traced.widths, further.values()))
    assert kept.macs() == traced.macs() == graph.macs(widths)
    assert kept.macs(further) == traced.macs(renamed) == graph.macs(further)
    assert kept.params(further) == traced.params(renamed)
    assert kept.activation_bytes(further) == traced.activation_bytes(renamed)
    return differences(kept, traced)


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_at_equals_tracing_the_slim_network(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    found = check(net, graph, kind.shape, stretched(graph, (0.5, 1.5, 0.75)))
    # ECA slides over the channels: the spatial size of its single channel is a width.
    assert found == (["1 eca: spatial"] if kind is Efficient else [])


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_mobilenet_v2"])
def test_at_equals_tracing_the_slim_network_of_the_zoo(name: str) -> None:
    model, graph = traced_zoo(name)
    assert check(model, graph, (3, 32, 32), stretched(graph, (0.5, 1.25, 0.75, 1))) == []


def test_at_can_be_chained_and_reversed() -> None:
    net, graph = traced_net(Dense)
    there = {"a": 7, "b": 3, "c": 11}
    assert graph.at({"a": 2, "b": 9}).at(there) == graph.at(there)
    assert graph.at({"b": 9}).at(graph.widths) == graph
    assert graph.at({"b": 9}).widths == {"a": 4, "b": 9, "c": 8}
    small = peel.slim(net, there, graph=graph)
    back = peel.slim(small, graph.widths, graph=graph.at(there))
    assert [p.shape for p in back.parameters()] == [p.shape for p in net.parameters()]


def test_unknown_ties_are_refused() -> None:
    _, graph = traced_net(Dense)
    with pytest.raises(peel.WidthsError, match="no tie is called"):
        graph.at({"d": 3})

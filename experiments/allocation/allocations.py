"""The networks, and the allocations of a budget that are trained.

Lambda is the part of the budget that the uniform backbone costs; the rest is the pool.

    uniform             one factor for all layers: the baseline
    equal/0.5           lambda 0.5, the pool in equal shares to all groups
    32x32/0.5           the whole pool to one group; 32x32+8x8/0.5: one half each; the same with lambda 0.3
    random-00/0.5       shares drawn from a Dirichlet distribution with parameter 0.7
    fitted              the best point of a smooth fit of the short trainings (see fit.py)

MobileNetV2 has more, with other groups:

    fine stream-8/0.8   per resolution, the hidden (expanded) channels apart from the residual stream
    kind hidden/0.7     all hidden channels, or the whole residual stream; also with lambda 0.5
    free uniform        the last convolution, frozen in all others, is free and a group of its own
    fine balanced-00    finer groups, all of them wide or narrow (see trial.py)
    fine fitted         the best point of the fit with finer groups
    fine ratios         the widths of `fine fitted` at 10 %, over uniform, at another budget

Both networks have some that are found without training an allocation:

    repair found        by the loss of the original, cut and repaired (see predict.py)
    repair hidden       the same scores, hidden channels only: the residual stream stays uniform
    sensitivity         widths by `peel.measure_sensitivity` (see sensitivity.py); with `half`, half of the
                        way from uniform to them; with `hidden`, the residual stream stays uniform;
                        with `within`, groups get what `repair hidden` gives them (see jobs.py)

    search              the plan of `peel run --method search` (see searched.py); with `divided`, also
                        `--division sensitivity`

Plans of searches by short trainings (see trial.py), one for every two seeds or one in all:

    trial-4             from trials of four epochs; fine trial-8: finer groups, eight epochs
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import peel
from peel import zoo
from peel.graph import ChannelGraph

NETWORKS = ("cifar_resnet18", "cifar_mobilenet_v2")
BUDGETS = ("10%", "25%")
CLASSES = 100

#: Allocations with random shares, and the parameter of their Dirichlet distribution.
RANDOM, CONCENTRATION = 14, 0.7

#: Names of balanced trials begin with this.
BALANCED = "fine balanced"


class Network(NamedTuple):
    model: nn.Module
    graph: ChannelGraph
    freeze: tuple[str, ...]


@cache
def network(name: str) -> Network:
    model = zoo.create(name, num_classes=CLASSES)
    graph = peel.trace(model, torch.zeros(1, 3, 32, 32))
    return Network(model, graph, tuple(zoo.FROZEN.get(model.peel_source["zoo"], ())))


@dataclass(frozen=True)
class Candidate:
    """One allocation of a budget. The fields are the first columns of a line of the results."""

    network: str
    budget: str
    allocation: str
    """Its name."""
    shares: dict[str, float] | None
    backbone_ratio: float | None
    """Lambda."""
    widths: dict[str, int]
    macs: int
    params: int


def candidate(
    name: str,
    budget: str,
    allocation: str,
    widths: Mapping[str, int],
    shares: dict[str, float] | None = None,
    ratio: float | None = None,
) -> Candidate:
    graph = network(name).graph
    macs, params = graph.macs(widths), graph.params(widths)
    return Candidate(name, budget, allocation, shares, ratio, dict(widths), macs, params)


@cache
def uniform(name: str, budget: str) -> Candidate:
    net = network(name)
    return candidate(name, budget, "uniform", peel.uniform(net.graph, budget, freeze=net.freeze, divisor=1))


def reallocated(
    name: str,
    budget: str,
    allocation: str,
    shares: dict[str, float],
    ratio: float,
    graph: ChannelGraph | None = None,
    freeze: Iterable[str] | None = None,
) -> Candidate:
    """The pool given to the groups of `graph` by their shares."""
    net = network(name)
    graph = graph or net.graph
    freeze = net.freeze if freeze is None else tuple(freeze)
    backbone = peel.backbone(graph, budget, ratio, freeze=freeze, divisor=1)
    every_share = {**dict.fromkeys(graph.groups, 0.0), **shares}
    widths = peel.reallocate(graph, backbone, every_share, budget, divisor=1, freeze=freeze, grow=True)
    return candidate(name, budget, f"{allocation}/{ratio:g}", widths, shares, ratio)


def groups_by_resolution(name: str) -> dict[str, tuple[str, ...]]:
    """The groups of the method, without frozen ties."""
    net = network(name)
    return {group: tuple(t for t in ties if t not in net.freeze) for group, ties in net.graph.groups.items()}


@cache
def coarse(name: str, budget: str) -> tuple[Candidate, ...]:
    """Uniform, then all allocations with groups by resolution."""
    groups = list(network(name).graph.groups)
    equal = ("equal", dict.fromkeys(groups, 1 / len(groups)))
    singles = [(group, {group: 1.0}) for group in groups]
    pairs = [("+".join(pair), dict.fromkeys(pair, 0.5)) for pair in itertools.combinations(groups, 2)]
    drawn = np.random.default_rng(0).dirichlet([CONCENTRATION] * len(groups), RANDOM).round(4).tolist()
    randoms = [(f"random-{i:02d}", dict(zip(groups, row, strict=True))) for i, row in enumerate(drawn)]
    with_half = (equal, *singles, *pairs, *randoms)
    return (
        uniform(name, budget),
        *(reallocated(name, budget, label, shares, 0.5) for label, shares in with_half),
        *(reallocated(name, budget, label, shares, 0.3) for label, shares in (*singles, *pairs)),
    )


# Other groups, of MobileNetV2 only


def is_hidden(tie: str) -> bool:
    """Whether these channels lie inside a block: no residual stream holds them."""
    return re.fullmatch(r"features\.\d+\.conv\.0\.0|layer\d\.\d\.conv1", tie) is not None


def fine_groups(name: str) -> dict[str, tuple[str, ...]]:
    """Per resolution, hidden channels and the residual stream apart; the last convolution on its own."""
    net = network(name)
    groups: dict[str, tuple[str, ...]] = {}
    for group, ties in net.graph.groups.items():
        side = group.split("x")[0]
        groups[f"stream-{side}"] = tuple(t for t in ties if not is_hidden(t) and t not in net.freeze)
        groups[f"hidden-{side}"] = tuple(t for t in ties if is_hidden(t))
    return {**groups, "last": net.freeze} if net.freeze else groups


@cache
def broad(name: str, budget: str) -> tuple[Candidate, ...]:
    """Hidden channels or the residual stream, and uniform with a free last convolution."""
    net = network(name)
    if not net.freeze:
        return ()
    free = candidate(name, budget, "free uniform", peel.uniform(net.graph, budget, divisor=1))
    return *by_kind(name, budget, 0.7), free


def by_kind(name: str, budget: str, ratio: float) -> list[Candidate]:
    """The whole pool to the residual stream, or to the hidden channels."""
    net = network(name)
    ties: dict[str, list[str]] = {"stream": [], "hidden": []}
    for tie in net.graph.widths:
        ties["hidden" if is_hidden(tie) else "stream"].append(tie)
    graph = net.graph.regroup(ties)
    return [reallocated(name, budget, f"kind {kind}", {kind: 1.0}, ratio, graph) for kind in ties]


@cache
def fine(name: str, budget: str) -> tuple[Candidate, ...]:
    """The whole pool to one of the finer groups, or to one resolution with a free last convolution."""
    net = network(name)
    if not net.freeze:
        return ()
    graph = net.graph.regroup(fine_groups(name))
    with_last = net.graph.regroup({**groups_by_resolution(name), "last": net.freeze})
    inner = [group for group in graph.groups if group != "last"]
    outer = with_last.groups
    return (
        *(reallocated(name, budget, f"fine {group}", {group: 1.0}, 0.8, graph) for group in inner),
        *(reallocated(name, budget, f"free {group}", {group: 1.0}, 0.7, with_last, ()) for group in outer),
        *by_kind(name, budget, 0.5),
    )

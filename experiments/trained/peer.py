"""Torch-Pruning (pip install torch-pruning==1.6.1) as a method: which channels it keeps at each budget.

Its documentation says to ignore the classifier and to prune in small steps until the speed-up is reached. The
channels that it keeps go to JSON. The network is then cut by `peel.slim`, which gives the weights that
Torch-Pruning itself leaves, so its networks are recalibrated, repaired and trained by the code of all others.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peel.graph import ChannelGraph
from peel.graph.rebuild import tensors_of
from peel.methods import Method, Plan, Problem
from peel.methods.config import MethodConfig
from peel.methods.method import TrainBackbone
from peel.methods.plan import assemble_plan
from peel.utils.files import write_bytes

from .networks import graph_of, load_original

#: Name of an arm -> whether channels are ranked across the whole network.
PEERS = {"tp-local": False, "tp-global": True}

#: Steps in which all channels would be pruned.
STEPS = 200

#: Tie -> the channels that are kept.
Kept = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TorchPruning(Method):
    """The channels that Torch-Pruning keeps."""

    kept: Kept

    def plan(self, problem: Problem, config: MethodConfig, train_backbone: TrainBackbone) -> Plan:
        return assemble_plan(problem, {tie: len(channels) for tie, channels in self.kept.items()})

    def scores(self, problem: Problem) -> Any:
        """One for a channel that is kept, else zero."""
        scores = {tie: torch.zeros(width) for tie, width in problem.graph.widths.items()}
        for tie, channels in self.kept.items():
            scores[tie][list(channels)] = 1.0
        return scores


def kept_channels(folder: Path, name: str, seed: int, arm: str, budgets: Sequence[str]) -> dict[str, Kept]:
    """Budget -> the channels that are kept of an original. What was computed before is read from its file."""
    path = folder / f"{name}-{seed}" / f"{arm}.json"
    known: dict[str, Kept] = json.loads(path.read_text()) if path.exists() else {}
    missing = [budget for budget in budgets if budget not in known]
    if missing:
        known |= prune(load_original(folder, name, seed), graph_of(name), missing, PEERS[arm])
        write_bytes(path, json.dumps(known).encode())
    return known


def prune(model: nn.Module, graph: ChannelGraph, budgets: Sequence[str], is_global: bool) -> dict[str, Kept]:
    """Budget -> the channels that are kept, at the MACs that are nearest to the budget."""
    left = sorted(budgets, key=fraction, reverse=True)
    found: dict[str, Kept] = {}
    before, macs_before = kept_in(tagged(model, graph), graph), graph.macs()
    for kept in prune_steps(model, graph, is_global):
        macs = graph.macs({tie: len(channels) for tie, channels in kept.items()})
        while left and macs <= (target := fraction(left[0]) * graph.macs()):
            found[left.pop(0)] = kept if target - macs < macs_before - target else before
        if not left:
            return found
        before, macs_before = kept, macs
    raise ValueError(f"Torch-Pruning cannot reach {left[0]} of the MACs.")


def prune_steps(model: nn.Module, graph: ChannelGraph, is_global: bool) -> Iterator[Kept]:
    """The channels that are kept after each group that Torch-Pruning cuts."""
    import torch_pruning as tp

    network = tagged(model, graph)
    pruner = tp.pruner.BasePruner(
        network,
        torch.zeros(1, 3, 32, 32),
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        global_pruning=is_global,
        pruning_ratio=1.0,
        iterative_steps=STEPS,
        ignored_layers=[layer for layer in network.modules() if isinstance(layer, nn.Linear)],
        in_channel_groups={},  # the default is one dict for all pruners
        out_channel_groups={},
        num_heads={},
    )
    for _ in range(STEPS):
        for group in pruner.step(interactive=True):
            group.prune()
            yield kept_in(network, graph)


def tagged(model: nn.Module, graph: ChannelGraph) -> nn.Module:
    """A copy with a channel's number in place of its running mean, or of its bias where it has no norm.

    Neither counts for the importance, and both are cut together with the channel.
    """
    network = copy.deepcopy(model).cpu().requires_grad_(True)
    tensors = tensors_of(network)
    with torch.no_grad():
        for tag in tag_names(graph).values():
            tensors[tag].copy_(torch.arange(len(tensors[tag])))
    return network


def tag_names(graph: ChannelGraph) -> dict[str, str]:
    """Tie -> the tensor that holds the numbers of its channels."""
    names = list(graph.widths)
    found: dict[str, str] = {}
    for ending in ("running_mean", "bias"):
        for tensor, axes in graph.layouts.items():
            if tensor.endswith(ending) and len(axes) == 1 and len(axes[0]) == 1 and axes[0][0].tie >= 0:
                found.setdefault(names[axes[0][0].tie], tensor)
    return found


def kept_in(network: nn.Module, graph: ChannelGraph) -> Kept:
    tensors: Mapping[str, Tensor] = tensors_of(network)
    return {tie: tensors[tag].long().tolist() for tie, tag in tag_names(graph).items()}


def fraction(budget: str) -> float:
    """0.5 of `50%`."""
    return float(budget.removesuffix("%")) / 100

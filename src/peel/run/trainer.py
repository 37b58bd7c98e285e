"""Trains the networks of a run, each once: what an earlier start of the run has trained is taken from its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..data.datasets import Split
from ..errors import CorruptFileError
from ..methods.problem import Problem
from ..steps.distillation import Pair
from ..surgery import record_of, slim
from ..surgery.padding import Padded, fast_widths, pad
from ..train.checkpoint import non_persistent_buffers
from ..train.history import Epoch
from ..train.loop import fit
from ..train.objective import Objective
from ..train.recipe import Recipe
from ..utils.rng import derive_seed
from .callbacks import Callback
from .folder import RunFolder
from .stage_record import StageRecord

__all__ = ["Trainer"]

WHAT = {
    "original": "the original",
    "backbone": "the over-pruned backbone",
    "uniform": "the uniform network of the same budget",
    "peel": "the slim network",
}

#: On a GPU epochs may be shorter than it takes to write a checkpoint: there is one after an epoch, but not more often than this.
EPOCH_SECONDS = 10.0

UNPADDED = (
    "Some widths are slow on a GPU, and the network trains with them: zero channels, which make them fast, would change what it computes, "
    "or could not be tried."
)

VARIES = (
    "Nobody promises that a GPU adds in the same order twice, so the same command with the same seed may end with slightly other weights "
    "and accuracies. With --deterministic it ends with the same bits, more slowly."
)


@dataclass
class Trainer:
    """Trains networks, and keeps them in a folder where there is one."""

    problem: Problem
    reporter: Callback
    checkpoint_seconds: float = 600.0
    workspace: RunFolder | None = None
    records: dict[str, StageRecord] = field(default_factory=dict)
    """Of the stages that are done."""

    @contextlib.contextmanager
    def keeping_in(self, workspace: RunFolder) -> Iterator[None]:
        """What is trained meanwhile is kept there."""
        home, self.workspace = self.workspace, workspace
        try:
            yield
        finally:
            self.workspace = home

    def train(
        self,
        stage: str,
        network: nn.Module,
        objective: Objective,
        recipe: Recipe,
        images: Split,
        each_epoch: Callable[[nn.Module], dict[str, Any]] | None = None,
    ) -> nn.Module:
        """The trained network; of a pair, the student."""
        engine, space = self.problem.engine, self.workspace
        what = WHAT[stage.split("-")[0]]
        done: StageRecord | None = engine.world.broadcast(
            space.finished(stage) if space is not None else None
        )
        if done is not None:
            self.reporter.stage(stage, f"{what}: finished before")
            if space is not None:
                space.checkpoints(stage).clear()  # a kill may have come before this
            self.records[stage] = done
            return engine.prepare(self._kept(stage, _widths_of(network))).eval()
        self.reporter.stage(stage, f"training {what}")
        padded, notes = self._padded(network)
        history = fit(
            network if padded is None else padded.model,
            objective,
            images,
            recipe,
            engine=engine,
            seed=derive_seed("order", self.problem.seed),
            test=self.problem.data.test,
            checkpoints=engine.world.broadcast(space.checkpoints(stage) if space is not None else None),
            checkpoint_seconds=self.checkpoint_seconds,
            epoch_seconds=EPOCH_SECONDS if engine.device.type == "cuda" else 0.0,
            watcher=_Watcher(stage, self.reporter, space),
            each_epoch=each_epoch
            if padded is None or each_epoch is None
            else lambda model: each_epoch(padded.unpadded(model)),
        )
        network = (
            network.student()
            if isinstance(network, Pair)
            else network
            if padded is None
            else padded.unpadded()
        )
        engine.prepare(network).eval()
        self.records[stage] = self._record(history, notes)
        if space is not None:
            space.finish(stage, self.records[stage], network)
        return network

    def recall(self, stage: str) -> None:
        """Take over the record of a stage, where an earlier start has finished it, without its network."""
        done = self.workspace.finished(stage) if self.workspace is not None else None
        if done is not None:
            self.reporter.stage(stage, f"{WHAT[stage.split('-')[0]]}: finished before")
            self.records[stage] = done

    def _record(self, history: list[Epoch], notes: list[str]) -> StageRecord:
        # Of every epoch as many images as it had: some may have been lost on the way.
        passes = sum(round(epoch.images_per_second * epoch.seconds) for epoch in history)
        varies = [] if self.problem.engine.deterministic else [VARIES]
        return StageRecord(history, passes, self.problem.data.described(), (*varies, *notes))

    def _kept(self, stage: str, expected: Mapping[str, int]) -> nn.Module:
        """What the stage has trained. The first process reads it; the others build it with their own code, from its weights."""
        problem, space, world = self.problem, self.workspace, self.problem.engine.world
        network = space.model_of(stage, problem.model) if space is not None else None
        if space is not None and network is not None:
            widths = _widths_of(network)
            other = [tie for tie in problem.graph.widths if widths.get(tie) != expected[tie]]
            if other:
                raise CorruptFileError(
                    f"{space.folder}/stages/{stage}.json is of another network: {other[0]} has {widths.get(other[0])} channels there, not "
                    f"{expected[other[0]]}. Restore it from a copy, or start anew with another {space.option}."
                )
        if world.size == 1 and network is not None:
            return network
        known = (
            (_widths_of(network), network.state_dict(), non_persistent_buffers(network))
            if network is not None
            else None
        )
        shared = world.broadcast(known)
        if network is None:
            widths, weights, passing = shared
            network = slim(
                problem.model, {tie: widths[tie] for tie in problem.graph.widths}, graph=problem.graph
            )
            network.load_state_dict(weights)
            for name, buffer in non_persistent_buffers(network).items():
                buffer.copy_(passing[name])
        return network

    def _padded(self, network: nn.Module) -> tuple[Padded | None, list[str]]:
        """The network with zero channels where the engine is faster with more; a note where that cannot be."""
        if not self.problem.engine.pad_channels or isinstance(network, Pair):
            return None, []
        widths = _widths_of(network)
        graph = self.problem.graph.at({tie: widths[tie] for tie in self.problem.graph.widths})
        raised = fast_widths(network, graph)
        padded = pad(self.problem.engine.prepare(network), graph, raised)
        return padded, [UNPADDED] if padded is None and raised != graph.widths else []


def _widths_of(network: nn.Module) -> Mapping[str, int]:
    return record_of(network).widths


@dataclass
class _Watcher:
    """Passes on what the loop tells, and writes the metrics."""

    stage: str
    reporter: Callback
    workspace: RunFolder | None

    def begin(self, history: list[Epoch]) -> None:
        if self.workspace is not None:
            self.workspace.restart_metrics(self.stage, history)
        self.reporter.begin(history)

    def step(self, done: int, total: int, images: int) -> None:
        self.reporter.step(done, total, images)

    def epoch(self, epoch: Epoch) -> None:
        if self.workspace is not None:
            self.workspace.log_epoch(self.stage, epoch)
        self.reporter.epoch(epoch)

"""Trains the networks of a run, each once: a resumed run loads what is finished from its folder."""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..cost.widths import Widths
from ..data.datasets import Split
from ..errors import ConfigError, CorruptFileError, DivergedError
from ..methods.problem import Problem
from ..methods.start import Start
from ..steps.distillation import Distillation, Pair
from ..surgery import slim
from ..surgery.info import attach_info, info_of
from ..surgery.padding import Padded, fast_widths, pad
from ..surgery.serialization import load
from ..train.callbacks import Callback
from ..train.checkpoint import non_persistent_buffers
from ..train.history import EpochRecord
from ..train.loop import fit
from ..train.objective import Objective, explain_failure, name_of
from ..train.recipe import Recipe
from ..train.task import TrainFunction
from ..utils.rng import derive_seed, seed_everything
from .folder import WAY_OUT, RunFolder
from .result import StageRecord

DESCRIPTIONS = {
    "original": "the original",
    "backbone": "the over-pruned backbone",
    "plan": "the plan",
    "uniform": "the uniform network of the same budget",
    "bench": "the networks",
}

#: On a GPU an epoch may be shorter than writing a checkpoint: at most one in this many seconds.
EPOCH_SECONDS = 10.0

UNPADDED = (
    "Some widths are slow on a GPU. The network was trained with them, because padding them with zero "
    "channels would change what it computes, or could not be tested."
)

NOT_DETERMINISTIC = (
    "GPU runs are not bit-identical: the same command and seed may give slightly different weights. "
    "--deterministic makes them so, and is slower."
)


@dataclass
class Trainer:
    problem: Problem
    callbacks: Sequence[Callback]
    checkpoint_seconds: float = 600.0
    folder: RunFolder | None = None
    records: dict[str, StageRecord] = field(default_factory=dict)
    """Of the finished stages."""

    def begin_stage(self, stage: str, prefix: str = "", suffix: str = "") -> None:
        for callback in self.callbacks:
            description = DESCRIPTIONS.get(stage.split("-")[0], "the slim network")
            callback.on_stage_begin(stage, f"{prefix}{description}{suffix}")

    def train(
        self,
        stage: str,
        network: nn.Module,
        objective: Objective,
        recipe: Recipe,
        images: Split,
        callbacks: Sequence[Callback] = (),
        start: Start | None = None,
    ) -> nn.Module:
        """The trained network; of a pair (in-place distillation), the student.

        With `start`, the network as it was before the training where that is better on held-out images.
        """
        engine, folder = self.problem.engine, self.folder
        done = engine.world.broadcast(folder.stage_record(stage) if folder is not None else None)
        if done is not None:
            self.begin_stage(stage, suffix=": already finished")
            if folder is not None:
                folder.checkpoints(stage).clear()  # the run was killed before it cleared them
            self.records[stage] = done
            return self._finished(self._load(stage, _widths_of(network)))
        start = start or Start(network)
        before = copy.deepcopy(network.state_dict()) if start.loss is not None and recipe.epochs else None
        self.begin_stage(stage, prefix="training " if recipe.epochs else "evaluating ")
        if recipe.epochs == 0 or self.problem.task.train_fn is not None:
            history = [self._train_without_loop(network, objective, recipe)]
            if folder is not None:
                folder.restart_metrics(stage, history)
            return self._end_stage(stage, network, history, [], start, before)
        padded, notes = self._pad(network)
        extra = callbacks if padded is None else [_Unpadded(callback, padded) for callback in callbacks]
        metrics = [] if folder is None else [_MetricsFile(stage, folder)]
        history = fit(
            network if padded is None else padded.model,
            objective,
            images,
            recipe,
            engine=engine,
            seed=derive_seed("order", self.problem.seed),
            test=self.problem.data.test,
            checkpoints=engine.world.broadcast(folder.checkpoints(stage) if folder is not None else None),
            checkpoint_seconds=self.checkpoint_seconds,
            epoch_seconds=EPOCH_SECONDS if engine.device.type == "cuda" else 0.0,
            callbacks=[*extra, *metrics, *self.callbacks],
            task=self.problem.task,
        )
        if isinstance(network, Pair):
            network = network.student()
        elif padded is not None:
            network = padded.unpadded()
        return self._end_stage(stage, network, history, notes, start, before)

    def _end_stage(
        self,
        stage: str,
        network: nn.Module,
        history: list[EpochRecord],
        notes: list[str],
        start: Start,
        before: Mapping[str, Tensor] | None,
    ) -> nn.Module:
        self._finished(network)
        record = self._record(history, notes, start.scores)
        if before is not None:
            record = self._keep_better(network, record, start, before)
        self.records[stage] = record
        if self.folder is not None:
            self.folder.save_stage(stage, self.records[stage], network)
        return network

    def _keep_better(
        self, network: nn.Module, record: StageRecord, start: Start, before: Mapping[str, Tensor]
    ) -> StageRecord:
        """Fine-tuning on few images may lose what the repair gave."""
        after = self.problem.held_out_loss(network)
        assert start.loss is not None and after is not None
        record = replace(record, held_out_losses=(start.loss, after))
        if after <= start.loss:
            return record
        network.load_state_dict(before)
        return replace(record, kept_metrics=self.problem.evaluate(network).to_dict())

    def _train_without_loop(self, network: nn.Module, objective: Objective, recipe: Recipe) -> EpochRecord:
        """No epoch, or the user's own function trains the network: all its epochs are one record."""
        problem, train_fn, seconds = self.problem, self.problem.task.train_fn, 0.0
        if recipe.epochs and train_fn is not None:
            seconds = self._train_with(train_fn, network, objective, recipe)
        passes = recipe.epochs * problem.data.train.size
        metrics = problem.evaluate(problem.engine.prepare(network))
        record = EpochRecord(
            recipe.epochs, recipe.epochs, 0.0, {}, metrics.to_dict(), seconds, passes / max(seconds, 1e-9)
        )
        for callback in self.callbacks if recipe.epochs else ():
            callback.on_epoch_end(record)
        return record

    def _train_with(
        self, train_fn: TrainFunction, network: nn.Module, objective: Objective, recipe: Recipe
    ) -> float:
        """Let the user's own function train the network. Returns the seconds."""
        problem, layers = self.problem, [(name, p.shape) for name, p in network.named_parameters()]
        seed_everything(derive_seed("model", problem.seed))
        teacher = objective.teacher if isinstance(objective, Distillation) else None
        network = problem.engine.prepare(network).train()
        began = time.perf_counter()
        with explain_failure(f"train_fn {name_of(train_fn)}"):
            result = train_fn(network, epochs=recipe.epochs, teacher=teacher)
        seconds = time.perf_counter() - began
        if result not in (None, network) or layers != [(n, p.shape) for n, p in network.named_parameters()]:
            raise ConfigError("train_fn must train the given model in place and keep its layers as they are.")
        broken = next((n for n, value in network.named_parameters() if not value.isfinite().all()), None)
        if broken is not None:
            raise DivergedError(
                f"train_fn {name_of(train_fn)} left weights that are not finite ({broken}). Lower its "
                "learning rate."
            )
        return seconds

    def _finished(self, network: nn.Module) -> nn.Module:
        """A trained network, which knows how to be fed."""
        attach_info(network, replace(info_of(network), input=self.problem.data.input_spec()))
        return self.problem.engine.prepare(network).eval()

    def is_finished(self, stage: str) -> bool:
        return self.problem.engine.world.broadcast(
            self.folder is not None and self.folder.stage_record(stage) is not None
        )

    def share_stage(self, finished: str, stage: str, network: nn.Module) -> nn.Module:
        """End a stage whose network would be trained as that of a finished one was. It takes no time."""
        self.begin_stage(stage, suffix=f": the {finished} network, which is trained already")
        history = [replace(epoch, seconds=0.0) for epoch in self.records[finished].history]
        record = self.records[stage] = replace(self.records[finished], history=history, image_passes=0)
        if self.folder is not None:
            self.folder.restart_metrics(stage, record.history)
            self.folder.save_stage(stage, record, network)
        return network

    def load_record(self, stage: str) -> None:
        """Take over the record of a stage that an earlier start finished, without its network."""
        done = self.folder.stage_record(stage) if self.folder is not None else None
        if done is not None:
            self.begin_stage(stage, suffix=": already finished")
            self.records[stage] = done

    def record_plan(self, seconds: float, image_passes: int) -> None:
        """The record of a plan that was found without training: its search counts as one epoch."""
        epoch = EpochRecord(1, 1, 0.0, {}, None, seconds, image_passes / max(seconds, 1e-9))
        self.records["plan"] = StageRecord([epoch], image_passes)
        if self.folder is not None:
            self.folder.write_json("stages/plan.record.json", asdict(self.records["plan"]))

    def _record(
        self, history: list[EpochRecord], notes: list[str], before_training: Mapping[str, float]
    ) -> StageRecord:
        passes = sum(round(epoch.images_per_second * epoch.seconds) for epoch in history)
        varies = [] if self.problem.engine.deterministic else [NOT_DETERMINISTIC]
        return StageRecord(history, passes, [*varies, *notes], dict(before_training))

    def _load(self, stage: str, widths: Widths) -> nn.Module:
        """The network of a finished stage. The main process reads it and sends the weights to the others."""
        problem = self.problem
        stored: Any = None
        if self.folder is not None:
            loaded = load(self.folder.path(f"stages/{stage}"), problem.model)
            if _widths_of(loaded) != widths:
                file = self.folder.path(f"stages/{stage}.safetensors")
                raise CorruptFileError(f"{file} has other widths than the plan. {WAY_OUT}")
            stored = loaded.state_dict(), non_persistent_buffers(loaded), info_of(loaded)
        weights, buffers, info = problem.engine.world.broadcast(stored)
        network = slim(problem.model, widths, graph=problem.graph).requires_grad_(True)
        network.load_state_dict(weights)
        for name, buffer in non_persistent_buffers(network).items():
            buffer.copy_(buffers[name])
        attach_info(network, info)
        return network

    def _pad(self, network: nn.Module) -> tuple[Padded | None, list[str]]:
        """The network padded with zero channels where that is faster; a note where it is not possible."""
        if not self.problem.engine.pad_channels or isinstance(network, Pair):
            return None, []
        widths = _widths_of(network)
        graph = self.problem.graph.at({tie: widths[tie] for tie in self.problem.graph.widths})
        wider = fast_widths(network, graph)
        padded = pad(self.problem.engine.prepare(network), graph, wider)
        return padded, [UNPADDED] if padded is None and wider != graph.widths else []


def _widths_of(network: nn.Module) -> Widths:
    return Widths(info_of(network).widths)


@dataclass
class _Unpadded(Callback):
    """Shows a callback the network without its zero channels."""

    callback: Callback
    padded: Padded

    def extra_metrics(self, model: nn.Module) -> dict[str, Any]:
        return self.callback.extra_metrics(self.padded.unpadded(model))


@dataclass
class _MetricsFile(Callback):
    """Writes metrics.jsonl."""

    stage: str
    folder: RunFolder

    def on_train_begin(self, history: list[EpochRecord]) -> None:
        self.folder.restart_metrics(self.stage, history)

    def on_epoch_end(self, record: EpochRecord) -> None:
        self.folder.log_epoch(self.stage, record)

"""Trains one network of a run: with peel's loop, or with a training function of the user's own."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..cost.widths import Widths
from ..data.datasets import Split
from ..errors import ConfigError, DivergedError
from ..methods.work import Goal
from ..steps.distillation import Distillation, Pair
from ..surgery.info import attach_info, info_of
from ..surgery.padding import Padded, fast_widths, pad
from ..train.callbacks import Callback
from ..train.history import EpochRecord
from ..train.loop import fit
from ..train.objective import explain_failure, name_of
from ..train.recipe import Recipe
from ..train.task import TrainFunction
from ..utils.rng import derive_seed, seed_everything
from .loaded import Loaded
from .result import Record
from .store import RunFolder, Store

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


@dataclass(frozen=True)
class Training:
    """What one training is: everything but the network and its objective."""

    name: str
    """Of the stage: its files, and its lines in metrics.jsonl."""
    key: str
    recipe: Recipe
    images: Split
    seed: int
    description: str
    callbacks: Sequence[Callback] = ()


def train_network(
    network: nn.Module, objective: Goal, training: Training, loaded: Loaded, store: Store
) -> tuple[nn.Module, Record]:
    """The trained network (of a pair, the student) and how it was trained. The caller stores both."""
    recipe, engine, folder = training.recipe, loaded.engine, store.folder
    loaded.begin_stage(
        training.name, f"{'training' if recipe.epochs else 'evaluating'} {training.description}"
    )
    if recipe.epochs == 0 or loaded.task.train_fn is not None:
        history = [_train_without_loop(network, objective, training, loaded)]
        if folder is not None:
            folder.restart_metrics(training.name, history)
        return finished(network, loaded), _record(training, history, [], loaded)
    padded, notes = _pad(network, loaded)
    extra = training.callbacks if padded is None else [_Unpadded(one, padded) for one in training.callbacks]
    metrics = [] if folder is None else [_MetricsFile(training.name, folder)]
    checkpoints = None if folder is None else store.checkpoints(training.name, training.key)
    history = fit(
        network if padded is None else padded.model,
        objective,
        training.images,
        recipe,
        engine=engine,
        seed=derive_seed("order", training.seed),
        test=loaded.data.test,
        checkpoints=engine.world.broadcast(checkpoints),
        checkpoint_seconds=loaded.config.checkpoint_seconds,
        epoch_seconds=EPOCH_SECONDS if engine.device.type == "cuda" else 0.0,
        callbacks=[*extra, *metrics, *loaded.callbacks],
        task=loaded.task,
    )
    if isinstance(network, Pair):
        network = network.student()
    elif padded is not None:
        network = padded.unpadded()
    return finished(network, loaded), _record(training, history, notes, loaded)


def finished(network: nn.Module, loaded: Loaded) -> nn.Module:
    """A trained network, which knows how to be fed."""
    attach_info(network, replace(info_of(network), input=loaded.data.input_spec()))
    return loaded.engine.prepare(network).eval()


def _record(training: Training, history: list[EpochRecord], notes: list[str], loaded: Loaded) -> Record:
    passes = sum(round(epoch.images_per_second * epoch.seconds) for epoch in history)
    varies = [] if loaded.engine.deterministic else [NOT_DETERMINISTIC]
    return Record(history, passes, training.key, [*varies, *notes])


def _train_without_loop(
    network: nn.Module, objective: Goal, training: Training, loaded: Loaded
) -> EpochRecord:
    """No epoch, or the user's own function trains the network: all its epochs are one record."""
    recipe, train_fn, seconds = training.recipe, loaded.task.train_fn, 0.0
    if recipe.epochs and train_fn is not None:
        seconds = _train_with(train_fn, network, objective, training, loaded)
    passes = recipe.epochs * loaded.data.train.size
    metrics = loaded.evaluate(network)
    record = EpochRecord(
        recipe.epochs, recipe.epochs, 0.0, {}, metrics.to_dict(), seconds, passes / max(seconds, 1e-9)
    )
    for callback in loaded.callbacks if recipe.epochs else ():
        callback.on_epoch_end(record)
    return record


def _train_with(
    train_fn: TrainFunction, network: nn.Module, objective: Goal, training: Training, loaded: Loaded
) -> float:
    """Let the user's own function train the network. Returns the seconds."""
    layers = [(name, p.shape) for name, p in network.named_parameters()]
    seed_everything(derive_seed("model", training.seed))
    teacher = objective.teacher if isinstance(objective, Distillation) else None
    network = loaded.engine.prepare(network).train()
    began = time.perf_counter()
    with explain_failure(f"train_fn {name_of(train_fn)}"):
        result = train_fn(network, epochs=training.recipe.epochs, teacher=teacher)
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


def _pad(network: nn.Module, loaded: Loaded) -> tuple[Padded | None, list[str]]:
    """The network padded with zero channels where that is faster; a note where it is not possible."""
    if not loaded.engine.pad_channels or isinstance(network, Pair):
        return None, []
    widths = Widths(info_of(network).widths)
    graph = loaded.graph.at({tie: widths[tie] for tie in loaded.graph.widths})
    wider = fast_widths(network, graph)
    padded = pad(loaded.engine.prepare(network), graph, wider)
    return padded, [UNPADDED] if padded is None and wider != graph.widths else []


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

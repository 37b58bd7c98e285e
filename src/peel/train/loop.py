"""The training loop, the same for every stage."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..data.augmentation import EVAL, View
from ..data.batch import call_model
from ..data.datasets import Split
from ..errors import PeelError
from ..utils.rng import derive_seed, seed_everything
from .callbacks import Callback
from .checkpoint import Checkpoints
from .engine import Engine, eval_batch_size, retry_on_oom
from .history import EpochRecord, Metrics
from .objective import Objective
from .phases import Phase
from .recipe import Recipe
from .signals import Interrupted, defer_signals, interrupt_requested
from .state import TrainingState
from .task import Scores, Task

#: Steps between two checks that the loss is finite; each check waits for the device.
CHECK_EVERY = 100

#: Compiling takes about a minute for a large network and saves about a quarter of the time.
COMPILE_SECONDS = 600.0


def fit(
    model: nn.Module,
    objective: Objective | Sequence[Phase],
    train: Split,
    recipe: Recipe,
    *,
    engine: Engine,
    seed: int,
    test: Split | None = None,
    checkpoints: Checkpoints | None = None,
    checkpoint_seconds: float = 600.0,
    epoch_seconds: float = 0.0,
    callbacks: Sequence[Callback] = (),
    task: Task | None = None,
) -> list[EpochRecord]:
    """Train the model in place and return a record of each epoch. Phases are steps of several losses.

    With `checkpoints`, the state is saved every `checkpoint_seconds` within an epoch, and at the end of an
    epoch if the last checkpoint is `epoch_seconds` old. Training resumes from the newest checkpoint.
    A signal stops training after the current step, with a checkpoint, and raises `Interrupted`.
    """
    steps_per_epoch = recipe.steps_per_epoch(train.size)
    engine.prepare(model)
    seed_everything(derive_seed("model", seed, engine.world.rank))
    task = task or Task()
    state = TrainingState(model, objective, recipe, engine, checkpoints, steps_per_epoch, task.optimizer)
    with defer_signals():
        try:
            state.resume()
            for callback in callbacks:
                callback.on_train_begin(state.history)
            while state.epoch < recipe.epochs:
                _train_epoch(state, train, seed, checkpoint_seconds, callbacks)
                _end_epoch(state, test, epoch_seconds, callbacks, task)
        finally:
            state.train_step.release()
    model.eval()
    return state.history


def _train_epoch(
    state: TrainingState, train: Split, seed: int, checkpoint_seconds: float, callbacks: Sequence[Callback]
) -> None:
    engine, recipe = state.engine, state.recipe
    state.model.train()
    if engine.world.broadcast(_should_compile(state)):
        state.train_step.compile()
    indices = state.indices(train.size, seed)
    view = View.of_epoch(recipe.augment, seed, state.epoch)
    for batch in train.batches(indices, state.local_batch_size, view, engine.device, engine.workers):
        state.run_step(batch)
        for callback in callbacks:
            callback.on_step_end(state.global_step, state.total_steps, recipe.batch_size)
        is_last = state.step == state.steps_per_epoch
        stop, is_save_due = (None, False) if is_last else state.poll(checkpoint_seconds)
        must_save = is_save_due or stop is not None
        if must_save or is_last or state.step % CHECK_EVERY == 0:
            state.check_finite(weights=must_save or is_last)
        if must_save:
            state.save()
        if stop is not None:
            raise Interrupted(stop)


def _should_compile(state: TrainingState) -> bool:
    if state.engine.compile != "auto":
        return state.engine.compile == "on"
    epochs_left = state.recipe.epochs - state.epoch
    return bool(state.history) and state.history[-1].seconds * epochs_left > COMPILE_SECONDS


def _end_epoch(
    state: TrainingState,
    test: Split | None,
    epoch_seconds: float,
    callbacks: Sequence[Callback],
    task: Task,
) -> None:
    model, engine, recipe = state.model, state.engine, state.recipe
    losses, seconds = state.mean_losses(), state.seconds
    engine.world.average_buffers(model)
    try:
        metrics = evaluate(model, test, engine, task=task) if test is not None else None
    except (Interrupted, PeelError):
        state.save()  # all steps are done: a resume repeats the evaluation only
        raise
    extra: dict[str, Any] = {}
    for callback in callbacks:
        extra.update(callback.extra_metrics(model))
    record = EpochRecord(
        epoch=state.epoch + 1,
        epochs=recipe.epochs,
        lr=recipe.lr_at(state.global_step - 1, state.steps_per_epoch),
        train=losses,
        test=metrics.to_dict() if metrics is not None else None,
        seconds=seconds,
        images_per_second=state.steps_per_epoch * recipe.batch_size / max(seconds, 1e-9),
        extra=extra,
    )
    state.end_epoch(record)
    stop, is_save_due = state.poll(epoch_seconds, force=True)
    if is_save_due or stop is not None or state.epoch == recipe.epochs:
        state.save()
    for callback in callbacks:
        callback.on_epoch_end(record)
    if stop is not None:
        raise Interrupted(stop)


def evaluate(
    model: nn.Module, split: Split, engine: Engine, batch_size: int | None = None, task: Task | None = None
) -> Metrics:
    """Loss and accuracies, or the metric of the task, over the whole split, divided among the processes.

    A signal raises `Interrupted` after the current batch, in all processes. Out of memory, the evaluation is
    repeated with half the batch size.
    """
    was_training = model.training
    model.eval()
    try:
        return retry_on_oom(
            lambda size: _evaluate(model, split, engine, size, task or Task()),
            batch_size or eval_batch_size(split),
            engine.device,
        )
    finally:
        model.train(was_training)


@torch.inference_mode()
def _evaluate(model: nn.Module, split: Split, engine: Engine, batch_size: int, task: Task) -> Metrics:
    scores = Scores(task, engine.device)
    # An accumulating metric has to see all samples. Else empty where there are more processes than images.
    rank, processes = (0, 1) if task.is_accumulating else (engine.world.rank, engine.world.size)
    indices = torch.arange(min(rank, split.size), split.size, processes)
    stop = None
    for batch in split.batches(indices, batch_size, EVAL, engine.device, engine.workers):
        with engine.autocast():
            output = call_model(model, batch.inputs)
        scores.add(model, output, batch)
        if (stop := interrupt_requested()) is not None:
            break
    stops, counts, classes = zip(*engine.world.gather((stop, scores.count, scores.classes)), strict=True)
    for signal in filter(None, stops):
        raise Interrupted(signal)
    return scores.result(engine.world.all_reduce(scores.sums), sum(counts), max(classes))

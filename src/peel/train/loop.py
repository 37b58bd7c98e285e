"""The training loop: plain PyTorch, the same for every stage. It can be stopped at any step and goes on with the same bits."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import nn

from ..data.augmentation import EVAL, View
from ..data.datasets import Split
from ..errors import DataError, DivergedError
from ..utils.rng import derive_seed, epoch_order, seed_everything
from .callbacks import Callback
from .checkpoint import Checkpoints
from .engine import Engine
from .faults import fault
from .history import EpochRecord, Metrics
from .memory import eval_batch_size, retry_on_oom
from .objective import Objective, get_logits
from .recipe import Recipe
from .signals import Interrupted, defer_signals, interrupt_requested
from .state import Start, Training

__all__ = ["evaluate", "fit"]

log = logging.getLogger("peel")

#: Steps between looks at whether the loss is still a number; each look waits for the device.
CHECK_EVERY = 100


class Pauses(NamedTuple):
    """The least number of seconds between two checkpoints."""

    within: float
    """An epoch."""
    between: float
    """Epochs."""


def fit(
    model: nn.Module,
    objective: Objective,
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
) -> list[EpochRecord]:
    """Train the model in place and return a record of each epoch.

    With `checkpoints`, the state is kept after
    every epoch (where epochs are short: after the first that ends `epoch_seconds` after the last time) and every `checkpoint_seconds`
    within one, and a call on an existing folder goes on from the newest.

    The batch of the recipe is that of all processes together: each of them takes an equal part of every batch.
    """
    steps = train.size // recipe.batch_size
    if steps < 1:
        raise DataError(
            f"a batch of {recipe.batch_size} images is larger than the training set of {train.size}. "
            f"Choose a batch size of at most {train.size}."
        )
    if recipe.retries and checkpoints is None:
        log.warning(
            "retries %d: there is no folder to go back to, so a training that diverges ends; name one with output.",
            recipe.retries,
        )
    engine.prepare(model)
    slower = 1.0
    with defer_signals():
        while True:
            training = Training(model, objective, recipe, engine, checkpoints, steps)
            seed_everything(derive_seed("model", seed, engine.world.rank))
            start = training.start(slower)
            for callback in callbacks:
                callback.on_train_begin(start.history)
            try:
                return _epochs(
                    training,
                    start,
                    train,
                    steps,
                    seed,
                    test,
                    Pauses(checkpoint_seconds, epoch_seconds),
                    callbacks,
                )
            except DivergedError as error:
                slower = start.slower / 2
                if slower < 0.5**recipe.retries or checkpoints is None:
                    raise
                level = logging.WARNING if engine.world.is_main_process else logging.DEBUG
                log.log(level, "%s This training goes back to it and on with %g of the rate.", error, slower)


def _epochs(
    training: Training,
    start: Start,
    train: Split,
    steps: int,
    seed: int,
    test: Split | None,
    pauses: Pauses,
    callbacks: Sequence[Callback],
) -> list[EpochRecord]:
    model, recipe, engine, history = training.model, training.recipe, training.engine, start.history
    start_step, spent_before = start.step, start.seconds
    last_kept = time.perf_counter()
    for epoch in range(start.epoch, recipe.epochs):
        model.train()
        order = training.part(epoch_order(train.size, seed, epoch)[: steps * recipe.batch_size], start_step)
        view = View.of_epoch(recipe.augment, seed, epoch)
        began = time.perf_counter()
        stop = None
        for step, batch in enumerate(
            train.batches(order, training.part_size, view, engine.device, engine.workers), start_step
        ):
            done = epoch * steps + step
            rate = recipe.rate(done, steps) * start.slower
            training.running(
                batch._replace(images=fault(done, batch.images)), rate, recipe.epochs * steps - done
            )
            for callback in callbacks:
                callback.on_step_end(done + 1, recipe.epochs * steps, recipe.batch_size)
            is_last = step + 1 == steps
            now = time.perf_counter()
            stop, is_due = training.asked(done, now - last_kept > pauses.within and not is_last)
            if (step + 1) % CHECK_EVERY == 0 or is_last or is_due or stop is not None:
                training.check_finite(epoch, step, weights=is_last or is_due or stop is not None)
            if is_due or (stop is not None and not is_last):
                training.keep(epoch, step + 1, history, spent_before + now - began, start.slower)
                last_kept = now
            if stop is not None and not is_last:
                raise Interrupted(stop)
        means = training.means(steps)
        seconds = spent_before + time.perf_counter() - began
        engine.world.average_buffers(model)
        try:
            scores = evaluate(model, test, engine, stop_early=True) if test is not None else None
        except Interrupted:
            # The steps of the epoch are done: on the way back only the evaluation is repeated.
            training.keep(epoch, steps, history, seconds, start.slower)
            raise
        record = EpochRecord(
            epoch + 1,
            recipe.epochs,
            recipe.rate((epoch + 1) * steps - 1, steps) * start.slower,
            means,
            asdict(scores) if scores is not None else None,
            seconds,
            steps * recipe.batch_size / max(seconds, 1e-9),
            {
                **{
                    key: value
                    for callback in callbacks
                    for key, value in callback.extra_metrics(model).items()
                },
                **({"slower": start.slower} if start.slower < 1 else {}),
            },
        )
        history.append(record)
        training.clear_sums()
        start_step, spent_before = 0, 0.0
        is_long_ago = time.perf_counter() - last_kept >= pauses.between
        if engine.world.broadcast(is_long_ago or stop is not None or epoch + 1 == recipe.epochs):
            training.keep(epoch + 1, 0, history, 0.0, start.slower)
            last_kept = time.perf_counter()
        for callback in callbacks:
            callback.on_epoch_end(record)
        if stop is not None:
            raise Interrupted(stop)
    model.eval()
    return history


def evaluate(
    model: nn.Module, split: Split, engine: Engine, batch_size: int | None = None, *, stop_early: bool = False
) -> Metrics:
    """Cross entropy, top-1 and top-5 over every image of the split, each counted once, by one process or shared among several.

    With `stop_early`, a signal that asks to stop is an exception (`Stopped`) after the batch at hand, in all processes when one has got
    it. Where memory is short, fewer images go through at a time.
    """
    size = batch_size or eval_batch_size(split.shape)
    was_training = model.training
    model.eval()
    try:
        return retry_on_oom(
            lambda size: _evaluated(model, split, engine, size, stop_early), size, engine.device
        )
    finally:
        model.train(was_training)


@torch.inference_mode()
def _evaluated(model: nn.Module, split: Split, engine: Engine, batch_size: int, stop_early: bool) -> Metrics:
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    # Nothing where there are more processes than images.
    mine = torch.arange(min(engine.world.rank, split.size), split.size, engine.world.size)
    stop = None
    for images, labels, _ in split.batches(mine, batch_size, EVAL, engine.device, engine.workers):
        with engine.autocast():
            output = model(images)
        scores = get_logits(output)
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
        sums += torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])
        if stop_early and (stop := interrupt_requested()) is not None:
            break
    if stop_early and (stop := engine.world.first_not_none(stop)) is not None:
        raise Interrupted(stop)
    loss_sum, first, among = (engine.world.all_reduce(sums) / split.size).tolist()
    return Metrics(loss_sum, first, among)

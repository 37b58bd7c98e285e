"""The training loop: plain PyTorch, the same for every stage. It can be stopped at any step and goes on with the same bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError, DivergedError
from .chance import derive, epoch_order
from .checkpoint import Checkpoints
from .data import Split
from .engine import Engine
from .faults import fault
from .objective import Objective, class_scores
from .recipe import Recipe
from .step import Step
from .stop import Stopped, listened_to, stop_requested
from .view import AS_IT_IS, View

__all__ = ["Epoch", "Scores", "Watcher", "evaluate", "fit"]

#: Steps between looks at whether the loss is still a number; each look waits for the device.
CHECK_EVERY = 100

#: With several processes, steps between asking each other whether one was told to stop.
ASK_EVERY = 10


@dataclass(frozen=True)
class Scores:
    """Accuracy (fractions) and cross entropy over a whole split."""

    loss: float
    top1: float
    top5: float


@dataclass(frozen=True)
class Epoch:
    """One line of the record of a training."""

    epoch: int
    of: int
    lr: float
    train: dict[str, float]
    test: dict[str, float] | None
    seconds: float
    images_per_second: float
    extra: dict[str, Any] = field(default_factory=dict)


class Watcher(Protocol):
    """Is told how training goes."""

    def begin(self, history: list[Epoch]) -> None: ...
    def step(self, done: int, total: int, images: int) -> None: ...
    def epoch(self, epoch: Epoch) -> None: ...


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
    watcher: Watcher | None = None,
    each_epoch: Callable[[nn.Module], dict[str, Any]] | None = None,
) -> list[Epoch]:
    """Train the model in place and return a record of each epoch.

    `each_epoch` may add to the record what it finds in the model at the end of an epoch. With `checkpoints`, the state is kept after
    every epoch and every `checkpoint_seconds` within one, and a call on an existing folder goes on from the newest.

    The batch of the recipe is that of all processes together: each of them takes an equal part of every batch.
    """
    steps = train.size // recipe.batch_size
    if steps < 1:
        raise DataError(
            f"a batch of {recipe.batch_size} images is larger than the training set of {train.size}. "
            f"Choose a batch size of at most {train.size}."
        )
    engine.prepare(model)
    with listened_to():
        return _fit(model, objective, train, recipe, engine, seed, test, checkpoints, checkpoint_seconds, watcher, each_epoch, steps)


def _fit(
    model: nn.Module,
    objective: Objective,
    train: Split,
    recipe: Recipe,
    engine: Engine,
    seed: int,
    test: Split | None,
    checkpoints: Checkpoints | None,
    checkpoint_seconds: float,
    watcher: Watcher | None,
    each_epoch: Callable[[nn.Module], dict[str, Any]] | None,
    steps: int,
) -> list[Epoch]:
    training = _Training(model, objective, recipe, engine, checkpoints)
    torch.manual_seed(derive("model", seed, engine.world.rank))
    start_epoch, start_step, history, spent_before = training.resume()
    if watcher is not None:
        watcher.begin(history)
    for epoch in range(start_epoch, recipe.epochs):
        model.train()
        order = training.part(epoch_order(train.size, seed, epoch)[: steps * recipe.batch_size], start_step)
        view = View.of_epoch(recipe.augment, seed, epoch)
        began = last_saved = time.perf_counter()
        for step, batch in enumerate(train.batches(order, training.part_size, view, engine.device, engine.workers), start_step):
            done = epoch * steps + step
            rate = recipe.rate(done, steps)
            training.running(batch._replace(images=fault(done, batch.images)), rate, recipe.epochs * steps - done)
            if watcher is not None:
                watcher.step(done + 1, recipe.epochs * steps, recipe.batch_size)
            is_last = step + 1 == steps
            now = time.perf_counter()
            stop = training.asked_to_stop(done)
            is_due = not is_last and training.is_due(done, now - last_saved > checkpoint_seconds)
            if (step + 1) % CHECK_EVERY == 0 or is_last or is_due or stop is not None:
                training.check_finite(epoch, step, weights=is_last or is_due or stop is not None)
            if is_due or (stop is not None and not is_last):
                training.keep(epoch, step + 1, history, spent_before + now - began)
                last_saved = now
            if stop is not None and not is_last:
                raise Stopped(stop)
        means = training.means(steps)
        seconds = spent_before + time.perf_counter() - began
        engine.world.join_buffers(model)
        record = Epoch(
            epoch + 1,
            recipe.epochs,
            rate,
            means,
            asdict(evaluate(model, test, engine)) if test is not None else None,
            seconds,
            steps * recipe.batch_size / max(seconds, 1e-9),
            each_epoch(model) if each_epoch is not None else {},
        )
        history.append(record)
        start_step, spent_before = 0, 0.0
        training.keep(epoch + 1, 0, history, 0.0)
        if watcher is not None:
            watcher.epoch(record)
        if stop is not None:
            raise Stopped(stop)
    model.eval()
    return history


@torch.inference_mode()
def evaluate(model: nn.Module, split: Split, engine: Engine, batch_size: int = 1000) -> Scores:
    """Cross entropy, top-1 and top-5 over every image of the split, each counted once, by one process or shared among several."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    mine = torch.arange(engine.world.rank, split.size, engine.world.size)
    for images, labels, _ in split.batches(mine, batch_size, AS_IT_IS, engine.device, engine.workers):
        with engine.autocast():
            output = model(images)
        scores = class_scores(output)
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
        sums += torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])
    model.train(was_training)
    loss_sum, first, among = (engine.world.add(sums) / split.size).tolist()
    return Scores(loss_sum, first, among)


class _Training:
    """The state of a training, and keeping it."""

    def __init__(self, model: nn.Module, objective: Objective, recipe: Recipe, engine: Engine, checkpoints: Checkpoints | None) -> None:
        self.model, self.recipe, self.engine, self.checkpoints = model, recipe, engine, checkpoints
        self.world = engine.world
        if recipe.batch_size % self.world.size:
            raise ConfigError(f"a batch of {recipe.batch_size} images cannot be shared evenly by {self.world.size} processes.")
        self.part_size = recipe.batch_size // self.world.size
        if engine.parts > self.part_size:
            raise ConfigError(f"{self.part_size} images cannot go through in {engine.parts} parts. Choose at most {self.part_size} parts.")
        self.running = Step(model, objective, recipe, engine)
        # A mask of infinities that belongs to the network is none of our business.
        floats = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
        self.finite = [tensor for tensor in floats if bool(torch.isfinite(tensor).all())]

    def part(self, order: Tensor, start_step: int) -> Tensor:
        """What this process sees of an epoch: its part of every batch, from a step on."""
        parts = order.view(-1, self.world.size, self.part_size)
        return parts[start_step:, self.world.rank].flatten()

    def asked_to_stop(self, step: int) -> int | None:
        """The signal that asks to stop; with several processes, all learn of it at the same step."""
        if self.world.size == 1:
            return stop_requested()
        if (step + 1) % ASK_EVERY:
            return None
        return next((number for number in self.world.gather(stop_requested()) if number is not None), None)

    def is_due(self, step: int, is_time: bool) -> bool:
        """Whether a checkpoint is to be written; the first process decides for all."""
        if self.checkpoints is None or (self.world.size > 1 and (step + 1) % ASK_EVERY):
            return False
        return bool(self.world.share(is_time))

    def means(self, steps: int) -> dict[str, float]:
        sums = self.running.sums
        totals = self.world.add(torch.stack(list(sums.values()))) / (steps * self.world.size)
        for value in sums.values():
            value.zero_()
        return dict(zip(sums, totals.tolist(), strict=True))

    def check_finite(self, epoch: int, step: int, *, weights: bool) -> None:
        """A loss that is no number any more stays so in the sum: one look covers all steps since the last.

        What the last step did to the weights shows in no loss yet, so before they are kept they are looked at themselves.
        """
        is_good = math.isfinite(float(self.running.sums["loss"]))
        if is_good and weights:
            is_good = bool(torch.stack([torch.isfinite(tensor).all() for tensor in self.finite]).all())
        if self.world.any(not is_good):
            is_kept = self.checkpoints is not None and self.checkpoints.exist()
            kept = f" The last good checkpoint is kept in {self.checkpoints.folder}." if is_kept and self.checkpoints is not None else ""
            raise DivergedError(
                f"the loss is no finite number any more (epoch {epoch + 1}, step {step + 1}).{kept} A lower lr, more warm-up epochs, or "
                "a look at the images usually helps."
            )

    def keep(self, epoch: int, step: int, history: list[Epoch], seconds: float) -> None:
        """Write a checkpoint."""
        if self.checkpoints is None:
            return
        device = self.engine.device
        random = self.world.gather((torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None))
        sums = {name: self.world.add(value.clone()) for name, value in self.running.sums.items()}
        if self.world.is_first:
            state = {
                "epoch": epoch,
                "step": step,
                "seconds": seconds,
                "history": [asdict(record) for record in history],
                "model": self.model.state_dict(),
                "optimiser": self.running.momenta(),
                "sums": sums,
                "random": random,
            }
            self.checkpoints.save(state, epoch, step)
        self.world.wait()

    def resume(self) -> tuple[int, int, list[Epoch], float]:
        """Take up the newest checkpoint: epoch, step, history and the seconds spent in that epoch."""
        state = self.world.share(self.checkpoints.newest() if self.checkpoints is not None and self.world.is_first else None)
        if state is None:
            return 0, 0, [], 0.0
        self.model.load_state_dict(state["model"])
        self.running.set_momenta(state["optimiser"])
        if self.world.is_first:
            self.running.sums.update({name: value.to(self.engine.device) for name, value in state["sums"].items()})
        else:
            self.running.sums.update({name: torch.zeros_like(value).to(self.engine.device) for name, value in state["sums"].items()})
        if self.world.rank < len(state["random"]):
            host, device = state["random"][self.world.rank]
            torch.set_rng_state(host)
            if device is not None and self.engine.device.type == "cuda":
                torch.cuda.set_rng_state(device, self.engine.device)
        return state["epoch"], state["step"], [Epoch(**record) for record in state["history"]], state["seconds"]

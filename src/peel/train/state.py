"""The state of a training: progress, and what a checkpoint holds."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import ConfigError, CorruptFileError, DivergedError
from ..utils.rng import epoch_order, get_rng_state, set_rng_state
from .checkpoint import Checkpoints, non_persistent_buffers
from .engine import Engine
from .history import EpochRecord
from .objective import Objective
from .phases import Phase, PhasedStep
from .recipe import Recipe
from .signals import interrupt_requested
from .step import TrainStep
from .task import OptimizerFactory

#: Several processes poll each other after every step if it takes longer than this, else after every tenth.
SLOW_STEP_SECONDS, POLL_STEPS = 0.1, 10


def local_batch_size(recipe: Recipe, engine: Engine) -> int:
    """Images per step and process; an error where the batch cannot be divided."""
    processes, micro_batches = engine.world.size, engine.accumulation_steps
    size = recipe.batch_size // processes
    if recipe.batch_size % processes or size < micro_batches:
        raise ConfigError(
            f"a batch of {recipe.batch_size} images cannot be divided among {processes} processes, in "
            f"{micro_batches} micro-batches each. Choose a multiple of {processes}, "
            f"such as --train.batch-size {max(size, micro_batches) * processes}."
        )
    return size


class TrainingState:
    """Model, optimizer, random numbers and progress of a training."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | Sequence[Phase],
        recipe: Recipe,
        engine: Engine,
        checkpoints: Checkpoints | None,
        steps_per_epoch: int,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        self.model, self.recipe, self.engine, self.checkpoints = model, recipe, engine, checkpoints
        self.world = engine.world
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = recipe.epochs * steps_per_epoch
        self.local_batch_size = local_batch_size(recipe, engine)
        self.train_step: TrainStep | PhasedStep
        if isinstance(objective, Sequence):
            self.train_step = PhasedStep(model, objective, recipe, engine)
        else:
            self.train_step = TrainStep(model, objective, recipe, engine, optimizer)
        self.history: list[EpochRecord] = []
        self.epoch = 0
        #: Steps done in this epoch.
        self.step = 0
        self.epoch_began = self.last_save = time.perf_counter()
        self.next_poll = 0

    @property
    def global_step(self) -> int:
        """Steps done over the whole training."""
        return self.epoch * self.steps_per_epoch + self.step

    @property
    def seconds(self) -> float:
        """Time spent in this epoch."""
        return time.perf_counter() - self.epoch_began

    def indices(self, size: int, seed: int) -> Tensor:
        """Indices of the images that this process still has to see in this epoch."""
        if self.step == 0:
            self.epoch_began = time.perf_counter()
        order = epoch_order(size, seed, self.epoch)[: self.steps_per_epoch * self.recipe.batch_size]
        batches = order.view(self.steps_per_epoch, self.world.size, self.local_batch_size)
        return batches[self.step :, self.world.rank].flatten()

    def run_step(self, batch: Batch) -> None:
        lr = self.recipe.lr_at(self.global_step, self.steps_per_epoch)
        self.train_step(batch, lr, self.global_step / self.total_steps)
        self.step += 1

    def end_epoch(self, record: EpochRecord) -> None:
        self.history.append(record)
        self.epoch, self.step = self.epoch + 1, 0
        for value in self.train_step.sums.values():
            value.zero_()

    def mean_losses(self) -> dict[str, float]:
        """Means over the epoch; waits for the device."""
        sums = self.train_step.sums
        total = self.world.all_reduce(torch.stack(list(sums.values())))
        means = (total / (self.steps_per_epoch * self.world.size)).tolist()
        return dict(zip(sums, means, strict=True))

    def poll(self, save_seconds: float, *, force: bool = False) -> tuple[int | None, bool]:
        """The signal that asks to stop, and whether a checkpoint is due; the same in all processes."""
        is_due = self.checkpoints is not None and time.perf_counter() - self.last_save >= save_seconds
        if self.world.size == 1:
            return interrupt_requested(), is_due
        if self.global_step < self.next_poll and not force:
            return None, False
        is_slow = self.seconds / max(1, self.step) > SLOW_STEP_SECONDS
        answers = self.world.gather((interrupt_requested(), is_due, is_slow))
        self.next_poll = self.global_step + (1 if answers[0][2] else POLL_STEPS)
        return next((stop for stop, _, _ in answers if stop is not None), None), answers[0][1]

    def check_finite(self, *, weights: bool) -> None:
        """Raise DivergedError if the loss of any step so far was not finite; waits for the device.

        No loss shows the effect of the last update yet: before a checkpoint the weights are checked as well.
        """
        is_finite = math.isfinite(float(self.train_step.sums["loss"]))
        if is_finite and weights:
            checks = [torch.isfinite(parameter).all() for parameter in self.model.parameters()]
            is_finite = bool(torch.stack(checks).all())
        if self.world.any(not is_finite):
            kept = f" Its checkpoints are in {self.checkpoints.folder}." if self.checkpoints else ""
            raise DivergedError(
                f"the loss is not finite (epoch {self.epoch + 1}, step {self.step}).{kept} "
                "Try a lower learning rate (--train.lr) or a longer warm-up (--train.warmup-epochs), and "
                "check the images."
            )

    def save(self) -> None:
        """Write a checkpoint."""
        if self.checkpoints is None:
            return
        # Random numbers, and batch-norm statistics within an epoch, differ between processes.
        is_alone = self.world.size == 1
        buffers = non_persistent_buffers(self.model) if is_alone else dict(self.model.named_buffers())
        buffers = {name: value.cpu() for name, value in buffers.items()}
        processes = self.world.gather({"rng": get_rng_state(self.engine.device), "buffers": buffers})
        sums = {name: self.world.all_reduce(value.clone()) for name, value in self.train_step.sums.items()}
        if self.world.is_main_process:
            state = {
                "epoch": self.epoch,
                "step": self.step,
                "seconds": self.seconds,
                "history": [asdict(record) for record in self.history],
                "model": self.model.state_dict(),
                "optimizer": self.train_step.optimizer_state(),
                "sums": sums,
                "processes": processes,
            }
            self.checkpoints.save(state, self.epoch, self.step)
        self.world.barrier()
        self.last_save = time.perf_counter()

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        if self.checkpoints is not None:
            state = self.world.broadcast(self.checkpoints.newest() if self.world.is_main_process else None)
            if state is not None:
                self._load(state, self.checkpoints)

    def _load(self, state: dict[str, Any], checkpoints: Checkpoints) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.train_step.load_optimizer_state(state["optimizer"])
            process = state["processes"][self.world.rank]
            set_rng_state(process["rng"], self.engine.device)
            self.history = [EpochRecord(**record) for record in state["history"]]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CorruptFileError(
                f"the newest checkpoint in {checkpoints.folder} was written by other code, of the model or "
                f"of peel ({str(error).splitlines()[0]}). Resume with that code, or choose another --output."
            ) from error
        for name, value in self.model.named_buffers():
            if name in process["buffers"]:
                value.copy_(process["buffers"][name])
        self.epoch, self.step = state["epoch"], state["step"]
        self.epoch_began -= state["seconds"]
        for name, value in state["sums"].items():
            # The saved sums are over all processes.
            own = value if self.world.is_main_process else torch.zeros_like(value)
            self.train_step.sums[name] = own.to(self.engine.device)

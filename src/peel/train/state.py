"""The state of a training, and keeping it."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, CorruptFileError, DivergedError
from ..utils.rng import get_rng_state, set_rng_state
from .checkpoint import Checkpoints, non_persistent_buffers
from .engine import Engine
from .history import EpochRecord
from .objective import Objective
from .recipe import Recipe
from .signals import interrupt_requested
from .step import Step

__all__ = ["Start", "Training", "part_size"]

log = logging.getLogger("peel")

#: Several processes ask each other about so often whether one was told to stop or a checkpoint is due: not at every step, which would make
#: each wait for the slowest, and not later than this many seconds or steps.
ASK_SECONDS, ASK_STEPS = 1.0, 10


@dataclass(frozen=True)
class Start:
    """Where a training begins or goes on."""

    epoch: int = 0
    step: int = 0
    history: list[EpochRecord] = field(default_factory=list)
    seconds: float = 0.0
    """Spent in that epoch already."""
    slower: float = 1.0
    """What the rate is multiplied by, after a training that diverged went back."""


def part_size(recipe: Recipe, engine: Engine) -> int:
    """Images of a batch that each process sees; an error where the batch cannot be shared so."""
    processes = engine.world.size
    if recipe.batch_size % processes:
        near = max(processes, recipe.batch_size // processes * processes)
        raise ConfigError(
            f"a batch of {recipe.batch_size} images cannot be shared evenly by {processes} processes. Choose a multiple of {processes}, "
            f"such as --train.batch-size {near}, or another number of processes."
        )
    size = recipe.batch_size // processes
    if engine.accumulation_steps > size:
        raise ConfigError(
            f"{size} images cannot go through in {engine.accumulation_steps} micro-batches. Choose at most {size}."
        )
    return size


class Training:
    """The state of a training, and keeping it."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        recipe: Recipe,
        engine: Engine,
        checkpoints: Checkpoints | None,
        steps: int,
    ) -> None:
        self.model, self.recipe, self.engine, self.checkpoints, self.steps = (
            model,
            recipe,
            engine,
            checkpoints,
            steps,
        )
        self.world = engine.world
        self.part_size = part_size(recipe, engine)
        self.running = Step(model, objective, recipe, engine)
        self.finite: list[Tensor] = []
        #: The step at which the processes last asked each other, and when, by the first one's clock; and the step at which they will again.
        self.last_ask: tuple[int, float] | None = None
        self.next_ask = 0

    def part(self, order: Tensor, start_step: int) -> Tensor:
        """What this process sees of an epoch: its part of every batch, from a step on."""
        parts = order.view(-1, self.world.size, self.part_size)
        return parts[start_step:, self.world.rank].flatten()

    def asked(self, step: int, is_time: bool) -> tuple[int | None, bool]:
        """The signal that asks to stop, and whether a checkpoint is due; with several processes, all learn it at the same step."""
        if self.world.size == 1:
            return interrupt_requested(), is_time and self.checkpoints is not None
        if step < self.next_ask:
            return None, False
        now = time.perf_counter()
        answers = self.world.gather((interrupt_requested(), is_time, now))
        _, is_due, moment = answers[0]
        last_step, last_moment = self.last_ask or (step - 1, moment - ASK_SECONDS)
        seconds_per_step = max((moment - last_moment) / (step - last_step), 1e-9)
        self.last_ask = step, moment
        self.next_ask = step + max(1, min(ASK_STEPS, int(ASK_SECONDS / seconds_per_step)))
        return next(
            (stop for stop, _, _ in answers if stop is not None), None
        ), is_due and self.checkpoints is not None

    def means(self, steps: int) -> dict[str, float]:
        sums = self.running.sums
        totals = self.world.all_reduce(torch.stack(list(sums.values()))) / (steps * self.world.size)
        return dict(zip(sums, totals.tolist(), strict=True))

    def clear_sums(self) -> None:
        for value in self.running.sums.values():
            value.zero_()

    def check_finite(self, epoch: int, step: int, *, weights: bool) -> None:
        """A loss that is no number any more stays so in the sum: one look covers all steps since the last.

        What the last step did to the weights shows in no loss yet, so before they are kept they are looked at themselves.
        """
        is_good = math.isfinite(float(self.running.sums["loss"]))
        if is_good and weights:
            is_good = bool(torch.stack([torch.isfinite(tensor).all() for tensor in self.finite]).all())
        if self.world.any(not is_good):
            is_kept = self.checkpoints is not None and self.checkpoints.exist()
            kept = (
                f" The last good checkpoint is kept in {self.checkpoints.folder}."
                if is_kept and self.checkpoints is not None
                else ""
            )
            raise DivergedError(
                f"the loss is no finite number any more (epoch {epoch + 1}, step {step + 1}).{kept} A lower lr, more warm-up epochs, or "
                "a look at the images usually helps."
            )

    def keep(
        self,
        epoch: int,
        step: int,
        history: list[EpochRecord],
        seconds: float,
        slower: float,
        *,
        goes_back: bool = False,
    ) -> None:
        """Write a checkpoint."""
        if self.checkpoints is None:
            return
        own = self.world.gather(self._own())
        sums = {name: self.world.all_reduce(value.clone()) for name, value in self.running.sums.items()}
        if self.world.is_main_process:
            state = {
                "epoch": epoch,
                "step": step,
                "steps": self.steps,
                "seconds": seconds,
                "slower": slower,
                "history": [asdict(record) for record in history],
                "model": self.model.state_dict(),
                "optimiser": self.running.momenta(),
                "sums": sums,
                "own": own,
            }
            self.checkpoints.save(state, epoch, step, goes_back=goes_back)
        self.world.barrier()

    def _own(self) -> dict[str, Any]:
        """What each process has for itself: random numbers, statistics of norm layers between the ends of epochs, and buffers that are no
        part of the network's own state.
        """
        buffers = (
            dict(self.model.named_buffers()) if self.world.size > 1 else non_persistent_buffers(self.model)
        )
        return {
            **get_rng_state(self.engine.device),
            "buffers": {name: value.cpu() for name, value in buffers.items()},
        }

    def start(self, slower: float) -> Start:
        """Begin, or go on from the newest checkpoint, with the rate as much slower as it says, or more."""
        where = self._resume(slower)
        # A mask of infinities that belongs to the network is none of our business.
        tensors = [*self.model.state_dict().values(), *non_persistent_buffers(self.model).values()]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        self.finite = [tensor for tensor in floats if bool(torch.isfinite(tensor).all())]
        return where

    def _resume(self, slower: float) -> Start:
        state = self.world.broadcast(
            self.checkpoints.newest() if self.checkpoints is not None and self.world.is_main_process else None
        )
        if state is None:
            if self.recipe.retries:
                # Somewhere to go back to.
                self.keep(0, 0, [], 0.0, slower)
            return Start(slower=slower)
        assert self.checkpoints is not None
        if (
            "steps" not in state
            or not isinstance(state["optimiser"], dict)
            or "random of python" not in state["own"][0]
        ):
            raise CorruptFileError(
                f"the newest checkpoint in {self.checkpoints.folder} is not as this version of peel writes it. "
                "Go on with the version that wrote it, or start anew with another --output."
            )
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise CorruptFileError(
                f"the newest checkpoint in {self.checkpoints.folder} has tensors of other shapes than the network that is trained here: "
                "another version of peel or of the model's code may have written it. Go on with that, or start anew with another --output."
            ) from error
        self.running.set_momenta(state["optimiser"])
        begins_anew = state["steps"] != self.steps and state["step"] > 0
        if begins_anew:
            log.warning(
                "an epoch has %d steps now, not %d: the one that was running begins anew.",
                self.steps,
                state["steps"],
            )
            state.update(step=0, seconds=0.0, sums={})
        for name, value in state["sums"].items():
            # They were added up over all processes.
            self.running.sums[name] = (value if self.world.is_main_process else torch.zeros_like(value)).to(
                self.engine.device
            )
        own = state["own"][self.world.rank]
        set_rng_state(own, self.engine.device)
        for name, value in self.model.named_buffers():
            if name in own["buffers"]:
                value.copy_(own["buffers"][name])
        history = [EpochRecord(**record) for record in state["history"]]
        start = Start(state["epoch"], state["step"], history, state["seconds"], min(slower, state["slower"]))
        if begins_anew:
            self.keep(start.epoch, 0, history, 0.0, start.slower, goes_back=True)
        return start

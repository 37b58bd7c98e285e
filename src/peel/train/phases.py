"""Training steps of several phases: several losses, parameters and optimizers within one step.

A plain objective is one phase with one loss, and `step.py` runs it: with CUDA graphs, compilation and DDP. A
step of phases runs eagerly. With several processes, gradients are averaged after each phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import ConfigError
from .engine import Engine
from .objective import Losses
from .recipe import Recipe
from .step import Sums, make_sgd
from .task import OptimizerFactory

LossesOf = Callable[[nn.Module, Batch], Iterable[Losses]]
"""(network, batch) -> losses. Each is backpropagated before the next one is computed."""


@dataclass(frozen=True)
class Phase:
    """One optimizer step within a training step.

    The sandwich rule of slimmable networks is one phase that yields a loss for each width. Architecture
    parameters have a phase, an optimizer and a rate of their own.
    """

    losses: LossesOf
    parameters: Sequence[str] | None = None
    """Names of parameters. None: those that no other phase names."""
    optimizer: OptimizerFactory | None = None
    """None: the recipe's SGD."""
    lr: Callable[[float], float] | None = None
    """The factor of the rates by the progress of the training, 0 to 1. None: the rate of the recipe."""
    begin: float = 0.0
    """From this progress on, it runs."""


class PhasedStep:
    """Runs training steps of several phases, in their order."""

    accumulation_steps: int

    def __init__(self, model: nn.Module, phases: Sequence[Phase], recipe: Recipe, engine: Engine) -> None:
        self.model, self.phases, self.engine = model, phases, engine
        self.accumulation_steps = engine.accumulation_steps
        self.parameters = _divide(model, phases)
        self.optimizers = [
            phase.optimizer(parameters) if phase.optimizer else make_sgd(model, recipe, parameters=parameters)
            for phase, parameters in zip(phases, self.parameters, strict=True)
        ]
        self.rates = [
            [float(group["lr"]) if phase.optimizer else 1.0 for group in optimizer.param_groups]
            for phase, optimizer in zip(phases, self.optimizers, strict=True)
        ]
        self.sums = Sums(engine.device)

    def __call__(self, batch: Batch, lr: float, progress: float) -> None:
        found: list[tuple[dict[str, Tensor], float]] = []
        for number, phase in enumerate(self.phases):
            if progress >= phase.begin:
                found += self._run(number, batch, lr if phase.lr is None else phase.lr(progress))
        for losses, weight in found:
            self.sums.add(losses, weight)

    def _run(self, number: int, batch: Batch, lr: float) -> list[tuple[dict[str, Tensor], float]]:
        phase, optimizer = self.phases[number], self.optimizers[number]
        for group, rate in zip(optimizer.param_groups, self.rates[number], strict=True):
            group["lr"] = rate * lr
        # Of all phases: a loss reaches parameters of others too.
        self.model.zero_grad(set_to_none=True)
        found = []
        for micro_batch in batch.split(self.accumulation_steps):
            weight = micro_batch.size / batch.size
            with self.engine.autocast():
                several = iter(phase.losses(self.model, Batch(*micro_batch)))
            count = 0
            while True:
                with self.engine.autocast():
                    losses = next(several, None)
                if losses is None:
                    break
                (losses.total * weight).backward()  # type: ignore[no-untyped-call]
                # The first loss of the first phase is that of the training; others stand beside it.
                place = "" if number == count == 0 else f" of phase {number + 1}.{count + 1}"
                terms = {"loss": losses.total.detach(), **losses.terms}
                found.append(({f"{name}{place}": value for name, value in terms.items()}, weight))
                count += 1
        self._average(self.parameters[number])
        optimizer.step()
        return found

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients over the processes."""
        world = self.engine.world
        if world.size == 1:
            return
        gradients = [one.grad if one.grad is not None else torch.zeros_like(one) for one in parameters]
        flat = world.all_reduce(torch.cat([gradient.flatten() for gradient in gradients])) / world.size
        parts = torch.split(flat, [one.numel() for one in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def compile(self) -> None:
        """Steps of several phases run eagerly."""

    def release(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)

    def optimizer_state(self) -> Any:
        return [optimizer.state_dict()["state"] for optimizer in self.optimizers]

    def load_optimizer_state(self, state: Any) -> None:
        for optimizer, own in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": own})


def _divide(model: nn.Module, phases: Sequence[Phase]) -> list[list[nn.Parameter]]:
    """The parameters of each phase; an error where a name is unknown, or two phases name one."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    named: set[str] = set()
    for phase in phases:
        for name in phase.parameters or ():
            if name not in trained:
                raise ConfigError(f"a phase names {name}, which is no parameter that is trained.")
            if name in named:
                raise ConfigError(f"two phases train {name}.")
            named.add(name)
    if sum(phase.parameters is None for phase in phases) > 1:
        raise ConfigError("two phases name no parameters: one of them must say which it trains.")
    rest = [one for name, one in trained.items() if name not in named]
    return [rest if phase.parameters is None else [trained[n] for n in phase.parameters] for phase in phases]

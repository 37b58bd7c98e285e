"""The training loop: plain PyTorch, the same for every stage. It can be stopped at any step and goes on with the same bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import DataError, DivergedError
from .chance import derive, epoch_order
from .checkpoint import Checkpoints
from .data import Split
from .engine import Engine
from .objective import Losses, Objective, class_scores
from .recipe import Recipe
from .view import AS_IT_IS, View

__all__ = ["Epoch", "Scores", "Watcher", "evaluate", "fit"]

#: Steps between looks at whether the loss is still a number; each look waits for the device.
CHECK_EVERY = 100

#: Steps that run as usual before a CUDA graph is recorded: the allocator and cuDNN settle meanwhile.
WARM_UP_STEPS = 5


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
    """
    steps = train.size // recipe.batch_size
    if steps < 1:
        raise DataError(
            f"a batch of {recipe.batch_size} images is larger than the training set of {train.size}. "
            f"Choose a batch size of at most {train.size}."
        )
    engine.prepare(model)
    run = _Run(model, objective, recipe, engine)
    history: list[Epoch] = []
    start_epoch = start_step = 0
    torch.manual_seed(derive("model", seed))
    state = checkpoints.newest() if checkpoints is not None else None
    if state is not None:
        start_epoch, start_step, history = run.restore(state)
    spent_before = state["seconds"] if state is not None else 0.0
    if watcher is not None:
        watcher.begin(history)
    for epoch in range(start_epoch, recipe.epochs):
        model.train()
        order = epoch_order(train.size, seed, epoch)[start_step * recipe.batch_size : steps * recipe.batch_size]
        view = View.of_epoch(recipe.augment, seed, epoch)
        began = last_saved = time.perf_counter()
        for step, (images, labels) in enumerate(train.batches(order, recipe.batch_size, view, engine.device, engine.workers), start_step):
            rate = recipe.rate(epoch * steps + step, steps)
            run.step(images, labels, rate)
            if watcher is not None:
                watcher.step(epoch * steps + step + 1, recipe.epochs * steps, recipe.batch_size)
            is_last = step + 1 == steps
            if (step + 1) % CHECK_EVERY == 0 or is_last:
                run.check_finite(epoch, step, checkpoints)
            now = time.perf_counter()
            if checkpoints is not None and not is_last and now - last_saved > checkpoint_seconds:
                run.check_finite(epoch, step, checkpoints)
                checkpoints.save(run.state(epoch, step + 1, history, spent_before + now - began), epoch, step + 1)
                last_saved = now
        means = run.means(steps)
        seconds = spent_before + time.perf_counter() - began
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
        run.reset_sums()
        start_step, spent_before = 0, 0.0
        if checkpoints is not None:
            checkpoints.save(run.state(epoch + 1, 0, history, 0.0), epoch + 1, 0)
        if watcher is not None:
            watcher.epoch(record)
    model.eval()
    return history


@torch.inference_mode()
def evaluate(model: nn.Module, split: Split, engine: Engine, batch_size: int = 1000) -> Scores:
    """Cross entropy, top-1 and top-5 over every image of the split, each counted once."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    for images, labels in split.batches(torch.arange(split.size), batch_size, AS_IT_IS, engine.device, engine.workers):
        with engine.autocast():
            output = model(images)
        scores = class_scores(output)
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
        sums += torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])
    model.train(was_training)
    loss_sum, first, among = (sums / split.size).tolist()
    return Scores(loss_sum, first, among)


class _Run:
    """The optimiser, the running sums and, on a GPU, the recorded step."""

    def __init__(self, model: nn.Module, objective: Objective, recipe: Recipe, engine: Engine) -> None:
        self.model, self.objective, self.recipe, self.engine = model, objective, recipe, engine
        self.optimiser = _optimiser(model, recipe, engine)
        self.sums: dict[str, Tensor] = {}
        self.steps_done = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: tuple[Tensor, Tensor] | None = None

    def step(self, images: Tensor, labels: Tensor, rate: float) -> None:
        self._set_rate(rate)
        if not self.engine.graphs:
            self._compute(images, labels)
            return
        if self.graph is None:
            if self.steps_done < WARM_UP_STEPS:
                self._on_side_stream(images, labels)
                self.steps_done += 1
                return
            self._record(images, labels)
        assert self.graph is not None
        assert self.static is not None
        self.static[0].copy_(images)
        self.static[1].copy_(labels)
        self.graph.replay()

    def _compute(self, images: Tensor, labels: Tensor) -> None:
        # A recorded step needs gradients that stay where they are.
        self.optimiser.zero_grad(set_to_none=not self.engine.graphs)
        with self.engine.autocast():
            losses = self.objective(self.model, images, labels)
        losses.total.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self._add(losses, labels)

    def _on_side_stream(self, images: Tensor, labels: Tensor) -> None:
        """A step as a recording needs it to have run before: away from the default stream."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(images, labels)
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, images: Tensor, labels: Tensor) -> None:
        self.static = (images.clone(memory_format=torch.preserve_format), labels.clone())
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._compute(*self.static)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @torch.no_grad()
    def _add(self, losses: Losses, labels: Tensor) -> None:
        parts = {"loss": losses.total, **losses.terms, "top1": (losses.scores.argmax(1) == labels).float().mean()}
        for name, value in parts.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), dtype=torch.float64, device=value.device)
            self.sums[name].add_(value.detach())

    def means(self, steps: int) -> dict[str, float]:
        return {name: float(value) / steps for name, value in self.sums.items()}

    def reset_sums(self) -> None:
        for value in self.sums.values():
            value.zero_()

    def check_finite(self, epoch: int, step: int, checkpoints: Checkpoints | None) -> None:
        """A loss that is no number any more stays so in the sum: one look covers all steps since the last."""
        if self.sums and not math.isfinite(float(self.sums["loss"])):
            kept = "" if checkpoints is None else f" The last good checkpoint is kept in {checkpoints.folder}."
            raise DivergedError(
                f"the loss is no finite number any more (epoch {epoch + 1}, step {step + 1}).{kept} A lower lr, more warm-up epochs, or "
                "a look at the images usually helps."
            )

    def state(self, epoch: int, step: int, history: list[Epoch], seconds: float) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "step": step,
            "seconds": seconds,
            "history": [asdict(record) for record in history],
            "model": self.model.state_dict(),
            "optimiser": [self.optimiser.state[p].get("momentum_buffer") for p in self._parameters()],
            "sums": self.sums,
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.engine.device) if self.engine.device.type == "cuda" else None,
        }

    def restore(self, state: dict[str, Any]) -> tuple[int, int, list[Epoch]]:
        self.model.load_state_dict(state["model"])
        for parameter, momentum in zip(self._parameters(), state["optimiser"], strict=True):
            if momentum is not None:
                # In the memory order of the parameter, as the optimiser itself makes it.
                self.optimiser.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)
        self.sums = {name: value.to(self.engine.device) for name, value in state["sums"].items()}
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None and self.engine.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"], self.engine.device)
        return state["epoch"], state["step"], [Epoch(**record) for record in state["history"]]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]


def _optimiser(model: nn.Module, recipe: Recipe, engine: Engine) -> torch.optim.SGD:
    """SGD; biases and the scales and shifts of norm layers, which have one axis at most, do not decay unless asked to."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1 or recipe.decay_norms]
    others = [parameter for parameter in trained if parameter.ndim <= 1 and not recipe.decay_norms]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    # A recorded step reads the rate from the device.
    rate: Any = torch.tensor(recipe.lr, device=engine.device) if engine.graphs else recipe.lr
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        fused=engine.graphs or None,
    )

"""`Work`: what a method is lent. What it has finished survives a kill."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from torch import nn

from ..data.datasets import Split
from ..errors import ConfigError
from ..repair.calibration import recalibrate
from ..surgery import slim
from ..train.callbacks import Callback
from ..train.checkpoint import Checkpoints
from ..train.engine import Engine
from ..train.history import Metrics
from ..train.loop import evaluate
from ..train.objective import Objective
from ..train.phases import Phase
from ..train.recipe import Recipe
from ..train.signals import Interrupted, defer_signals, interrupt_requested
from ..utils.rng import derive_seed, get_rng_state, seed_everything, set_rng_state
from ..utils.validation import describe_error
from .calibration import Calibration
from .method import Problem, Scores

T = TypeVar("T")


#: Names of stages of a run.
RESERVED = ("original", "plan", "uniform", "final")


class Stateful(Protocol):
    """What `steps` stores: tensors, numbers, texts, and lists and dicts of them."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Notebook(Protocol):
    """Where a method's work is stored."""

    def read_value(self, name: str) -> bytes | None: ...
    def write_value(self, name: str, data: bytes) -> None: ...
    def checkpoints(self, stage: str) -> Checkpoints | None: ...


Goal = Objective | Sequence[Phase]
"""What a training minimizes: an objective, or phases of several losses, parameters and optimizers."""

Train = Callable[[str, nn.Module, Goal, Recipe, Split, Sequence[Callback]], nn.Module]
"""(name, network, objective, recipe, images, callbacks) -> the trained network."""


@dataclass
class Spent:
    """What a method has used, beside its trainings: those have records of their own."""

    seconds: float = 0.0
    macs: float = 0.0
    trained: dict[str, float] = field(default_factory=dict)
    """Training -> its multiply-adds, as far as a rehearsal can tell."""


class Work:
    """What a method may ask for: training, evaluation, repaired networks, and results that are stored."""

    is_rehearsal = False

    def __init__(
        self,
        problem: Problem,
        engine: Engine,
        *,
        calibration: Calibration,
        trainer: Train,
        notebook: Notebook | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint_seconds: float = 600.0,
    ) -> None:
        self.problem, self.engine, self.calibration = problem, engine, calibration
        self.spent = Spent()
        self.notes: list[str] = []
        self.step_names: list[str] = []
        self._names: set[tuple[str, str]] = set()
        self._trainer, self._notebook, self._callbacks = trainer, notebook, callbacks
        self._checkpoint_seconds = checkpoint_seconds

    # Networks

    def train(
        self,
        name: str,
        network: nn.Module,
        objective: Goal,
        recipe: Recipe | None = None,
        *,
        images: Split | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> nn.Module:
        """The trained network. A finished training is loaded, an interrupted one goes on."""
        problem = self.problem
        self._check_name("train", name)
        images = problem.train if images is None else images
        return self._trainer(name, network, objective, recipe or problem.recipes.search, images, callbacks)

    def evaluate(self, network: nn.Module, images: Split | None = None) -> Metrics:
        """Loss and accuracies, or the user's metric, on held-out images unless others are given."""
        images = self.problem.held_out if images is None else images
        if images is None:
            raise ConfigError("no images are held out: a method that evaluates needs Needs(held_out=True).")
        return evaluate(self.engine.prepare(network), images, self.engine, task=self.problem.task)

    def loss(self, network: nn.Module) -> float:
        """On held-out images; of a task without a loss, its metric with the other sign."""
        metrics = self.evaluate(network)
        return metrics.loss if metrics.loss is not None else -(metrics.score or 0.0)

    def start(self, widths: Mapping[str, int]) -> nn.Module:
        """What a training begins with: fresh weights or, where they are inherited, those of the original."""
        if self.problem.inherits:
            return self.repaired(widths)
        return slim(self.problem.model, widths, graph=self.problem.graph).requires_grad_(True)

    def repaired(self, widths: Mapping[str, int], scores: Scores | None = None) -> nn.Module:
        """A network that is cut from the trained original and repaired."""
        return self.calibration.cut(widths, scores)

    def recalibrate(self, network: nn.Module) -> None:
        """Measure batch-norm statistics anew."""
        recalibrate(network, self.calibration.batches)

    # Results

    def once(self, name: str, kind: type[T], compute: Callable[[], T]) -> T:
        """A value of plain fields, computed once. It is returned as read back from its file, also then."""
        self._check_name("once", name)
        world = self.engine.world
        data = world.broadcast(None if self._notebook is None else self._notebook.read_value(name))
        if data is None:
            seed_everything(self.seed(name))
            # Every process computes it, and the last digits may differ: the main process decides.
            data = world.broadcast(_encode(name, compute(), kind))
            if self._notebook is not None:
                self._notebook.write_value(name, data)
        return msgspec.json.decode(data, type=kind)

    def steps(self, name: str, count: int, state: Stateful | None = None) -> Iterator[int]:
        """Numbers from 0 to `count`. After a kill, `state` and random numbers are those of a checkpoint.

        Without a state, all numbers come again: what they compute then stands in `once`.
        """
        self._check_name("steps", name)
        self.step_names.append(name)
        checkpoints = self._notebook.checkpoints(name) if self._notebook is not None and state else None
        world, done = self.engine.world, 0
        stored = world.broadcast(None if checkpoints is None else checkpoints.newest())
        seed_everything(self.seed(name))
        if stored is not None and state is not None:
            state.load_state_dict(stored["state"])
            set_rng_state(stored["rng"], self.engine.device)
            done = stored["done"]

        def save(number: int) -> None:
            if checkpoints is not None and state is not None and world.is_main_process:
                rng = get_rng_state(self.engine.device)
                checkpoints.save({"state": state.state_dict(), "rng": rng, "done": number}, 0, number)

        self._tell(name)
        saved = time.monotonic()
        with defer_signals():
            for number in range(done, count):
                yield number
                stop = next(filter(None, world.gather(interrupt_requested())), None)
                is_due = time.monotonic() - saved >= self._checkpoint_seconds
                if stop is not None or is_due or number + 1 == count:
                    save(number + 1)
                    saved = time.monotonic()
                if stop is not None:
                    raise Interrupted(stop)
                for callback in self._callbacks:
                    callback.on_step_end(number + 1, count, 1)

    @contextmanager
    def timed(self, macs: float, text: str) -> Iterator[None]:
        """Count what is computed here: its time, and its multiply-adds. The text tells users what it is."""
        self._tell(text)
        began = time.perf_counter()
        yield
        self.spent.seconds += time.perf_counter() - began
        self.spent.macs += macs

    @property
    def training_images(self) -> int:
        return self.problem.train.size

    def seed(self, *parts: int | str) -> int:
        """A seed that depends on that of the run and on these parts."""
        return derive_seed("method", *parts, self.problem.seed)

    def note(self, text: str) -> None:
        """What the user should know."""
        self.notes.append(text)

    def _check_name(self, kind: str, name: str) -> None:
        """A name is that of a file, and by it the work is found again after a kill: each is used once."""
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name) or name in RESERVED:
            raise ConfigError(
                f"work.{kind}({name!r}, ...): a name has letters, digits, '.', '_' and '-', and is none of "
                f"{', '.join(RESERVED)}."
            )
        if (kind, name) in self._names:
            raise ConfigError(
                f"work.{kind}({name!r}, ...) is called twice: give each call a name of its own."
            )
        self._names.add((kind, name))

    def _tell(self, text: str) -> None:
        for callback in self._callbacks:
            callback.on_stage_begin("plan", text)


def _encode(name: str, value: T, kind: type[T]) -> bytes:
    try:
        data = msgspec.json.encode(value)
        msgspec.json.decode(data, type=kind)
    except (TypeError, ValueError) as error:  # a tensor; NaN, which JSON does not have
        raise ConfigError(
            f"work.once({name!r}, ...): {describe_error(error)}. It stores plain values that are finite: "
            "numbers, texts, lists, dicts and dataclasses of them."
        ) from error
    return data

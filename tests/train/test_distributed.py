"""Several processes: collectives, gradient accumulation with DDP, interrupts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from helpers.killing import exit_code, start
from helpers.small import CPU, PLAIN, Pooled, Restless, Small, few_digits, fresh, same_weights
from peel.data.augmentation import EVAL
from peel.data.batch import Batch
from peel.errors import OutOfMemoryError, RunError
from peel.train.callbacks import Callback
from peel.train.checkpoint import Checkpoints
from peel.train.distributed import World, init_distributed, shutdown_distributed
from peel.train.engine import Engine
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy
from peel.train.signals import Interrupted, defer_signals, handle_signals
from peel.train.state import TrainingState
from peel.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("one_thread")

Task = Callable[..., Any]


def together(count: int, place: Path, task: Task, *arguments: Any, warm: bool = True) -> list[Any]:
    """The results of `task(world, *arguments)` in several processes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        start(_one, rank, count, store.port, place, task, *arguments, warm=warm) for rank in range(count)
    ]
    assert [exit_code(process, 60) for process in processes] == [0] * count
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(count)]


def _one(rank: int, count: int, port: int, place: Path, task: Task, *arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        (place / f"{rank}.json").write_text(
            json.dumps(task(init_distributed(torch.device("cpu")), *arguments))
        )
    finally:
        shutdown_distributed()


def engine_of(world: World, **settings: Any) -> Engine:
    return replace(CPU, world=world, **settings)


def _evaluated(world: World, images: int) -> list[float]:
    scores = evaluate(fresh(), few_digits().test.subset(torch.arange(images)), engine_of(world), batch_size=7)
    return [scores.loss, scores.top1, scores.top5]


@pytest.mark.parametrize("images", [1, 89])
def test_an_evaluation_in_several_processes_counts_every_image_once(images: int, tmp_path: Path) -> None:
    """Neither number is divisible by three, and a process may have no image."""
    alone = _evaluated(World(), images)
    for found in together(3, tmp_path, _evaluated, images):
        assert found == pytest.approx(alone, rel=1e-6)


def _compared(world: World, odd: int) -> str:
    try:
        world.check_equal("the plan", "another" if world.rank == odd else "the same")
    except RunError as error:
        return str(error)
    return ""


def test_processes_with_different_plans_do_not_train(tmp_path: Path) -> None:
    assert (
        together(3, tmp_path, _compared, 1)
        == ["the plan differs between rank 0 and rank 1. Start all processes with the same settings."] * 3
    )
    assert together(2, tmp_path, _compared, -1) == ["", ""]


def _counted(exchanges: list[int], gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    exchanges.append(1)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def _exchanges(world: World, parts: list[int]) -> list[int]:
    """How often DDP exchanges gradients in one step, for these numbers of micro-batches."""
    return [_exchanged(world, number) for number in parts]


def _exchanged(world: World, parts: int) -> int:
    step = TrainStep(fresh(), CrossEntropy(0.0), PLAIN, engine_of(world, accumulation_steps=parts))
    batch = Batch(torch.randn(12, 3, 8, 8), torch.arange(12) % 10, None)
    step(batch, 0.1)
    exchanges: list[int] = []
    assert isinstance(step.loss, DistributedDataParallel)
    # A lambda, as DDP checks the annotations of a function that has any.
    step.loss.register_comm_hook(exchanges, lambda state, bucket: _counted(state, bucket.buffer()))
    step(batch, 0.1)
    return len(exchanges)


class TwoHeads(nn.Module):
    """The second head gets no gradient, as the auxiliary heads of some networks."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = fresh(), nn.Linear(10, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(images)
        return logits, self.unused(logits)


def _weights(world: World, accumulation_steps: int) -> list[float]:
    """Sums of the weights after three steps; several processes share the batches of one."""
    torch.manual_seed(0)
    model = TwoHeads()
    step = TrainStep(model, CrossEntropy(), PLAIN, engine_of(world, accumulation_steps=accumulation_steps))
    for batch in few_digits().train.batches(torch.arange(96), 32, EVAL, CPU.device):
        step(batch.split(world.size)[world.rank], 0.1)
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def _out_of_memory(world: World) -> str:
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, images: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no memory")

    step = TrainStep(Full(), CrossEntropy(), PLAIN, engine_of(world))
    try:
        step(Batch(torch.randn(12, 3, 8, 8), torch.arange(12) % 10, None), 0.1)
    except OutOfMemoryError as error:
        return str(error)
    return ""


def _first_step(world: World, model: nn.Module, images: int, sync_bn: bool) -> str:
    """The error of the first step, if there is one."""
    step = TrainStep(model, CrossEntropy(), PLAIN, engine_of(world, sync_bn=sync_bn))
    try:
        step(Batch(torch.randn(images, 3, 8, 8), torch.arange(images) % 10, None), 0.1)
    except (OutOfMemoryError, RunError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Failing(Small):
    """Fails between two norm layers."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, images: Tensor) -> Tensor:
        self.norm1(self.conv1(images))
        if self.error is not None:
            raise self.error
        return super().forward(images)


def _failures_of_one(world: World) -> list[str]:
    """What the processes say when one of them fails in its first step, with and without sync batch norm."""
    errors = [torch.OutOfMemoryError("no memory"), ValueError("a fault")]
    models = [Failing(error if world.rank == 1 else None) for error in errors]
    return [_first_step(world, model, 12, sync_bn) for model in models for sync_bn in (False, True)]


def _compiled(world: World) -> list[str]:
    """The classes of the modules that are compiled when compilation is on from the first step."""
    compiled: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda module, **_: compiled.append(type(module).__name__) or module)
        step = TrainStep(fresh(), CrossEntropy(0.0), PLAIN, engine_of(world))
        step.compile()
        step(Batch(torch.randn(12, 3, 8, 8), torch.arange(12) % 10, None), 0.1)
    return compiled


class SignalAt(Callback):
    """Sends SIGTERM to its own process at a step."""

    def __init__(self, step: int) -> None:
        self.signal_at = step

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        if step == self.signal_at:
            signal.raise_signal(signal.SIGTERM)


def _is_same_after_resume(world: World, folder: str) -> bool:
    """Whether a training of three epochs of four steps, interrupted in its second, ends the same."""
    models = []
    saved = Checkpoints(Path(folder), "a")
    for number, checkpoints in enumerate((None, saved, saved)):
        torch.manual_seed(0)
        model = Restless()
        callbacks = [SignalAt(6)] if number == 1 and world.rank == 1 else []
        with handle_signals(), contextlib.suppress(Interrupted):
            fit(
                model,
                CrossEntropy(),
                few_digits().train,
                PLAIN,
                engine=engine_of(world),
                seed=0,
                checkpoints=checkpoints,
                callbacks=callbacks,
            )
        models.append(model)
    state = saved.newest()
    is_whole = state is not None and state["epoch"] == PLAIN.epochs
    return is_whole and same_weights(models[0], models[2]) and not same_weights(models[0], models[1])


def _with_ddp(world: World, folder: str) -> dict[str, Any]:
    return {
        "compiled": _compiled(world),
        "same after resume": _is_same_after_resume(world, folder),
        "exchanges": _exchanges(world, [1, 3]),
        "weights": _weights(world, 1),
        "out of memory": _out_of_memory(world),
        "one image with sync_bn": _first_step(world, Pooled(), 1, True),
        "failures of one": _failures_of_one(world),
    }


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two processes with DDP. Not warm: the threads of DDP do not survive a fork."""
    place = tmp_path_factory.mktemp("ddp")
    return together(2, place, _with_ddp, str(place / "checkpoints"), warm=False)


def test_gradients_are_exchanged_once_for_all_micro_batches(with_ddp: list[dict[str, Any]]) -> None:
    whole, split = with_ddp[0]["exchanges"]
    assert with_ddp[1]["exchanges"] == [whole, split]
    assert 1 <= whole == split


def test_two_processes_reach_the_weights_of_one_that_accumulates_the_same_micro_batches(
    with_ddp: list[dict[str, Any]],
) -> None:
    """Also with a head that gets no gradient."""
    assert with_ddp[0]["weights"] == with_ddp[1]["weights"]
    assert with_ddp[0]["weights"] == pytest.approx(_weights(World(), 2), rel=1e-5, abs=1e-6)


def test_a_signal_to_one_process_stops_both_and_they_resume_with_the_same_bits(
    with_ddp: list[dict[str, Any]],
) -> None:
    assert [found["same after resume"] for found in with_ddp] == [True, True]


def test_ddp_is_compiled_too(with_ddp: list[dict[str, Any]]) -> None:
    for found in with_ddp:
        assert found["compiled"][-1] == "DistributedDataParallel"


def test_out_of_memory_in_several_processes_names_the_way_out(with_ddp: list[dict[str, Any]]) -> None:
    for found in with_ddp:
        assert "a micro-batch of 12 images does not fit" in found["out of memory"]
        assert "--accumulate" in found["out of memory"]


def test_no_process_waits_for_one_that_fails_in_its_first_step(with_ddp: list[dict[str, Any]]) -> None:
    for found in with_ddp:
        for message in found["failures of one"][:2]:
            assert "OutOfMemoryError: a micro-batch of 12 images does not fit" in message
    assert with_ddp[1]["failures of one"][2:] == ["ValueError: a fault"] * 2
    told = "RunError: rank 1 failed in its first step (ValueError: a fault)."
    assert with_ddp[0]["failures of one"][2:] == [told] * 2


def test_with_sync_bn_one_image_per_process_is_enough(with_ddp: list[dict[str, Any]]) -> None:
    assert [found["one image with sync_bn"] for found in with_ddp] == ["", ""]


def _interrupted_evaluation(world: World) -> int | None:
    with handle_signals(), defer_signals():
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            evaluate(fresh(), few_digits().test, engine_of(world), batch_size=7)
        except Interrupted as stop:
            return stop.signal_number
    return None


def test_a_signal_to_one_process_during_an_evaluation_stops_all(tmp_path: Path) -> None:
    assert together(2, tmp_path, _interrupted_evaluation) == [signal.SIGTERM] * 2


def _polled(world: World, pause: float, signal_at: int, steps: int) -> list[int]:
    """The steps at which this process learns of a signal to rank 1, when training continues."""
    recipe = replace(PLAIN, batch_size=2 * world.size)
    state = TrainingState(fresh(), CrossEntropy(0.0), recipe, engine_of(world), None, steps)
    learned = []
    with handle_signals(), defer_signals():
        for step in range(steps):
            time.sleep(pause)
            if world.rank == 1 and step == signal_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            state.step += 1
            if state.poll(save_seconds=600.0)[0] == signal.SIGUSR1:
                learned.append(step)
    return learned


@pytest.mark.slow
def test_processes_poll_each_other_after_every_slow_step(tmp_path: Path) -> None:
    first, second = together(2, tmp_path, _polled, 0.6, 2, 4)
    assert first == second == [2, 3]


def test_processes_poll_each_other_after_every_tenth_fast_step(tmp_path: Path) -> None:
    first, second = together(2, tmp_path, _polled, 0.0, 3, 40)
    assert first == second
    assert len(first) < 10
    assert first[0] <= 13

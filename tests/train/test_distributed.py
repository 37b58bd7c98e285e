"""What several processes agree on, seen from inside: each is real, and most are forked from a server that is warm."""

from __future__ import annotations

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
from helpers.small import CPU, PLAIN, few_digits, fresh
from peel.data.augmentation import View
from peel.data.batch import Batch
from peel.errors import RunError
from peel.train.distributed import World, init_distributed, shutdown_distributed
from peel.train.engine import Engine
from peel.train.loop import evaluate
from peel.train.objective import CrossEntropy
from peel.train.signals import Interrupted, defer_signals, handle_signals
from peel.train.state import Training
from peel.train.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

Task = Callable[..., Any]


def together(count: int, place: Path, task: Task, *arguments: Any, warm: bool = True) -> list[Any]:
    """What `task(world, *arguments)` gives in each of several processes that meet."""
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
def test_every_test_image_is_counted_once_however_many_processes_share_them(
    images: int, tmp_path: Path
) -> None:
    """Neither number can be divided by three: no image stands in for another to make parts equal, and a process may have none."""
    alone = _evaluated(World(), images)
    for found in together(3, tmp_path, _evaluated, images):
        assert found == pytest.approx(alone, rel=1e-6)


def _compared(world: World, odd: int) -> str:
    try:
        world.check_equal("the plan", "another" if world.rank == odd else "the same")
    except RunError as error:
        return str(error)
    return ""


def test_processes_that_have_different_plans_do_not_train(tmp_path: Path) -> None:
    assert (
        together(3, tmp_path, _compared, 1)
        == ["the plan differs between processes: 1 disagree with 0. Start them with the same settings."] * 3
    )
    assert together(2, tmp_path, _compared, -1) == ["", ""]


def _counted(travelled: list[int], gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    travelled.append(1)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def _exchanges(world: World, parts: list[int]) -> list[int]:
    """How often gradients travel in one step, with the batch in so many parts."""
    return [_exchanged(world, number) for number in parts]


def _exchanged(world: World, parts: int) -> int:
    engine = engine_of(world, accumulation_steps=parts)
    step = Step(fresh(), CrossEntropy(0.0), PLAIN, engine)
    batch = Batch(torch.randn(12, 3, 8, 8), torch.arange(12) % 10, None)
    step(batch, 0.1, 10)
    travelled: list[int] = []

    assert isinstance(step.loss, DistributedDataParallel)
    # Torch wants to read the types of a function that has any.
    step.loss.register_comm_hook(travelled, lambda state, bucket: _counted(state, bucket.buffer()))
    step(batch, 0.1, 9)
    return len(travelled)


class Sometimes(nn.Module):
    """A layer that only one process happens to take, as one that is dropped by chance."""

    def __init__(self, takes: bool) -> None:
        super().__init__()
        self.net, self.extra, self.takes = fresh(), nn.Linear(10, 10), takes

    def forward(self, images: Tensor) -> Tensor:
        scores = self.net(images)
        return self.extra(scores) if self.takes else scores  # type: ignore[no-any-return]


def _by_chance(world: World) -> list[float]:
    torch.manual_seed(0)
    images = few_digits().train
    step = Step(model := Sometimes(world.is_main_process), CrossEntropy(), PLAIN, engine_of(world))
    for batch in images.batches(torch.arange(64), 32, View.of_epoch("none", 0, 0), CPU.device):
        step(batch, 0.1, 9)
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def _both(world: World) -> tuple[list[int], list[float]]:
    return _exchanges(world, [1, 3]), _by_chance(world)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes with DistributedDataParallel found. Not warm: the threads that it asks torch for do not survive a fork."""
    return together(2, tmp_path_factory.mktemp("averaged"), _both, warm=False)


def test_gradients_travel_once_for_all_parts_of_a_batch(averaged: list[Any]) -> None:
    (whole, parted), others = (exchanges for exchanges, _ in averaged)
    assert [whole, parted] == others
    assert 1 <= whole == parted


def test_paths_that_are_taken_by_chance_do_not_part_the_processes(averaged: list[Any]) -> None:
    first, second = (weights for _, weights in averaged)
    assert first == second


def _stopped_while_looking(world: World) -> int | None:
    with handle_signals(), defer_signals():
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            evaluate(fresh(), few_digits().test, engine_of(world), batch_size=7, stop_early=True)
        except Interrupted as stop:
            return stop.signal_number
    return None


def test_when_one_is_told_to_stop_during_an_evaluation_all_of_them_stop(tmp_path: Path) -> None:
    assert together(2, tmp_path, _stopped_while_looking) == [signal.SIGTERM] * 2


def _asked(world: World, pause: float, told_at: int, steps: int) -> list[int]:
    """The steps at which this process learns that one was told to stop, when nobody stops."""
    training = Training(
        fresh(), CrossEntropy(0.0), replace(PLAIN, batch_size=2 * world.size), engine_of(world), None, 1
    )
    learned = []
    with handle_signals(), defer_signals():
        for step in range(100, 100 + steps):
            time.sleep(pause)
            if world.rank == 1 and step == 100 + told_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            if training.asked(step, is_time=False)[0] == signal.SIGUSR1:
                learned.append(step - 100)
    return learned


def test_slow_steps_are_each_followed_by_the_question_whether_to_stop(tmp_path: Path) -> None:
    first, second = together(2, tmp_path, _asked, 0.6, 2, 4)
    assert first == second == [2, 3]


def test_of_fast_steps_every_tenth_is(tmp_path: Path) -> None:
    first, second = together(2, tmp_path, _asked, 0.0, 3, 40)
    assert first == second
    assert len(first) < 10
    assert first[0] <= 13

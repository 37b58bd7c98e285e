"""Signals interrupt training after the current step, with a checkpoint."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import run
from helpers.faults import inject
from helpers.folders import kept, weights
from helpers.killing import KILLED
from helpers.small import CPU, PLAIN, Small, few_digits, fresh, same_weights, trained
from peel.data.datasets import Split
from peel.train import signals
from peel.train.callbacks import Callback
from peel.train.checkpoint import Checkpoints
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe
from peel.train.signals import Interrupted, defer_signals, handle_signals, interrupt_requested
from peel.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),  # test_faults.py sends it from outside
    ],
)
def test_an_interrupted_command_resumes_with_the_same_bits(
    number: signal.Signals, tmp_path: Path, whole: bytes
) -> None:
    folder = tmp_path / "stopped"
    code, output = run(folder, FAULT=f"5:{number.name.removeprefix('SIG')}")
    assert code == 128 + number
    assert "Resume with the same command" in output
    assert f"--output {folder}" in output
    assert list((folder / "checkpoints").glob("original-00000-0000006-*.pt"))
    assert run(folder)[0] == 0
    assert weights(folder) == whole


def test_signals_are_deferred_while_training_runs_and_raised_otherwise() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with handle_signals():
        with defer_signals():
            assert interrupt_requested() is None
            signal.raise_signal(signal.SIGTERM)
            assert interrupt_requested() == signal.SIGTERM
        with pytest.raises(Interrupted, match="SIGUSR1") as caught:
            signal.raise_signal(signal.SIGUSR1)
        assert caught.value.signal_number == signal.SIGUSR1
    assert interrupt_requested() is None
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_ctrl_c_is_raised_at_once() -> None:
    with handle_signals(), defer_signals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_worker_process_whose_launcher_is_gone_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_LAUNCHER", os.getppid())
    assert interrupt_requested() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert interrupt_requested() == signal.SIGTERM


class Vanishing:
    """Python drops exceptions that are raised in a destructor."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_is_dropped_interrupts_the_next_training() -> None:
    with handle_signals():
        Vanishing()
        with pytest.raises(Interrupted, match="SIGTERM"):
            trained()


class SignalingSplit:
    """Test images that interrupt the process, the second time they are evaluated."""

    def __init__(self, split: Split) -> None:
        self.split, self.size, self.labels, self.shape = split, split.size, split.labels, split.shape
        self.times = 0

    def batches(self, *arguments: Any) -> Any:
        self.times += 1
        for batch in self.split.batches(*arguments):
            if self.times == 2:
                signal.raise_signal(signal.SIGTERM)
            yield batch


def test_after_a_signal_during_the_evaluation_only_that_is_repeated(tmp_path: Path) -> None:
    test = few_digits().test
    straight, expected = trained(test=test)
    checkpoints = Checkpoints(tmp_path, "a")
    with handle_signals(), pytest.raises(Interrupted):
        trained(test=SignalingSplit(test), checkpoints=checkpoints)
    state = checkpoints.newest()
    assert state is not None
    assert (state["epoch"], state["step"]) == (1, 4)
    resumed, history = trained(test=test, checkpoints=checkpoints, model=fresh(1))
    assert same_weights(resumed, straight)
    assert [(record.train, record.test) for record in history] == [
        (record.train, record.test) for record in expected
    ]


def test_a_signal_in_the_last_step_is_raised_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, "a")
    with monkeypatch.context() as patch, handle_signals(), pytest.raises(Interrupted):
        inject("11:term", patch)
        trained(checkpoints=checkpoints)
    state = checkpoints.newest()
    assert state is not None
    assert (state["epoch"], state["step"]) == (3, 0)
    assert len(trained(checkpoints=checkpoints)[1]) == PLAIN.epochs


def test_an_interrupt_releases_the_gpu_before_it_leaves_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    monkeypatch.setattr(TrainStep, "release", lambda self: released.append(interrupt_requested()))
    with handle_signals(), pytest.raises(Interrupted):
        inject("3:term", monkeypatch)
        trained()
    assert released == [signal.SIGTERM]


class StopAfter(Callback):
    """Interrupts its own process after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGTERM)


def resources(folder: Path) -> tuple[int, int, int, int]:
    """Memory, open files and children of this process, and bytes of checkpoints."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    size = sum(path.stat().st_size for path in folder.iterdir())
    return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd")), len(children), size


def test_twenty_interrupts_in_one_process_leak_nothing(tmp_path: Path) -> None:
    recipe = Recipe(epochs=10, batch_size=4, lr=0.01, augment="crop")
    found, history = [], None
    while history is None:
        try:
            with handle_signals():
                history = fit(
                    Small(),
                    CrossEntropy(),
                    few_digits().train,
                    recipe,
                    engine=CPU,
                    seed=0,
                    checkpoints=Checkpoints(tmp_path, "peel"),
                    callbacks=[StopAfter(24)],
                )
        except Interrupted:
            found.append(resources(tmp_path))
    memory, files, children, checkpoint_bytes = zip(*found)
    assert len(found) == 20, "500 steps, interrupted after every 24"
    assert len(history) == recipe.epochs
    assert memory[-1] - memory[2] < 2**22
    assert len(set(files)) == 1
    assert len(set(children)) == 1
    assert checkpoint_bytes[-1] < 1.5 * checkpoint_bytes[2]


@pytest.mark.slow
def test_a_run_killed_twenty_times_leaves_no_process_and_no_more_than_two_checkpoints(
    tmp_path: Path, whole: bytes
) -> None:
    folder = tmp_path / "run"
    for _ in range(20):
        assert run(folder, "--checkpoint-seconds", "0", FAULT="1:kill")[0] == KILLED
        assert len(kept(folder)) <= 2
        assert len(list((folder / "checkpoints").iterdir())) <= 3, "at most one incomplete file"
    assert run(folder)[0] == 0
    assert weights(folder) == whole
    assert not kept(folder)
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(folder) not in status.read_bytes().decode(errors="replace")
        except OSError:
            continue


def test_handlers_are_not_set_outside_of_the_main_thread() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with handle_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]

"""Several processes that are killed or told to stop, through the command line (F8): they keep their state, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import peel
from helpers.commands import line
from helpers.folders import kept, weights
from helpers.killing import wait_for
from helpers.small import Small, same_weights

pytestmark = pytest.mark.usefixtures("one_thread")


def surroundings(**variables: str) -> dict[str, str]:
    """The environment of a process of its own that finds the networks of the tests."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(["tests", *sys.path]),
        **variables,
    }


def ends_as_an_uninterrupted_one(
    folder: Path, whole: Path, started: Callable[[Path], list[str]], variables: dict[str, str]
) -> None:
    for output in (folder, whole):
        subprocess.run(started(output), env=variables, check=True, capture_output=True, timeout=120)
    stopped, straight = (peel.load(place / "stages" / "original", model=Small()) for place in (folder, whole))
    assert same_weights(stopped, straight)


@pytest.mark.slow
def test_a_process_killed_once_is_started_again_by_torchrun_and_the_run_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    def torchrun(output: str, **environment: str) -> str:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
        variables = surroundings(**environment)
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "peel", *line(tmp_path / output)],
            env=variables, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr

    began = time.monotonic()
    said = torchrun("killed", PEEL_FAULT="15:kill:1")
    assert time.monotonic() - began < 60
    assert "exitcode: -9) local_rank: 1" in said, "who died first is said"
    assert "going on after epoch 1 of 2" in said
    torchrun("whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "pause"),
    [
        (signal.SIGTERM, 0.1),
        (signal.SIGINT, 0.1),
        (signal.SIGUSR1, 0.1),
        (signal.SIGTERM, 4.0),
        (signal.SIGKILL, 0.1),
    ],
)
def test_several_processes_that_are_told_to_stop_keep_their_state(
    number: signal.Signals, pause: float, tmp_path: Path
) -> None:
    """Soon, however long their steps are; and when the one that started them is killed, nobody is left behind."""
    variables = surroundings()
    folder = tmp_path / "stopped"

    def started(output: Path) -> list[str]:
        return [sys.executable, "-m", "peel", *line(output, "--gpus", "2", model="helpers.small:Slow")]

    process = subprocess.Popen(
        started(folder),
        env=surroundings(PAUSE=str(pause)),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(folder / ("state.json" if pause > 1 else "metrics.jsonl"))
    time.sleep(0.5)
    began = time.monotonic()
    # A scheduler tells the command alone; a terminal tells everyone.
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert said.count("Go on with the same command") == 1
    assert "--gpus 2" in said.partition("Go on with the same command")[2], "the command as it was given"
    assert len(kept(folder)) >= 1
    ends_as_an_uninterrupted_one(folder, tmp_path / "whole", started, variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "pause", "code"),
    [
        (signal.SIGTERM, 0.1, 1),
        (signal.SIGTERM, 4.0, 1),
        (signal.SIGINT, 0.1, 1),
        (signal.SIGUSR1, 0.1, -signal.SIGUSR1),
    ],
)
def test_processes_of_torchrun_that_are_told_to_stop_keep_their_state(
    number: signal.Signals, pause: float, code: int, tmp_path: Path
) -> None:
    """With the exit codes of torchrun, which does not know of SIGUSR1 and dies of it; its processes notice."""
    variables = surroundings()
    folder = tmp_path / "stopped"

    def started(output: Path) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        return [sys.executable, *launcher, "-m", "peel", *line(output, model="helpers.small:Slow")]

    process = subprocess.Popen(
        started(folder),
        env=surroundings(PAUSE=str(pause)),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(folder / ("state.json" if pause > 1 else "metrics.jsonl"))
    time.sleep(0.5)
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    # What the processes say ends when the last of them does.
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.count("Go on with the same command") == 1
    assert len(kept(folder)) >= 1
    ends_as_an_uninterrupted_one(folder, tmp_path / "whole", started, variables)


def two_slow_processes(folder: Path, *, pause: int) -> subprocess.Popen[str]:
    """`peel run --gpus 2`, whose steps take so many seconds."""
    variables = surroundings(PAUSE=str(pause))
    command = [sys.executable, "-m", "peel", *line(folder, "--gpus", "2", model="helpers.small:Slow")]
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
def test_ctrl_c_twice_stops_several_processes_at_once(tmp_path: Path) -> None:
    process = two_slow_processes(tmp_path / "run", pause=20)
    wait_for(tmp_path / "run" / "state.json")
    time.sleep(2)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130
    assert said.count("interrupted") == 1


@pytest.mark.slow
def test_a_process_that_finds_another_gone_when_both_were_told_to_stop_says_how_to_go_on(
    tmp_path: Path,
) -> None:
    """One may end before the other, which still waits for it: no reason to speak of a crash."""
    process = two_slow_processes(tmp_path / "run", pause=2)
    wait_for(tmp_path / "run" / "state.json")
    time.sleep(4)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (second,) = [
        int(child) for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()
    ]
    began = time.monotonic()
    process.terminate()
    os.kill(second, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 9
    assert said.count("Go on with the same command") == 1
    assert "waited in vain" not in said


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.5, 2.5, 3.5, 4.5])
def test_when_the_starter_is_killed_early_no_process_is_left_behind(seconds: float, tmp_path: Path) -> None:
    """They may still be on their way to meet each other."""
    process = two_slow_processes(tmp_path / "run", pause=1)
    time.sleep(seconds)
    process.kill()
    began = time.monotonic()
    process.communicate(timeout=60)  # what they say ends when the last of them does
    assert time.monotonic() - began < 30


class Late(Small):
    """One process is busy with it when the other waits already."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("RANK") == os.environ["LATE"]:
            time.sleep(100)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("late", ["0", "1"])
def test_processes_that_have_not_met_yet_stop_soon(late: str, number: signal.Signals, tmp_path: Path) -> None:
    variables = surroundings(LATE=late)
    command = [
        sys.executable,
        "-m",
        "peel",
        *line(tmp_path / "run", "--gpus", "2", model="test_several:Late"),
    ]
    process = subprocess.Popen(
        command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    time.sleep(12)
    began = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 128 + number
    assert said.count(f"stopped by {number.name}") == 1


class Skipping(Small):
    """Leaves a layer out now and then."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        if not self.training or float(torch.rand(())) > 0.1:
            x = x + self.norm2(self.conv2(x)).relu()
        return self.fc(self.norm4(self.conv4(self.norm3(self.conv3(x)).relu())).relu().mean((2, 3)))


def in_two_processes(
    output: Path, model: str, *options: str, **chosen: str
) -> subprocess.CompletedProcess[str]:
    variables = surroundings()
    command = [
        *line(output, *(part for pair in chosen.items() for part in pair), model=model),
        "--gpus",
        "2",
        *options,
    ]
    return subprocess.run(
        [sys.executable, "-m", "peel", *command],
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_a_layer_that_one_process_leaves_out_is_explained(tmp_path: Path) -> None:
    done = in_two_processes(tmp_path / "run", "test_several:Skipping")
    # Not so in the trial before the first step, where that would be allowed for from then on: by this seed.
    assert done.returncode == 2, done.stderr
    assert "error: a layer of the network had no part in a step" in done.stderr
    assert "Traceback" not in done.stderr
    stopped = (tmp_path / "run" / "error.json").read_text()
    assert (
        "had no part in a step" in stopped or "another process of this run ended, and has said why" in stopped
    )


@pytest.mark.slow
def test_joint_norms_take_one_image_per_process(tmp_path: Path) -> None:
    done = in_two_processes(
        tmp_path / "run",
        "helpers.small:Pooled",
        "--sync-bn",
        **{"--train.batch-size": "2", "--train.epochs": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_teacher_has_its_passing_buffers_in_every_process_after_a_restart(tmp_path: Path) -> None:
    whole = {"--stages": "original,backbone,plan,peel", "--backbone.epochs": "1"}
    assert in_two_processes(tmp_path / "once", "helpers.small:Restless", **whole).returncode == 0
    for steps in ("original", whole["--stages"]):
        done = in_two_processes(tmp_path / "twice", "helpers.small:Restless", **{**whole, "--stages": steps})
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "once" / "slim.safetensors").read_bytes() == (
        tmp_path / "twice" / "slim.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_a_network_that_draws_from_python_and_numpy_ends_with_the_same_bits_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial before the first step of a process must leave no trace: a run that was killed has one more of them."""
    assert in_two_processes(tmp_path / "whole", "helpers.small:Restless").returncode == 0
    monkeypatch.setenv("PEEL_FAULT", "15:kill:1")
    assert in_two_processes(tmp_path / "killed", "helpers.small:Restless").returncode != 0
    monkeypatch.delenv("PEEL_FAULT")
    done = in_two_processes(tmp_path / "killed", "helpers.small:Restless")
    assert done.returncode == 0, done.stderr
    assert "going on after epoch 1 of 2" in done.stderr
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")

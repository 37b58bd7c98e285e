"""`peel run` in several processes: torchrun and `--gpus`, signals, killed processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.commands import line
from helpers.folders import kept, weights
from helpers.killing import wait_for

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

#: Ways to start two processes: arguments before and after the command.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "peel"]
GPUS = ["-m", "helpers.gpus"]
LAUNCHERS: dict[str, tuple[list[str], list[str]]] = {
    "gpus": (GPUS, ["--gpus", "2"]),
    "torchrun": (TORCHRUN, []),
    "torchrun that restarts": ([*TORCHRUN[:2], "--max-restarts=1", *TORCHRUN[2:]], []),
    "torchrun and gpus": (TORCHRUN, ["--gpus", "2"]),
    "gpus with sync-bn": (GPUS, ["--gpus", "2", "--sync-bn"]),
}

RESUME = "Resume with the same command"


def start(launcher: str, output: Path, *options: str, model: str, **variables: str) -> subprocess.Popen[str]:
    before, after = LAUNCHERS[launcher]
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path if part)
    return subprocess.Popen(
        [sys.executable, *before, *line(output, *options, model=model), *after],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], code: int | None = 0) -> str:
    """What it printed. The pipe is closed when the last of its processes ends."""
    _, output = process.communicate(timeout=120)
    assert process.returncode == code or code is None, output
    return output


@pytest.mark.parametrize("launcher", ["gpus", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopped_processes_save_their_state_and_resume(
    number: signal.Signals, launcher: str, tmp_path: Path
) -> None:
    """A signal to the launcher stops the processes; if the launcher is killed, they notice and stop."""
    folder, slow = tmp_path / "stopped", "helpers.small:Slow"
    process = start(launcher, folder, model=slow, PAUSE="0.1")
    wait_for(folder / "metrics.jsonl")
    time.sleep(0.5)
    began = time.monotonic()
    # A terminal sends Ctrl-C to the whole process group, a scheduler a signal to the command alone.
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    output = finish(process, None)
    assert time.monotonic() - began < 20
    assert output.count(RESUME) == 1, output
    if launcher == "gpus":
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert "--gpus 2" in output.partition(RESUME)[2], "the command as it was given"
    assert len(kept(folder)) >= 1
    for name in ("stopped", "whole"):
        finish(start(launcher, tmp_path / name, model=slow))
    assert weights(folder) == weights(tmp_path / "whole")


def test_torchrun_restarts_a_killed_process_and_the_run_ends_bit_identical(tmp_path: Path) -> None:
    faulty = "helpers.small:Faulty"
    output = finish(start("torchrun that restarts", tmp_path / "killed", model=faulty, FAULT="15:kill:1"))
    assert "resuming after epoch 1 of 2" in output
    finish(start("torchrun that restarts", tmp_path / "whole", model=faulty))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["kill", "stage"])
def test_all_kinds_of_random_numbers_and_buffers_are_resumed_in_every_process(
    kind: str, tmp_path: Path
) -> None:
    """After a kill, and in a later stage whose teacher was trained by an earlier start."""
    restless = "helpers.small:Restless"
    options = ["--stages", "original,plan,final", "--backbone.epochs", "1", "--method", "peel"]
    finish(start("gpus", tmp_path / "once", *options, model=restless))
    if kind == "stage":
        finish(start("gpus", tmp_path / "twice", *options[2:], model=restless))
    else:
        process = start("gpus", tmp_path / "twice", *options, "--checkpoint-seconds", "0", model=restless)
        wait_for(tmp_path / "twice" / "metrics.jsonl")
        os.kill(process.pid, signal.SIGKILL)
        finish(process, None)
    finish(start("gpus", tmp_path / "twice", *options, model=restless))
    once, twice = ((tmp_path / name / "slim.safetensors").read_bytes() for name in ("once", "twice"))
    assert once == twice


def test_sync_bn_trains_with_one_image_per_process(tmp_path: Path) -> None:
    options = ["--train.batch-size", "2", "--train.epochs", "1"]
    finish(start("gpus with sync-bn", tmp_path / "run", *options, model="helpers.small:Pooled"))
    assert (tmp_path / "run" / "stages" / "original.record.json").exists()


def test_torchrun_and_gpus_are_not_combined(tmp_path: Path) -> None:
    output = finish(start("torchrun and gpus", tmp_path / "run", model="helpers.small:Small"), None)
    assert "torchrun has already started the processes: leave --gpus out" in output
    assert not (tmp_path / "run").exists()

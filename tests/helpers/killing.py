"""Real processes that are killed by SIGKILL, from outside or at an exact point.

They are forked from a server that has imported everything (`helpers.warm`), so that each starts at once.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.charts import leave_undrawn
from peel.train.callbacks import Callback

KILLED = -signal.SIGKILL

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["helpers.warm"])


def start(target: Callable[..., None], *arguments: Any, warm: bool = True) -> Any:
    """A process that runs `target` on one thread. If it is not `warm`, it imports everything first."""
    before = dict(os.environ)
    os.environ.update(
        OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=os.pathsep.join(filter(None, sys.path))
    )
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    context = CONTEXT if warm else multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def exit_code(process: Any, seconds: float = 120) -> int:
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the process did not end within {seconds} s")
    return int(process.exitcode)


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_replace(number: int, *, after: bool) -> None:
    """Kill this process right before or after its `number`-th call of os.replace."""
    replace, calls = os.replace, 0

    def counting(*arguments: Any, **settings: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            die()
        replace(*arguments, **settings)
        if calls == number:
            die()

    os.replace = counting  # type: ignore[assignment]


class KillAtStep(Callback):
    """Kills its own process at one step of one stage."""

    def __init__(self, stage: str = "", step: int = 0) -> None:
        self.fatal, self.name = (stage, step), ""

    def on_stage_begin(self, name: str, description: str) -> None:
        self.name = name

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        if (self.name, step) == self.fatal:
            die()


def run_until(
    folder: Path,
    settings: dict[str, Any],
    step: tuple[str, int] = ("", 0),
    write: tuple[int, bool] | None = None,
    model: str = "Small",
) -> None:
    """A run that is killed at a step of a stage, or before or after a write."""
    import torch

    from helpers import small

    torch.set_num_threads(1)
    leave_undrawn(pytest.MonkeyPatch())
    if write is not None:
        die_at_replace(write[0], after=write[1])
    small.small_run(getattr(small, model)(), output=folder, callbacks=[KillAtStep(*step)], **settings)


def run_command(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """The command line in this process. Its output goes to a file, a pipe or a terminal."""
    import torch

    from peel.cli.main import main

    torch.set_num_threads(1)
    leave_undrawn(pytest.MonkeyPatch())
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if "PYTHONIOENCODING" in environment:  # the interpreter has read it already
        encoding, errors = environment["PYTHONIOENCODING"].split(":")
        sys.stdout.reconfigure(encoding=encoding, errors=errors)  # type: ignore[attr-defined]
        sys.stderr.reconfigure(encoding=encoding)  # type: ignore[attr-defined]
    sys.exit(main(arguments))


def command(arguments: list[str], log: Path, **environment: str) -> Any:
    """The command line in a process of its own."""
    return start(run_command, arguments, log, environment)

"""For long (F21): stopped or killed twenty times, a run holds no more than before and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.commands import run
from helpers.folders import kept, weights
from helpers.killing import KILLED, exit_code, start
from helpers.small import CPU, Small, few_digits
from peel.train.checkpoint import Checkpoints
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe
from peel.train.signals import Interrupted, handle_signals

pytestmark = pytest.mark.usefixtures("one_thread")


class Stopping:
    """Asks the own process to stop after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def begin(self, history: Any) -> None:
        pass

    def step(self, done: int, total: int, images: int) -> None:
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGTERM)

    def epoch(self, epoch: Any) -> None:
        pass


def soak(folder: Path, said: Path) -> None:
    """Five hundred steps, stopped and taken up again twenty times in one process; what it holds after each time."""
    torch.set_num_threads(1)
    recipe = Recipe(epochs=10, batch_size=4, lr=0.01, augment="crop")
    checkpoints = Checkpoints(folder / "checkpoints", "peel")
    found, history = [], None
    while history is None:
        try:
            with handle_signals():
                history = fit(
                    Small(), CrossEntropy(), few_digits().train, recipe, engine=CPU, seed=0, test=few_digits().test,
                    checkpoints=checkpoints, watcher=Stopping(24),
                )  # fmt: skip
        except Interrupted:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            files = sum(path.stat().st_size for path in (folder / "checkpoints").iterdir())
            found.append(
                [pages * resource.getpagesize(), len(os.listdir("/proc/self/fd")), len(children), files]
            )
    assert len(history) == recipe.epochs
    said.write_text(json.dumps(found))


def test_resumed_twenty_times_a_process_holds_no_more_than_before(tmp_path: Path) -> None:
    assert exit_code(start(soak, tmp_path, tmp_path / "said")) == 0
    found = json.loads((tmp_path / "said").read_text())
    memory, files, children, kept_bytes = zip(*found)
    assert len(found) == 20, "500 steps, stopped after every 24"
    assert memory[-1] - memory[2] < 2**21
    assert len(set(files)) == 1
    assert set(children) == {0}
    assert kept_bytes[-1] < 1.5 * kept_bytes[2]


def test_killed_twenty_times_a_run_leaves_no_process_and_no_more_than_two_checkpoints(
    tmp_path: Path, whole: bytes
) -> None:
    folder = tmp_path / "run"
    for step in range(1, 21):
        assert run(folder, "--checkpoint-seconds", "0", PEEL_FAULT=f"{step}:kill")[0] == KILLED
        assert len(kept(folder)) <= 2
        assert len(list((folder / "checkpoints").iterdir())) <= 3, "at most one half-written file"
    assert run(folder)[0] == 0
    assert weights(folder) == whole
    assert not kept(folder)
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(folder) not in status.read_bytes().decode(errors="replace")
        except OSError:
            continue

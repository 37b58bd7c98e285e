"""The remaining time that a run shows."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from helpers.small import few_digits, small_run, taught
from peel.cli import progress
from peel.cli.progress import RunProgress

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock(RunProgress):
    """Each training step takes one second, whatever the network; nothing else takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.text = io.StringIO()
        super().__init__(Console(file=self.text, width=200))

    def on_run_begin(self, stages: Any) -> None:
        super().on_run_begin([(name, 1.0) for name, _ in stages])

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        self.now += 1.0
        super().on_step_end(step, total_steps, batch_size)


@pytest.mark.parametrize("method", ["sensitivity", "uniform", "peel"])
def test_the_time_left_counts_every_stage_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    recipe = {"epochs": 2, "batch_size": 100}  # two epochs of two steps for each network
    settings: dict[str, Any] = {"method": method, "init": "inherit", "train": recipe, "backbone": recipe}
    with clock:
        small_run(taught(), few_digits(), weights="pretrained", callbacks=[clock], **settings)
    trained = {"sensitivity": 2, "uniform": 1, "peel": 3}[method]
    left = [float(found) for found in re.findall(r"about ([\d.]+) s left", clock.text.getvalue())]
    assert left == [4.0 * trained - 2 * epoch for epoch in range(1, 2 * trained + 1)]

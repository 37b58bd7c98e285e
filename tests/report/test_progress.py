"""The remaining time that a run shows."""

from __future__ import annotations

import contextlib
import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import peel
from helpers.small import few_digits, small_run, taught
from peel.report import progress
from peel.report.progress import ProgressBar
from peel.train.callbacks import Callback
from peel.train.history import EpochRecord

#: What a live bar begins and ends with.
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock(ProgressBar):
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
    recipe = {
        "epochs": 2,
        "batch_size": 90,
    }  # two epochs of two steps for each network: 20 images are left out
    settings: dict[str, Any] = {
        "method": method,
        "init": "inherit",
        "budget": "70%",
        "train": recipe,
        "backbone": recipe,
    }
    small_run(taught(), few_digits(), weights="pretrained", callbacks=[clock], **settings)
    trained = {"sensitivity": 2, "uniform": 1, "peel": 3}[method]
    left = [float(found) for found in re.findall(r"about ([\d.]+) s left", clock.text.getvalue())]
    assert left == [4.0 * trained - 2 * epoch for epoch in range(1, 2 * trained + 1)]


class Broken(Callback):
    def on_epoch_end(self, record: EpochRecord) -> None:
        raise RuntimeError("stop")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_of_a_python_call_is_shown_and_ends_with_it(is_terminal: bool) -> None:
    """Also by an error: a bar that stays would draw over what the caller prints."""
    for callbacks in ([], [Broken()]):
        text = io.StringIO()
        bar = peel.ProgressBar(Console(file=text, width=100, force_terminal=is_terminal, highlight=False))
        with pytest.raises(RuntimeError, match="stop") if callbacks else contextlib.nullcontext():
            small_run(stages=("original",), callbacks=[bar, *callbacks])
        assert "stage 1 of 1" in text.getvalue()
        assert is_terminal or "epoch 1/" in text.getvalue()
        assert (HIDE_CURSOR in text.getvalue()) == is_terminal
        assert text.getvalue().count(HIDE_CURSOR) == text.getvalue().count(SHOW_CURSOR)


def do_nothing(model: nn.Module, epochs: int, teacher: nn.Module | None) -> None:
    """A training function."""


def numbers() -> Any:
    """Images with a number of ten parts each: a task without classes."""
    return tuple(TensorDataset(torch.randn(64, 3, 8, 8), torch.randn(64, 10)) for _ in range(2))


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"loss": F.cross_entropy, "metric": lambda output, target: 0.125}, "test 0.1250, "),
        ({"loss": F.cross_entropy, "train_fn": do_nothing}, "images/s"),
        ({"loss": lambda output, target: output.square().mean()}, "loss "),
        ({"loss": F.mse_loss, "data": numbers()}, "test loss "),
    ],
    ids=["metric", "train_fn", "loss", "no score"],
)
def test_tasks_of_the_users_own_show_their_progress(settings: dict[str, Any], shown: str) -> None:
    text = io.StringIO()
    bar = peel.ProgressBar(Console(file=text, width=100))
    result = small_run(stages=("original",), callbacks=[bar], **settings)
    assert shown in text.getvalue().split("epoch ")[-1]
    assert ("loss" in str(result)) == ("data" in settings)


class Ends(Callback):
    """Raises at the end, or is told of it."""

    def __init__(self, error: str = "") -> None:
        self.error, self.ended = error, False

    def on_run_end(self) -> None:
        self.ended = True
        if self.error:
            raise RuntimeError(self.error)


def test_every_callback_is_told_of_the_end() -> None:
    callbacks = [Ends(), Ends("mine"), Ends()]
    with pytest.raises(RuntimeError, match="mine"):
        small_run(stages=("original",), callbacks=callbacks)
    assert all(callback.ended for callback in callbacks)


@pytest.mark.parametrize("callbacks", [[Ends], Ends(), ["bar"]])
def test_what_is_no_callback_is_refused(callbacks: Any) -> None:
    with pytest.raises(peel.ConfigError, match="callbacks"):
        small_run(callbacks=callbacks)


def test_a_progress_bar_serves_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining time of the second run does not count the work of the first."""
    clock = Clock(monkeypatch)
    for _ in range(2):
        small_run(method="uniform", callbacks=[clock], train={"epochs": 2, "batch_size": 100})
    left = re.findall(r"about ([\d.]+) s left", clock.text.getvalue())
    assert float(left[0]) > 0
    assert left[: len(left) // 2] == left[len(left) // 2 :]

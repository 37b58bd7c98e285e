"""`prune` leaves the caller's process as it was, whether it succeeds, fails or only plans."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import peel
from helpers.small import Small, small_run
from peel.train.callbacks import Callback
from peel.train.engine import make_engine
from peel.utils.environment import count_cores
from peel.utils.process_state import preserve_process_state


def state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "python": random.getstate(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "precision": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "environment": dict(os.environ),
        "grad": torch.is_grad_enabled(),
    }


class Failing(Callback):
    """Disturbs the process as a model or a library may, then fails."""

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        raise RuntimeError("a failure in the middle")


def test_success(one_thread: None) -> None:
    model, before = Small(), state()
    small_run(model, stages=["original"])
    assert state() == before


def test_dry_run_and_refusal(one_thread: None) -> None:
    model, before = Small(), state()
    small_run(model, dry_run=True)
    with pytest.raises(peel.BudgetError):
        small_run(model, budget=1)
    with pytest.raises(peel.ConfigError):
        small_run(model, rounds=0)
    assert state() == before


def test_failure(one_thread: None) -> None:
    model, before = Small(), state()
    with pytest.raises(RuntimeError, match="in the middle"):
        small_run(model, stages=["original"], callbacks=[Failing()])
    assert state() == before


class Threads(Callback):
    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        self.seen = torch.get_num_threads()


@pytest.mark.parametrize(("settings", "expected"), [({}, 1), ({"threads": 2}, 2)])
def test_a_tiny_network_is_trained_on_one_thread_unless_told(settings: dict[str, int], expected: int) -> None:
    threads = Threads()
    with preserve_process_state():
        torch.set_num_threads(2)
        small_run(stages=["original"], callbacks=[threads], **settings)
        assert threads.seen == expected
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("layer_macs", "expected"), [(8e6, 1), (60e6, 1), (70e6, 2), (1e9, 2)])
def test_threads_follow_the_work_of_a_layer_up_to_those_that_are_there(
    layer_macs: float, expected: int
) -> None:
    with preserve_process_state():
        torch.set_num_threads(2)
        make_engine("cpu", layer_macs=layer_macs)
        assert torch.get_num_threads() == expected


def test_the_given_model_is_left_as_it_was(one_thread: None) -> None:
    model = Small().train()
    model.norm1.eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = small_run(model, stages=["original"])
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert not model.norm1.training
    assert any("weights of the given model are not used" in note for note in result.notes)


class ThreadCount(Callback):
    """Counts the threads of this process while a network is trained."""

    def __init__(self) -> None:
        self.found = 0

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        self.found = max(self.found, count_threads())


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_waiting_threads_leave_the_cores_to_others_where_torch_was_loaded_before_peel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GNU's OpenMP library does not spin while it has more threads than cores."""
    settings: dict[str, Any] = {"stages": ["original"], "threads": 2}
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    small_run(**settings, callbacks=[passive := ThreadCount()])
    before = count_threads()
    monkeypatch.delenv("OMP_WAIT_POLICY")
    small_run(**settings, callbacks=[spinning := ThreadCount()])
    assert spinning.found >= passive.found + max(2, count_cores())
    end = time.monotonic() + 10
    while count_threads() > before:
        assert time.monotonic() < end, "the threads stay"
        time.sleep(0.01)

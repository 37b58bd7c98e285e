"""Signals, short memory and losses that are no numbers: what is promised in docs/faults.md."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import peel
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe
from small import CPU, Small, few_digits, small_run

RECIPE = Recipe(epochs=2, batch_size=64, lr=0.05, augment="crop")


def command(output: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    options = [
        "--train.epochs",
        "2",
        "--search.epochs",
        "1",
        "--train.batch-size",
        "128",
        "--device",
        "cpu",
        "--quiet",
        "--output",
        str(output),
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["tests", *sys.path]), **environment}
    return subprocess.run(
        [sys.executable, "-m", "peel", "run", "small:Small", *options], env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("term", signal.SIGTERM),
        pytest.param("usr1", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("int", signal.SIGINT, marks=pytest.mark.slow),  # test_faults.py has it from outside
    ],
)
def test_a_run_that_is_told_to_stop_keeps_its_state_and_goes_on_with_the_same_bits(name: str, number: int, tmp_path: Path) -> None:
    stopped = command(tmp_path / "stopped", PEEL_FAULT=f"5:{name}")
    assert stopped.returncode == 128 + number
    assert "the state is kept" in stopped.stderr
    assert f"--output {tmp_path / 'stopped'}" in stopped.stderr
    assert list((tmp_path / "stopped" / "checkpoints").glob("original-00000-0000006-*.pt"))
    assert command(tmp_path / "stopped").returncode == 0
    assert command(tmp_path / "whole").returncode == 0
    assert (tmp_path / "stopped" / "slim.safetensors").read_bytes() == (tmp_path / "whole" / "slim.safetensors").read_bytes()


def test_short_memory_halves_the_parts_and_the_batch_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PEEL_FAULT", "0:oom")
    monkeypatch.setenv("PEEL_FAULT_OOM", "")
    torch.manual_seed(0)
    short = Small()
    with caplog.at_level(logging.WARNING, "peel"):
        history = fit(short, CrossEntropy(), few_digits().train, RECIPE, engine=CPU, seed=0)
    assert "2 parts of about 32 images" in caplog.text
    assert len(history) == 2
    monkeypatch.setenv("PEEL_FAULT_OOM", "")
    torch.manual_seed(0)
    parts = Small()
    fit(parts, CrossEntropy(), few_digits().train, RECIPE, engine=type(CPU)(CPU.device, parts=2), seed=0)
    for (name, value), other in zip(short.named_parameters(), parts.parameters()):
        assert torch.equal(value, other), name


def test_memory_for_not_even_one_image_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEEL_FAULT_OOM", "1")
    with pytest.raises(peel.MemoryShortError, match="1 images does not fit"):
        small_run()


def test_a_loss_that_is_no_number_stops_the_run_and_the_last_good_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEEL_FAULT", "4:nan")
    with pytest.raises(peel.DivergedError, match="epoch 2, step"):
        small_run(output=tmp_path / "run")
    monkeypatch.setenv("PEEL_FAULT", "")
    assert [path.name[:22] for path in (tmp_path / "run" / "checkpoints").glob("*.pt")] == ["original-00001-0000000"]
    small_run(output=tmp_path / "run")
    small_run(output=tmp_path / "whole")
    assert (tmp_path / "run" / "slim.safetensors").read_bytes() == (tmp_path / "whole" / "slim.safetensors").read_bytes()

"""Several processes train as one: real ones, started by torchrun, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import peel

OWN = """
from torch import nn

def model(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, num_classes),
    )
"""

#: Without a teacher: what it says depends on the statistics of its norm layers, which each process gathers from its own part. With a low
#: rate: a high one makes more of differences in rounding.
SHORT = [
    "--train.epochs",
    "1",
    "--backbone.epochs",
    "1",
    "--train.batch-size",
    "128",
    "--train.lr",
    "0.01",
    "--distill",
    "none",
]
SHORT += ["--device", "cpu", "--quiet"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def start(
    place: Path, *options: str, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, "-m", "peel", "run", "own.py:model", *SHORT, *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, cwd=place, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(process: subprocess.Popen[str], expected: int = 0, seconds: float = 120) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == expected, output
    return output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = peel.load(folder / "slim", model=_own())
    return {
        name: value
        for name, value in model.state_dict().items()
        if "running" not in name and "num_batches" not in name
    }


def _own() -> torch.nn.Module:
    space: dict[str, object] = {}
    exec(OWN, space)
    return space["model"]()  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_reach_the_weights_of_one_that_adds_up_the_same_parts(place: Path, processes: int) -> None:
    finished(start(place, "--accumulate", str(processes), "--output", "alone"))
    output = finished(start(place, "--gpus", str(processes), "--output", "together"))
    assert output.count("PEEL") == 1, "only the first process talks"
    plans = [json.loads((place / name / "plan.json").read_text()) for name in ("alone", "together")]
    assert plans[0]["widths"] == plans[1]["widths"]
    alone, together = weights(place / "alone"), weights(place / "together")
    for name, value in alone.items():
        assert torch.allclose(value, together[name], rtol=1e-3, atol=1e-4), name
    settings = json.loads((place / "together" / "state.json").read_text())
    assert settings["resolved"]["processes"] == processes


@pytest.mark.slow
def test_with_joint_norms_processes_reach_the_weights_of_one_that_sees_the_whole_batch(place: Path) -> None:
    finished(start(place, "--output", "alone"))
    finished(start(place, "--gpus", "2", "--sync-bn", "--output", "together"))
    finished(start(place, "--gpus", "2", "--output", "apart"))
    alone, together, apart = (weights(place / name) for name in ("alone", "together", "apart"))
    for name, value in alone.items():
        assert torch.allclose(value, together[name], rtol=1e-3, atol=1e-4), name
    assert not all(
        torch.allclose(value, apart[name], rtol=1e-3, atol=1e-4) for name, value in alone.items()
    ), "parts differ"


AUXILIARY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head, self.other = nn.Linear(8, num_classes), nn.Linear(8, num_classes)

    def forward(self, x):
        x = self.body(x)
        return (self.head(x), self.other(x)) if self.training else self.head(x)
"""


@pytest.mark.slow
def test_a_head_that_does_not_reach_the_loss_is_not_waited_for(place: Path) -> None:
    (place / "own.py").write_text(AUXILIARY.replace("class Net", "class model"))
    finished(start(place, "--gpus", "2", "--output", "run"))
    assert (place / "run" / "slim.safetensors").exists()


@pytest.mark.slow
def test_two_machines_as_two_agents_that_meet_on_the_network(place: Path) -> None:
    port = 29400 + os.getpid() % 1000
    meeting = (
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=peel",
    )
    agents = [start(place, "--output", "far", launcher=meeting) for _ in range(2)]
    outputs = [finished(agent) for agent in agents]
    assert sum(output.count("PEEL") for output in outputs) == 1
    assert (place / "far" / "slim.safetensors").exists()


@pytest.mark.slow
def test_another_number_of_processes_does_not_go_on_with_a_run(place: Path) -> None:
    finished(start(place, "--output", "run"))
    output = finished(start(place, "--gpus", "2", "--output", "run"), expected=2)
    assert "processes: 1 -> 2" in output
    assert len(output.splitlines()) == 3, "each error is said once, and nothing else"


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_evenly_is_refused(place: Path) -> None:
    output = finished(start(place, "--gpus", "3", "--output", "run"), expected=2)
    (said,) = output.strip().splitlines()
    assert said.startswith(
        "error: a batch of 128 images cannot be shared evenly by 3 processes. Choose a multiple of 3"
    )
    assert "--train.batch-size 126" in said
    assert not (place / "run" / "state.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "error", "hang"])
def test_when_a_process_fails_all_end_soon_and_the_run_can_go_on(place: Path, kind: str) -> None:
    whole = start(place, "--gpus", "2", "--output", "whole")
    finished(whole)
    began = time.monotonic()
    broken = start(place, "--gpus", "2", "--output", "broken", PEEL_FAULT=f"7:{kind}:1", PEEL_TIMEOUT="10")
    output = finished(broken, expected=1, seconds=90)
    assert time.monotonic() - began < 60
    if kind == "error":
        assert "[rank1]: RuntimeError: a fault that was ordered" in output
        assert "[rank0]" not in output
    else:
        said = {
            "kill": "process 1 of 2 was ended by SIGKILL",
            "hang": "process 1 of 2 does not answer and was ended",
        }[kind]
        assert said in output
        assert "The same command goes on." in output
        assert "Traceback" not in output
    finished(start(place, "--gpus", "2", "--output", "broken"))
    first, second = weights(place / "whole"), weights(place / "broken")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_what_stops_one_process_is_the_exit_code_of_all(place: Path) -> None:
    output = finished(start(place, "--gpus", "2", "--output", "run", PEEL_FAULT="9:nan:1"), expected=4)
    assert output.count("the loss is no finite number any more") == 1
    output = finished(start(place, "--gpus", "2", "--output", "other", PEEL_FAULT_OOM="1"), expected=5)
    assert output.count("a part of 1 images does not fit") == 1


@pytest.mark.slow
def test_memory_that_runs_short_later_stops_all_with_the_words_of_one(place: Path) -> None:
    output = finished(start(place, "--gpus", "2", "--output", "run", PEEL_FAULT="9:oom:1"), expected=5)
    assert output.count("does not fit into the memory") == 1
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_network_that_cannot_be_pickled_goes_through_all_stages(place: Path) -> None:
    (place / "own.py").write_text(
        AUXILIARY.replace("class Net", "class model").replace(
            "        self.head", "        self.act = lambda x: x\n        self.head"
        )
    )
    finished(start(place, "--gpus", "2", "--output", "run", "--stages", "original"))
    finished(start(place, "--gpus", "2", "--output", "run"))
    assert (place / "run" / "slim.safetensors").exists()


@pytest.mark.slow
def test_memory_that_is_short_in_one_process_halves_the_parts_of_all(place: Path) -> None:
    finished(start(place, "--gpus", "2", "--accumulate", "2", "--output", "wanted"))
    output = finished(start(place, "--gpus", "2", "--output", "short", PEEL_FAULT="0:oom:1"))
    assert "2 parts of about 32 images" in output
    wanted, short = weights(place / "wanted"), weights(place / "short")
    assert all(torch.equal(value, short[name]) for name, value in wanted.items())

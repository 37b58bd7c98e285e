"""Several processes train as one: real processes on the CPU, started by torchrun's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import peel
from helpers.folders import read
from helpers.own_data import PAIR, hits
from helpers.small import Small

#: Each run starts processes that import everything. tests/train/test_distributed.py is not slow.
pytestmark = pytest.mark.slow

#: Without a teacher, whose logits depend on batch-norm statistics that each process has of its own part.
#: With a low learning rate: a high one amplifies differences in rounding.
SHORT = [
    "--data", "digits",
    "--method", "peel", "--train.epochs", "1", "--backbone.epochs", "1", "--train.batch-size", "128",
    "--train.lr", "0.01",
    "--distill", "none", "--device", "cpu", "--bench-seconds", "0", "--quiet",
]  # fmt: skip


def start(
    place: Path,
    *options: str,
    model: str = "helpers.small:Faulty",
    launcher: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.Popen[str]:
    module = "helpers.gpus" if "--gpus" in options else "peel"
    command = [sys.executable, *launcher, "-m", module, "run", model, *SHORT, *options]
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path if part)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    return subprocess.Popen(
        command, cwd=place, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], expected: int = 0, seconds: float = 120) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == expected, output
    return output


def run_program(place: Path, program: str, processes: int = 2) -> str:
    """What the processes print that torchrun starts."""
    place.mkdir(exist_ok=True)
    (place / "program.py").write_text(textwrap.dedent(program))
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path if part)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*launcher, "program.py"],
        cwd=place,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the slim network, without batch-norm statistics."""
    state = peel.load(folder / "slim", model=Small()).state_dict()
    return {name: value for name, value in state.items() if "running" not in name and "num_" not in name}


def are_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(first[name], second[name], rtol=1e-3, atol=1e-4) for name in first)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_reach_the_weights_of_one_that_accumulates_the_same_micro_batches(
    tmp_path: Path, processes: int
) -> None:
    finish(start(tmp_path, "--accumulate", str(processes), "--output", "alone"))
    output = finish(start(tmp_path, "--gpus", str(processes), "--output", "together"))
    assert output.count("PEEL") == 1, "only the main process prints"
    plans = [read(tmp_path / name / "plan.json") for name in ("alone", "together")]
    assert plans[0]["slim"]["widths"] == plans[1]["slim"]["widths"]
    assert are_close(weights(tmp_path / "alone"), weights(tmp_path / "together"))
    assert read(tmp_path / "together" / "state.json")["subject"]["processes"] == processes


def test_with_sync_bn_processes_reach_the_weights_of_one_with_the_whole_batch(tmp_path: Path) -> None:
    finish(start(tmp_path, "--output", "alone"))
    finish(start(tmp_path, "--gpus", "2", "--sync-bn", "--output", "together"))
    finish(start(tmp_path, "--gpus", "2", "--output", "apart"))
    alone, together, apart = (weights(tmp_path / name) for name in ("alone", "together", "apart"))
    assert are_close(alone, together)
    assert not are_close(alone, apart)


AUXILIARY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        layers = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.body, self.unpicklable = nn.Sequential(*layers), lambda x: x
        self.head, self.other = nn.Linear(8, num_classes), nn.Linear(8, num_classes)

    def forward(self, x):
        x = self.unpicklable(self.body(x))
        return (self.head(x), self.other(x)) if self.training else self.head(x)
"""


def test_a_network_with_an_unused_head_that_cannot_be_pickled_is_trained_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(AUXILIARY)
    options = ["--gpus", "2", "--output", "run"]
    finish(start(tmp_path, *options, "--stages", "original", model="own.py:Net"))
    finish(start(tmp_path, *options, model="own.py:Net"))
    assert (tmp_path / "run" / "slim.safetensors").exists()


def test_two_machines_meet_on_the_network(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{29400 + os.getpid() % 1000}"
    launcher = (
        "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}", "--rdzv-id=peel",
    )  # fmt: skip
    agents = [start(tmp_path, "--output", "run", launcher=launcher) for _ in range(2)]
    outputs = [finish(agent) for agent in agents]
    assert sum(output.count("PEEL") for output in outputs) == 1
    assert (tmp_path / "run" / "slim.safetensors").exists()


def test_a_run_does_not_resume_with_another_number_of_processes(tmp_path: Path) -> None:
    finish(start(tmp_path, "--output", "run"))
    output = finish(start(tmp_path, "--gpus", "2", "--output", "run"), expected=2)
    assert "processes: 1 -> 2" in output
    assert output.count("error:") == 1
    assert "Traceback" not in output


def test_a_batch_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    output = finish(start(tmp_path, "--gpus", "3", "--output", "run"), expected=2)
    (line,) = output.strip().splitlines()
    assert line.startswith("error: a batch of 128 images cannot be ")
    assert "3 processes" in line
    assert "--train.batch-size 126" in line
    assert not (tmp_path / "run" / "state.json").exists()


@pytest.mark.parametrize("kind", ["kill", "error", "hang"])
def test_when_a_process_fails_all_end_soon_and_the_run_resumes(tmp_path: Path, kind: str) -> None:
    options = ["--gpus", "2", "--output"]
    finish(start(tmp_path, *options, "whole"))
    began = time.monotonic()
    process = start(tmp_path, *options, "broken", FAULT=f"7:{kind}:1", PEEL_TIMEOUT="10")
    output = finish(process, expected=75 if kind == "hang" else 1, seconds=90)
    assert time.monotonic() - began < 120
    messages = {
        "kill": "error: process 1 was killed by SIGKILL. The same command resumes.",
        "hang": "error: another process did not answer",
        "error": "RuntimeError: a fault on demand",
    }
    assert output.count(messages[kind]) == 1, output
    assert output.count("error: ") == (kind != "error")
    finish(start(tmp_path, *options, "broken"))
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("fault", "code", "message"), [("9:nan:1", 4, "finite"), ("9:oom:1", 5, "does not fit")]
)
def test_the_error_of_one_process_ends_all_with_its_exit_code(
    fault: str, code: int, message: str, tmp_path: Path
) -> None:
    output = finish(start(tmp_path, "--gpus", "2", "--output", "run", FAULT=fault), expected=code)
    assert output.count(message) == 1, output
    assert "Traceback" not in output


def test_a_dataset_of_ones_own_is_divided_among_processes(tmp_path: Path) -> None:
    """Each sample is seen once, and the metric is that of all of them."""
    program = """
        import peel
        from helpers.own_data import PAIR, Hits, bce, stream
        from helpers.small import Small

        settings = dict(weights="train", loss=bce, metric=Hits(), distill="none", device="cpu")
        train = {"epochs": 1, "batch_size": 32, "lr": 0.01}
        peel.prune(Small(3), PAIR, train=train, stages=["original"], output="run", **settings)
        try:
            peel.prune(Small(3), (stream(PAIR[0]), PAIR[1]), **settings)
        except peel.ConfigError as error:
            print("refused:", error)
        """
    output = run_program(tmp_path, program)
    assert output.count("refused: the loader of the training data chooses its samples itself") == 2
    state = read(tmp_path / "run" / "state.json")["subject"]
    assert state["processes"] == 2
    original = peel.load(tmp_path / "run" / "stages" / "original", model=Small(3)).eval()
    images, targets = PAIR[1].tensors
    (row,) = read(tmp_path / "run" / "result.json")["rows"]
    assert row["metric"] == pytest.approx(float(hits(original(images), targets)), abs=1e-6)

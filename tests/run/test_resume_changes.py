"""Resuming with other settings, code, images or versions: refused with the difference, or logged."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import peel
from helpers.commands import run
from helpers.folders import content, kept, read, weights
from helpers.small import Counting, few_digits, small_run, taught
from peel.data.datasets import Data
from peel.errors import RunError
from peel.run.prune import prune
from peel.run.result import Result

pytestmark = pytest.mark.usefixtures("one_thread")


# Settings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 4}, ["seed: 3 -> 4"]),
        ({"budget": "40%"}, ["budget.macs: 53072 -> 42457"]),
        (
            {"criterion": "weight", "backbone_ratio": 0.7},
            ["peel.criterion: 'bn' -> 'weight'", "peel.backbone_ratio: 0.8 -> 0.7"],
        ),
        ({"train": {"epochs": 3, "batch_size": 64}}, ["train.epochs: 2 -> 3"]),
        ({"backbone": {"epochs": 1, "lr": 0.05}}, ["backbone.lr: 0.1 -> 0.05"]),
        ({"groups": {"all": ["conv1", "conv2", "conv3", "conv4"]}}, ["groups.all: None -> ['conv1'"]),
        ({"data": few_digits(199)}, ["data.images: '"]),
        ({"plan": {"conv1": 4, "conv2": 4, "conv3": 8, "conv4": 8}}, ["method: 'peel' -> 'given'"]),
        ({"weights": taught()}, ["weights: 'train' -> 'given'"]),
    ],
)
def test_other_settings_are_refused_with_the_difference(
    changes: dict[str, Any], expected: list[str], own: Path
) -> None:
    before = content(own)
    with pytest.raises(RunError, match="was started with other settings") as caught:
        small_run(**{"output": own, "seed": 3, **changes})
    for line in expected:
        assert f"\n  {line}" in str(caught.value)
    after = content(own)
    assert set(after) == set(before)
    assert all(after[name] == before[name] for name in before if name != ".lock")


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--train.batch-size", "64"], "train.batch_size: 128 -> 64"),
        (["--train.lr", "0.3"], "train.lr: 0.1 -> 0.3"),
    ],
)
def test_a_command_does_not_resume_with_another_batch_size_or_learning_rate(
    options: list[str], difference: str, killed: Path, whole: bytes
) -> None:
    before = [path.name for path in kept(killed)]
    code, output = run(killed, *options)
    assert code == 2
    assert difference in output
    assert [path.name for path in kept(killed)] == before
    assert run(killed)[0] == 0
    assert weights(killed) == whole


def test_a_run_resumes_with_more_micro_batches_after_an_out_of_memory_error(killed: Path) -> None:
    assert kept(killed)
    code, output = run(killed, "--accumulate", "2")
    assert code == 0
    assert "resuming after epoch 1 of 2" in output, "from its own checkpoints"
    assert "resumes with accumulate 2 instead of 1" in output


# The model


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would take a file that changes within a second for the one that it has compiled."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


CRITERION = """
from peel.steps.criteria.magnitude import NormScale

class Own(NormScale):
    each_epoch = True
"""


def test_an_edited_criterion_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    settings = {"criterion": f"{file}:Own", "output": tmp_path / "run", "stages": ["plan"]}
    file.write_text(CRITERION)
    small_run(**settings)
    file.write_text(CRITERION.replace("True", "False"))
    with pytest.raises(RunError, match=r"file of the method: '\w+' -> '\w+'"):
        small_run(**settings)
    file.write_text(CRITERION)
    assert small_run(**settings).plan is not None


def original(model: Path, folder: Path) -> Result:
    return small_run(f"{model}:Net", output=folder, stages=["original"])


LAYERS = """
from torch import nn

def Net(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, num_classes),
    )
"""

FORWARD = """
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.fc = nn.Conv2d(8, 12, 3, padding=1), nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.second(x))
        return self.fc(x.mean((2, 3)) * 0.5)
"""

TENSORS = """
import random

import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.first, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, num_classes)
        self.register_buffer("mean", torch.tensor([0.25]))
        self.register_buffer("scale", torch.tensor([0.75]), persistent=False)
        self.slope = torch.tensor(1.5)
        self.drawn = random.uniform(1.0, 2.0) + np.random.uniform()

    def forward(self, x):
        x = self.norm(self.first((x - self.mean) * self.scale * self.slope)).relu()
        return self.fc(x.mean((2, 3)) * torch.tensor([0.5, 3.5]).sum() * self.drawn)
"""

#: Source -> changes of it, each with the difference that is named.
CHANGES: dict[str, list[tuple[str, str, str]]] = {
    LAYERS: [
        ("12", "16", "params"),
        ("ReLU()", "SiLU()", "layers"),
        ("padding=1", "stride=2, padding=1", "macs"),
        ("BatchNorm2d(12)", "BatchNorm2d(12, momentum=0.5)", "layers"),
    ],
    FORWARD: [
        ("F.relu(self.second", "F.silu(self.second", "operators"),
        ("F.relu(self.norm(self.first(x)))", "self.norm(F.relu(self.first(x)))", "operators"),
        ("0.5", "50.0", "constants"),
    ],
    TENSORS: [(number, "0.875", "(layers|constants)") for number in ("0.25", "0.75", "1.5", "3.5")],
}

#: Changes that do not change what is computed.
HARMLESS = {
    LAYERS: ("", ""),
    FORWARD: ("F.relu(self.second(x))", "F.relu(self.second(x), inplace=True)"),
    # Its random numbers are drawn anew at every start, and are the same.
    TENSORS: ("", ""),
}


@pytest.mark.parametrize("source", CHANGES, ids=["layers", "forward pass", "tensors in the code"])
def test_a_run_does_not_resume_with_a_model_that_computes_something_else(source: str, tmp_path: Path) -> None:
    path, folder = tmp_path / "net.py", tmp_path / "run"
    path.write_text(source)
    original(path, folder)
    for old, new, difference in CHANGES[source]:
        path.write_text(source.replace(old, new))
        with pytest.raises(RunError, match=rf"model\.{difference}: .* -> "):
            original(path, folder)
    path.write_text(source.replace(*HARMLESS[source]) + "\n# a comment\n")
    original(path, folder)


def test_a_model_file_may_be_moved(tmp_path: Path) -> None:
    path, moved = tmp_path / "net.py", tmp_path / "moved" / "net.py"
    path.write_text(FORWARD)
    first = original(path, tmp_path / "run")
    moved.parent.mkdir()
    path.rename(moved)
    assert original(moved, tmp_path / "run").rows == first.rows


# Images


def test_other_pixels_under_the_same_name_are_noticed(own: Path) -> None:
    data = few_digits()
    pixels = data.train.pixels.clone()  # type: ignore[attr-defined]
    pixels[0, 0, 0, 0] ^= 1
    altered = Data(data.name, data.classes, copy.copy(data.train), data.test, data.augment)
    object.__setattr__(altered.train, "pixels", pixels)
    with pytest.raises(RunError, match=r"data\.images"):
        small_run(data=altered, output=own, seed=3)


def write_images(root: Path, side: int, kind: str, count: int = 6) -> None:
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = np.random.default_rng(i).integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{i}.{kind}")


@pytest.mark.parametrize(("side", "kind"), [(12, "png"), (100, "bmp")], ids=["in memory", "streamed"])
def test_a_run_resumes_with_moved_images_and_not_with_changed_ones(
    side: int, kind: str, tmp_path: Path
) -> None:
    root, counting = tmp_path / "data", Counting()
    settings: dict[str, Any] = {
        "train": {"epochs": 1, "batch_size": 6}, "image_size": side, "workers": 0, "stages": ["original"],
        "output": tmp_path / "run", "callbacks": [counting],
    }  # fmt: skip
    write_images(root, side, kind)
    prune("helpers.small:Small", root, **settings)
    path = root / "train" / "cat" / f"0.{kind}"
    good = path.read_bytes()
    pixels = np.array(Image.open(path))
    # Images in memory are compared by their pixels, files by their names and sizes.
    Image.fromarray(pixels ^ 1 if kind == "png" else pixels[:-1]).save(path)
    with pytest.raises(RunError, match=r"data\.images: "):
        prune("helpers.small:Small", root, **settings)
    path.write_bytes(good)
    root.rename(tmp_path / "moved")
    prune("helpers.small:Small", tmp_path / "moved", **settings)
    assert counting.steps == {"original": 2}, "trained once"


# Versions and threads


def test_another_torch_or_peel_is_logged(killed: Path, whole: bytes) -> None:
    path = killed / "environment.json"
    path.write_text(json.dumps({**read(path), "torch": "2.0.1", "peel": "0.0.7"}))
    code, output = run(killed)
    assert code == 0
    assert f"resumes with torch {torch.__version__} instead of 2.0.1" in output
    assert f"resumes with peel {peel.__version__} instead of 0.0.7" in output
    assert weights(killed) == whole


def test_another_torch_may_capture_the_same_code_as_other_operators(own: Path) -> None:
    state = read(own / "state.json")
    state["subject"]["model"]["operators"] = "of another torch"
    (own / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match=r"model\.operators"):
        small_run(output=own, seed=3)
    environment = read(own / "environment.json")
    (own / "environment.json").write_text(json.dumps({**environment, "torch": "2.0.1"}))
    counting = Counting()
    small_run(output=own, seed=3, callbacks=[counting])
    assert counting.steps == {}


def test_a_run_of_a_gpu_is_not_resumed_on_a_cpu(own: Path) -> None:
    state = read(own / "state.json")
    state["subject"]["device"] = "cuda"
    (own / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match=r"other settings:\n  device: 'cuda' -> 'cpu'\n"):
        small_run(output=own, seed=3)


def test_another_number_of_threads_is_logged(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Threads add sums in another order."""
    small_run(output=own, seed=3)
    assert "threads" not in caplog.text
    small_run(output=own, seed=3, threads=2)
    assert f"{own} resumes with threads 2 instead of 1: the result may not be bit-identical" in caplog.text

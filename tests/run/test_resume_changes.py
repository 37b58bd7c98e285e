"""Going on with something else than a run was begun with (F9, F10): refused with the difference, or said."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import peel
from helpers.commands import run
from helpers.folders import content, kept, read, weights
from helpers.killing import KILLED
from helpers.small import few_digits, small_run
from peel.data.datasets import Data
from peel.errors import RunError

pytestmark = pytest.mark.usefixtures("one_thread")


# Settings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 4}, ["seed: 3 -> 4"]),
        ({"budget": "40%"}, ["method.budget: '50%' -> '40%'"]),
        (
            {"criterion": "weight", "backbone_ratio": 0.7},
            ["method.criterion: 'bn' -> 'weight'", "method.keep: 0.8 -> 0.7"],
        ),
        ({"train": {"epochs": 3, "batch_size": 64}}, ["train.epochs: 2 -> 3"]),
        ({"backbone": {"epochs": 1, "lr": 0.05}}, ["search.lr: 0.1 -> 0.05"]),
        ({"groups": {"all": ["conv1", "conv2", "conv3", "conv4"]}}, ["groups.all: None -> ['conv1'"]),
        ({"data": few_digits(199)}, ["images: [200, 90] -> [199, 90]", "fingerprint: "]),
        ({"plan": {"conv1": 4, "conv2": 4, "conv3": 8, "conv4": 8}}, ["plan: None -> {'conv1': 4"]),
        ({"teacher": "elsewhere"}, ["teacher: 'train' -> 'elsewhere'"]),
    ],
)
def test_other_settings_on_an_existing_folder_are_refused_with_the_difference(
    changes: dict[str, Any], expected: list[str], own: Path
) -> None:
    before = content(own)
    with pytest.raises(RunError, match="was started with other settings") as caught:
        small_run(**{"output": own, "seed": 3, **changes})
    for line in expected:
        assert line in str(caught.value)
    unchanged = [name for name in before if name != ".lock"]
    after = content(own)
    assert set(after) == set(before)
    assert all(after[name] == before[name] for name in unchanged)


def test_a_run_with_zero_channels_that_only_one_kind_of_device_adds_names_the_device(own: Path) -> None:
    settings = read(own / "state.json")
    settings["resolved"].update(pad_channels=True, device="cuda")
    (own / "state.json").write_text(json.dumps(settings))
    with pytest.raises(
        RunError, match=r"pads: True -> False .*go on with the kind of --device that began the run"
    ):
        small_run(output=own, seed=3)


@pytest.mark.parametrize("role", ["output", "teacher"])
def test_a_whole_run_and_a_teacher_alone_are_not_taken_for_two_versions(
    role: str, own: Path, tmp_path: Path
) -> None:
    """The settings of a teacher that runs share are fewer."""
    (own / "stages" / "original.record.json").unlink()
    if role == "output":
        settings = read(own / "state.json")
        (own / "state.json").write_text(
            json.dumps({**settings, "resolved": {"seed": settings["resolved"]["seed"]}})
        )
    said = {
        "output": "was started with other settings",
        "teacher": "is the folder of a run that has not trained its original. Finish that",
    }
    with pytest.raises(RunError, match=said[role]):
        small_run(**{"output": tmp_path / "other", "seed": 3, role: own})


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--train.batch-size", "64"], "train.batch_size: 128 -> 64"),
        (["--train.lr", "0.3"], "train.lr: 0.1 -> 0.3"),
    ],
)
def test_a_run_does_not_go_on_with_another_batch_or_rate(
    options: list[str], difference: str, killed: Path, whole: bytes
) -> None:
    before = [path.name for path in kept(killed)]
    code, said = run(killed, *options)
    assert code == 2
    assert difference in said
    assert [path.name for path in kept(killed)] == before
    assert run(killed)[0] == 0
    assert weights(killed) == whole


@pytest.mark.parametrize("options", [["--accumulate", "2"], ["--train.retries", "1"]])
def test_a_run_goes_on_with_what_its_errors_advise(options: list[str], killed: Path) -> None:
    """More parts where memory was short, retries where it diverged."""
    before = kept(killed)
    assert before
    code, said = run(killed, *options)
    assert code == 0
    assert "of another run" not in said, "its checkpoints are still its own"
    assert ("parts 2 instead of 1" in said) == (options[0] == "--accumulate")


# The model


OWN = """
from torch import nn

def model(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, num_classes),
    )
"""


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("12", "16", "original.params: "),
        ("ReLU()", "SiLU()", "original.layers: "),
        ("padding=1", "stride=2, padding=1", "original.macs: "),
        ("BatchNorm2d(12)", "BatchNorm2d(12, momentum=0.5)", "original.layers: "),
    ],
)
def test_a_run_does_not_go_on_with_a_model_whose_code_changed(
    old: str, new: str, difference: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    assert run(tmp_path / "run", model=f"{path}:model", PEEL_FAULT="15:kill")[0] == KILLED
    path.write_text(OWN.replace(old, new))
    code, said = run(tmp_path / "run", model=f"{path}:model")
    assert code == 2, said
    assert difference in said
    assert " -> " in said
    path.write_text(OWN + "\n# a remark changes nothing\n")
    assert run(tmp_path / "run", model=f"{path}:model")[0] == 0


FUNCTIONAL = """
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


def test_a_run_does_not_go_on_with_a_model_that_computes_something_else(tmp_path: Path) -> None:
    """The layers are the same; the change is in the forward pass alone."""
    path, model = tmp_path / "fn.py", f"{tmp_path / 'fn.py'}:Net"
    path.write_text(FUNCTIONAL)
    assert run(tmp_path / "run", model=model, PEEL_FAULT="15:kill")[0] == KILLED
    for old, new, difference in (
        ("F.relu(self.second", "F.silu(self.second", "operators: relu 2 -> 1, silu 0 -> 1"),
        (
            "F.relu(self.norm(self.first(x)))",
            "self.norm(F.relu(self.first(x)))",
            "operators: the same ones in another order, from number 2 on",
        ),
        ("0.5", "50.0", "constants: "),
    ):
        path.write_text(FUNCTIONAL.replace(old, new))
        code, said = run(tmp_path / "run", model=model)
        assert code == 2, said
        assert f"original.{difference}" in said
        assert "What the network computes has changed" in said
        assert f"the code of {model}" in said
    path.write_text(
        FUNCTIONAL.replace("F.relu(self.second(x))", "F.relu(self.second(x), inplace=True)  # the same")
    )
    assert run(tmp_path / "run", model=model)[0] == 0


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


def test_numbers_in_tensors_of_the_code_are_known_and_those_drawn_are_the_same_at_every_start(
    tmp_path: Path,
) -> None:
    path, model = tmp_path / "net.py", f"{tmp_path / 'net.py'}:Net"
    path.write_text(TENSORS)
    assert run(tmp_path / "run", model=model, PEEL_FAULT="15:kill")[0] == KILLED
    for number in ("0.25", "0.75", "1.5", "3.5"):
        path.write_text(TENSORS.replace(number, "0.875"))
        code, said = run(tmp_path / "run", model=model)
        assert code == 2, said
        assert "What the network computes has changed" in said
    path.write_text(TENSORS)
    code, said = run(tmp_path / "run", model=model)
    assert code == 0, said


def test_a_model_file_that_was_moved_is_the_same_model(tmp_path: Path) -> None:
    path, moved, other = tmp_path / "net.py", tmp_path / "moved" / "net.py", tmp_path / "other" / "net.py"
    for place in (path, moved, other):
        place.parent.mkdir(exist_ok=True)
        place.write_text(FUNCTIONAL if place != other else FUNCTIONAL.replace("0.5", "50.0"))
    assert run(tmp_path / "run", model=f"{path}:Net", PEEL_FAULT="15:kill")[0] == KILLED
    code, said = run(tmp_path / "run", model=f"{other}:Net")
    assert code == 2, said
    code, said = run(tmp_path / "run", model=f"{moved}:Net")
    assert code == 0, said
    assert "going on after epoch 1" in said


# Images


def test_images_that_changed_under_the_same_name_are_noticed(own: Path) -> None:
    data = few_digits()
    pixels = data.train.pixels.clone()  # type: ignore[attr-defined]
    pixels[0, 0, 0, 0] ^= 1
    altered = Data(data.name, data.classes, copy.copy(data.train), data.test, data.augment)
    object.__setattr__(altered.train, "pixels", pixels)
    with pytest.raises(RunError, match="fingerprint"):
        small_run(data=altered, output=own, seed=3)


def write_images(root: Path, side: int, kind: str, count: int = 6) -> None:
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = np.random.default_rng(i).integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{i}.{kind}")


@pytest.mark.parametrize(
    ("side", "kind"), [(12, "png"), (100, "bmp")], ids=["in memory", "read from disk, of the same size"]
)
def test_a_run_does_not_go_on_with_images_that_changed(side: int, kind: str, tmp_path: Path) -> None:
    write_images(tmp_path / "data", side, kind)
    options = [
        "--data",
        str(tmp_path / "data"),
        "--train.batch-size",
        "6",
        "--image-size",
        str(side),
        "--workers",
        "0",
    ]
    assert run(tmp_path / "run", *options, PEEL_FAULT="3:kill")[0] == KILLED
    path = tmp_path / "data" / "train" / "cat" / f"0.{kind}"
    good = path.read_bytes()
    pixels = np.array(Image.open(path))
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)
    assert kind == "png" or path.stat().st_size == len(good)
    code, said = run(tmp_path / "run", *options)
    assert code == 2
    assert "fingerprint: " in said
    path.write_bytes(good)
    (tmp_path / "data").rename(tmp_path / "moved")
    assert run(tmp_path / "run", "--data", str(tmp_path / "moved"), *options[2:])[0] == 0, (
        "the same images in another place are the same"
    )


# Versions and threads


def test_a_folder_of_another_version_of_peel_with_other_settings_is_said_to_be_one(own: Path) -> None:
    """What only the other version knows cannot be given to this one."""
    settings = read(own / "state.json")
    resolved = settings["resolved"]
    del resolved["pad_channels"], resolved["method"]["keep"]
    (own / "state.json").write_text(json.dumps({**settings, "resolved": {"align": 1, **resolved}}))
    with pytest.raises(RunError, match="was begun by another version of peel") as caught:
        small_run(output=own, seed=3)
    said = str(caught.value)
    assert "align: 1 (only there)" in said
    assert "pads: False (only here)" in said
    assert "method.keep: 0.8 (only here)" in said
    assert "Finish it with the version that began it, or name another --output" in said
    assert "the same settings" not in said
    assert "None" not in said


def test_going_on_with_another_torch_or_peel_is_said(killed: Path, whole: bytes) -> None:
    path = killed / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "2.0.1", "peel": "0.0.7"}))
    code, said = run(killed)
    assert code == 0
    assert f"was begun with torch 2.0.1 and goes on with {torch.__version__}" in said
    assert f"was begun with peel 0.0.7 and goes on with {peel.__version__}" in said
    assert weights(killed) == whole


def test_a_torch_that_calls_its_operators_otherwise_is_no_model_whose_code_changed(
    killed: Path, whole: bytes
) -> None:
    for name, change in (("environment", {"torch": "2.0.1"}), ("settings", {})):
        path = killed / f"{name}.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text().replace("conv2d", "convolution")), **change})
        )
    code, said = run(killed)
    assert code == 0
    assert "other operators" in said
    assert "convolution 4 -> 0, conv2d 0 -> 4" in said
    assert weights(killed) == whole, "its checkpoints are still its own"


def test_going_on_with_another_number_of_threads_is_said(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The threads share sums, which are then added in another order."""
    said = f"{own} was begun with threads 1 and goes on with 2: the bits may differ"
    small_run(output=own, seed=3)
    assert "threads" not in caplog.text
    torch.set_num_threads(2)
    try:
        small_run(output=own, seed=3)
    finally:
        torch.set_num_threads(1)
    assert said in caplog.text

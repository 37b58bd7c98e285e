"""Wrong input: messages name the thing, the value and the way out. Exit code 2, or 3 for files and images."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from helpers.small import Small, small_run
from peel import zoo
from peel.cli.main import main
from peel.errors import BudgetError, ConfigError, DataError, ModelError, PeelError, WidthsError
from peel.report.progress import ProgressBar
from peel.run.prune import prune

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
from torch import nn

def model(num_classes=10):
    layers, inputs = [], 3
    for outputs, stride in ((8, 1), (8, 1), (16, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))

def seven():
    return model(7)
"""


def write_image(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(path)


def write_set(root: Path) -> None:
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            for i in range(6):
                write_image(root / split / name / f"{i}.png", 10 * label + i)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and data of many kinds."""
    (tmp_path / "own.py").write_text(MODEL)
    write_set(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    write_image(tmp_path / "halves" / "train" / "cat" / "0.png")
    for split in ("train", "val"):
        (tmp_path / "bare" / split).mkdir(parents=True)
        for name in ("cat", "dog"):
            write_image(tmp_path / "hollow" / split / name / "0.png")
    (tmp_path / "hollow" / "train" / "dog" / "0.png").rename(tmp_path / "hollow" / "train" / "dog" / "0.txt")
    for split, names in (("train", ("cat", "dog")), ("val", ("cat", "fish"))):
        for name in names:
            write_image(tmp_path / "different" / split / name / "0.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def write_plans(place: Path) -> None:
    """Plans and settings that cannot be used."""
    (place / "binary.toml").write_bytes(b"a = \xff")
    for name, text in {
        "not.json": "widths: 3",
        "list.json": "[1, 2]",
        "unknown.json": '{"0": 4, "3": 4, "conv9": 8}',
        "zero.json": '{"0": 0, "3": 4, "6": 8}',
        "fraction.json": '{"0": 4.5, "3": 4, "6": 8}',
        "corrupt.json": '{"format": "peel-plan"}',
        "deep.toml": f"{'.'.join('a' * 3000)} = 1",
        "long.toml": f"seed = '{'x' * 10_000}'",
    }.items():
        (place / name).write_text(text)


#: Images, labels and files that cannot be used: exit code 3.
FILES: list[tuple[list[str], list[str]]] = [
    (["--data", "nowhere"], ["'nowhere'", "digits, cifar10"]),
    (["--data", "digit"], ["Did you mean digits"]),
    (["--data", "file"], ["neither a dataset nor a folder", "train/ and val/"]),
    (["--data", "empty"], ["empty needs", "it holds nothing"]),
    (["--data", "halves"], ["halves/train/cat holds fewer than two images", "there is no val/ or test/"]),
    (["--data", "bare"], ["bare/train has no folders", "one folder of images per class"]),
    (["--data", "hollow"], ["hollow/train/dog holds no images", "Remove the folder"]),
    (["--data", "different"], ["different classes: dog, fish not in both"]),
    (["--data", "good", "--train.batch-size", "13"], ["batch of 13", "training set of 12", "at most 12"]),
    (["--data", "good", "--train.batch-size", "6", "--backbone.batch-size", "13"], ["batch of 13"]),
    (["--train.batch-size", "1438"], ["batch of 1438", "at most 1437"]),
    (["--weights", "file"], ["file cannot be loaded by torch"]),
    (["--weights", "missing.pt"], ["there are no weights at missing.pt"]),
]

#: Settings that cannot be: exit code 2.
OPTIONS: list[tuple[list[str], list[str]]] = [
    (["--image-size", "0"], ["image_size: expected int >= 1, not 0"]),
    # The method
    (["--peel.backbone-ratio", "0"], ["peel.backbone_ratio: expected float > 0.0, not 0"]),
    (["--peel.backbone-ratio", "1.5"], ["backbone_ratio", "not 1.5"]),
    (["--peel.backbone-ratio", "-0.1"], ["backbone_ratio", "not -0.1"]),
    (["--peel.backbone-ratio", "nan"], ["backbone_ratio", "nan"]),
    (["--peel.criterion", "gradent"], ["gradent", "Did you mean gradient"]),
    (["--peel.policy", "winner-takes-all"], ["'winner-takes-all'", "Did you mean winner-take-all"]),
    (["--export", "slim.tflite"], ["slim.tflite has no format", ".onnx"]),
    (["--export", "slim.onnx", "--stages", "original"], ["--export needs the slim network", "final"]),
    (["--method", "sensitive"], ["'sensitive'", "Did you mean sensitivity"]),
    (
        ["--method", "sensitivity", "--peel.max-width", "1"],
        ["peel.max_width is a setting of the method peel"],
    ),
    (
        ["--method", "uniform", "--peel.criterion", "gradient"],
        ["--method peel --peel.criterion", "here is uniform"],
    ),
    (["--criterion", "gradient"], ["--criterion"]),
    (["--peel.criterio", "bn"], ["the method peel has no setting criterio", "Did you mean criterion"]),
    (["--peel.rounds"], ["--peel.rounds needs a value"]),
    (["--peel.solver", "triangle"], ["'triangle'", "Did you mean triangular"]),
    (["--peel.backbone-init", "even"], ["backbone_init is one of uniform, equal, not 'even'"]),
    (["--distill", "inplace"], ["'inplace'", "Did you mean in-place"]),
    (["--peel.reduce", "max"], ["reduce is one of mean, sum, not 'max'"]),
    (["--resource", "flops"], ["resource is one of macs, params, memory, latency, not 'flops'"]),
    (["--resource", "latency", "--budget", "8ms"], ["no latency is known", "peel latency MODEL"]),
    (["--budget", "macs<=50%, flops<=1M"], ["the resource of a limit is one of macs", "'flops'"]),
    (["--peel.rounds", "0"], ["peel.rounds: expected int >= 1, not 0"]),
    (["--divisor", "0"], ["divisor: expected int >= 1, not 0"]),
    (["--divisor", "7.5"], ["--divisor: 7.5 is not a whole number"]),
    (["--peel.l1-coefficient", "-1"], ["peel.l1_coefficient: expected float >= 0.0, not -1"]),
    (
        ["--peel.l1-coefficient", "0.1", "--peel.l1-strength", "3"],
        ["l1_coefficient and l1_strength", "give one of them"],
    ),
    (["--temperature", "0"], ["temperature: expected float > 0.0, not 0"]),
    (["--peel.max-width", "1.0", "--peel.solver", "triangular"], ["max_width needs solver"]),
    (["--freeze", "conv9"], ["conv9", "peel inspect lists the ties"]),
    (["--peel.ignore", "*"], ["matches every layer"]),
    (["--stages", "original,fina"], ["'fina'", "Did you mean final"]),
    # Budgets
    (["--budget", "half"], ["'half'", "50%"]),
    (["--budget", "0"], ["the budget must be finite and at least 1"]),
    (["--budget=-5%"], ["-5%"]),
    (["--budget", "100"], ["100 MACs cannot be reached", "the smallest network has"]),
    (["--budget", "2500", "--peel.backbone-ratio", "0.5"], ["0.5", "cannot be reached"]),
    # Recipes
    (["--recipe", "imagenet-resnt"], ["'imagenet-resnt'", "Did you mean imagenet-resnet"]),
    (["--train.epoch", "3"], ["--train.epoch", "Did you mean"]),
    (["--train.epochs", "0"], ["epochs", "0"]),
    (["--train.lr", "-1"], ["lr", "-1"]),
    (["--backbone.schedule", "cosin"], ["'cosin'", "Did you mean cosine"]),
    (["--train.augment", "flip"], ["augment is one of", "'flip'"]),
    (["--train.epochs", "many"], ["many"]),
    (["--train.epochs", "1.5"], ["--train.epochs: 1.5 is not a whole number"]),
    # Files
    (["--plan", "missing.json"], ["plan: cannot read missing.json", "No such file"]),
    (["--plan", "not.json"], ["plan: not.json is not JSON"]),
    (["--plan", "list.json"], ["plan is a plan.json or a mapping"]),
    (["--plan", "corrupt.json"], ["plan: corrupt.json: not a plan"]),
    (["--plan", "unknown.json"], ["conv9"]),
    (["--plan", "zero.json"], ["0: the width must be at least 1, not 0"]),
    (["--plan", "fraction.json"], ["0: the width must be a whole number, not 4.5"]),
    (["--groups.all", "nine"], ["nine", "peel inspect lists the ties"]),
    (["--output", "file"], ["file is a file", "--output"]),
    # The rest
    (["--device", "tpu"], ["tpu"]),
    (["--device", "cuda:99"], ["cuda:99"]),
    (
        ["--gpus", "2"],
        ["--gpus 2: the number of GPUs", "is 0. Leave it out", "torchrun --nproc-per-node 2"],
    ),
    (["--threads", "0"], ["threads: expected int >= 1, not 0"]),
    (["--threads", "100000"], ["threads: this machine has", "cores", "not 100000"]),
    (["--peel.rounds", "1000"], ["peel.rounds: expected int <= 100, not 1000"]),
    (["--mean", "nan"], ["mean must be 1 or 3 numbers", "nan"]),
    (["--output", "a\0b"], ["cannot create the folder a\0b", "NUL character"]),
    (["--weights", "x" * 300], ["no file can have this name, it is too long"]),
    (["--data", "x" * 300], ["no file can have this name, it is too long"]),
    (["--config", "deep.toml"], ["deep.toml is corrupt: it is nested too deeply", "--config"]),
    (["--config", "binary.toml"], ["binary.toml is corrupt", "--config"]),
    (["--config", "long.toml"], ["seed", "..."]),
    (["--workers", "-1"], ["workers: expected int >= 0, not -1"]),
    (["--seed", "one"], ["one"]),
    (["--seed", "-1"], ["seed: expected int >= 0, not -1"]),
    (["--citerion", "bn"], ["--citerion", "Did you mean"]),
]


@pytest.mark.parametrize(
    ("code", "options", "expected"), [*((3, *case) for case in FILES), *((2, *case) for case in OPTIONS)]
)
def test_a_wrong_flag_is_explained_and_nothing_is_written(
    code: int, options: list[str], expected: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plans(place)
    before = content(place)
    output = [] if "--output" in options else ["--output", "out"]
    data = [] if "--data" in options else ["--data", "digits"]
    method = [] if "--method" in options else ["--method", "peel"]
    assert main(["run", "own.py:model", "--quiet", *output, *data, *method, *options]) == code
    captured = capsys.readouterr()
    shown = " ".join((captured.out + captured.err).replace("│", " ").split())
    for part in expected:
        assert part in shown
    assert "Traceback" not in shown
    assert captured.out == "" or "╭" in captured.out
    assert content(place) == before


@pytest.mark.parametrize("target", ["file/out", "locked/out", "good"])
@pytest.mark.parametrize(
    "command",
    [
        ["latency", "own.py:model", "--input", "3,8,8", "--output"],
        ["curve", "own.py:model", "--weights", "w.pt", "--data", "digits", "--output"],
        ["export", "own.py:model", "--weights", "random", "--input", "3,8,8", "--to"],
        ["run", "own.py:model", "--data", "digits", "--output", "out", "--export"],
    ],
    ids=lambda command: command[0],
)
def test_a_file_that_cannot_be_written_is_noticed_before_the_work(
    command: list[str],
    target: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    suffix = {"run": ".onnx", "export": ".onnx", "latency": ".json", "curve": ".csv"}[command[0]]
    for kind in (".onnx", ".json", ".csv"):
        (place / f"good{kind}").mkdir()
    (place / "locked").mkdir()
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and access(path, mode))
    monkeypatch.setattr(zoo, "create", lambda *_, **__: pytest.fail("a model was built"))
    before = content(place)
    assert main([*command, f"{target}{suffix}"]) == 2
    assert f"cannot write {target}" in (shown := capsys.readouterr().err)
    assert command[-1] in shown
    assert content(place) == before


@pytest.mark.parametrize("model", ["own.py:modell", "cifar_resnet21", "own.py:seven"])
def test_a_wrong_model_is_explained_and_nothing_is_written(
    model: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(place)
    command = ["run", model, "--data", "digits", "--output", "out", "--quiet"]
    assert main(command) == (3 if model == "own.py:seven" else 2)
    messages = {
        "own.py:modell": "Did you mean model",
        "cifar_resnet21": "Did you mean",
        "own.py:seven": "10 classes",
    }
    assert messages[model] in capsys.readouterr().err
    assert content(place) == before


EXITS = """
import sys
from torch import nn
from peel import Method

def exits(num_classes=10):
    sys.exit(0)

class Leaves(Method):
    def solve(self, *_):
        raise SystemExit

class Forward(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        sys.exit("enough")
"""

SCRIPT = """
import argparse
argparse.ArgumentParser().parse_args(["--epochs", "3"])
"""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["inspect", "exits.py:exits"], r"exits.py, line 7, ended the process \(SystemExit: 0\)"),
        (["inspect", "exits.py:Forward"], r"exits.py, line 19, ended the process \(SystemExit: enough\)"),
        (["run", "script.py:net", "--data", "digits"], 'script.py, line 3, ended .* __name__ == "__main__"'),
        (["run", "own.py:model", "--data", "digits", "--method", "exits.py:Leaves"], "exits.py, line 11, e"),
    ],
)
def test_code_of_the_users_own_that_ends_the_process_is_named(
    command: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "exits.py").write_text(EXITS)
    (place / "script.py").write_text(SCRIPT)
    stages = ["--stages", "plan", "--output", "out", "--quiet"] if command[0] == "run" else []
    assert main([*command, *stages]) == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown), shown
    assert "Traceback" not in shown


def test_a_module_with_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"shape \(7,\), but digits has 10 classes.* with 10 outputs"):
        small_run(Small(num_classes=7), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"backbone_ratio": "0.8"}, ConfigError, "backbone_ratio: expected float, not '0.8'"),
        ({"backbone": {"learning_rate": 3}}, ConfigError, "no setting backbone.learning_rate"),
        ({"budget": 1.5}, BudgetError, "1.5"),
        ({"budget": True}, PeelError, "True"),
        ({"plan": {**dict.fromkeys(("conv1", "conv2", "conv3", "conv4"), 4), "fc": 3}}, WidthsError, "fc"),
        ({"plan": 3}, ConfigError, "plan"),
        ({"groups": {"all": ["conv1", "conv1"]}}, PeelError, "conv1"),
        ({"recipe": "cifarr"}, ConfigError, "Did you mean cifar"),
    ],
)
def test_a_wrong_keyword_is_explained(
    settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        small_run(output=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


class Stateful(Small):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Small().half(), "torch.float16 weights.*float32"),
        (nn.Flatten(), "no parameters"),
        (Stateful(), "_extra_state.*Make it a buffer"),
    ],
    ids=["half", "nothing", "stateful"],
)
def test_a_module_that_cannot_be_trained_or_saved_is_refused(
    model: nn.Module, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        small_run(model, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_network_without_norm_layers_needs_another_criterion(tmp_path: Path) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)]
    with pytest.raises(ConfigError, match=r'norm layers.* criterion="weight"'):
        small_run(nn.Sequential(*layers), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert small_run(nn.Sequential(*layers), criterion="weight", stages=["plan"]).plan is not None


# Data that does not suit the model


def test_a_network_of_ones_own_needs_data(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "own.py:model", "--output", "out"]) == 2
    assert "no data is given for own.py:model: give data= (--data)" in capsys.readouterr().err
    assert not (place / "out").exists()
    with pytest.raises(ConfigError, match=r"no data is given for helpers.small:Small"):
        prune(Small())
    assert prune("cifar_resnet20", dry_run=True).plan is not None


def test_one_class_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        shutil.rmtree(place / "good" / split / "dog")
    assert main(["run", "own.py:model", "--data", "good", "--output", "out"]) == 3
    assert "good has one class, cat: a classifier needs two" in capsys.readouterr().err
    assert not (place / "out").exists()


def test_top_5_of_two_classes_is_left_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "own.py:model", "--data", "good", "--output", "out", "--quiet", "--stages", "original"]
    assert main([*command, "--train.epochs", "1", "--train.batch-size", "6"]) == 0
    shown = capsys.readouterr().out
    assert "top-1" in shown
    assert "top-5" not in shown
    assert json.loads((place / "out" / "result.json").read_text())["rows"][0]["top5"] is None
    page = (place / "out" / "report.html").read_text()
    assert "top-1" in page
    assert "top-5" not in page


# Corrupt images


def test_the_command_stops_at_corrupt_images_and_runs_without_them(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "good" / "train" / "dog" / "empty.png").write_bytes(b"")
    (place / "good" / "val" / "cat" / "text.jpg").write_text("this is no image")
    before = content(place)
    command = ["run", "own.py:model", "--data", "good", "--output", "out", "--quiet", "--stages", "original"]
    command += ["--train.epochs", "1", "--train.batch-size", "6"]
    assert main(command) == 3
    message = capsys.readouterr().err
    assert "train/dog/empty.png" in message
    assert "val/cat/text.jpg" in message
    assert content(place) == before
    assert main([*command, "--skip-corrupt"]) == 0
    assert json.loads((place / "out" / "result.json").read_text())["rows"][0]["image_passes"] == 12


# Training that fails


def test_a_run_that_diverges_says_so_and_keeps_finished_stages(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "own.py:model", "--data", "digits", "--output", "out", "--quiet", "--train.epochs", "1"]
    command += [
        "--train.batch-size",
        "256",
        "--method",
        "peel",
        "--backbone.epochs",
        "2",
        "--backbone.lr",
        "1e30",
    ]
    assert main([*command, "--backbone.warmup-epochs", "1"]) == 4
    assert "finite" in capsys.readouterr().err
    assert (place / "out" / "stages" / "original.record.json").exists()
    assert not (place / "out" / "stages" / "backbone.record.json").exists()


def test_an_interrupted_command_says_so_and_resumes_later(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "own.py:model", "--data", "digits", "--output", "out", "--stages", "original"]
    command += ["--train.epochs", "2", "--train.batch-size", "256"]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "on_epoch_end", interrupt)
        assert main(command) == 130
    assert "interrupted" in capsys.readouterr().err
    assert main(command) == 0
    lines = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]

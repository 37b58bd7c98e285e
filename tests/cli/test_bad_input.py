"""What a person may get wrong, and what they are told: the thing, the value and the way out; exit code 2, or 3 for images and files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from helpers.small import CPU, Small, small_run
from peel.cli.main import main
from peel.data.datasets import load_data
from peel.errors import BudgetError, ConfigError, DataError, ModelError, PeelError, WidthsError
from peel.train.callbacks import Callback
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe

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
SIZE = {"small": (12, 10), "large": (120, 110)}


def write_image(path: Path, size: tuple[int, int], seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)


def write_set(root: Path, size: tuple[int, int] = SIZE["small"], count: int = 6) -> None:
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            for i in range(count):
                write_image(root / split / name / f"{i}.png", size, 10 * label + i)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and data of many kinds."""
    (tmp_path / "own.py").write_text(MODEL)
    write_set(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    write_image(tmp_path / "halves" / "train" / "cat" / "0.png", SIZE["small"])
    for split in ("train", "val"):
        (tmp_path / "bare" / split).mkdir(parents=True)
        for name in ("cat", "dog"):
            write_image(tmp_path / "hollow" / split / name / "0.png", SIZE["small"])
    (tmp_path / "hollow" / "train" / "dog" / "0.png").rename(tmp_path / "hollow" / "train" / "dog" / "0.txt")
    for split, names in (("train", ("cat", "dog")), ("val", ("cat", "fish"))):
        for name in names:
            write_image(tmp_path / "different" / split / name / "0.png", SIZE["small"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def files(place: Path) -> None:
    """Plans and groups that cannot be used."""
    for name, text in {
        "not.json": "widths: 3",
        "list.json": "[1, 2]",
        "unknown.json": '{"widths": {"0": 4, "3": 4, "conv9": 8}}',
        "zero.json": '{"0": 0, "3": 4, "6": 8}',
        "fraction.json": '{"0": 4.5, "3": 4, "6": 8}',
        "groups.json": '{"all": ["0", "3", "nine"]}',
        "lists.json": '{"all": "0"}',
    }.items():
        (place / name).write_text(text)


#: Images, labels and files that cannot be used: exit code 3.
FILES: list[tuple[list[str], list[str]]] = [
    (["--data", "nowhere"], ["'nowhere'", "digits, cifar10"]),
    (["--data", "digit"], ["Did you mean digits"]),
    (["--data", "file"], ["file is a file", "train/ and val/"]),
    (["--data", "empty"], ["empty needs the folders train/ and val/", "it holds nothing"]),
    (["--data", "halves"], ["halves needs the folders train/ and val/", "it holds train"]),
    (["--data", "bare"], ["bare/train has no folders", "one folder of images per class"]),
    (["--data", "hollow"], ["hollow/train/dog holds no images", "Remove the folder"]),
    (["--data", "different"], ["different classes: dog, fish not in both"]),
    (
        ["--data", "good", "--train.batch-size", "13"],
        ["a batch of 13 images", "training set of 12", "at most 12"],
    ),
    (["--data", "good", "--train.batch-size", "6", "--backbone.batch-size", "13"], ["a batch of 13 images"]),
    (["--train.batch-size", "1438"], ["a batch of 1438 images", "at most 1437"]),
    (["--teacher", "file"], ["file cannot be read as weights"]),
]

#: Settings that cannot be: exit code 2.
OPTIONS: list[tuple[list[str], list[str]]] = [
    (["--image-size", "0"], ["image_size must be a whole number of at least 1, not 0"]),
    # Settings of the method
    (["--backbone-ratio", "0"], ["keep (lambda)", "above 0 and at most 1, not 0"]),
    (["--backbone-ratio", "1.5"], ["keep (lambda)", "not 1.5"]),
    (["--backbone-ratio", "-0.1"], ["keep (lambda)", "not -0.1"]),
    (["--backbone-ratio", "nan"], ["keep (lambda)", "nan"]),
    (["--criterion", "gradent"], ["criterion is one of bn, weight", "'gradent'", "Did you mean gradient"]),
    (["--policy", "winner-takes-all"], ["'winner-takes-all'", "Did you mean winner-take-all"]),
    (["--solver", "triangle"], ["'triangle'", "Did you mean triangular"]),
    (["--backbone-init", "even"], ["start is one of uniform, equal, not 'even'"]),
    (["--distill", "inplace"], ["'inplace'", "Did you mean in-place"]),
    (["--reduce", "max"], ["reduce is one of mean, sum, not 'max'"]),
    (["--resource", "flops"], ["resource is one of macs, params, memory, not 'flops'"]),
    (["--rounds", "0"], ["rounds must be a whole number of at least 1, not 0"]),
    (["--divisor", "0"], ["divisor must be a whole number of at least 1, not 0"]),
    (["--l1-coefficient", "-1"], ["penalty must not be negative, not -1"]),
    (["--l1-coefficient", "0.1", "--l1-strength", "3"], ["penalty and pull", "give one of them"]),
    (["--temperature", "0"], ["temperature must be positive, not 0"]),
    (["--max-width", "1.0", "--solver", "triangular"], ["cap needs solve"]),
    (["--freeze", "conv9"], ["no free tie is called 'conv9'"]),
    (["--ignore", "*"], ["matches every layer"]),
    (["--stages", "original,pel"], ["no step is called 'pel'", "Did you mean peel"]),
    # Budgets
    (["--budget", "half"], ["cannot read 'half' as a budget", "50%"]),
    (["--budget", "0"], ["the budget must be positive, not '0'"]),
    (["--budget=-5%"], ["cannot read '-5%' as a budget"]),
    (["--budget", "100"], ["a budget of 100 macs cannot be reached", "the smallest network has"]),
    (
        ["--budget", "2500", "--backbone-ratio", "0.5"],
        ["which may cost 0.5 of the budget", "cannot be reached"],
    ),
    # Recipes
    (["--recipe", "imagenet-resnt"], ["'imagenet-resnt'", "Did you mean imagenet-resnet"]),
    (["--train.epoch", "3"], ["--train.epoch", "Did you mean"]),
    (["--train.epochs", "0"], ["epochs must be a whole number of at least 1, not 0"]),
    (["--train.lr", "-1"], ["lr must be a number from 0", "-1"]),
    (["--backbone.schedule", "cosin"], ["'cosin'", "Did you mean cosine"]),
    (["--train.augment", "flip"], ["augment is one of", "'flip'"]),
    (["--train.epochs", "many"], ["many"]),
    # Files
    (["--plan", "missing.json"], ["cannot read the plan missing.json", "No such file"]),
    (["--plan", "not.json"], ["the plan not.json is not JSON"]),
    (["--plan", "list.json"], ["a plan is an object with `widths`"]),
    (["--plan", "unknown.json"], ["conv9"]),
    (["--plan", "zero.json"], ["0: the width must be at least 1, not 0"]),
    (["--plan", "fraction.json"], ["0: the width must be a whole number, not 4.5"]),
    (["--groups", "missing.json"], ["cannot read the groups in missing.json"]),
    (["--groups", "not.json"], ["not.json is not JSON"]),
    (["--groups", "groups.json"], ["nine"]),
    (["--groups", "lists.json"], ["group name -> list of tie names"]),
    (["--teacher", "missing.pt"], ["there is no teacher at missing.pt"]),
    (["--output", "file"], ["the output folder file is a file", "--output"]),
    # The rest
    (["--device", "tpu"], ["the device 'tpu' cannot be used"]),
    (["--device", "cuda:99"], ["the device 'cuda:99' cannot be used"]),
    (["--workers", "-1"], ["workers must be", "-1"]),
    (["--seed", "one"], ["one"]),
    (["--citerion", "bn"], ["--citerion", "Did you mean"]),
]


@pytest.mark.parametrize(
    ("code", "options", "expected"), [*((3, *case) for case in FILES), *((2, *case) for case in OPTIONS)]
)
def test_a_wrong_option_is_explained_and_nothing_is_written(
    code: int, options: list[str], expected: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(place)
    before = content(place)
    output = [] if "--output" in options else ["--output", "out"]
    assert main(["run", "own.py:model", "--quiet", *output, *options]) == code
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).replace("│", " ").split())
    for part in expected:
        assert part in said
    assert "Traceback" not in said
    assert captured.out == "" or "╭" in captured.out
    assert content(place) == before


@pytest.mark.parametrize("model", ["own.py:modell", "cifar_resnet21", "own.py:seven"])
def test_a_wrong_model_is_explained_and_nothing_is_written(
    model: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(place)
    assert main(["run", model, "--output", "out", "--quiet"]) == (3 if model == "own.py:seven" else 2)
    said = capsys.readouterr().err
    assert {
        "own.py:modell": "Did you mean model",
        "cifar_resnet21": "Did you mean",
        "own.py:seven": "10 classes",
    }[model] in said
    assert content(place) == before


def test_a_module_whose_head_has_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"scores of shape \(7,\), the data digits has 10 classes.* with 10 outputs"
    ):
        small_run(Small(num_classes=7), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"citerion": "bn"}, ConfigError, "no setting 'citerion'. Did you mean criterion"),
        ({"train": {"epoch": 3}}, ConfigError, "no field 'epoch'. Did you mean epochs"),
        ({"backbone": {"learning_rate": 3}}, ConfigError, "no field 'learning_rate'"),
        ({"backbone_ratio": "0.8"}, ConfigError, "keep .* must be a finite number, not '0.8'"),
        ({"backbone_ratio": True}, ConfigError, "keep .* not True"),
        ({"rounds": 1.5}, ConfigError, "rounds must be a whole number"),
        ({"budget": 1.5}, BudgetError, "1.5"),
        ({"budget": True}, BudgetError, "True"),
        ({"plan": {**dict.fromkeys(("conv1", "conv2", "conv3", "conv4"), 4), "fc": 3}}, WidthsError, "fc"),
        ({"plan": 3}, ConfigError, "a plan is"),
        ({"groups": {"all": ["conv1", "conv1"]}}, PeelError, "conv1"),
        ({"recipe": "cifarr"}, ConfigError, "Did you mean cifar"),
    ],
)
def test_a_wrong_argument_is_explained(
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
        (Small().half(), "weights of type torch.float16.*float32"),
        (nn.Flatten(), "no parameters"),
        (Stateful(), "_extra_state is a state.*Make it a buffer"),
    ],
    ids=["half", "nothing", "stateful"],
)
def test_a_module_that_cannot_be_trained_or_kept_is_refused(
    model: nn.Module, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        small_run(model, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_network_without_norm_layers_is_told_so_before_anything_is_trained(tmp_path: Path) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)]
    with pytest.raises(ConfigError, match='no norm layers with scales: choose criterion="weight"'):
        small_run(nn.Sequential(*layers), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert small_run(nn.Sequential(*layers), criterion="weight", stages=["backbone", "plan"]).plan is not None


# Images


def spoil(root: Path) -> list[str]:
    """Five kinds of broken files, in both splits; their names."""
    truncated = root / "train" / "cat" / "cut.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (120, 110, 3), dtype=np.uint8)).save(truncated)
    truncated.write_bytes(truncated.read_bytes()[:2000])
    (root / "train" / "dog" / "empty.png").write_bytes(b"")
    (root / "val" / "cat" / "text.jpg").write_text("this is no image")
    half = root / "val" / "dog" / "half.png"
    half.write_bytes((root / "val" / "dog" / "0.png").read_bytes()[:-200])
    (root / "val" / "dog" / "away.png").symlink_to(root / "nowhere.png")
    return [
        "train/cat/cut.jpg",
        "train/dog/empty.png",
        "val/cat/text.jpg",
        "val/dog/half.png",
        "val/dog/away.png",
    ]


@pytest.mark.parametrize("size", SIZE)
def test_broken_images_of_both_splits_are_named_at_once_and_left_out_on_request(
    size: str, tmp_path: Path
) -> None:
    write_set(tmp_path, SIZE[size])
    broken = spoil(tmp_path)
    with pytest.raises(DataError, match=r"5 of 29 images cannot be read") as caught:
        load_data(str(tmp_path))
    for name in broken:
        assert name in str(caught.value)
    assert "--skip-corrupt" in str(caught.value)
    left = load_data(str(tmp_path), skip_corrupt=True)
    assert (left.train.size, left.test.size) == (12, 12)
    assert left.train.labels.tolist() == [0] * 6 + [1] * 6


def test_a_folder_that_cannot_be_read_as_an_image_is_no_image(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train" / "cat" / "folder.png").mkdir()
    assert load_data(str(tmp_path)).train.size == 12


def test_copies_that_an_editor_hides_are_no_images(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train" / "cat" / ".ipynb_checkpoints").mkdir()
    write_image(tmp_path / "train" / "cat" / ".ipynb_checkpoints" / "0-checkpoint.png", SIZE["small"])
    assert load_data(str(tmp_path)).train.size == 12


@pytest.mark.parametrize("size", SIZE)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_of_which_no_image_is_left_is_an_error(split: str, size: str, tmp_path: Path) -> None:
    write_set(tmp_path, SIZE[size])
    for path in (tmp_path / split / "cat").iterdir():
        path.write_text("broken")
    with pytest.raises(DataError, match=rf"{split}/cat"):
        load_data(str(tmp_path), skip_corrupt=True)


def test_many_broken_images_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    write_set(tmp_path, count=20)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_text("broken")
    with pytest.raises(DataError, match=r"40 of 80 images cannot be read(.|\n)*and 20 more"):
        load_data(str(tmp_path))


def test_the_command_stops_at_broken_images_and_runs_without_them(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = spoil(place / "good")
    before = content(place)
    command = [
        "run",
        "own.py:model",
        "--data",
        "good",
        "--output",
        "out",
        "--quiet",
        "--stages",
        "original",
        "--train.epochs",
        "1",
    ]
    command += ["--train.batch-size", "6", "--backbone.batch-size", "6"]
    assert main(command) == 3
    said = capsys.readouterr().err
    assert all(name in said for name in broken)
    assert content(place) == before
    assert main([*command, "--skip-corrupt"]) == 0
    assert json.loads((place / "out" / "state.json").read_text())["resolved"]["images"] == [12, 12]


def test_in_a_huge_set_the_beginning_and_the_end_of_each_file_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peel.data.image_folder.FULL_SCAN", 10)
    write_set(tmp_path, SIZE["large"])
    broken = spoil(tmp_path)
    with pytest.raises(DataError, match=r"5 of 29") as caught:
        load_data(str(tmp_path))
    assert all(name in str(caught.value) for name in broken)


def test_an_image_that_is_broken_in_its_middle_is_named_in_a_huge_set_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such small images are all read before training, so that it shows."""
    monkeypatch.setattr("peel.data.image_folder.FULL_SCAN", 10)
    write_set(tmp_path)
    broken = tmp_path / "train" / "dog" / "3.png"
    data = bytearray(broken.read_bytes())
    data[100:140] = bytes(40)
    broken.write_bytes(data)
    with pytest.raises(DataError, match=r"1 of 24") as caught:
        load_data(str(tmp_path))
    assert "train/dog/3.png" in str(caught.value)
    assert load_data(str(tmp_path), skip_corrupt=True).train.size == 11


def test_a_streamed_set_trains_and_evaluates(tmp_path: Path) -> None:
    write_set(tmp_path, SIZE["large"])
    data = load_data(str(tmp_path), image_size=100)
    recipe = Recipe(epochs=1, batch_size=4, augment="imagenet")
    history = fit(
        Small(num_classes=2), CrossEntropy(), data.train, recipe, engine=CPU, seed=0, test=data.test
    )
    assert history[0].test is not None


# Training that fails


class Interrupted(NoCallback):
    def epoch(self, epoch: Any) -> None:
        raise KeyboardInterrupt


def test_a_run_that_diverges_says_so_and_keeps_what_it_had(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "run",
        "own.py:model",
        "--output",
        "out",
        "--quiet",
        "--train.epochs",
        "1",
        "--train.batch-size",
        "256",
    ]
    command += ["--backbone.epochs", "2", "--backbone.lr", "1e30", "--backbone.warmup-epochs", "1"]
    assert main(command) == 4
    said = capsys.readouterr().err
    assert "the loss is no finite number any more" in said
    assert "checkpoint" not in said, "there is none yet"
    assert (place / "out" / "stages" / "original.record.json").exists()
    assert not (place / "out" / "stages" / "backbone.record.json").exists()


def test_an_interrupted_command_says_so_and_goes_on_later(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "run",
        "own.py:model",
        "--output",
        "out",
        "--quiet",
        "--train.epochs",
        "2",
        "--train.batch-size",
        "256",
        "--stages",
        "original",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("peel.run.callbacks.Silent", Interrupted)
        assert main(command) == 130
    assert "interrupted" in capsys.readouterr().err
    assert main(command) == 0
    lines = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]

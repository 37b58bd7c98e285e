"""`peel bench`, `peel export` and `peel eval` on a run folder, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import peel
from helpers.deploy import OWN, slim_small
from helpers.small import SHORT, few_digits, taught
from peel import zoo
from peel.cli.main import main
from peel.deploy.networks import load_network
from peel.run.prune import prune
from peel.run.result import Result
from peel.surgery.info import SlimInfo, attach_info

pytestmark = [pytest.mark.usefixtures("one_thread", "hasty"), pytest.mark.filterwarnings("ignore")]


def test_from_a_run_to_an_onnx_file_that_keeps_its_accuracy(
    finished: tuple[Path, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = str(finished[0]), str(tmp_path / "slim.onnx")
    assert main(["export", folder, "--to", file]) == 0
    shown = capsys.readouterr().out
    assert f"exported {file}" in shown
    assert "checked at batch 1 and 5 against torch" in shown
    values = []
    for network in (folder, file):
        assert main(["eval", network, "--data", "digits", "--device", "cpu", "--json"]) == 0
        values.append(json.loads(capsys.readouterr().out))
    assert values[0]["top1"] == values[1]["top1"]
    assert values[0]["macs"] == values[1]["macs"] == finished[1].rows[-1].macs
    assert main(["eval", file, "--data", "digits"]) == 0
    assert f"{values[0]['top1']:.2%}" in capsys.readouterr().out


def test_one_command_from_a_trained_network_to_an_onnx_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("from helpers.small import Small\n")
    save_file(taught().state_dict(), "trained.safetensors")
    command = ["run", "net.py:Small", "--weights", "trained.safetensors", "--data", "digits", "--quiet"]
    command += ["--budget", "60%", "--method", "sensitivity", "--train.epochs", "0", "--bench-seconds", "0"]
    assert main([*command, "--output", "slim", "--export", "slim.onnx", "--json"]) == 0
    shown = capsys.readouterr()
    row = json.loads(shown.out)["rows"][-1]
    assert "exported slim.onnx" in shown.err
    assert main(["eval", "slim.onnx", "--data", "digits", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == row["top1"]


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 12, 10)])
def test_a_model_of_the_users_own_is_exported_with_its_input(
    shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = str(tmp_path / "own.onnx"), ",".join(map(str, shape))
    line = ["export", "helpers.small:Small", "--to", file, "--input", text, "--weights", "random"]
    assert main(line) == 0
    assert f"exported {file}" in capsys.readouterr().out
    assert load_network(file).shape == shape


@pytest.mark.parametrize("source", ["small.pt", "trained"])
def test_a_model_with_its_trained_weights_is_evaluated_and_exported(
    source: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The accuracy is that of `peel curve`; the images say their size, a model saved by peel its shape."""
    given, file = ["helpers.small:Small", "--weights", str(place / source)], str(tmp_path / "net.onnx")
    images = ["--data", "digits", "--mean", "0.3", "--std", "0.4"]
    curve = ["--budgets", "0.5", "--images", "64", "--test-images", "360"]
    found = []
    for line in (["curve", *given, *images, *curve], ["eval", *given, *images]):
        assert main([*line, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["original"] == found[1]["top1"] > 0.5
    shape = [] if source == "trained" else ["--input", "3,8,8"]
    assert main(["export", *given, "--to", file, *shape]) == 0
    capsys.readouterr()
    assert main(["eval", file, *images, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == found[1]["top1"]


def test_random_weights_are_asked_for_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "net.onnx")
    lines = [
        ["export", "helpers.small:Small", "--to", file, "--input", "3,8,8"],
        ["eval", "helpers.small:Small", "--data", "digits"],
    ]
    for line in lines:
        assert main(line) == 2
        shown = capsys.readouterr().err
        assert "helpers.small:Small is a model without weights" in shown
        assert "--weights FILE, --weights pretrained" in shown and "--weights random" in shown
        assert list(tmp_path.iterdir()) == []
    random = ["--weights", "random"]
    assert main([*lines[0], *random, "--num-classes", "7"]) == 0
    assert load_network(file).model(torch.zeros(1, 3, 8, 8)).shape == (1, 7)
    capsys.readouterr()
    assert main([*lines[1], *random, "--image-size", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] < 0.5


def test_pretrained_weights_are_exported_with_what_feeds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = zoo.create("squeezenet1_1").state_dict()
    monkeypatch.setattr(zoo, "_pretrained_weights", lambda spec: weights)
    line = ["export", "squeezenet1_1", "--weights", "pretrained", "--to", str(tmp_path / "net.pt2")]
    assert main([*line, "--num-classes", "10"]) == 2
    assert "know 1000 classes, but --num-classes is 10" in capsys.readouterr().err
    assert main(line) == 0
    extra = {"peel.json": ""}
    program = torch.export.load(tmp_path / "net.pt2", extra_files=extra)
    assert torch.equal(program.state_dict["features.0.weight"], weights["features.0.weight"])
    spec = json.loads(extra["peel.json"])
    assert (spec["shape"], spec["resize"], spec["mean"]) == ([3, 224, 224], 256, [0.485, 0.456, 0.406])
    assert main(["eval", "squeezenet1_1", "--weights", "pretrained", "--data", "digits"]) == 3
    assert "know 1000 classes, but digits has 10" in capsys.readouterr().err


def test_bench_of_a_model_of_ones_own_needs_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("from helpers.small import Small\n")
    command = ["bench", "net.py:Small", "--backend", "eager", "--seconds", "0.05", "--json"]
    assert main(command) == 2
    assert "give --input channels,height,width" in capsys.readouterr().err
    assert main([*command, "--input", "3,8,8"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["macs"] < 1e6


def test_bench_of_a_run(finished: tuple[Path, Result], capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", str(finished[0]), "--backend", "eager", "--seconds", "0.01", "--threads", "1"]
    assert main([*line, "--batch", "4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["conditions"]["batch"] == 4
    assert data["conditions"]["torch"]
    original, slim = data["entries"]
    assert slim["baseline"] == original["network"]
    assert slim["mac_reduction"] == pytest.approx(original["macs"] / slim["macs"])
    assert slim["efficiency"] == pytest.approx(slim["speedup"]["median"] / slim["mac_reduction"])
    assert main(line) == 0
    shown = capsys.readouterr().out
    for expected in ("1 thread of", "batch 1", "p10 to p90", "samples/s", "speed-up", "over MACs"):
        assert expected in shown


def test_int8_shows_accuracy_and_speed_before_and_after(
    finished: tuple[Path, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "int8.onnx")
    line = ["export", str(finished[0]), "--to", file, "--int8", "--data", "digits", "--images", "32"]
    assert main([*line, "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    for expected in ("float32", "int8", "times as fast", "Calibrated on 32 images", f"exported {file}"):
        assert expected in shown


def test_a_run_of_your_own_network_is_exported_by_what_built_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    model = "net_of_mine.py:Net"
    settings = {"distill": "none", "stages": ["final"], "plan": {"conv1": 3, "conv2": 7}, "budget": "100%"}
    prune(model, few_digits(), **SHORT, output="run", **settings)  # type: ignore[arg-type]
    assert main(["export", "run", "--to", "whole.pt2"]) == 0
    assert "exported whole.pt2" in capsys.readouterr().out
    assert main(["export", "run/slim.safetensors", "--to", "mine.pt2"]) == 3
    assert "--model" in capsys.readouterr().err
    assert main(["export", "run/slim.safetensors", "--to", "mine.pt2", "--model", model]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["bench"], 2, "name a run folder"),
        (["bench", "small.pt"], 3, "small.pt is no network"),
        (["bench", "small.onnx", "--backend", "tensorrt"], 2, "eager, compile, onnxruntime"),
        (
            ["export", "saved.safetensors", "--to", "x.tflite", "--model", "helpers.small:Small"],
            2,
            "no format",
        ),
        (
            ["export", "helpers.small:Small", "--to", "x.py", "--input", "3,8,8"],
            2,
            ".onnx, .pt2, .safetensors",
        ),
        (["export", "saved.safetensors", "--to", "x.onnx"], 3, "--model path/to/file.py:callable"),
        (
            ["export", "saved.safetensors", "--to", "x.onnx", "--model", "helpers.small:Pooled"],
            3,
            "does not fit",
        ),
        (["export", "saved.safetensors", "--to", "x.onnx", "--int8"], 2, "--data"),
        (
            ["export", "odd.safetensors", "--to", "x.onnx", "--model", "helpers.deploy:Branching"],
            2,
            "data-dependent",
        ),
        (["export", "small.onnx", "--to", "x.onnx"], 2, "an ONNX file already"),
        (["export", "empty", "--to", "x.onnx"], 2, "not a run folder"),
        (["export", "saved.safetensors"], 2, "--to"),
        (
            ["export", "helpers.small:Small", "--to", "x.onnx", "--weights", "small.pt"],
            2,
            "give --input channels,height,width",
        ),
        (["export", "helpers.small:Small", "--to", "x.onnx", "--weights", "no.pt"], 3, "no weights at no.pt"),
        (["export", "no_such_net", "--to", "x.onnx"], 2, "no model is called"),
        (["export", "small.onnx", "--to", "x.onnx", "--weights", "small.pt"], 2, "leave it out: small.onnx"),
        (["eval", "small.onnx", "--data", "digits", "--image-size", "9"], 2, "--image-size is for models"),
        (["eval", "small.onnx"], 2, "--data"),
        (["eval", "small.onnx", "--data", "nowhere"], 3, "neither a dataset nor a folder"),
        (["eval", "broken.onnx", "--data", "digits"], 3, "cannot load broken.onnx"),
        (["eval", "small.onnx", "--data", "digits", "--mean", "1", "2"], 2, "mean must be 1 or 3 numbers"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    code: int,
    message: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "Traceback" not in captured.err
    assert sorted(place.iterdir()) == before


@pytest.fixture(scope="module")
def place(small_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with networks of many kinds."""
    from helpers.deploy import Branching

    folder, network = tmp_path_factory.mktemp("networks"), taught()
    peel.save(slim_small(), folder / "saved")
    torch.save(network.state_dict(), folder / "small.pt")
    attach_info(network, SlimInfo({"class": "Small"}, input=few_digits().input_spec()))
    peel.save(network, folder / "trained")
    shutil.copy(small_onnx, folder)
    odd = slim_small()
    odd.__class__ = Branching
    peel.save(odd, folder / "odd")
    (folder / "broken.onnx").write_bytes(b"no network")
    (folder / "empty").mkdir()
    return folder

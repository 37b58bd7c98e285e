"""`peel curve`: a table, files, and errors."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import peel
from helpers.small import Small, few_digits, taught
from peel.cli.main import main
from peel.data.in_memory import InMemoryImages
from peel.surgery.info import SlimInfo, attach_info


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.pt"
    torch.save(taught().state_dict(), path)
    return path


def arguments(weights: Path, *others: str) -> list[str]:
    sizes = ["--images", "100", "--test-images", "100"]
    return ["curve", "helpers.small:Small", "--weights", str(weights), "--data", "digits", *sizes, *others]


@pytest.mark.usefixtures("drawn_charts")
def test_a_curve_is_printed_and_written(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(
        weights, "--budgets", "0.8", "50%", "--divisor", "1", "--output", str(tmp_path / "curve")
    )
    assert main(line) == 0
    shown = capsys.readouterr()
    assert "repaired" in shown.out and "80%" in shown.out and "nothing was trained" in shown.out
    assert "MACs and params are those of uniform widths" in shown.out
    assert "50% of the MACs" in shown.err
    assert "written: " + ", ".join(f"{tmp_path}/curve.{kind}" for kind in ("json", "csv", "png")) in shown.err
    found = json.loads((tmp_path / "curve.json").read_text())
    first, second = found["points"]
    assert (first["budget"], second["budget"]) == (0.8, 0.5)
    assert second["macs"] <= 0.5 * found["macs"]
    assert second["repaired"] > second["cut"]
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert [float(row["repaired"]) for row in rows] == [point["repaired"] for point in found["points"]]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for point, row in zip(found["points"], rows, strict=True):
        assert point["macs_by_sensitivity"] <= point["budget"] * found["macs"]
        assert int(row["macs_by_sensitivity"]) == point["macs_by_sensitivity"]
        assert int(row["params_by_sensitivity"]) == point["params_by_sensitivity"]
    assert any(point["params_by_sensitivity"] != point["params"] for point in found["points"])


def test_each_line_of_the_picture_lies_at_its_own_macs(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        "peel.report.charts.budget_chart", lambda points, *_: [drawn.update(points), b"picture"][1]
    )
    assert main(arguments(weights, "--budgets", "0.5", "--output", str(tmp_path / "curve"))) == 0
    found = json.loads((tmp_path / "curve.json").read_text())
    (point,) = found["points"]
    for column, macs, accuracy in (
        ("cut", "macs", "cut"),
        ("repaired", "macs", "repaired"),
        ("repaired, by sensitivity", "macs_by_sensitivity", "repaired_by_sensitivity"),
    ):
        (pair,) = drawn[column]
        assert pair == pytest.approx((100 * point[macs] / found["macs"], 100 * point[accuracy]))


@pytest.mark.parametrize("command", ["curve", "eval"])
def test_the_split_of_a_folder_without_val_and_the_standard_error_are_told(
    command: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, network = tmp_path / "photos", taught()
    write_digits(folder)
    line = arguments(weights, "--budgets", "0.5")
    if command == "eval":
        input = {**few_digits().input_spec(), "classes": list("0123456789")}
        attach_info(network, SlimInfo({"class": "Small"}, {}, {}, {}, input))
        peel.save(network, tmp_path / "whole")
        line = ["eval", str(tmp_path / "whole.safetensors"), "--model", "helpers.small:Small", "--data", ""]
    line[line.index("--data") + 1] = str(folder)
    assert main(line) == 0
    shown = capsys.readouterr()
    # 12 images of each class, of which one is held out.
    assert "10% of each class (10 of 120 images, 1 per class) are held out" in " ".join(shown.err.split())
    assert "may have been trained on these images" in " ".join(shown.err.split())
    assert main([*line, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert "10 test images: standard error" in shown.out
    if command == "eval":
        assert values["standard_error"] == pytest.approx((values["top1"] * (1 - values["top1"]) / 10) ** 0.5)
    assert f"{100 * values['standard_error']:.1f} points" in shown.out


def write_digits(folder: Path) -> None:
    """Twelve images of each class, without val/."""
    split = few_digits(600, 300).train
    assert isinstance(split, InMemoryImages) and split.labels is not None
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
        for i, place in enumerate((split.labels == label).nonzero()[:12, 0].tolist()):
            Image.fromarray(split.pixels[place].numpy()).save(folder / str(label) / f"{i}.png")


def test_mean_and_std_are_lists_as_in_a_run(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--mean", "0.3", "0.3", "0.3", "--std", "0.4", "0.4", "0.4", "--budgets", "0.5", "--json"]
    assert main(arguments(weights, *settings)) == 0
    assert json.loads(capsys.readouterr().out)["original"] > 0.5


@pytest.mark.parametrize("command", ["curve", "eval", "run"])
def test_the_normalization_is_told_with_its_source(
    command: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["helpers.small:Small", "--weights", str(weights), "--data", "digits"]
    others = {
        "curve": ["--budgets", "0.5", "--images", "64", "--test-images", "64"],
        "run": ["--stages", "original", "--train.epochs", "0", "--output"],
    }
    for number, (flags, expected) in enumerate(
        (
            (
                [],
                "by mean 0.3057 0.3057 0.3057 and std 0.3766 0.3766 0.3766 (of the training images); give --",
            ),
            (
                ["--mean", "0.3"],
                "by mean 0.3 0.3 0.3 (given) and std 0.3766 0.3766 0.3766 (of the training i",
            ),
            (["--mean", "0.3", "--std", "0.4"], "by mean 0.3 0.3 0.3 and std 0.4 0.4 0.4 (given).\n"),
        )
    ):
        place = [str(tmp_path / str(number))] if command == "run" else []
        assert main([command, *given, *flags, *others.get(command, []), *place]) == 0
        assert f"note: Images are normalized {expected}" in capsys.readouterr().err


def test_without_matplotlib_the_table_is_printed_and_written(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(arguments(weights, "--budgets", "0.5", "--output", str(tmp_path / "curve"))) != 0
    shown = capsys.readouterr()
    assert "nothing was trained" in shown.out
    assert "peel-pruning[report]" in shown.err
    assert (tmp_path / "curve.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budgets", "1.5"), "budgets are fractions of the MACs"),
        (("--budgets", "half"), "such as 0.5 or 50%, not half"),
        (("--images", "0"), "images must be at least 1"),
        (("--weights", "nowhere.pt"), "there are no weights at nowhere.pt"),
    ],
)
def test_wrong_settings_are_refused(
    weights: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(weights)
    if options[0] in line:
        line[line.index(options[0]) + 1] = options[1]
    else:
        line += options
    assert main(line) != 0
    assert message in capsys.readouterr().err


def test_a_network_that_is_not_trained_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    torch.save(Small().state_dict(), tmp_path / "random.pt")
    assert main(arguments(tmp_path / "random.pt", "--budgets", "0.5")) != 0
    assert "is right for only" in capsys.readouterr().err

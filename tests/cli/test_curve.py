"""`peel curve`: a table, files, and errors."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

from helpers.small import Small, taught
from peel.cli.main import main


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.pt"
    torch.save(taught().state_dict(), path)
    return path


def arguments(weights: Path, *others: str) -> list[str]:
    sizes = ["--images", "100", "--test-images", "100"]
    return ["curve", "helpers.small:Small", "--weights", str(weights), "--data", "digits", *sizes, *others]


def test_a_curve_is_printed_and_written(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(
        weights, "--budgets", "0.8", "50%", "--divisor", "1", "--output", str(tmp_path / "curve")
    )
    assert main(line) == 0
    shown = capsys.readouterr()
    assert "repaired" in shown.out and "80%" in shown.out and "nothing was trained" in shown.out
    assert "50% of the MACs" in shown.err
    found = json.loads((tmp_path / "curve.json").read_text())
    first, second = found["points"]
    assert (first["budget"], second["budget"]) == (0.8, 0.5)
    assert second["macs"] <= 0.5 * found["macs"]
    assert second["repaired"] > second["cut"]
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert [float(row["repaired"]) for row in rows] == [point["repaired"] for point in found["points"]]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_mean_and_std_are_lists_as_in_a_run(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--mean", "0.3", "0.3", "0.3", "--std", "0.4", "0.4", "0.4", "--budgets", "0.5", "--json"]
    assert main(arguments(weights, *settings)) == 0
    assert json.loads(capsys.readouterr().out)["original"] > 0.5


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

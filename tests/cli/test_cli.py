"""The command line: inspect, errors, imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from peel.cli.main import main

OWN = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.fc = nn.Linear(6, num_classes)
    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)))

def number():
    return 3

def fails():
    raise OSError("no such weights")
"""


def test_inspect_shows_groups_ties_and_what_is_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "cifar_resnet20"]) == 0
    output = capsys.readouterr().out
    for expected in (
        "40.8M MACs",
        "272.5k params",
        "32x32",
        "16x16",
        "8x8",
        "layer3.0.conv1",
        "add in layer2.0",
        "its output",
        "estimate",
    ):
        assert expected in output


def test_inspect_as_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "cifar_resnet20", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (
        sum(group["macs"] for group in data["groups"]) + data["outside_groups"]["macs"]
        == data["macs"]
        == 40_813_184
    )
    assert (
        sum(group["params"] for group in data["groups"]) + data["outside_groups"]["params"] == data["params"]
    )
    assert {tie["name"] for tie in data["ties"] if tie["fixed"]} == {"fc"}
    assert data["ties"][0]["members"][0] == {
        "tensor": "conv1.weight",
        "axis": 0,
        "offset": 0,
        "size": 16,
        "multiplicity": "1",
    }


def test_inspect_verify_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "cifar_resnet20", "--verify", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verification"]["passed"] is True
    assert "verifying" in captured.err


@pytest.mark.parametrize("reference", ["own_models.py:Small", "own_models:Small"])
def test_a_users_model_is_found_by_file_and_by_module(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    assert main(["inspect", reference, "--input", "1,8,8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [tie["name"] for tie in data["ties"]] == ["conv", "fc"]
    assert data["input_shapes"] == [[1, 1, 8, 8]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "resnet19"], "Did you mean resnet18"),
        (["inspect", "cifar_resnet20", "--input", "3,x"], "channels,height,width"),
        (["inspect", "cifar_resnet20", "--input", "0,8,8"], "channels,height,width"),
        (["inspect", "cifar_resnet20", "--input", "4,32,32"], "(1, 4, 32, 32)"),
        (["inspect", "nowhere.py:model"], "no file nowhere.py"),
        (["inspect", "no_such_package:model"], "no module 'no_such_package'"),
        (["inspect", "own_models.py:Smal"], "Did you mean Small"),
        (["inspect", "own_models.py:number"], "gave a int, not a torch.nn.Module"),
        (["inspect", "own_models.py:fails"], "raised OSError: no such weights"),
        (["inspect", "own_models.py:fails", "--num-classes", "3"], "num_classes=3"),
        (["inspect", "broken.py:model"], "SyntaxError"),
        (["inspect", "resnet18", "--num-classes", "-1"], "num_classes=-1"),
        (["inspect", "timm:resnet50.bogus_tag"], "bogus_tag"),
        (["inspect", ":x"], "not a reference"),
        (["inspct", "resnet18"], "inspect"),
        (["inspect"], "MODEL"),
    ],
)
def test_wrong_input_is_explained(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def model(:")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "Traceback" not in captured.err


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_help_does_not_import_torch() -> None:
    loaded = run("import sys; from peel.cli import main; main(['--help']); print('torch' in sys.modules)")
    assert "inspect" in loaded
    assert loaded.endswith("False")


def test_importing_peel_imports_neither_torchvision_nor_timm() -> None:
    loaded = run(
        "import sys, peel; peel.trace, peel.slim, peel.uniform, peel.load; "
        "print([m for m in ('torchvision', 'timm') if m in sys.modules])"
    )
    assert loaded == "[]"

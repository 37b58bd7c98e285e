"""Exported files compute what the network computes, or they are not written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import peel
from helpers.deploy import Branching, OnlyTwo, slim_small
from helpers.killing import KILLED, die, exit_code, start
from helpers.small import Small, fresh
from peel.deploy import export as export_module
from peel.deploy import onnx_model
from peel.deploy.export import TOLERANCE, folder_beside
from peel.errors import ExportError, PeelError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_onnx_file_takes_any_batch_and_says_how_to_feed_it(small_onnx: Path) -> None:
    model = slim_small()
    assert names(small_onnx.parent) == ["small.onnx"]
    session = onnxruntime.InferenceSession(small_onnx)
    images = torch.randn(3, 3, 8, 8)
    (logits,) = session.run(None, {"images": images.numpy()})
    assert torch.allclose(torch.from_numpy(logits), model(images), atol=1e-4)
    metadata = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert metadata["classes"] == list("0123456789")
    assert (metadata["shape"], metadata["mean"], metadata["std"]) == ([3, 8, 8], [0.3] * 3, [0.4] * 3)
    assert metadata["params"] == sum(parameter.numel() for parameter in model.parameters())
    assert os.fsencode(Path(__file__).parents[1]) not in small_onnx.read_bytes()


def test_a_torch_export_file(tmp_path: Path) -> None:
    model = slim_small()
    made = peel.export(model, tmp_path / "small.pt2")
    assert (made.files, made.batches) == ((tmp_path / "small.pt2",), (1, 5))
    assert made.difference < TOLERANCE
    extra = {"peel.json": ""}
    program = torch.export.load(tmp_path / "small.pt2", extra_files=extra)
    images = torch.randn(7, 3, 8, 8)
    assert torch.allclose(program.module()(images), model(images), atol=1e-5)
    assert json.loads(extra["peel.json"])["mean"] == [0.3] * 3


def test_a_safetensors_file_is_what_peel_loads(tmp_path: Path) -> None:
    model = slim_small()
    made = peel.export(model, tmp_path / "small.safetensors")
    assert names(tmp_path) == ["small.safetensors"]
    assert made.difference == 0
    again = peel.load(tmp_path / "small", model=Small()).eval()
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(images), model(images))


def test_the_model_is_left_as_it_was_and_a_fixed_batch_is_kept(tmp_path: Path) -> None:
    model = slim_small().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = peel.export(model, tmp_path / "new" / "small.onnx", torch.randn(4, 3, 8, 8), batch=3)
    assert made.batches == (3,)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert onnx_model.OnnxModel(made.path).input_shape == [3, 3, 8, 8]


# Refused


def test_an_exporter_failure_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for suffix in (".onnx", ".pt2"):
        with pytest.raises(ExportError) as caught:
            peel.export(Branching().eval(), tmp_path / f"x{suffix}", torch.randn(1, 3, 8, 8))
        text = str(caught.value)
        assert text.startswith(f"Branching cannot be exported to {suffix}: ")
        assert "data-dependent" in text
        assert "\n" not in text
        assert len(text) < 400
        assert caught.value.__cause__ is not None
    assert names(tmp_path) == []


def test_a_file_that_disagrees_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.onnx").write_text("the file of yesterday")
    write = export_module.write_onnx

    def wrong(model: Any, *rest: Any, **options: Any) -> None:
        other = fresh(seed=1)
        write(other.eval(), *rest, **options)

    monkeypatch.setattr(export_module, "write_onnx", wrong)
    with pytest.raises(ExportError, match="with a batch of 1, differs from the network by"):
        peel.export(fresh(), tmp_path / "x.onnx", torch.randn(1, 3, 8, 8))
    assert names(tmp_path) == ["x.onnx"]
    assert (tmp_path / "x.onnx").read_text() == "the file of yesterday"


def export_until_killed(path: Path) -> None:
    torch.export.save = lambda *_, **__: die()
    peel.export(slim_small(), path)


def test_the_next_export_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "small.pt2"
    assert exit_code(start(export_until_killed, path)) == KILLED
    assert [name[:9] for name in names(tmp_path)] == [".writing-"]
    with folder_beside(tmp_path / "other.onnx") as folder:
        assert names(tmp_path) == [folder.name]
        peel.export(slim_small(), path)
        assert names(tmp_path) == [folder.name, "small.pt2"], "an export that is running keeps its folder"
    assert names(tmp_path) == ["small.pt2"]


def test_a_file_says_the_shape_that_it_was_exported_with(tmp_path: Path) -> None:
    """Not that of the images of the training."""
    extra = {"peel.json": ""}
    peel.export(slim_small(), tmp_path / "wide.pt2", torch.zeros(1, 3, 8, 12))
    torch.export.load(tmp_path / "wide.pt2", extra_files=extra)
    assert json.loads(extra["peel.json"])["shape"] == [3, 8, 12]


def test_code_that_depends_on_the_batch_is_refused_and_a_fixed_batch_is_not(tmp_path: Path) -> None:
    model = OnlyTwo().eval()
    with pytest.raises(ExportError):
        peel.export(model, tmp_path / "x.pt2", torch.randn(1, 3, 8, 8))
    assert names(tmp_path) == []
    assert peel.export(model, tmp_path / "x.pt2", torch.randn(1, 3, 8, 8), batch=2).batches == (2,)


class Nan(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("nan")


@pytest.mark.parametrize(
    ("model", "file", "options", "message"),
    [
        (Small(), "x.tflite", {}, r"one of .onnx, .pt2, .safetensors"),
        (Small(), "x", {}, "no format"),
        (Small(), "x.onnx", {}, "input shape of Small is not known: give an example_input"),
        (Small(), "x.onnx", {"example_input": torch.randn(1, 4, 8, 8)}, r"cannot run on .*\(2, 4, 8, 8\)"),
        (Small(), "x.onnx", {"example_input": [1]}, "must be a tensor"),
        (Small(), "x.onnx", {"example_input": torch.randn(1, 3, 8, 8), "batch": 0}, "at least 1"),
        (Small(), "x.py", {}, r"one of .onnx, .pt2, .safetensors\."),
        (Nan(), "x.pt2", {"example_input": torch.randn(1, 3, 8, 8)}, "differs from the network by nan"),
        (3, "x.onnx", {}, "only a torch.nn.Module"),
    ],
)
def test_what_cannot_be_exported_is_explained(
    model: nn.Module, file: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        peel.export(model, tmp_path / file, **options)
    assert names(tmp_path) == []


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(PeelError, match=r"needs onnxscript: pip install peel-pruning\[deploy\]"):
        peel.export(slim_small(), tmp_path / "x.onnx")
    assert names(tmp_path) == []


class Chaotic(Small):
    """Rounding errors grow with every step."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(super().forward(x))
        for _ in range(60):
            x = 3.9 * x * (1 - x)
        return x


def test_rounding_errors_that_explode_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"differs .* float32 and float64 differ by .*trained"):
        peel.export(Chaotic(), tmp_path / "x.onnx", torch.randn(1, 3, 8, 8))
    assert names(tmp_path) == []

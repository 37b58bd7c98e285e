"""Exported files compute what the network computes, or they are not written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import peel
from helpers.deploy import OWN, Branching, OnlyTwo, slim_small
from helpers.killing import KILLED, die, exit_code, start
from helpers.small import Small, fresh
from peel import zoo
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
    assert names(tmp_path) == ["small.json", "small.safetensors"]
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


# Without peel


WITHOUT_PEEL = """
import sys
sys.modules["peel"] = None
sys.path.insert(0, sys.argv[1])
import torch
from exported import CLASSES, load, normalize
torch.save((load()(normalize(torch.load(sys.argv[2]))), CLASSES), sys.argv[3])
"""


def load_without_peel(folder: Path, pixels: Tensor) -> tuple[Tensor, list[str] | None]:
    torch.save(pixels, folder / "in.pt")
    arguments = [str(folder), str(folder / "in.pt"), str(folder / "out.pt")]
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", WITHOUT_PEEL, *arguments], check=True, env=environment, cwd="/")
    logits, classes = torch.load(folder / "out.pt")
    return logits, classes


def test_a_python_file_builds_your_network_without_peel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    model = zoo.create("own_net.py:Net", num_classes=10)
    graph = peel.trace(model, torch.zeros(1, 3, 8, 8))
    small = peel.slim(model, {"conv1": 5, "conv2": 11}, graph=graph, weights="inherit").eval()
    made = peel.export(small, tmp_path / "exported.py", build="own_net.py:Net")
    assert {file.name for file in made.files} == {"exported.py", "exported.json", "exported.safetensors"}
    assert made.path.read_text().count("\n") < 70
    pixels = torch.rand(4, 3, 8, 8)
    logits, classes = load_without_peel(tmp_path, pixels)
    assert torch.allclose(logits, small(pixels), atol=1e-6)
    assert classes is None


@pytest.mark.slow
def test_a_python_file_of_the_zoo_carries_what_it_needs(tmp_path: Path) -> None:
    model = zoo.create("cifar_resnet20", num_classes=4)
    graph = peel.trace(model, torch.zeros(1, 3, 8, 8))
    small = peel.slim(model, peel.uniform(graph, "40%"), graph=graph).eval()
    made = peel.export(small, tmp_path / "exported.py")  # checked in a process without peel
    assert made.difference < 1e-6
    assert "import peel" not in made.path.read_text()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("own_net.py:needs_an_argument", "missing 1 required positional argument"),
        ("own_net.py:nothing", "has no 'nothing'"),
        ("nowhere.py:Net", "no file nowhere.py"),
    ],
)
def test_a_python_file_that_does_not_build_the_network_is_not_written(
    build: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    small = slim_small()
    with pytest.raises(ExportError, match=message):
        peel.export(small, tmp_path / "out" / "exported.py", build=build)
    assert names(tmp_path / "out") == []


# Refused


@pytest.mark.parametrize("name", ["own_net", "notes", "class", "json", "torch"])
def test_a_python_file_hides_and_overwrites_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    (tmp_path / "notes.py").write_text("# mine\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match=rf"{name}\.py (is there|cannot be imported|would hide)"):
        peel.export(slim_small(), tmp_path / f"{name}.py", build="own_net.py:Net")
    assert names(tmp_path) == ["notes.py", "own_net.py"]
    assert (tmp_path / "own_net.py").read_text() == OWN


def test_a_python_file_does_not_take_the_name_of_the_module_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="would hide the module own_net"):
        peel.export(slim_small(), tmp_path / "out" / "own_net.py", build="own_net.py:Net")


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
        (Small(), "a-b.py", {"example_input": torch.randn(1, 3, 8, 8)}, "cannot be imported"),
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

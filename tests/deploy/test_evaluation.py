"""Saved networks have the accuracy that their run reported, in torch, in ONNX Runtime, and in int8."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
import pytest
import torch

import peel
from helpers.deploy import slim_small
from helpers.small import few_digits, taught
from peel.data.datasets import Data
from peel.deploy.evaluation import check_classes, evaluate_network, load_data_for
from peel.deploy.networks import load_network, make_network
from peel.deploy.onnx_model import OnnxModel
from peel.deploy.quantization import export_int8
from peel.errors import ConfigError, DataError, ExportError, StoreError
from peel.run.result import Result

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def test_a_run_and_its_onnx_file_have_the_accuracy_of_its_table(
    finished: tuple[Path, Result], tmp_path: Path
) -> None:
    folder, run = finished
    network = load_network(str(folder))
    metrics = evaluate_network(network, few_digits(), device="cpu")
    row = run.rows[-1]
    assert (metrics.top1, metrics.top5) == (row.top1, row.top5)
    assert metrics.loss == pytest.approx(row.loss, rel=1e-5)
    peel.export(network.model, tmp_path / "slim.onnx")
    stored = load_network(str(tmp_path / "slim.onnx"))
    assert (stored.shape, stored.macs, stored.params) == (network.shape, row.macs, row.params)
    assert stored.input["classes"] == list(few_digits().classes)
    again = evaluate_network(stored, few_digits())
    assert (again.top1, again.top5) == (row.top1, row.top5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("macs", "many", "its metadata macs is malformed: expected int"),
        ("shape", "3x8x8", "its metadata shape is malformed: expected a list"),
        ("shape", [3, 9, 9], r"inputs have the shape \(3, 9, 9\), its graph says \(3, 8, 8\)"),
        ("mean", [float("nan")] * 3, "its metadata mean.* is malformed"),
        ("std", [0.0] * 3, "its metadata std.* is malformed"),
        ("classes", 10, "its metadata classes is malformed"),
        ("resize", 10**12, "its metadata resize is malformed"),
    ],
)
def test_metadata_that_an_onnx_file_cannot_have_are_named(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.onnx"
    shutil.copyfile(_exported(), path)
    model = onnx.load(path)
    kept = [item for item in model.metadata_props if item.key != name]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=name, value=json.dumps(value))
    onnx.save(model, path)
    with pytest.raises(StoreError, match=rf"x.onnx: .*{message}.*Export the network again"):
        load_network(str(path))


@cache
def _exported() -> Path:
    return peel.export(slim_small(), Path(tempfile.mkdtemp()) / "slim.onnx").path


def test_images_are_normalized_as_the_network_was_trained() -> None:
    network = make_network("small", slim_small())
    data = load_data_for(network, "digits")
    assert (data.test.mean, data.test.std) == ((0.3,) * 3, (0.4,) * 3)
    assert data.shape == (3, 8, 8)
    chosen = load_data_for(network, "digits", mean=[0.5], std=[0.25])
    assert (chosen.test.mean, chosen.test.std) == ((0.5,) * 3, (0.25,) * 3)
    told = [one.normalization_notes(is_trained=True)[0] for one in (data, chosen)]
    assert [note.partition("(")[2] for note in told] == ["of the network).", "given)."]
    unknown = replace(network, input={})
    assert load_data_for(unknown, "digits").test.mean == load_data_for(unknown, "digits").train.mean


def test_data_that_does_not_fit_is_refused() -> None:
    network = make_network("small", slim_small())
    pixels, labels = torch.zeros(4, 8, 8, 3, dtype=torch.uint8), torch.tensor([0, 1, 2, 0])
    three = Data.from_tensors("three", ("a", "b", "c"), (pixels, labels), (pixels, labels))
    with pytest.raises(DataError, match=r"returns \(10,\) logits .* three has 3 classes"):
        check_classes(network, three)
    turned = replace(network, input={"classes": list("9876543210")})
    with pytest.raises(DataError, match="another order: 9, 8"):
        check_classes(turned, few_digits())
    with pytest.raises(DataError, match="neither a dataset nor a folder"):
        load_data_for(network, "nowhere")
    with pytest.raises(DataError, match="not images"):
        load_data_for(replace(network, shape=(16,)), "digits")


def test_a_fixed_batch_must_fit(tmp_path: Path) -> None:
    network = load_network(str(peel.export(slim_small(), tmp_path / "x.onnx", batch=45).path))
    data = few_digits()
    in_torch = evaluate_network(make_network("small", slim_small()), data, device="cpu")
    assert evaluate_network(network, data).top1 == in_torch.top1
    fewer = replace(data, test=data.test.subset(torch.arange(80)))
    with pytest.raises(DataError, match="batches of 45 only, which 80 test images do not fill"):
        evaluate_network(network, fewer)
    with pytest.raises(ConfigError, match="on the CPU here"):
        evaluate_network(network, data, device="cuda")


def test_int8_keeps_the_accuracy_and_says_what_it_gives(tmp_path: Path) -> None:
    network = make_network("taught", taught(), (3, 8, 8))
    progress: list[str] = []
    made = export_int8(
        network, tmp_path / "int8.onnx", few_digits(), images=64, seconds=0.05, progress=progress.append
    )
    assert [path.name for path in tmp_path.iterdir()] == ["int8.onnx"]
    assert made.images == 64
    assert made.before.top1 > 0.5
    assert abs(made.after.top1 - made.before.top1) < 0.1
    assert made.speedup.low <= made.speedup.median <= made.speedup.high
    stored = load_network(str(tmp_path / "int8.onnx"))
    assert isinstance(stored.model, OnnxModel)
    assert stored.input["precision"] == "int8"
    assert evaluate_network(stored, few_digits()) == made.after
    images = torch.randn(5, 3, 8, 8)
    full, low = network.model(images), stored.model(images)
    assert not torch.allclose(full, low, rtol=0, atol=1e-4 * float(full.abs().max()))
    assert any("calibrating on 64 images" in text for text in progress)


def test_int8_is_refused_without_its_conditions(tmp_path: Path) -> None:
    network = make_network("small", slim_small())
    for file, options, message in (
        ("x.pt2", {}, "written as .onnx"),
        ("x.onnx", {"calibration": "best"}, "calibration is one of minmax, entropy, percentile"),
        ("x.onnx", {"images": 0}, "at least one calibration image"),
    ):
        with pytest.raises(ExportError, match=message):
            export_int8(network, tmp_path / file, few_digits(), **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())

"""The programs and the notebook in examples/ run, on few samples."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import peel
from helpers.detectors import DetectionNet
from peel.run.result import Result

pytestmark = pytest.mark.usefixtures("one_thread", "no_timing", "hasty")

EXAMPLES = Path(__file__).parents[1] / "examples"


PRUNE = peel.prune


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peel, "prune", functools.partial(PRUNE, bench_seconds=0))


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(result: Result, budget: float) -> None:
    original, uniform, slim = result.rows
    assert slim.macs <= budget * original.macs
    assert uniform.macs <= budget * original.macs
    assert result.model is not None


@pytest.mark.parametrize(("name", "samples"), [("multi_label", 64), ("segmentation", 48), ("audio", 256)])
def test_the_program(name: str, samples: int) -> None:
    result = example(name).main(samples=samples, epochs=1)
    check(result, 0.3 if name == "audio" else 0.5)
    assert all((row.top1 if name == "audio" else row.metric) is not None for row in result.rows)


def test_the_detection_program_with_a_small_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peel, "prune", functools.partial(PRUNE, bench_seconds=0.05))

    class Labeled(DetectionNet):
        """Its detections have labels."""

        def forward(self, images: Any, targets: Any = None) -> Any:
            found = super().forward(images, targets)
            if not self.training:
                for item in found:
                    item["labels"] = torch.ones(len(item["boxes"]), dtype=torch.int64)
            return found

    result = example("detection").main(samples=32, epochs=1, model=Labeled())
    check(result, 0.5)
    assert result.rows[-1].speedup is not None, result.bench
    assert all(row.metric is not None for row in result.rows)


@pytest.mark.slow
def test_the_detection_program_with_ssdlite() -> None:
    check(example("detection").main(samples=32, epochs=1), 0.5)


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PEEL_EXAMPLE_SAMPLES", "192")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "own_loop.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["graph"].macs(names["widths"]) <= names["graph"].macs() / 2
    assert 0 < names["after"] <= 1

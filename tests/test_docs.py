"""Links of the docs lead somewhere. The examples of extending.md, detection.md, own_data.md and deploy.md run
as they are printed.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import peel
from helpers.deploy import slim_small
from helpers.detectors import DetectionNet
from helpers.own_data import PAIR, bce, hits
from helpers.small import SHORT, Small, few_digits, small_run
from peel.methods.peel import rounds_of

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])

#: How pages that are also shown elsewhere (README.md) link to files of the repository.
HERE = "https://github.com/peel-pruning/peel/blob/main/"


def block(text: str, page: str = "extending.md") -> str:
    """The code block of a page that contains a text."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (found,) = [code for code in blocks if text in code]
    return str(found)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http", "mailto:")) and not link.startswith(HERE):
            continue
        path, _, anchor = link.removeprefix(HERE).partition("#")
        target = page if not path else (ROOT if link.startswith(HERE) else page.parent) / path
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_the_criterion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_criterion.py").write_text(block("# my_criterion.py"))
    monkeypatch.chdir(tmp_path)
    plan = small_run(method="peel", criterion="my_criterion.py:SquaredScale", stages=["plan"]).plan
    assert plan is not None
    assert rounds_of(plan)[0].importance is not None
    assert plan.method["criterion"] == "my_criterion.py:SquaredScale"
    names: dict[str, Any] = {}
    exec(block("# my_criterion.py"), names)
    again = small_run(method="peel", criterion=names["SquaredScale"](), stages=["plan"]).plan
    assert again is not None
    assert rounds_of(again) == rounds_of(plan)


def test_the_operator_rule() -> None:
    class Cumulative(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cumsum(x, 1))

    before = dict(peel.graph.trace(Small(), torch.zeros(1, 3, 8, 8)).widths)
    code = block("register_rule").replace('@peel.graph.register_rule("aten::cumsum")\n', "")
    names: dict[str, Any] = {}
    exec(code, names)
    graph = peel.trace(Cumulative(), torch.zeros(1, 3, 8, 8), rules={"aten::cumsum": names["cumsum"]})
    assert dict(graph.widths) == before
    assert "aten::cumsum" not in graph.unknown_operators


def test_data_and_callback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = few_digits().train, few_digits().test
    names = {
        "images": train.pixels,  # type: ignore[attr-defined]
        "labels": train.labels % 2,
        "test_images": test.pixels,  # type: ignore[attr-defined]
        "test_labels": test.labels % 2,
    }
    prune = peel.prune

    def short(model: object, data: Any, **settings: Any) -> Any:
        data = few_digits() if data == "digits" else data
        return prune(
            Small(len(data.classes)),
            data,
            **{**SHORT, "stages": ["original"], "weights": "train", **settings},
        )

    monkeypatch.setattr(peel, "prune", short)
    exec(block("from_tensors"), names)
    result: Any = names["result"]
    assert result.rows[0].top1 > 0.5
    exec(block("class PrintAccuracy"), {})
    shown = capsys.readouterr().out
    assert "original - training the original" in shown
    assert "epoch 2 of 2: top-1" in shown


def test_a_detector(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torchvision.models import detection

    monkeypatch.setattr(detection, "fasterrcnn_mobilenet_v3_large_fpn", lambda weights: DetectionNet())
    names: dict[str, Any] = {}
    exec(block("targets = ", "detection.md"), names)
    assert "MACs of backbone, head" in capsys.readouterr().out
    assert names["small"].backbone.map.out_channels < names["detector"].backbone.map.out_channels
    assert all(parameter.grad is not None for parameter in names["small"].parameters())
    exec(block("modules=", "detection.md"), names)
    assert names["graph"].modules == ("backbone", "head")


def test_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prune = peel.prune

    def short(*given: Any, **settings: Any) -> Any:
        return prune(*given, **{**settings, "train": {"epochs": 1}, "bench_seconds": 0})

    monkeypatch.setattr(peel, "prune", short)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "model": Small(3),
        "train": PAIR[0],
        "val": PAIR[1],
        "loader": DataLoader(PAIR[0], 32),
        "images": PAIR[0].tensors[0],
        "loss": bce,
        "metric": hits,
    }
    exec(block('output="run"', "own_data.md"), names)
    assert (tmp_path / "run" / "result.json").exists()
    exec(block("def train_fn", "own_data.md"), names)
    assert len(names["result"].rows) == 3
    exec(block("measure_importance", "own_data.md"), names)
    assert names["graph"].macs(names["widths"]) <= names["graph"].macs() / 2


def test_feeding_an_onnx_file(
    small_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(small_onnx, tmp_path / "slim.onnx")
    monkeypatch.chdir(tmp_path)
    pixels = torch.rand(4, 8, 8, 3)
    exec(block("get_modelmeta", "deploy.md"), {"pixels": pixels.numpy()})
    logits = slim_small()((pixels.permute(0, 3, 1, 2) - 0.3) / 0.4)
    assert capsys.readouterr().out.strip() == str([str(int(best)) for best in logits.argmax(1)])

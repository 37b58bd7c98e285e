"""Saved models: loaded exactly, refused when corrupt, never unpickled, readable without peel."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import NETS, Net, Residual, SplitByAttribute
from peel import zoo


def slimmed(name: str = "cifar_resnet20") -> nn.Module:
    model, graph = traced_zoo(name)
    return peel.slim(model, peel.uniform(graph, "40%"), graph=graph).eval()


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_mobilenet_v2", "cifar_vgg16_bn"])
def test_a_zoo_model_loads_from_the_path_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = slimmed(name)
    assert peel.save(small, tmp_path / "slim") == tmp_path / "slim.json"
    monkeypatch.setattr(torch.export, "export", None)  # no tracing
    loaded = peel.load(tmp_path / "slim").eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), small(x))
    assert type(loaded) is type(small)


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_the_users_own_model_loads_with_an_instance(kind: type[Net], tmp_path: Path) -> None:
    net, graph = traced_net(kind)
    widths = {
        name: max(1, width // graph.steps[name] // 2) * graph.steps[name]
        for name, width in graph.widths.items()
    }
    small = peel.slim(net, widths, graph=graph).eval()
    peel.save(small, tmp_path / "own.json")
    with pytest.raises(peel.StoreError, match=f"nets:{kind.__name__}.*model="):
        peel.load(tmp_path / "own")
    given = kind().eval()
    before = [parameter.shape for parameter in given.parameters()]
    loaded = peel.load(tmp_path / "own", model=given)
    x = torch.randn(2, *kind.shape)
    assert torch.equal(loaded(x), small(x))
    assert [parameter.shape for parameter in given.parameters()] == before


def test_a_loaded_model_can_be_saved_and_slimmed_again(tmp_path: Path) -> None:
    small = slimmed()
    peel.save(small, tmp_path / "a")
    loaded = peel.load(tmp_path / "a")
    graph = peel.trace(loaded, torch.randn(1, 3, 32, 32))
    smaller = peel.slim(loaded, peel.uniform(graph, "50%"), graph=graph).eval()
    peel.save(smaller, tmp_path / "b")
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(peel.load(tmp_path / "b").eval()(x), smaller(x))
    assert json.loads((tmp_path / "b.json").read_text())["costs"]["macs"] == graph.macs(
        peel.uniform(graph, "50%")
    )


def test_the_number_of_classes_is_saved(tmp_path: Path) -> None:
    model = zoo.create("cifar_resnet20", num_classes=7)
    peel.save(model, tmp_path / "m")
    assert peel.load(tmp_path / "m").fc.out_features == 7


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    peel.save(slimmed(), tmp_path / "slim")
    return tmp_path


def test_flipped_bytes_and_truncations_are_refused(saved: Path) -> None:
    for name in ("slim.safetensors", "slim.json"):
        path = saved / name
        good = path.read_bytes()
        generator = torch.Generator().manual_seed(0)
        for place in torch.randint(len(good), (40,), generator=generator).tolist():
            path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
            with pytest.raises(peel.StoreError, match=name):
                peel.load(saved / "slim")
        for length in (0, 1, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:length])
            with pytest.raises(peel.StoreError, match=name):
                peel.load(saved / "slim")
        path.write_bytes(good)
    peel.load(saved / "slim")


class Malicious:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.canary,))


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_is_refused_and_its_code_never_runs(saved: Path, writer: str) -> None:
    canary = saved / "canary"
    with (saved / "slim.safetensors").open("wb") as file:
        pickle.dump(Malicious(canary), file) if writer == "pickle" else torch.save(Malicious(canary), file)
    with pytest.raises(peel.StoreError, match="is a pickle"):
        peel.load(saved / "slim")
    assert not canary.exists()


def rewrite(path: Path, **changes: object) -> None:
    """Change a JSON file and its checksum."""
    from peel.surgery.serialization import _checksum

    document = {**json.loads(path.read_text()), **changes}
    document["checksum"] = _checksum(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"file": "../slim.safetensors", "sha256": ""}}, "plain file name"),
        ({"modules": {"conv1": {"forward": 3}}}, "conv1.forward = 3 does not fit"),
        ({"modules": {"conv1": {"out_channels": "os.system"}}}, "does not fit"),
        ({"modules": {"nowhere": {"out_channels": 3}}}, "no module nowhere"),
        ({"format": "other"}, "not a model saved by peel"),
        ({"model": {"zoo": "canary.py:run", "arguments": {}}}, "does not run other code"),
        (
            {"model": {"zoo": "timm:resnet18", "arguments": {"checkpoint_path": "x.pt"}}},
            "does not load other files",
        ),
        ({"model": {"zoo": "timm:resnet18", "arguments": {"pretrained": True}}}, "does not load other files"),
        ({"modules": {"conv1": {"stride": [7, 7]}}}, "does not fit"),
        ({"modules": {"conv1": {"out_channels": -4}}}, "does not fit"),
        ({"weights": "slim.safetensors"}, "malformed"),
        ({"modules": []}, "malformed"),
        ({"model": "resnet18"}, "malformed"),
        ({"version": 99}, "version 99"),
        ({"model": {"zoo": "cifar:cifar_resnet56", "arguments": {}}}, "does not fit this model"),
        ({"model": {"zoo": "cifar:nothing", "arguments": {}}}, "no model is called"),
    ],
)
def test_a_file_can_only_change_widths_of_a_model(
    saved: Path, changes: dict[str, object], message: str
) -> None:
    rewrite(saved / "slim.json", **changes)
    with pytest.raises(peel.PeelError, match=message):
        peel.load(saved / "slim")


def test_code_named_in_a_file_never_runs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "canary.py").write_text("import pathlib; pathlib.Path('ran').touch()\ndef run(): ...")
    monkeypatch.chdir(saved)
    rewrite(saved / "slim.json", model={"zoo": "canary.py:run", "arguments": {}})
    with pytest.raises(peel.StoreError):
        peel.load(saved / "slim")
    assert not (saved / "ran").exists()


def test_wrappers_are_removed_before_saving(tmp_path: Path) -> None:
    small = slimmed()
    x = torch.randn(1, 3, 32, 32)
    for wrapped in (nn.DataParallel(small), torch.compile(small)):
        peel.save(wrapped, tmp_path / "slim")
        assert torch.equal(peel.load(tmp_path / "slim").eval()(x), small(x))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(peel.StoreError, match=r"no file .*nothing.json"):
        peel.load(tmp_path / "nothing")
    with pytest.raises(peel.StoreError, match="cannot write"):
        (tmp_path / "file").write_text("")
        peel.save(slimmed(), tmp_path / "file" / "slim")


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    net, graph = traced_net(Residual)
    peel.save(peel.slim(net, {"stem": 4}, graph=graph), tmp_path / "m")
    with pytest.raises(peel.StoreError, match="does not fit this model"):
        peel.load(tmp_path / "m", model=SplitByAttribute())


def test_a_full_disk_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = slimmed()
    peel.save(small, tmp_path / "slim")
    good = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(peel.StoreError, match="No space left"):
        peel.save(slimmed("cifar_vgg16_bn"), tmp_path / "slim")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == good


def test_the_reader_in_the_docs_needs_no_peel(tmp_path: Path) -> None:
    """The code of docs/format.md runs unchanged in a process without peel."""
    small = slimmed("cifar_mobilenet_v2")
    peel.save(small, tmp_path / "slim")
    x = torch.randn(1, 3, 32, 32)
    torch.save({"x": x, "y": small(x).detach()}, tmp_path / "expected.pt")
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    reader = re.search(r"```python\n(.*?)```", text, re.S)
    assert reader is not None
    assert len(reader[1].splitlines()) <= 40
    script = f"""
import sys
sys.modules["peel"] = None
{reader[1]}
from torch import nn
from torchvision.models import MobileNetV2
settings = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2]]
settings += [[6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]
model = MobileNetV2(num_classes=10, inverted_residual_setting=settings)
model.features[0][0].stride = (1, 1)
model = read_slim("slim.json", model).eval()
expected = torch.load("expected.pt")
difference = (model(expected["x"]) - expected["y"]).abs().max()
assert difference <= 1e-4 * expected["y"].abs().max(), difference
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)

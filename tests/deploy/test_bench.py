"""Networks are timed side by side, each slim one against its own original."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import peel
from helpers.deploy import Branching, slim_small
from helpers.folders import save_pair
from helpers.small import Small, fresh, same_weights
from peel.deploy.backends import available_backends, make_runner
from peel.deploy.bench import bench
from peel.deploy.networks import load_network
from peel.errors import ConfigError, ModelError, RunError, StoreError
from peel.run.result import Result
from peel.run.weights import load_weights
from peel.surgery.info import info_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

CPU = torch.device("cpu")


class Heavy(Small):
    """Does the work of `Small` thirty times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(29):
            super().forward(x)
        return super().forward(x)


def test_modules_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    heavy, light = Heavy(), fresh()
    result = bench(
        {"heavy": heavy, "light": light},
        torch.randn(1, 3, 8, 8),
        batch=2,
        backends=["eager"],
        threads=1,
        seconds=0.1,
    )
    text = str(result)
    assert len(text.splitlines()) < 10
    assert "samples/s" in text
    first, second = result.entries
    assert (first.network, first.baseline, first.speedup) == ("heavy", None, None)
    assert (second.network, second.baseline) == ("light", "heavy")
    assert second.speedup is not None
    assert second.speedup.low > 5
    assert second.speedup.verdict == "faster"
    assert second.mac_reduction == pytest.approx(30)
    assert second.efficiency == pytest.approx(second.speedup.median / 30)
    assert second.throughput == pytest.approx(2 / second.seconds.median)
    assert (result.conditions["batch"], result.conditions["threads"]) == (2, 1)
    assert torch.get_num_threads() == 1
    assert heavy.training
    # A narrow terminal has fewer columns and no cell that is shortened or wrapped.
    monkeypatch.setenv("COLUMNS", "80")
    head, *rows = str(result).partition("network")[2].splitlines()[:3]
    assert "speed-up" in head
    assert "samples/s" not in head
    assert [row.split()[0] for row in rows] == ["heavy", "light"]
    assert "left out, too narrow: samples/s" in str(result)


@pytest.mark.usefixtures("hasty")
def test_a_run_brings_its_original_along_once(finished: tuple[Path, Result], tmp_path: Path) -> None:
    folder, run = finished
    shutil.copytree(folder, tmp_path / "again")
    result = bench([folder, tmp_path / "again"], backends=["eager"], threads=1, seconds=0.01)
    names = [entry.network for entry in result.entries]
    assert names == [f"{folder} original", f"{folder} slim", f"{tmp_path / 'again'} slim"]
    assert [entry.baseline for entry in result.entries] == [None, names[0], names[0]]
    assert [entry.macs for entry in result.entries] == [run.rows[0].macs, *[run.rows[-1].macs] * 2]


@pytest.mark.usefixtures("hasty")
def test_files_and_names_are_networks(small_onnx: Path, tmp_path: Path) -> None:
    files = [small_onnx, Path(shutil.copy(small_onnx, tmp_path / "other.onnx"))]
    result = bench(files, threads=1, seconds=0.01, backends=["onnxruntime"])
    assert [entry.macs for entry in result.entries] == [info_of(slim_small()).costs["macs"]] * 2
    values = result.to_dict()["entries"][1]
    assert set(values["seconds"]) == {"median", "p10", "p90", "round_count"}
    assert values["speedup"]["verdict"] in ("faster", "slower", "no measurable gain")
    named = bench(["cifar_resnet20", files[0]], threads=1, seconds=0.01, backends=["eager"])
    assert [entry.macs for entry in named.entries] == [40_813_184]
    with pytest.raises(ConfigError, match="None of eager can run these networks"):
        bench(files, backends=["eager"])


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", pytest.param("compile", marks=pytest.mark.slow)])
def test_every_backend_computes_the_same(backend: str) -> None:
    assert backend in available_backends(CPU)
    model = fresh().train()
    run = make_runner(backend, model, torch.randn(1, 3, 8, 8))
    image = torch.randn(1, 3, 8, 8)
    assert torch.allclose(run(image), fresh().eval()(image), atol=1e-5)
    assert model.training
    assert same_weights(model, fresh())


@pytest.mark.usefixtures("hasty")
def test_a_backend_that_fails_is_left_out_unless_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peel.deploy.bench.available_backends", lambda device: ["eager", "onnxruntime"])
    networks, example = {"odd": Branching()}, torch.randn(1, 3, 8, 8)
    result = bench(networks, example, threads=1, seconds=0.01)
    assert [entry.backend for entry in result.entries] == ["eager"]
    assert any(note.startswith("onnxruntime failed: ") for note in result.notes)
    with pytest.raises(Exception, match="data-dependent"):
        bench(networks, example, threads=1, seconds=0.01, backends=["onnxruntime"])


@pytest.mark.usefixtures("hasty")
def test_what_cannot_be_timed_is_explained(own: Path, tmp_path: Path) -> None:
    peel.save(slim_small(), tmp_path / "saved")
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[str, type[Exception], str]] = [
        ("broken.onnx", StoreError, "ONNX Runtime cannot load .*broken.onnx"),
        ("missing.onnx", StoreError, "no file .*missing.onnx"),
        ("weights.pt", StoreError, "weights.pt is no network"),
        ("saved.safetensors", StoreError, "--model path/to/file.py:callable"),
        ("empty", RunError, "not a run folder"),
    ]
    for name, error, message in cases:
        with pytest.raises(error, match=message):
            bench([tmp_path / name], threads=1, seconds=0.01, backends=["eager"])
    with pytest.raises(ModelError, match="no model is called 'resnet19'"):
        bench(["resnet19"])
    with pytest.raises(ConfigError, match="backend is one of eager, compile, onnxruntime"):
        bench({"a": slim_small()}, backends=["tensorrt"])
    with pytest.raises(ConfigError, match="positive"):
        bench({"a": slim_small()}, batch=0)
    with pytest.raises(ModelError, match="input shape of a is not known"):
        bench({"a": Small()})
    (own / "slim.safetensors").unlink()
    with pytest.raises(RunError, match="has no slim network yet"):
        bench([own])


def test_a_run_folder_of_an_older_version_is_read(own: Path) -> None:
    model = "helpers.small:Small"
    new = load_network(str(own), model=model)
    save_pair(peel.load(own / "slim", model=Small()), own / "slim")
    old = load_network(str(own), model=model)
    assert same_weights(old.model, new.model)
    assert (old.macs, old.input) == (new.macs, new.input)
    teacher = load_weights(own / "slim.json", Small())
    assert same_weights(teacher, new.model)


@pytest.mark.usefixtures("hasty")
def test_a_saved_model_of_your_own_needs_what_builds_it(tmp_path: Path) -> None:
    peel.save(slim_small(), tmp_path / "saved")
    result = bench(
        [tmp_path / "saved"], model="helpers.small:Small", backends=["eager"], threads=1, seconds=0.01
    )
    assert [entry.network for entry in result.entries] == [f"{tmp_path}/saved original", f"{tmp_path}/saved"]
    assert result.entries[1].mac_reduction is not None

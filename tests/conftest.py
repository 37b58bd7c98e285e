"""Shared fixtures. Runs that tests only read are done once per session."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from hypothesis import HealthCheck, settings

import peel
from helpers.charts import leave_undrawn
from helpers.commands import run
from helpers.deploy import slim_small
from helpers.folders import kept, weights
from helpers.graphs import single_thread, traced_zoo
from helpers.killing import KILLED
from helpers.small import small_run
from peel.run.result import Result

settings.register_profile(
    "peel", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("peel")
# scripts/test starts a process per core. Threads that wait for a busy core cost many times what they bring.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def undrawn_charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are drawn in `tests/report`, in tests that use `drawn_charts`."""
    if request.path.parent.name != "report" and "drawn_charts" not in request.fixturenames:
        leave_undrawn(monkeypatch)


@pytest.fixture
def drawn_charts() -> None:
    """Asks for charts that are drawn."""


@pytest.fixture
def resnet18() -> tuple[torch.nn.Module, peel.ChannelGraph]:
    return traced_zoo("resnet18")


@pytest.fixture
def cifar_net() -> tuple[torch.nn.Module, peel.ChannelGraph]:
    return traced_zoo("cifar_resnet20")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The same bits in every process; and small networks are faster on one thread."""
    with single_thread():
        yield


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are taken, but nothing depends on them."""
    monkeypatch.setattr("peel.deploy.timing.WARM_SECONDS", 0.001)
    monkeypatch.setattr("peel.deploy.timing.ROUND_SECONDS", 0.001)
    monkeypatch.setattr("peel.deploy.timing.LOAD_SECONDS", 0.01)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A finished run. Do not change its folder: use `own`."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with single_thread():
        return folder, small_run(output=folder, seed=3)


@pytest.fixture
def own(finished: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of the folder of the finished run."""
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def small_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`slim_small` as an ONNX file. Do not change it."""
    with single_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peel.export(slim_small(), tmp_path_factory.mktemp("onnx") / "small.onnx").path


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that an uninterrupted `commands.run` ends with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder)[0] == 0
    return weights(folder)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder of `commands.run`, killed in its second epoch, with a checkpoint after each step."""
    folder = tmp_path / "killed"
    assert run(folder, "--checkpoint-seconds", "0", FAULT="15:kill")[0] == KILLED
    assert len(kept(folder)) == 2
    return folder

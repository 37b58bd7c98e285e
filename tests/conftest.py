"""Fixtures shared by the tests: graphs are traced once, runs that are only looked at are done once."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from hypothesis import HealthCheck, settings

import peel
from commands import run
from folders import kept, weights
from killing import KILLED
from nets import Net
from peel import zoo
from peel.result import Result
from small import small_run

settings.register_profile("peel", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("peel")
torch.set_num_threads(2)


@functools.cache
def traced_net(kind: type[Net]) -> tuple[Net, peel.ChannelGraph]:
    torch.manual_seed(0)
    net = kind().eval()
    return net, peel.trace(net, torch.randn(1, *kind.shape))


@functools.cache
def traced_zoo(name: str, size: int | None = None) -> tuple[torch.nn.Module, peel.ChannelGraph]:
    torch.manual_seed(0)
    model = zoo.create(name).eval()
    channels, height, width = zoo.find(name).input_size
    return model, peel.trace(model, torch.randn(1, channels, size or height, size or width))


@pytest.fixture
def resnet18() -> tuple[torch.nn.Module, peel.ChannelGraph]:
    return traced_zoo("resnet18")


@pytest.fixture
def cifar_net() -> tuple[torch.nn.Module, peel.ChannelGraph]:
    return traced_zoo("cifar_resnet20")


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For networks so small that a second thread would only wait; and the same bits in every process."""
    with single_thread():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run that came to its end; its folder is not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with single_thread():
        return folder, small_run(output=folder, seed=3)


@pytest.fixture
def own(finished: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that `commands.run` ends with when nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder)[0] == 0
    return weights(folder)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder of such a run that was killed in its second epoch, with a checkpoint after each step."""
    folder = tmp_path / "killed"
    assert run(folder, "--checkpoint-seconds", "0", PEEL_FAULT="15:kill")[0] == KILLED
    assert len(kept(folder)) == 2
    return folder

"""Fixtures shared by the tests: graphs are traced once."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from hypothesis import HealthCheck, settings

import peel
from nets import Net
from peel import zoo

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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For networks so small that a second thread would only wait; and the same bits in every process."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)

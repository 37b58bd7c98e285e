"""Graphs that are traced once and shared by tests."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

import peel
from helpers.nets import Net
from peel import zoo


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


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

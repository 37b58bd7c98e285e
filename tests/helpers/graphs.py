"""Graphs that are traced once and shared by tests."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch

import peel
from helpers.nets import Net
from peel import zoo
from peel.cost.polynomial import CostModel


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


def by_layer(cost: CostModel, units: Sequence[int]) -> dict[str, int]:
    """Layer -> its part of a cost."""
    costs: dict[str, int] = {}
    for term in cost.terms:
        costs[term.layer] = costs.get(term.layer, 0) + term.value(units)
    return costs


def make_divisible(value: float, divisor: int) -> int:
    """The rounding of the MobileNet papers: the nearest multiple, but never below 90 % of `value`."""
    nearest = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * value else nearest


def scaled(widths: Mapping[str, int], factor: float, divisor: int = 1, freeze: str = "") -> dict[str, int]:
    """Every width times `factor`, rounded as the MobileNet papers do where there is a divisor."""
    return {
        name: width
        if name == freeze
        else make_divisible(width * factor, divisor)
        if divisor > 1
        else max(1, round(width * factor))
        for name, width in widths.items()
    }

"""Hooks are part of what a model does: captures, checks and slim networks have copies of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel


class Stored:
    """The last output of a module, as fastai's `Hook` keeps it: with its gradient history."""

    def __init__(self, module: nn.Module) -> None:
        self.value: Tensor | None = None
        self.handle = module.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.value = output


class SkipByHook(nn.Module):
    """A skip that no argument hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Conv2d(8, 6, 3, padding=1)
        self.last = nn.Conv2d(14, 4, 1)
        self.register_skip()

    def register_skip(self) -> None:
        self.stored = Stored(self.first)

    def skip(self) -> Tensor:
        assert self.stored.value is not None
        return self.stored.value

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return self.last(torch.cat([x, self.skip()], 1))


class SkipByClosure(SkipByHook):
    """The list is known to a function, and to the model."""

    def register_skip(self) -> None:
        skips: list[Tensor] = []
        self.first.register_forward_hook(lambda module, inputs, output: skips.append(output))
        self.skips = skips

    def skip(self) -> Tensor:
        return self.skips.pop()


class SkipBetweenHooks(SkipByHook):
    """Two functions share a variable; the forward knows nothing of it."""

    def register_skip(self) -> None:
        skip = torch.zeros(())

        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            nonlocal skip
            skip = output

        def add(module: nn.Module, inputs: Any) -> Any:
            return (torch.cat([*inputs, skip], 1),)

        self.first.register_forward_hook(keep)
        self.last.register_forward_pre_hook(add)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


class SkipByModule(SkipByHook):
    """A default argument and a closure hold modules of the model."""

    def register_skip(self) -> None:
        def keep(module: nn.Module, inputs: Any, output: Tensor, owner: nn.Module = self.second) -> None:
            owner.skip = output

        self.first.register_forward_hook(keep)

    def skip(self) -> Tensor:
        return self.second.skip


class SkipInstalledLate(SkipByHook):
    """Installs its hook at the first forward and remembers that, as transformers 5 does."""

    is_installed = False

    def register_skip(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_installed:
            self.is_installed = True
            super().register_skip()
        return super().forward(x)


SKIPS = [SkipByHook, SkipByClosure, SkipBetweenHooks, SkipByModule, SkipInstalledLate]


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", SKIPS)
def test_a_network_whose_skips_are_hooks_is_cut(
    kind: type[SkipByHook], has_run: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, images = kind().eval(), torch.randn(3, 3, 8, 8)
    if has_run:
        model(images)  # it keeps a tensor with a gradient history, of another batch
    graph = peel.trace(model, images[:1])
    assert graph.widths == {"first.0": 8, "second": 6}
    assert peel.verify(model, images[:1], graph=graph).passed
    small = peel.slim(model, {"first.0": 5, "second": 2}, graph=graph, weights="inherit").eval()
    before = model(images)
    features = small.first(images)
    wanted = F.conv2d(torch.cat([small.second(features), features], 1), small.last.weight, small.last.bias)
    with torch.no_grad():
        assert torch.allclose(small(images), wanted, atol=1e-6)
    assert torch.equal(model(images), before), "its hooks are its own"
    small(images).sum().backward()
    peel.save(small, tmp_path / "slim")
    loaded = peel.load(tmp_path / "slim", model=kind()).eval()
    assert torch.equal(loaded(images), small(images))


class Decoder(nn.Module):
    """A block of fastai's DynamicUnet: its skip comes from a hook on another module."""

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self.stored = stored
        self.conv, self.last = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(14, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert self.stored.value is not None
        return self.last(torch.cat([self.conv(x), self.stored.value], 1))


class Image(Tensor):
    """fastai gives its outputs a class of its own."""


class InTwoModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.decoder = Decoder(Stored(self.encoder[0]))

    def forward(self, x: Tensor) -> Tensor:
        is_broken = x.isnan().any()
        x = self.decoder(self.encoder(x))
        return x * 0 if is_broken else x.as_subclass(Image)  # no capture as a whole


def test_skips_between_modules_that_are_captured_by_themselves() -> None:
    model, images = InTwoModules().eval(), torch.randn(3, 3, 8, 8)
    model(images)
    graph = peel.trace(model, images[:1])
    assert graph.modules == ("encoder", "decoder")
    assert graph.widths == {"encoder.0": 8, "decoder.conv": 6}
    assert peel.verify(model, images, graph=graph).passed
    small = peel.slim(model, {"encoder.0": 5, "decoder.conv": 2}, graph=graph).eval()
    assert small(images).shape == (3, 4, 8, 8)


def test_a_hook_that_changes_the_output_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model[1].register_forward_hook(lambda module, inputs, output: output.chunk(2, 1)[0])
    graph = peel.trace(model, torch.randn(1, 3, 4, 4))
    small = peel.slim(model, peel.uniform(graph, "50%"), graph=graph)
    assert small(torch.randn(2, 3, 4, 4)).shape == (2, 2, 4, 4)


def test_hooks_of_a_slim_network_collect_for_themselves() -> None:
    """What a hook cannot have a copy of (a lock, an open file) is shared."""
    model, images = SkipByHook(), torch.randn(2, 3, 8, 8)
    seen: list[tuple[int, ...]] = []
    lock = threading.Lock()

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        with lock:
            seen.append(tuple(output.shape))

    model.second.register_forward_hook(count)
    graph = peel.trace(model, images)
    small = peel.slim(model, {"first.0": 5, "second": 2}, graph=graph)
    assert peel.verify(model, images, graph=graph).passed
    small(images)
    assert not seen
    model(images)
    assert seen == [(2, 6, 8, 8)]
    hook = next(iter(small.second._forward_hooks.values()))
    own = dict(zip(hook.__code__.co_freevars, (cell.cell_contents for cell in hook.__closure__), strict=True))
    assert own["lock"] is lock
    assert own["seen"] == [(2, 2, 8, 8)]


def test_a_hook_that_cannot_be_captured_is_named() -> None:
    model = SkipByHook()
    model.second.register_forward_hook(lambda module, inputs, output: output.numpy())
    with pytest.raises(peel.TraceError, match=r"output.numpy\(\)"):
        peel.trace(model, torch.randn(1, 3, 8, 8))


# Tensors of the last forward


class Remembers(nn.Module):
    """Keeps its features: in an attribute, in a list, and in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.features: Tensor | None = None
        self.all: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.conv(x).relu()
        self.all = [self.features, self.features.mean((2, 3))]
        self.by_name["pooled"] = self.all[1]
        return self.fc(self.all[1])


def test_a_model_that_keeps_tensors_of_its_last_forward_is_copied(tmp_path: Path) -> None:
    model, images = Remembers(), torch.randn(3, 3, 8, 8)
    model(images).sum().backward()
    graph = peel.trace(model, images[:1])
    assert graph.widths == {"conv": 8}
    assert peel.verify(model, images, graph=graph).passed
    small = peel.slim(model, {"conv": 3}, graph=graph, weights="inherit")
    assert model.features is not None and model.features.grad_fn is not None, "the model is as it was"
    peel.repair(small, model, torch.randn(80, 3, 8, 8), graph=graph)
    small(images).sum().backward()
    assert small.features.shape == (3, 3, 6, 6)
    again = peel.trace(small, images)
    assert peel.slim(small, {"conv": 2}, graph=again)(images).shape == (3, 4)
    peel.save(small, tmp_path / "slim")
    assert torch.equal(peel.load(tmp_path / "slim", model=model)(images), small(images))

"""Networks as frameworks write them: shared modules, caches, dicts of own classes, training-only parts."""

from __future__ import annotations

import functools
import logging
import random
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))

# Parts that are used in training only


class Masked(nn.Module):
    """Hides places in training, as Wav2Vec2 does. What runs is random, so training cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.hidden, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 4, 1)
        self.mask = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        if self.training:
            hidden = torch.from_numpy(np.random.rand(*x.shape[:3]) < 0.5)
            x = x.clone()
            x[hidden] = self.mask
        x = self.hidden(x.permute(0, 3, 1, 2))
        if self.training and (torch.rand([]) < 0.5 or random.random() < 0.1):
            x = x.relu()
        return self.last(x)


def test_a_width_that_training_needs_is_fixed_where_training_cannot_be_captured() -> None:
    model = Masked()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    graph = peel.trace(model, IMAGES[:1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert graph.widths == {"hidden": 6}
    assert "x[hidden] = self.mask" in graph.fixed["stem"]
    assert peel.verify(model, IMAGES[:1], graph=graph).passed
    for seed in range(4):  # the layer is dropped, or not
        torch.manual_seed(seed)
        small = peel.slim(model, {"hidden": 3}, graph=graph).train()
        small(IMAGES).sum().backward()
        assert small.mask.grad is not None


class NeedsTargets(Masked):
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.training and targets is None:
            raise ValueError("training needs targets")
        return super().forward(x)


def test_training_that_needs_more_than_the_example_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "peel"):
        graph = peel.trace(NeedsTargets(), IMAGES[:1])
    assert graph.widths == {"stem": 8, "hidden": 6}
    assert "NeedsTargets does not run in training mode" in caplog.text
    assert "training needs targets" in caplog.text


# Modules with two names


class Twice(nn.Module):
    """Calls its blocks by their second names, as nnU-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Conv2d(3, 8, 1, groups=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, groups=8)]
        )
        self.path = nn.Sequential(*self.blocks, nn.ReLU())
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.path(x))


def test_attributes_of_a_module_with_two_names_follow() -> None:
    model = Twice().eval()
    graph = peel.trace(model, IMAGES[:1])
    assert graph.widths == {"blocks.0": 8}
    small = peel.slim(model, {"blocks.0": 5}, graph=graph).eval()
    assert (small.path[0].out_channels, small.path[2].groups, small.last.in_channels) == (5, 5, 5)
    assert peel.verify(model, IMAGES[:1], graph=graph).passed


# Configurations


class Frozen(OrderedDict[str, Any]):
    """The configuration of a model of diffusers: entries are attributes, and nothing can be changed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("it is frozen")


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen(scale=2.0, flip=True)
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.config.scale
        return self.last(x.flip(-1) if self.config.flip else x)


def test_a_configuration_of_its_own_class_keeps_it() -> None:
    model = Configured()
    graph = peel.trace(model, IMAGES[:1])
    assert graph.widths == {"first": 8}
    small = peel.slim(model, {"first": 5}, graph=graph)
    assert isinstance(small.config, Frozen)
    assert small(IMAGES).shape == (4, 4, 8, 8)


# Helpers with a cache


@functools.lru_cache
def positions(length: int, channels: int) -> Tensor:
    return torch.linspace(0, 1, length).sin() * torch.ones(channels, 1)


class CachedHelper(nn.Module):
    """Adds a table that is computed once for all models, as RT-DETR does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + positions(x.shape[-1], x.shape[1])[:, None])


def test_a_helper_with_a_cache_fixes_nothing_and_keeps_no_tensor_of_a_capture() -> None:
    positions.cache_clear()
    model = CachedHelper()
    graph = peel.trace(model, IMAGES[:1])
    assert graph.widths == {"first": 8}
    assert peel.verify(model, IMAGES[:1], graph=graph).passed
    small = peel.slim(model, {"first": 5}, graph=graph)
    for network in (model, small):
        assert type(network(IMAGES)) is Tensor, "with values"
    assert peel.trace(model, IMAGES[:1]).widths == graph.widths


def test_a_network_of_fixed_ties_says_how_to_capture_its_parts() -> None:
    graph = peel.trace(nn.Conv2d(3, 4, 1), IMAGES[:1])
    with pytest.raises(peel.BudgetError, match=r"modules=\['backbone'\]"):
        peel.uniform(graph, "50%")


# Operators, outputs and inputs


@pytest.mark.parametrize("kind", [nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_in_place_frees_its_channels(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), kind(0.2, inplace=True), nn.Conv2d(8, 4, 1))
    assert peel.trace(model, IMAGES[:1]).widths == {"0": 8}


class WithMask(nn.Module):
    """Returns logits, where they are positive, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.last(self.first(x))
        return x, x > 0, x[:0]


def test_outputs_may_be_masks_or_empty() -> None:
    result = peel.verify(WithMask(), IMAGES[:1])
    assert result.passed, str(result)


class Processed(UserDict[str, Any]):
    """What an image processor of transformers returns."""


class ByKeyword(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, *, pixel_values: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(pixel_values * scale)


@pytest.mark.parametrize("mapping", [dict, Processed])
def test_images_may_be_a_dict_of_keyword_arguments(mapping: type[Any]) -> None:
    torch.manual_seed(0)
    model, images = ByKeyword().eval(), torch.randn(256, 3, 8, 8)
    given = mapping(pixel_values=images, scale=2.0)
    graph = peel.trace(model, given)
    assert peel.verify(model, given, graph=graph).passed
    networks = [peel.slim(model, {"0": 5}, graph=graph, weights="inherit") for _ in range(3)]
    peel.repair(networks[0], model, given, graph=graph)
    peel.repair(
        networks[1], model, [mapping(pixel_values=part, scale=2.0) for part in images.split(64)], graph=graph
    )
    with torch.no_grad():
        wanted = model(**given)
        errors = [F.mse_loss(network.eval()(**given), wanted).item() for network in networks]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert errors[0] < 0.9 * errors[2]
    peel.recalibrate(networks[2], given)
    assert set(peel.explain_scores(model, graph, given)) == {"0"}


# Attributes for a new head


class Head(nn.Module):
    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.in_features, self.num_classes = in_features, 5
        self.fc = nn.Linear(in_features, self.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


class Classifier(nn.Module):
    """Builds another head from an attribute, as networks of timm do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_features, self.image_size, self.num_classes = 8, 8, 8
        self.first, self.last = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1)
        self.head = Head(8)

    def reset_classifier(self) -> None:
        self.head = Head(self.num_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.first(x)))


def test_a_new_head_can_be_built_after_slimming(tmp_path: Path) -> None:
    model = Classifier()
    graph = peel.trace(model, IMAGES[:1])
    small = peel.slim(model, {"first": 2, "last": 3}, graph=graph)
    assert (small.num_features, small.image_size, small.num_classes) == (3, 8, 8)
    assert (small.head.in_features, small.head.num_classes) == (3, 5)
    peel.save(small, tmp_path / "slim")
    assert torch.equal(peel.load(tmp_path / "slim", model=model)(IMAGES), small(IMAGES))
    small.reset_classifier()
    assert small(IMAGES).shape == (4, 5)

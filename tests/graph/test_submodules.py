"""Nested inputs, and models that are traced through some of their submodules."""

from __future__ import annotations

import copy
import logging
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import peel
from helpers.detectors import IMAGES, TARGETS, DetectionNet, torchvision_detector
from peel.cli.inspect import draw, inspection
from peel.cost.count import count_macs
from peel.graph.channel_graph import OF_MODULES, OUTPUT_OF_MODULES
from peel.surgery.info import info_of

# Nested inputs


class TwoBranches(nn.Module):
    """Takes its inputs as a list, in a dict of its own, or one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(1, 6, 3, padding=1)
        self.fc = nn.Linear(14, 5)

    def forward(self, inputs: object, scale: float = 1.0, more: object = None) -> Tensor:
        if isinstance(inputs, dict):
            inputs = [inputs["image"], inputs["rest"][0]]
        a, b = inputs if more is None else (inputs, more["depth"])  # type: ignore[misc, index]
        features = torch.cat([self.left(a).relu() * scale, self.right(b).relu()], 1)
        return self.fc(features.mean((2, 3)))


A, B = torch.randn(1, 3, 8, 8), torch.randn(1, 1, 8, 8)


@pytest.mark.parametrize(
    "example",
    [
        [A, B],
        ([A, B],),
        ((A, B), 0.5),
        ({"image": A, "rest": (B, None)},),
        {"inputs": [A, B], "scale": 2.0},
        (A, 1.0, {"depth": B}),
    ],
    ids=["list", "list in tuple", "tuple in tuple", "dict in tuple", "list in dict", "dict beside tensor"],
)
def test_inputs_may_be_nested(example: object) -> None:
    net = TwoBranches()
    graph = peel.trace(net, example)
    assert dict(graph.widths) == {"left": 8, "right": 6}
    assert graph.input_shapes == ((1, 3, 8, 8), (1, 1, 8, 8))
    assert graph.macs() == 8 * 8 * 9 * (3 * 8 + 6) + 14 * 5
    verification = peel.verify(net, example, graph=graph)
    assert verification.passed, str(verification)
    small = peel.slim(net, peel.uniform(graph, "50%"), graph=graph)
    assert small([A, B]).shape == (1, 5)


def test_nested_inputs_stay_as_they_are() -> None:
    """A tensor in a list may have no batch axis: costs are those of the whole input."""

    class Stacking(TwoBranches):
        def forward(self, images: list[Tensor]) -> Tensor:  # type: ignore[override]
            return self.left(torch.stack(images)).mean((2, 3))

    net = Stacking()
    graph = peel.trace(net, [A[0], A[0]])
    assert graph.macs() == 2 * 8 * 8 * 9 * 3 * 8
    assert graph.input_shapes == ((3, 8, 8), (3, 8, 8))


# Submodules


def train_step(model: nn.Module) -> None:
    losses = model.train()(IMAGES, copy.deepcopy(TARGETS))
    sum(losses.values()).backward()
    unused = [name for name, own in model.named_parameters() if own.requires_grad and own.grad is None]
    assert unused == []
    for parameter in model.parameters():
        assert parameter.grad is None or bool(torch.isfinite(parameter.grad).all())


def test_a_detector_is_traced_through_the_modules_that_can_be_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = DetectionNet()
    with caplog.at_level(logging.WARNING, "peel"):
        graph = peel.trace(model, IMAGES)
    assert graph.modules == ("backbone", "head")
    assert "traced through its modules backbone, head" in caplog.text.lower()
    assert "of backbone, head" in repr(graph)
    shown = StringIO()
    draw(inspection("net", graph), Console(file=shown, width=200))
    assert "captured through backbone, head: MACs and activations are theirs" in shown.getvalue()
    assert dict(graph.widths) == {"backbone.stem": 8, "backbone.map": 12, "head.tower": 10}
    assert set(graph.fixed.values()) == {OUTPUT_OF_MODULES, "a single channel"}
    features = torch.zeros(len(IMAGES), 3, 16, 16)
    counted = count_macs(model.backbone, (features,), {})
    counted += count_macs(model.head, (list(model.backbone(features).values()),), {})
    assert graph.macs() == counted
    assert graph.params() == sum(parameter.numel() for parameter in model.parameters())


def test_a_slim_detector_trains_detects_and_is_saved(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = DetectionNet()
    graph = peel.trace(model, IMAGES)
    widths = peel.uniform(graph, "50%")
    small = peel.slim(model, widths, graph=graph)
    assert small.backbone.map.out_channels == widths["backbone.map"] < 12
    assert sum(parameter.numel() for parameter in small.parameters()) == graph.params(widths)
    train_step(small)
    assert [set(found) for found in small.eval()(IMAGES)] == [{"boxes", "scores"}] * len(IMAGES)
    peel.save(small, tmp_path / "slim")
    again = peel.load(tmp_path / "slim", model=model)
    assert info_of(again).costs["modules"] == ["backbone", "head"]
    assert info_of(again).costs["macs"] == graph.macs(widths)
    verification = peel.verify(model, IMAGES, graph=graph)
    assert verification.passed, str(verification)


def test_modules_can_be_named_and_their_outputs_keep_their_width() -> None:
    graph = peel.trace(DetectionNet(), IMAGES, modules="backbone")
    assert graph.modules == ("backbone",)
    assert dict(graph.widths) == {"backbone.stem": 8}
    assert graph.fixed["backbone.map"] == OUTPUT_OF_MODULES
    small = peel.slim(DetectionNet(), {"backbone.stem": 3}, graph=graph)
    train_step(small)


def test_a_detector_is_left_as_it_was() -> None:
    model = DetectionNet().train()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    peel.trace(model, IMAGES)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class ReadsFeatures(DetectionNet):
    """Code between the modules reads a feature map."""

    def features(self, x: Tensor) -> dict[str, Tensor]:
        found = self.backbone(x)
        return {**found, "0": found["0"] / found["0"].abs().mean()}


class UnusedExit(DetectionNet):
    """A module with weights that this input does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Conv2d(12, 4, 1)

    def features(self, x: Tensor) -> dict[str, Tensor]:
        found = self.backbone(x)
        if float(found["0"].abs().max()) > 1e6:
            found["0"] = found["0"] + self.exit(found["0"]).mean()
        return found


@pytest.mark.parametrize("kind", [ReadsFeatures, UnusedExit])
def test_what_other_code_reads_or_might_read_keeps_its_width(kind: type[DetectionNet]) -> None:
    model = kind()
    graph = peel.trace(model, IMAGES)
    assert dict(graph.widths) == {"backbone.stem": 8, "head.tower": 10}
    assert graph.fixed["backbone.map"] in OF_MODULES.values()
    peel.slim(model, {"backbone.stem": 3, "head.tower": 2}, graph=graph).eval()(IMAGES)


class DependsOnWidth(DetectionNet):
    def features(self, x: Tensor) -> dict[str, Tensor]:
        found = self.backbone(x)
        if found["0"].shape[1] != 12:
            raise ValueError("this code wants twelve channels")
        return found


def test_code_between_the_modules_that_wants_a_width_is_an_error() -> None:
    with pytest.raises(peel.TraceError, match="code between them does not run at other widths"):
        peel.trace(DependsOnWidth(), IMAGES, modules=["backbone", "head"])
    with pytest.raises(peel.TraceError, match="DependsOnWidth cannot be captured"):
        peel.trace(DependsOnWidth(), IMAGES)


class NarrowBackbone(nn.Module):
    """Does something else when it is narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.map = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 12, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        return {"0": self.map(x.relu() if x.shape[1] >= 4 else x)}


def test_a_slim_detector_is_compared_with_the_prediction() -> None:
    model = DetectionNet()
    model.backbone = NarrowBackbone()
    graph = peel.trace(model, IMAGES)
    assert graph.modules == ("backbone", "head")
    peel.slim(model, {"backbone.stem": 5}, graph=graph)
    with pytest.raises(peel.WidthsError, match=r"test_submodules\.py:\d+ .*x\.relu\(\)"):
        peel.slim(model, {"backbone.stem": 3}, graph=graph)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("bakcbone", "no submodule 'bakcbone'. Did you mean backbone"),
        ("", "no submodule ''"),
        (["backbone", "backbone.stem"], "does not call backbone.stem, or only inside another"),
    ],
)
def test_wrong_names_of_modules_are_refused(modules: object, message: str) -> None:
    with pytest.raises(peel.TraceError, match=message):
        peel.trace(DetectionNet(), IMAGES, modules=modules)  # type: ignore[arg-type]


# Detection networks of torchvision

FASTER_RCNN = (
    "backbone",
    "rpn.head",
    "roi_heads.box_roi_pool",
    "roi_heads.box_head",
    "roi_heads.box_predictor",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_faster_rcnn_with_named_modules() -> None:
    model = torchvision_detector("fasterrcnn_mobilenet_v3_large_fpn")
    graph = peel.trace(model, IMAGES[:1], modules=FASTER_RCNN)
    # The pyramid's width is read by the region proposals, the pooling of regions and the box head.
    assert graph.widths["backbone.fpn.layer_blocks.1.0"] == 256
    assert set(graph.fixed.values()) == {OUTPUT_OF_MODULES}
    small = peel.slim(model, peel.uniform(graph, "50%"), graph=graph)
    train_step(small)
    assert {"boxes", "labels", "scores"} <= set(small.eval()(IMAGES[:1])[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("fasterrcnn_mobilenet_v3_large_fpn", FASTER_RCNN),
        ("fasterrcnn_resnet50_fpn", FASTER_RCNN),
        ("ssdlite320_mobilenet_v3_large", ("backbone", "head")),
        ("ssd300_vgg16", ("backbone", "head")),
        ("retinanet_resnet50_fpn", ("backbone", "head")),
    ],
)
def test_detection_network_of_torchvision(name: str, modules: tuple[str, ...]) -> None:
    model = torchvision_detector(name)
    graph = peel.trace(model, IMAGES[:1])
    assert graph.modules == modules
    # Everything but classes and boxes can change, the heads included.
    assert set(graph.fixed.values()) == {OUTPUT_OF_MODULES}
    assert graph.free_fraction == 1.0
    widths = peel.uniform(graph, "50%")
    assert 0.49 < graph.macs(widths) / graph.macs() <= 0.5
    small = peel.slim(model, widths, graph=graph, weights="inherit")
    assert sum(parameter.numel() for parameter in small.parameters()) == graph.params(widths)
    train_step(small)
    assert {"boxes", "labels", "scores"} <= set(small.eval()(IMAGES[:1])[0])
    if name != "ssd300_vgg16":
        verification = peel.verify(model, IMAGES[:1], graph=graph)
        assert verification.passed, str(verification)

"""`repair`: planted redundancy is repaired exactly, other networks get better, nothing else is touched."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from helpers.graphs import traced_net
from helpers.nets import (
    NETS,
    Chain,
    Decoder,
    Dense,
    Depthwise,
    Flattened,
    Grouped,
    GroupNormed,
    Net,
    Residual,
    SelectiveKernel,
    Shared,
    Signal,
    Standardized,
)
from peel.data.datasets import load_data
from peel.repair import original_record
from peel.repair.explain import explain_scores, greedy_order
from peel.repair.regression import Regression
from peel.repair.repair import Repairer


class Planted(nn.Module):
    """A layer behind 8 channels of which the last 4 (of each 8) are combinations of the first 4."""

    def __init__(self, layer: nn.Module, axes: int) -> None:
        super().__init__()
        kinds: dict[int, type[nn.Module]] = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        self.stem = kinds[axes](3, 8, *([1] if axes else []))
        self.layer = layer
        with torch.no_grad():
            mix = torch.randn(4, 4)
            self.stem.weight[4:] = torch.tensordot(mix, self.stem.weight[:4], 1)
            self.stem.bias[4:] = mix @ self.stem.bias[:4]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.stem(x))


LAYERS = {
    "linear": (lambda: nn.Linear(8, 5), (7, 3)),
    "linear without bias": (lambda: nn.Linear(8, 5, bias=False), (3,)),
    "conv1d": (lambda: nn.Conv1d(8, 5, 3, padding=1, dilation=2), (3, 16)),
    "conv2d": (lambda: nn.Conv2d(8, 5, 3, 2, 1, bias=False), (3, 9, 8)),
    "uneven kernel": (lambda: nn.Conv2d(8, 5, (1, 4), (1, 3), (0, 2), (1, 2)), (3, 9, 12)),
    "padding same": (lambda: nn.Conv2d(8, 5, (4, 3), padding="same"), (3, 8, 9)),
    "padding reflect": (lambda: nn.Conv2d(8, 5, 3, padding=1, padding_mode="reflect"), (3, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(8, 5, 2), (3, 4, 4, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(8, 5, 3, 2, 1, 1), (3, 9)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(8, 5, 3, 2, 1, dilation=2, bias=False), (3, 6, 5)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(8, 5, 2, 2), (3, 4, 4, 4)),
}


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(images)


def difference(first: Tensor, second: Tensor) -> float:
    return float((first - second).square().mean() / second.var())


@pytest.mark.parametrize("name", LAYERS)
def test_planted_redundancy_is_repaired_exactly(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    net = Planted(make(), 0 if "linear" in name else len(shape) - 1).eval()
    images = torch.randn(64, *shape)
    graph = peel.trace(net, images[:1])
    scores = {"stem": torch.arange(8.0, 0.0, -1.0)}
    small = peel.slim(net, {"stem": 4}, graph=graph, weights="inherit", scores=scores)
    assert difference(outputs(small, images), outputs(net, images)) > 0.1
    report = peel.repair(small, net, images, graph=graph)
    assert report.refitted == ("stem", "layer") and not report.left_alone
    others = torch.randn(8, *shape)
    assert difference(outputs(small, others), outputs(net, others)) < 1e-6


def test_a_grouped_layer_is_repaired_in_each_group() -> None:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 8, 1)
    with torch.no_grad():
        stem.weight[[1, 3, 5, 7]], stem.bias[[1, 3, 5, 7]] = -2 * stem.weight[::2], -2 * stem.bias[::2]
    images = torch.randn(64, 3, 6, 6)
    for layer in (nn.Conv2d(8, 6, 3, groups=2), nn.ConvTranspose2d(8, 6, 3, groups=2)):
        net = nn.Sequential(stem, layer).eval()
        graph = peel.trace(net, images[:1])
        scores = {"0": torch.tensor([2.0, 1.0] * 4)}
        small = peel.slim(net, {"0": 4}, graph=graph, weights="inherit", scores=scores)
        peel.repair(small, net, images, graph=graph)
        assert difference(outputs(small, images), outputs(net, images)) < 1e-6


class Sum(nn.Module):
    """The first branch goes through 6 channels that span 3. The second runs last and reads the images."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.hidden = nn.Conv2d(3, 6, 1)
        self.first = nn.Conv2d(6, 5, 1)
        self.second = nn.Conv2d(3, 5, 1, bias=how != "norm")
        self.norm = nn.BatchNorm2d(5) if how == "norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        stream = self.first(self.hidden(x))
        if self.how == "in place":
            stream += F.dropout(self.second(x), 0.5, self.training)
            return stream.flatten(1)
        branch = self.norm(self.second(x))
        return (torch.add(branch, stream) if self.how == "norm" else stream + branch).flatten(1)


def cut_sum(how: str) -> tuple[nn.Module, nn.Module, Tensor, peel.ChannelGraph]:
    torch.manual_seed(0)
    net, images = Sum(how).eval(), torch.randn(64, 3, 5, 5)
    if how == "norm":
        nn.init.uniform_(net.norm.weight, 0.5, 2.0)
        peel.recalibrate(net, images)
    graph = peel.trace(net, images[:1])
    return net, peel.slim(net, {"hidden": 2}, graph=graph, weights="inherit"), images, graph


@pytest.mark.parametrize("memory", [2**32, 10_000])
@pytest.mark.parametrize("how", ["norm", "bias", "in place"])
def test_the_last_layer_of_a_sum_corrects_the_error_of_the_other_part(how: str, memory: int) -> None:
    net, small, images, graph = cut_sum(how)
    report = peel.repair(small, net, images, graph=graph, memory=memory)
    assert report.errors["first"][1] > 0.05  # two channels do not span three
    others = torch.randn(8, 3, 5, 5)
    assert difference(outputs(small, others), outputs(net, others)) < 1e-5


def test_a_branch_that_hardly_counts_in_the_sum_is_not_blown_up() -> None:
    net, _, images, graph = cut_sum("norm")
    with torch.no_grad():
        net.norm.weight[0], net.norm.weight[1] = 0.0, 1e-9
    small = peel.slim(net, {"hidden": 2}, graph=graph, weights="inherit")
    peel.repair(small, net, images, graph=graph)
    assert small.second.weight.detach().abs().max() < 20 * net.second.weight.detach().abs().max()
    own, wanted = (outputs(model, images).view(64, 5, -1)[:, 2:] for model in (small, net))
    assert difference(own, wanted) < 1e-3


class Blocks(nn.Module):
    """A residual network without an activation in the stream; the second stage has a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, 1, 1)
        self.project = nn.Conv2d(12, 16, 1, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(inputs, 16, 3, stride, 1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(True),
                nn.Conv2d(16, outputs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            for inputs, outputs, stride in ((12, 12, 1), (12, 12, 1), (12, 16, 2), (16, 16, 1), (16, 16, 1))
        )
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            branch = block(x)
            branch += x if branch.shape == x.shape else self.project(x)
            x = branch
        return self.fc(F.relu(x).mean((2, 3)))


def test_corrected_sums_bring_a_trained_network_closer_to_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digits = load_data("digits").train
    images = digits.pixels[..., :1].movedim(3, 1).float() / 128 - 1
    labels = digits.labels
    torch.manual_seed(0)
    net = Blocks()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(40):
        index = torch.randint(1200, (64,))
        optimizer.zero_grad()
        F.cross_entropy(net(images[index]), labels[index]).backward()
        optimizer.step()
    graph = peel.trace(net.eval(), images[:1])
    scores = explain_scores(net, graph, images[:300])
    wanted = outputs(net, images[1200:])
    errors = []
    for is_corrected in (True, False):
        if not is_corrected:
            monkeypatch.setattr(original_record._Recorder, "at_addition", lambda *_: None)
        widths = peel.uniform(graph, "50%", divisor=1)
        small = peel.slim(net, widths, graph=graph, weights="inherit", scores=scores)
        peel.repair(small, net, images[:300], graph=graph)
        errors.append(difference(outputs(small, images[1200:]), wanted))
    assert errors[0] < errors[1]


def test_images_are_not_marked() -> None:
    net, graph = traced_net(Residual)
    with torch.inference_mode():
        images = torch.randn(8, *Residual.shape)
    small = peel.slim(net, peel.uniform(graph, "60%"), graph=graph, weights="inherit")
    assert peel.repair(small, net, images, graph=graph).refitted
    assert not vars(images)


def halved(graph: peel.ChannelGraph) -> dict[str, int]:
    return {
        name: max(1, width // 2 // graph.steps[name]) * graph.steps[name]
        for name, width in graph.widths.items()
    }


@functools.cache
def repaired(kind: type[Net], memory: int = 2**32) -> tuple[nn.Module, nn.Module, peel.RepairReport]:
    """The cut network, the repaired one and the report."""
    net, graph = traced_net(kind)
    widths = {
        name: max(1, round(0.7 * width / graph.steps[name])) * graph.steps[name]
        for name, width in graph.widths.items()
    }
    torch.manual_seed(1)
    images = torch.randn(48, *kind.shape)
    cut = peel.slim(net, widths, graph=graph, weights="inherit")
    small = copy.deepcopy(cut)
    return cut, small, peel.repair(small, net, images, graph=graph, memory=memory)


#: The others are slow tests, because tracing all of them takes half a minute.
QUICK = (Chain, Residual, Depthwise, Grouped, Dense, Flattened, Shared, Decoder, Signal, SelectiveKernel)
EVERY = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in NETS]


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_every_network_gets_closer_to_the_original(kind: type[Net]) -> None:
    net, _ = traced_net(kind)
    before = copy.deepcopy(net.state_dict())
    cut, small, _ = repaired(kind)
    torch.manual_seed(2)
    images = torch.randn(64, *kind.shape)
    wanted, first, second = (outputs(model, images) for model in (net, cut, small))
    wanted, first, second = (v[0] if isinstance(v, tuple) else v for v in (wanted, first, second))
    assert difference(second, wanted) <= difference(first, wanted)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("kind", [Chain, Shared, Dense, Decoder, Residual], ids=lambda kind: kind.__name__)
def test_several_batches_give_the_same_network_as_one(kind: type[Net]) -> None:
    graph = traced_net(kind)[1]
    whole, parts = repaired(kind)[1], repaired(kind, 20 * graph.activation_bytes())[1]
    images = torch.randn(8, *kind.shape)
    # Other places are sampled, so that the fits differ a little.
    assert difference(outputs(parts, images), outputs(whole, images)) < 0.05
    assert repaired(kind)[2].refitted == repaired(kind, 20 * graph.activation_bytes())[2].refitted


def test_what_cannot_be_refitted_is_named() -> None:
    report = repaired(Standardized)[2]
    assert "computed" in report.left_alone["conv2"]
    assert report.refitted == ("conv1", "fc")
    assert "left alone: conv2" in str(report)


@pytest.mark.parametrize(
    ("kind", "images_per_pass"),
    [(Chain, 48), (Chain, 20), (Residual, 48), (Depthwise, 48), (Shared, 48), (GroupNormed, 48)],
)
def test_a_second_repair_changes_nothing(kind: type[Net], images_per_pass: int) -> None:
    net, graph = traced_net(kind)
    images, memory = torch.randn(48, *kind.shape), images_per_pass * graph.activation_bytes()
    small = peel.slim(net, halved(graph), graph=graph, weights="inherit")
    assert not peel.repair(small, net, images, graph=graph, memory=memory).notes
    once = copy.deepcopy(small.state_dict())
    assert not peel.repair(small, net, images, graph=graph, memory=memory).notes
    for name, value in small.state_dict().items():
        torch.testing.assert_close(value, once[name], rtol=0, atol=0)


def test_the_result_depends_on_the_cut_and_not_on_what_came_between() -> None:
    net, graph = traced_net(Residual)
    images = torch.randn(48, *Residual.shape)
    small = peel.slim(net, halved(graph), graph=graph, weights="inherit")
    other = copy.deepcopy(small)
    peel.recalibrate(other, images)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert "note: the network was changed" in str(peel.repair(other, net, images, graph=graph))
    peel.repair(small, net, images, graph=graph)
    for name, value in small.named_parameters():
        torch.testing.assert_close(dict(other.named_parameters())[name], value, rtol=0, atol=0)


def test_another_original_of_the_same_shape_is_refused() -> None:
    net, graph = traced_net(Chain)
    images = torch.randn(32, *Chain.shape)
    small = peel.slim(net, {"conv1": 5}, graph=graph, weights="inherit")
    torch.manual_seed(1)
    with pytest.raises(peel.WidthsError, match="not cut from this original: its weights are others"):
        peel.repair(small, Chain().eval(), images, graph=graph)
    trained = copy.deepcopy(net)
    with torch.no_grad():
        trained.fc.bias += 1e-3
    with pytest.raises(peel.WidthsError, match="or have been trained since"):
        peel.repair(small, trained, images, graph=graph)
    same = copy.deepcopy(net).train()
    same(images)  # only batch-norm statistics differ
    peel.repair(small, same, images, graph=graph)


class Tied(nn.Module):
    """An encoder and a decoder that share one weight, as a convolution and a transposed one."""

    def __init__(self, width: int, hidden: int, is_shared: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(hidden, width, 3, 3) / 5)
        self.back = self.weight if is_shared else nn.Parameter(self.weight.detach().clone())
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        hidden = F.relu(F.conv2d(x, self.weight, padding=1))
        return self.head((x + self.norm(F.conv_transpose2d(hidden, self.back, padding=1))).mean((2, 3)))


def tied(width: int, hidden: int, is_shared: bool) -> tuple[nn.Module, peel.ChannelGraph, Tensor]:
    torch.manual_seed(0)
    net, images = Tied(width, hidden, is_shared).eval(), torch.randn(64, 3, 4, 4)
    return net, peel.trace(net, images[:1]), images


@pytest.mark.parametrize("widths", [(6, 10), (8, 8)], ids=["other widths", "equal widths"])
def test_a_convolution_and_a_transposed_one_that_share_a_weight_are_two_readers(
    widths: tuple[int, int],
) -> None:
    shared, alone = tied(*widths, True), tied(*widths, False)
    wanted = explain_scores(*alone)
    for tie, scores in explain_scores(*shared).items():
        assert torch.equal(scores, wanted[tie])
    measured, curves = peel.measure_sensitivity(*shared), peel.measure_sensitivity(*alone).change
    assert measured.change.keys() == {"stem", "weight"}
    for tie, change in measured.change.items():
        torch.testing.assert_close(change, curves[tie])


@pytest.mark.parametrize("widths", [(6, 10), (8, 8)], ids=["other widths", "equal widths"])
def test_a_weight_that_both_share_is_left_alone_and_named(widths: tuple[int, int]) -> None:
    net, graph, images = tied(*widths, True)
    small = peel.slim(net, halved(graph), graph=graph, weights="inherit")
    cut = copy.deepcopy(small)
    report = peel.repair(small, net, images, graph=graph)
    assert "layers of several kinds share its weight" in report.left_alone["weight"]
    assert report.refitted == ("stem", "head") and "norm" in report.norms
    assert torch.equal(small.weight, cut.weight)
    wanted = outputs(net, images)
    assert difference(outputs(small, images), wanted) < difference(outputs(cut, images), wanted)


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == 8, "images have 8 pixels"
        return self.net(x)


def test_an_assertion_of_the_model_is_an_error_in_words() -> None:
    net = Picky().eval()
    images = torch.randn(8, 3, 9, 9)
    graph = peel.trace(net, images[:1, :, :8, :8])
    small = peel.slim(net, halved(graph), graph=graph, weights="inherit")
    calls = [
        lambda: peel.explain_scores(net, graph, images),
        lambda: peel.measure_sensitivity(net, graph, images),
        lambda: peel.repair(small, net, images, graph=graph),
        lambda: peel.recalibrate(small, images),
    ]
    for call in calls:
        with pytest.raises(peel.DataError, match="cannot take these images: images have 8 pixels"):
            call()


def test_a_model_without_values_is_refused_in_words() -> None:
    net, graph = traced_net(Chain)
    images = torch.randn(8, *Chain.shape)
    small, meta = peel.slim(net, {"conv1": 5}, graph=graph, weights="inherit"), copy.deepcopy(net).to("meta")
    calls = [
        lambda: peel.explain_scores(meta, graph, images),
        lambda: peel.measure_sensitivity(meta, graph, images),
        lambda: peel.slim(meta, {"conv1": 5}, graph=graph, weights="inherit"),
        lambda: peel.repair(small, meta, images, graph=graph),
        lambda: peel.repair(copy.deepcopy(small).to("meta"), net, images, graph=graph),
        lambda: peel.recalibrate(meta, images),
    ]
    for call in calls:
        with pytest.raises(peel.ModelError, match="on the meta device"):
            call()


def test_inference_mode_is_no_obstacle_and_tensors_that_were_made_in_it_are_named() -> None:
    net, graph = traced_net(Chain)
    with torch.inference_mode():
        images, own = torch.randn(32, *Chain.shape), Chain().eval()
        small = peel.slim(net, {"conv1": 5}, graph=graph, weights="inherit")
        assert peel.repair(small, net, images, graph=graph).refitted
        assert peel.measure_sensitivity(net, graph, images).change
        cut = copy.deepcopy(small)
        calls = [
            lambda: peel.measure_sensitivity(own, graph, images),
            lambda: peel.recalibrate(own, images),
            lambda: peel.repair(cut, net, images, graph=graph),
        ]
        for call in calls:
            with pytest.raises(peel.ModelError, match=r"made under torch\.inference_mode"):
                call()
    assert peel.repair(small, net, images, graph=graph).refitted


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_images_are_refused(value: float) -> None:
    net, graph = traced_net(Chain)
    images = torch.full((8, *Chain.shape), value)
    small = peel.slim(net, {"conv1": 5}, graph=graph, weights="inherit")
    calls = [
        lambda: peel.explain_scores(net, graph, images),
        lambda: peel.measure_sensitivity(net, graph, images),
        lambda: peel.repair(small, net, images, graph=graph),
        lambda: peel.recalibrate(small, list(images.split(4))),
    ]
    for call in calls:
        with pytest.raises(peel.DataError, match=f"images are constant: every value is {value:g}"):
            call()


def test_at_full_width_nothing_changes() -> None:
    net, graph = traced_net(Dense)
    same = peel.slim(net, graph.widths, graph=graph, weights="inherit")
    report = peel.repair(same, net, torch.randn(8, *Dense.shape), graph=graph)
    assert report.refitted == report.norms == ()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in same.state_dict().items())


def test_new_channels_keep_their_weights() -> None:
    net, graph = traced_net(Chain)
    wide = peel.slim(net, {"conv1": 6, "conv2": 14}, graph=graph, weights="inherit")
    before = wide.conv2.weight.clone()
    peel.repair(wide, net, torch.randn(32, *Chain.shape), graph=graph)
    assert torch.equal(wide.conv2.weight[12:], before[12:])
    assert not torch.equal(wide.conv2.weight[:12], before[:12])


@pytest.mark.parametrize("kind", [Chain, Depthwise, Flattened], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_or_huge_images_never_give_numbers_that_are_not_finite(kind: type[Net], count: int) -> None:
    net, graph = traced_net(kind)
    for images in (torch.randn(count, *kind.shape), 1e25 * torch.randn(count, *kind.shape)):
        small = peel.slim(
            net, {name: max(1, w // 2) for name, w in graph.widths.items()}, graph=graph, weights="inherit"
        )
        peel.repair(small, net, images, graph=graph)
        assert all(torch.isfinite(value).all() for value in small.state_dict().values())


def test_a_batch_norm_keeps_the_mean_and_variance_of_its_output() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten()
    )
    images = torch.randn(128, 3, 8, 8)
    peel.recalibrate(net, images)
    net.eval()
    graph = peel.trace(net, images[:1])
    small = peel.slim(net, {"0": 5}, graph=graph, weights="inherit")
    report = peel.repair(small, net, images, graph=graph)
    assert report.norms == ("3",) and report.errors["2"][1] > 0.05  # the fit is not exact
    own, wanted = (outputs(model, images).view(128, 8, -1) for model in (small, net))
    torch.testing.assert_close(own.mean((0, 2)), wanted.mean((0, 2)), atol=0.03, rtol=0)
    torch.testing.assert_close(own.var((0, 2)), wanted.var((0, 2)), atol=0.05, rtol=0.05)


def test_images_come_as_a_tensor_or_in_batches() -> None:
    net, graph = traced_net(Chain)
    images = torch.randn(30, *Chain.shape)
    loader = torch.utils.data.DataLoader([(image, 0) for image in images], batch_size=7)
    states = []
    for given in (images, loader, [images[:20], images[20:]]):
        small = peel.slim(net, {"conv1": 5}, graph=graph, weights="inherit")
        assert peel.repair(small, net, given, graph=graph).images == 30
        states.append(small.state_dict())
    assert all(torch.equal(state[name], value) for state in states for name, value in states[0].items())


def test_one_image_changes_nothing_and_a_few_are_noted() -> None:
    net, graph = traced_net(Residual)
    images = torch.randn(64, *Residual.shape)
    small = peel.slim(net, halved(graph), graph=graph, weights="inherit")
    before = copy.deepcopy(small.state_dict())
    report = peel.repair(small, net, images[:1], graph=graph)
    assert "note: one image is too few for a repair" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    for count in (2, 15):
        small = peel.slim(net, halved(graph), graph=graph, weights="inherit")
        report = peel.repair(small, net, images[:count], graph=graph)
        assert report.refitted and f"note: {count} images are too few to tell" in str(report)
    for count in (16, 64):
        small = peel.slim(net, halved(graph), graph=graph, weights="inherit")
        report = peel.repair(small, net, images[:count], graph=graph)
        assert report.refitted and not report.notes


@pytest.mark.parametrize("kind", [GroupNormed, Chain], ids=lambda kind: kind.__name__)
def test_a_repair_that_is_worse_on_held_out_images_is_not_kept(
    kind: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, graph = traced_net(kind)
    images = torch.randn(40, *kind.shape)
    small = peel.slim(net, halved(graph), graph=graph, weights="inherit")
    recalibrated = copy.deepcopy(small)
    peel.recalibrate(recalibrated, images)
    solve = Regression.solve
    monkeypatch.setattr(  # a fit with wrong weights
        Regression, "solve", lambda *args, **how: replace(solve(*args, **how), weight=10 * args[0].old)
    )
    report = peel.repair(small, net, images, graph=graph)
    assert "on 10 of the 40 images, which were held out, a repair with the others is worse" in str(report)
    assert bool(report.norms) == (kind is Chain)
    assert not report.refitted
    for name, value in small.named_parameters():
        torch.testing.assert_close(value, recalibrated.get_parameter(name), rtol=0, atol=0)
    torch.testing.assert_close(outputs(small, images), outputs(recalibrated, images))


def test_modes_and_random_states_stay() -> None:
    net, graph = traced_net(Chain)
    small = peel.slim(net, {"conv1": 5}, graph=graph, weights="inherit")
    small.train()
    small.bn.eval()
    state = torch.get_rng_state()
    peel.repair(small, net, torch.randn(8, *Chain.shape, generator=torch.Generator()), graph=graph)
    assert small.training and not small.bn.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in small.modules())


def test_wrong_input_is_refused_in_words() -> None:
    net, graph = traced_net(Chain)
    images = torch.randn(4, *Chain.shape)
    fresh = peel.slim(net, {"conv1": 5}, graph=graph)
    with pytest.raises(peel.WidthsError, match="weights='inherit'"):
        peel.repair(fresh, net, images, graph=graph)
    small = peel.slim(net, {"conv1": 5}, graph=graph, weights="inherit")
    other, other_graph = traced_net(Depthwise)
    with pytest.raises(peel.WidthsError, match="not cut from this original"):
        peel.repair(small, other, images, graph=other_graph)
    with pytest.raises(peel.DataError, match="empty"):
        peel.repair(small, net, images[:0], graph=graph)
    with pytest.raises(peel.DataError, match="holds no tensor, but ndarray"):
        peel.repair(small, net, [images.numpy()], graph=graph)
    with pytest.raises(peel.DataError, match="cannot take these images"):
        peel.explain_scores(net, graph, torch.randn(4, 5, 8, 8))
    before = copy.deepcopy(small.state_dict())
    with pytest.raises(peel.DataError, match="cannot take these images"):
        peel.repair(small, net, torch.randn(4, 5, 8, 8), graph=graph)
    images[2, 0, 0, 0] = float("nan")
    with pytest.raises(peel.DataError, match="images holds 1 values that are not finite"):
        peel.repair(small, net, images, graph=graph)
    with pytest.raises(peel.DataError, match="in batch 1"):
        peel.repair(small, net, [torch.zeros_like(images), images], graph=graph)
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_recalibrate_measures_batch_norms_and_nothing_else() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 2)
    )
    before = copy.deepcopy(net.state_dict())
    images = 3 + torch.randn(64, 3, 8, 8)
    peel.recalibrate(net, images)
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    values = outputs(net[:2], images)
    torch.testing.assert_close(values.mean((0, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    assert net[1].momentum == 0.1 and net[2].training


@pytest.mark.parametrize("seed", range(8))
def test_the_channels_that_explain_the_others_are_chosen_first(seed: int) -> None:
    torch.manual_seed(seed)
    net = Planted(nn.Conv2d(8, 5, 1), 2).eval()
    images = torch.randn(32, 3, 6, 6)
    with torch.no_grad():  # channels 4 to 7 are multiples of channels 0 to 3: one of each pair is enough
        net.stem.weight[4:], net.stem.bias[4:] = 3 * net.stem.weight[:4], 3 * net.stem.bias[:4]
    graph = peel.trace(net, images[:1])
    scores = explain_scores(net, graph, images)["stem"]
    chosen = scores.topk(3).indices  # three inputs span all channels
    assert len({int(channel) % 4 for channel in chosen}) == 3
    small = peel.slim(net, {"stem": 3}, graph=graph, weights="inherit", scores={"stem": scores})
    peel.repair(small, net, images, graph=graph)
    # The third of many that explain the rest is the one that varies most: so the fit is well-conditioned.
    assert difference(outputs(small, images), outputs(net, images)) < 1e-4


def test_the_greedy_order_prefers_a_channel_that_others_follow() -> None:
    strong, pair = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.9, 0.9])
    order, _ = greedy_order([torch.outer(strong, strong) + torch.outer(pair, pair)])
    assert int(order.argmin()) in (1, 2) and int(order.argmax()) in (1, 2)


def test_with_fewer_samples_than_channels_the_rest_follow_by_their_variance() -> None:
    torch.manual_seed(0)
    samples = torch.randn(5, 12).double()
    covariance = torch.cov(samples.T, correction=0)
    (full, _), (short, _) = greedy_order([covariance]), greedy_order([covariance], rank=4)
    # Four channels explain all others, and come first in both.
    assert full.topk(4).indices.tolist() == short.topk(4).indices.tolist()
    rest = short.argsort(descending=True)[4:]
    variances = covariance.diagonal()[rest]
    assert torch.equal(variances, variances.sort(descending=True).values)


@pytest.mark.parametrize("kind", [Residual, Depthwise, Decoder, Grouped], ids=lambda kind: kind.__name__)
def test_several_networks_are_repaired_as_each_alone(kind: type[Net]) -> None:
    """The original is recorded once, for networks of different widths."""
    net, graph = traced_net(kind)
    images = torch.randn(64, *kind.shape)
    repairer = Repairer(net, images, graph)
    for part in (0.8, 0.5, 0.3):
        units = [max(1, int(part * one)) for one in graph.units()]
        widths = {tie: one * step for (tie, step), one in zip(graph.steps.items(), units)}
        alone, among = (peel.slim(net, widths, graph=graph, weights="inherit") for _ in range(2))
        peel.repair(alone, net, images, graph=graph)
        repairer.repair(among)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(among.state_dict()[name], value, rtol=0, atol=0)


def test_a_layer_with_more_features_is_fitted_at_more_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the places of a narrow network are the first of those that the original was recorded at."""
    monkeypatch.setattr(original_record, "PLACES", 1)
    net = traced_net(Residual)[0]
    record = original_record.record_original(net, [torch.randn(4, *Residual.shape)])
    key, output = next(
        (key, one) for key, one in record.outputs.items() if len(one.places) < math.prod(one.shape)
    )
    few, many = (record.sample(key, output.shape, count) for count in (1, record.filters[key[0]].features))
    assert few is not None
    assert many is not None
    assert len(few) < len(many) == len(output.places)
    assert torch.equal(output.places[record.rows_for(key, 1)], few)
    assert torch.equal(many, output.places)

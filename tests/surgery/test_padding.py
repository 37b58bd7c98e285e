"""Zero channels: the padded network computes and learns the same."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import Chain, ChannelsLast, Depthwise, GroupNormed, Net, Residual
from helpers.small import Small, small_run
from peel.cost.count import count_macs
from peel.graph import ChannelGraph
from peel.run import training
from peel.surgery.padding import Padded, fast_widths, pad


def more(graph: ChannelGraph, channels: int) -> peel.Widths:
    """All ties wider by some steps."""
    return peel.Widths({name: width + channels * graph.steps[name] for name, width in graph.widths.items()})


def train(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    losses = []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_mobilenet_v2"])
def test_a_padded_network_trains_like_the_network_itself(name: str) -> None:
    model, graph = traced_zoo(name, 16)
    widths = peel.uniform(graph, "40%")
    torch.manual_seed(0)
    small = peel.slim(model, widths, graph=graph).double()
    for module in small.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    raised = fast_widths(small, graph.at(widths))
    padded = pad(small, graph.at(widths), raised)
    assert padded is not None
    assert padded.graph.widths == raised
    assert graph.macs(padded.graph.widths) == count_macs(
        padded.model.eval(), (torch.zeros(1, 3, 16, 16).double(),), {}
    )
    images, labels = torch.randn(6, 3, 16, 16).double(), torch.randint(10, (6,))
    assert train(padded.model, images, labels) == pytest.approx(train(small, images, labels), rel=1e-9)
    back = padded.unpadded()
    assert {name: tuple(p.shape) for name, p in back.named_parameters()} == {
        name: tuple(p.shape) for name, p in small.named_parameters()
    }
    with torch.no_grad():
        assert torch.allclose(back.eval()(images), small.eval()(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Chain, Residual, Depthwise])
def test_padding_and_unpadding_gives_the_same_bits(kind: type) -> None:
    net, graph = traced_net(kind)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    padded = pad(net, graph, more(graph, 3))
    assert padded is not None
    back = padded.unpadded().state_dict()
    assert all(torch.equal(value, back[name]) for name, value in before.items())
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)


class ReZero(Net):
    """Its branch is scaled by zero before training, and zero channels change it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.norm, self.outer = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 6, 1),
            nn.GroupNorm(2, 6),
            nn.Conv2d(6, 8, 1),
        )
        self.alpha, self.fc = nn.Parameter(torch.zeros(1)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.alpha * self.outer(self.norm(self.inner(x)).relu()))


class ReZeroWithin(ReZero):
    """A branch in the branch: before the first step it has no gradient either."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.inner(x)
        return self.head(x + self.alpha * self.outer((y + self.beta * self.norm(y)).relu()))


class ResponseNormed(Net):
    """The response norm of ConvNeXt V2. One more channel changes its mean by very little."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 2000, 1), nn.Linear(2000, 5)
        self.scale = nn.Parameter(torch.zeros(1, 2000, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        size = x.norm(dim=(2, 3), keepdim=True)
        return self.head(x + self.scale * x * size / size.mean(1, keepdim=True))


class SlowedByWidth(Net):
    """The same outputs at every width, but gradients that are scaled by the width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        slowed = x / x.shape[1] ** 0.5
        return self.head((x - slowed).detach() + slowed)


@pytest.mark.parametrize("kind", [ReZero, ReZeroWithin, ResponseNormed, SlowedByWidth])
def test_networks_that_zero_channels_change_in_training_only_are_not_padded(kind: type) -> None:
    net, graph = traced_net(kind)
    last = list(graph.widths)[-1]
    raised = peel.Widths({**graph.widths, last: graph.widths[last] + graph.steps[last]})
    assert pad(net, graph, raised) is None


def test_a_network_that_does_not_run_in_double_precision_is_not_padded() -> None:
    class Single(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    net, graph = traced_net(Single)
    assert pad(net, graph, more(graph, 3)) is None


def padding_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU engine that pads, as a GPU engine does."""
    run = importlib.import_module("peel.run.loading")
    engines = run.make_engine
    monkeypatch.setattr(
        run,
        "make_engine",
        lambda *arguments, **named: replace(engines(*arguments, **named), pad_channels=True),
    )


def test_a_run_without_padding_has_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = Small()
    model.norm2 = nn.GroupNorm(1, 8)  # type: ignore[assignment]
    padding_engine(monkeypatch)
    for _ in range(2):
        assert small_run(model, device="cpu", output=tmp_path / "run").notes.count(training.UNPADDED) == 1, (
            "also when it is finished"
        )


@pytest.mark.usefixtures("one_thread")
def test_a_padded_run_gives_the_result_of_an_unpadded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small_run(device="cpu")
    padded = []

    def noting(*arguments: object) -> Padded | None:
        padded.append(pad(*arguments))  # type: ignore[arg-type]
        return padded[-1]

    padding_engine(monkeypatch)
    monkeypatch.setattr(training, "pad", noting)
    found = small_run(device="cpu")
    assert training.UNPADDED not in found.notes
    # The original has fast widths already; the backbone, the uniform and the slim network do not.
    assert [result is not None for result in padded] == [False, True, True, True]
    assert found.plan is not None
    assert plain.plan is not None
    assert found.plan.widths == plain.plan.widths
    assert [row.top1 for row in found.rows] == [row.top1 for row in plain.rows]
    assert found.model is not None
    assert plain.model is not None
    weights = found.model.state_dict()
    for name, wanted in plain.model.state_dict().items():
        torch.testing.assert_close(weights[name], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [ChannelsLast, GroupNormed])
def test_networks_that_zero_channels_change_are_not_padded(kind: type) -> None:
    net, graph = traced_net(kind)
    assert pad(net, graph, more(graph, 3)) is None


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_resnet18", "cifar_vgg16_bn"])
def test_fast_widths_are_not_padded(name: str) -> None:
    model, graph = traced_zoo(name)
    assert fast_widths(model, graph) == graph.widths
    assert pad(model, graph, graph.widths) is None


def at_share(name: str, share: str) -> tuple[ChannelGraph, peel.Widths, peel.Widths]:
    """A graph, its uniform widths at a share of its MACs, and the fast widths."""
    model, graph = traced_zoo(name, 32)
    widths = peel.uniform(graph, share)
    return graph, widths, fast_widths(peel.slim(model, widths, graph=graph), graph.at(widths))


@pytest.mark.parametrize(
    ("width", "wanted"),
    [(3, 8), (25, 32), (33, 64), (48, 64), (64, 64), (65, 96), (97, 128), (129, 192), (193, 256), (400, 448)],
)
def test_ties_between_convolutions_are_raised_to_tiles(width: int, wanted: int) -> None:
    """As measured on an H200."""
    model, graph = traced_zoo("cifar_resnet18", 16)
    last = list(graph.widths)[-1]
    widths = {last: width}
    assert fast_widths(peel.slim(model, widths, graph=graph), graph.at(widths))[last] == wanted


@pytest.mark.parametrize("name", ["cifar_mobilenet_v2", "resnext50_32x4d"])
def test_other_ties_are_raised_to_multiples_of_eight(name: str) -> None:
    graph, widths, found = at_share(name, "40%")
    assert all(
        found[tie] >= widths[tie] and found[tie] % 8 == 0 and found[tie] % graph.steps[tie] == 0
        for tie in found
    )
    if name == "cifar_mobilenet_v2":
        assert all(found[tie] < widths[tie] + 8 for tie in found), (
            "its convolutions over several pixels are grouped, or read the image"
        )


def test_the_first_layer_of_a_bottleneck_network_is_raised_to_a_multiple_of_eight() -> None:
    graph, _, found = at_share("resnet50", "50%")
    inside = [
        tie
        for tie in graph.ties
        if tie in found and any("conv2" in layer for layer in graph.ties[tie].layers)
    ]
    assert inside
    assert all(found[tie] in (64, 96, 192, 384) for tie in inside)
    assert found[next(iter(found))] == 48


def test_grouped_convolutions_keep_whole_groups() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 48, 1),
        torch.nn.Conv2d(48, 48, 3, padding=1, groups=3),
        torch.nn.Conv2d(48, 48, 1),
        torch.nn.Conv2d(48, 5, 1),
    )
    graph = peel.trace(net, torch.zeros(1, 3, 8, 8))
    widths = {name: 39 if graph.steps[name] == 3 else width for name, width in graph.widths.items()}
    found = fast_widths(peel.slim(net, widths, graph=graph), graph.at(widths))
    assert set(found.values()) == {48}
    narrow = {name: 9 if graph.steps[name] == 3 else width for name, width in graph.widths.items()}
    assert 24 in fast_widths(peel.slim(net, narrow, graph=graph), graph.at(narrow)).values()

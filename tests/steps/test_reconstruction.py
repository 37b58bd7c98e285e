"""The criterion reconstruction: its error where it is known by other means."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.criteria import by_tie, filled, images, make_inputs, normalized
from helpers.nets import Chain, Flattened, Net
from peel.steps.criteria.reconstruction import Reconstruction

pytestmark = pytest.mark.usefixtures("one_thread")


class Maps(Net):
    """Four channels with given maps, and a layer that reads them."""

    def __init__(self, reader: nn.Conv2d | nn.Linear) -> None:
        super().__init__()
        self.conv, self.maps, self.reader = nn.Conv2d(3, 4, 1), nn.Parameter(torch.zeros(4, 8, 8)), reader
        self.fc = nn.Linear(5, 5)
        filled(self.conv.weight, 0.0)
        filled(self.conv.bias, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.read(self.conv(x) + self.maps))

    def read(self, x: Tensor) -> Tensor:
        if isinstance(self.reader, nn.Linear):
            return self.reader(x.flatten(1))
        return self.reader(x).mean((2, 3))


READERS = {
    "flattened": lambda: nn.Linear(4 * 64, 5),
    "conv": lambda: nn.Conv2d(4, 5, 3),
    "valid": lambda: nn.Conv2d(4, 5, 3, padding="valid"),
    "padded": lambda: nn.Conv2d(4, 5, 3, padding=1),
    "same": lambda: nn.Conv2d(4, 5, 3, padding="same"),
    "strided": lambda: nn.Conv2d(4, 5, (3, 2), stride=(2, 3)),
    "dilated": lambda: nn.Conv2d(4, 5, 3, dilation=(2, 3)),
}


@pytest.mark.parametrize("kind", READERS)
def test_the_error_without_half_of_constant_channels(kind: str) -> None:
    net = Maps(READERS[kind]())
    # The kernel reads at its last place only. Channels are constant where it reads and random elsewhere.
    weight = torch.zeros_like(net.reader.weight).view(5, 4, -1)
    weight[:, :, -1] = 1.0
    with torch.no_grad():
        net.reader.weight.copy_(weight.view_as(net.reader.weight))
    blank = torch.zeros(1, 4, 8, 8, requires_grad=True)
    net.read(blank).sum().backward()
    assert blank.grad is not None
    is_read = blank.grad[0] > 0
    inputs = make_inputs(net)
    for values, error in (
        ([1.0, 2.0, 4.0, 8.0], (3 / 15) ** 2),
        ([8.0, 1.0, 4.0, 2.0], (3 / 15) ** 2),
        ([5.0, 1.0, 5.0, -1.0], 0),
        ([1.0, 1.0, 1.0, 1.0], (2 / 4) ** 2),
        ([0.0, 0.0, 3.0, 1.0], 0),
        (
            [1.0, 1.0, 3.0, -2.5],
            (1.5 / 2.5) ** 2,
        ),  # greedily: 1, then -2.5, though 3 and -2.5 would be better
    ):
        constant = torch.tensor(values)[:, None, None].expand(4, 8, 8)
        net.maps.data = torch.where(is_read, constant, 100 * torch.randn(4, 8, 8))
        assert by_tie(Reconstruction().measure(inputs))["conv", "reader"] == pytest.approx([error], abs=1e-5)


class Joined(Net):
    """A layer that reads flattened maps of two others, and one that reads their means."""

    shape = (3, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)
        self.flat, self.mean, self.fc = nn.Linear(64, 5), nn.Linear(4, 5), nn.Linear(5, 5)
        for layer, values in ((self.a, [1.0, 2.0]), (self.b, [4.0, 8.0])):
            filled(layer.weight, 0.0)
            filled(layer.bias, values)
        filled(self.flat.weight, 1.0)
        filled(self.mean.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.a(x), self.b(x)], 1)
        return self.fc(self.flat(x.flatten(1)) + self.mean(x.mean((2, 3))))


def test_each_tie_is_removed_from_the_sum_over_all_ties() -> None:
    found = by_tie(
        Reconstruction().measure(make_inputs(Joined(), train=images(16, Joined.shape), shape=Joined.shape))
    )
    for layer in ("flat", "mean"):
        assert found["a", layer] == pytest.approx([(1 / 15) ** 2], rel=1e-4)
        assert found["b", layer] == pytest.approx([(4 / 15) ** 2], rel=1e-4)


def test_a_tie_whose_half_is_unused_has_no_error() -> None:
    torch.manual_seed(0)
    net = Chain().eval()
    before = by_tie(Reconstruction().measure(make_inputs(net)))
    with torch.no_grad():
        net.conv2.weight[:, 1::2] = 0
    after = by_tie(Reconstruction().measure(make_inputs(net)))
    assert before["conv1", "conv2"][0] > 0.01
    assert after["conv1", "conv2"] == [0]
    assert after["conv2", "fc"][0] > 0.01


@pytest.mark.parametrize("seed", range(5))
def test_greedy_removal_is_nearly_as_good_as_the_best_half(seed: int) -> None:
    torch.manual_seed(seed)
    net = Flattened().eval()
    filled(
        net.fc.weight, net.fc.weight[0].tolist()
    )  # rows alike: it does not matter which outputs are looked at
    split = images(12, Flattened.shape, seed)
    inputs = make_inputs(net, train=split, shape=Flattened.shape)
    with torch.no_grad():
        parts = F.relu(net.hidden(net.conv(normalized(split)[0]).flatten(1))) * net.fc.weight[0]
    whole = float(parts.sum(1).square().sum())
    halves = [
        float(parts[:, list(half)].sum(1).square().sum()) / whole
        for half in itertools.combinations(range(7), 3)
    ]
    (found,) = by_tie(Reconstruction(images=12).measure(inputs))["hidden", "fc"]
    assert min(halves) * (1 - 1e-4) <= found <= sorted(halves)[len(halves) // 4]
    assert any(found == pytest.approx(half, rel=1e-3) for half in halves)


def test_reconstruction_is_reproducible() -> None:
    torch.manual_seed(0)
    net = Chain().eval()
    first, again, other = (
        by_tie(Reconstruction().measure(make_inputs(net, seed=seed))) for seed in (3, 3, 4)
    )
    assert first == again != other

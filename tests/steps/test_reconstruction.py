"""The criterion reconstruction: its error where it is known by other means."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.criteria import filled, images, make_inputs
from helpers.nets import Chain, Depthwise, Flattened, Net
from peel.steps.criteria.reconstruction import Reconstruction
from peel.steps.importance import CriterionInput

pytestmark = pytest.mark.usefixtures("one_thread")


def errors(inputs: CriterionInput, **settings: int) -> dict[str, float]:
    """The error of each tie: one value."""
    found = Reconstruction(**settings).measure(inputs)
    assert len({item.tie for item in found}) == len(found)
    return {item.tie: item.values.item() for item in found}


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
    "same and even": lambda: nn.Conv2d(4, 5, (2, 4), padding="same"),
    "reflected": lambda: nn.Conv2d(4, 5, 3, padding=(1, 2), padding_mode="reflect"),
    "strided": lambda: nn.Conv2d(4, 5, (3, 2), stride=(2, 3)),
    "dilated": lambda: nn.Conv2d(4, 5, 3, dilation=(2, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
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
        assert errors(inputs)["conv"] == pytest.approx(error, abs=1e-5)


def test_padding_by_other_values_than_zero_counts() -> None:
    """The kernel reads its left neighbor, and the first column reads the last one."""
    found = {}
    for mode in ("zeros", "circular"):
        net = Maps(nn.Conv2d(4, 5, 3, padding=1, padding_mode=mode))
        filled(net.reader.weight, 0.0)
        with torch.no_grad():
            net.reader.weight[:, :, 1, 0] = 1.0
            net.maps[0] = 1.0
            net.maps[1, :, 7] = 3.0  # read by the first column only
        net.maps.data[2:] = net.maps.data[:2]
        found[mode] = errors(make_inputs(net), places=500)["conv"]
    # Where the last column is not read, its two channels are removed; else one of each two equal channels.
    assert found == {"zeros": 0, "circular": pytest.approx(0.25, rel=1e-5)}


class Independent(Net):
    """Channels that are independent signs, and a layer that reads all of them alike."""

    shape = (3, 5, 5)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.reader, self.fc = nn.Conv2d(3, width, 1), nn.Conv2d(width, 4, 1), nn.Linear(4, 5)
        filled(self.conv.weight, 0.0)
        filled(self.conv.bias, 1.0)
        filled(self.reader.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reader(F.dropout(self.conv(x), 0.5, training=True) - 1))


def test_half_of_independent_channels_have_half_of_the_output_at_every_width() -> None:
    torch.manual_seed(0)
    split = images(1024, Independent.shape)
    found = {}
    for width in (16, 64, 256, 2048):
        inputs = make_inputs(Independent(width), train=split, shape=Independent.shape)
        found[width] = errors(inputs)["conv"]
    assert found == pytest.approx(dict.fromkeys(found, 0.5), abs=0.03)
    assert max(found.values()) - min(found.values()) < 0.03


class Twice(Net):
    """Two maps of four channels that one layer reads in two calls, or that two layers read."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 1), nn.Linear(5, 5)
        self.maps = nn.ParameterList([torch.zeros(4, 1, 1) for _ in range(2)])
        self.readers = nn.ModuleList([nn.Conv2d(4, 5, 1) for _ in range(readers)])
        filled(self.conv.weight, 0.0)
        filled(self.conv.bias, 0.0)
        for values, parameter in zip(([1.0, 2.0, 4.0, 8.0], [8.0, 4.0, 2.0, 1.0]), self.maps):
            filled(parameter, [[[value]] for value in values])
        for reader in self.readers:
            filled(reader.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(self.readers[0](x + self.maps[0]) + self.readers[-1](x + self.maps[1]))


@pytest.mark.parametrize("readers", [1, 2])
def test_every_call_of_every_layer_that_reads_a_tie_counts(readers: int) -> None:
    """Each call alone would remove 1 and 2, with an error of (3/15)^2."""
    found = errors(make_inputs(Twice(readers)))
    assert found["conv"] == pytest.approx(((2 + 4) / 15) ** 2, rel=0.02)


def test_gates_read_nothing() -> None:
    assert set(errors(make_inputs(Depthwise()))) == {"expand"}


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
    found = errors(make_inputs(Joined(), train=images(16, Joined.shape), shape=Joined.shape))
    assert found["a"] == pytest.approx((1 / 15) ** 2, rel=1e-4)
    assert found["b"] == pytest.approx((4 / 15) ** 2, rel=1e-4)


def test_a_tie_whose_half_is_unused_has_no_error() -> None:
    torch.manual_seed(0)
    net = Chain().eval()
    before = errors(make_inputs(net))
    with torch.no_grad():
        net.conv2.weight[:, 1::2] = 0
    after = errors(make_inputs(net))
    assert before["conv1"] > 0.01
    assert after["conv1"] == 0
    assert after["conv2"] > 0.01


@pytest.mark.parametrize("seed", range(5))
def test_greedy_removal_is_nearly_as_good_as_the_best_half_and_scored_on_other_images(seed: int) -> None:
    torch.manual_seed(seed)
    net = Flattened().eval()
    filled(net.fc.weight, net.fc.weight[0].tolist())  # alike: it does not matter which outputs are sampled
    inputs = make_inputs(net, train=images(60, Flattened.shape, seed), shape=Flattened.shape)

    def errors_of_halves(start: int) -> list[float]:
        with torch.no_grad():
            (batch,) = inputs.batches(30, 30, start)
            parts = F.relu(net.hidden(net.conv(batch.inputs).flatten(1))) * net.fc.weight[0]
            whole = float(parts.sum(1).square().sum())
            halves = itertools.combinations(range(7), 3)
            return [float(parts[:, list(half)].sum(1).square().sum()) / whole for half in halves]

    choosing, scoring = errors_of_halves(0), errors_of_halves(30)
    found = errors(inputs, images=60)["hidden"]
    distance, chosen = min((abs(error - found), i) for i, error in enumerate(scoring))
    assert distance < 1e-3 * found
    assert choosing[chosen] <= sorted(choosing)[len(choosing) // 4]


def test_reconstruction_is_reproducible() -> None:
    torch.manual_seed(0)
    net = Chain().eval()
    first, again, other = (errors(make_inputs(net, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other

"""Step 2: each criterion where the answer is known by other means, and what is made of its numbers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from helpers.graphs import traced_net
from helpers.nets import NETS, Chain, ChannelsLast, Decoder, Dense, Grouped, MapNorm, Net
from helpers.subjects import CPU, Rivals, filled, images, importance, per_tie, seen, subject
from peel.data.batch import Batch
from peel.data.in_memory import InMemoryImages
from peel.steps.criteria import find_criterion
from peel.steps.criteria.gradient import Gradient
from peel.steps.criteria.legr import Legr
from peel.steps.criteria.reconstruction import Reconstruction
from peel.steps.importance import (
    CriterionInput,
    Importance,
    LayerScores,
    WithL1,
    l1_coefficient_for,
    norm_scales,
    summarise,
)
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import RECIPES, Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

# Scales of norm layers


class Normed(Net):
    """A depthwise convolution with a norm of its own on the channels of the stem, a projection, and a norm for both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.dw, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4)
        self.late, self.bn3 = nn.Conv2d(4, 2, 3, stride=2), nn.BatchNorm2d(2)
        self.project, self.bn4 = nn.Conv2d(4, 2, 3, stride=2), nn.BatchNorm2d(2)
        self.fc = nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn2(self.dw(F.relu(self.bn1(self.stem(x))))))
        return self.head(F.relu(self.bn3(self.late(x)) + self.bn4(self.project(x))))


NORMED = {"early": ["stem"], "late": ["late"]}


def normed() -> Normed:
    torch.manual_seed(0)
    net = Normed()
    filled(net.bn1.weight, [1.0, -2.0, 3.0, -4.0])
    filled(net.bn2.weight, 0.5)
    filled(net.bn3.weight, [0.25, -0.75])
    filled(net.bn4.weight, [2.0, 1.0])
    return net.eval()


def test_scales_count_once_per_norm_layer_by_their_absolute_value() -> None:
    of = subject(normed(), NORMED)
    assert importance("bn", of).groups == {
        "early": (1 + 2 + 3 + 4 + 4 * 0.5) / 8,
        "late": (0.25 + 0.75 + 2 + 1) / 4,
    }
    assert importance("bn", of, "sum").groups == {"early": 12.0, "late": 4.0}
    assert importance("bn", of, "sum").ties == {"stem": 1.5, "late": 1.0}


def test_scales_of_channels_that_cannot_change_are_not_counted() -> None:
    net = Dense()  # its norm layer reads the image itself (3 channels), a (4) and b (6)
    filled(net.bn.weight, [100.0] * 3 + [1.0] * 4 + [2.0] * 6)
    found = importance("bn", subject(net, {"all": ["a", "b", "c"]}))
    assert found.groups["all"] == (4 * 1 + 6 * 2) / 10
    assert found.ties == {"a": 1.0, "b": 2.0}


class Doubled(Net):
    """A norm layer over two outputs for each channel of one layer, and the channels of another."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.twice, self.side = (
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(4, 8, 1, groups=4),
            nn.Conv2d(3, 5, 1),
        )
        self.bn, self.fc = nn.BatchNorm2d(13), nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(torch.cat([self.twice(self.expand(x)), self.side(x)], 1))))


def test_channels_are_found_where_they_lie_in_a_norm_layer() -> None:
    net = Doubled()
    filled(net.bn.weight, [1.0, 2.0] * 4 + [5.0] * 5)
    assert importance("bn", subject(net, {"all": ["expand", "side"]})).ties == {"expand": 1.5, "side": 5.0}


def test_norm_layers_of_any_kind_count_by_their_scale() -> None:
    net = ChannelsLast()
    filled(net.norm.weight, [float(i) for i in range(8)])
    assert importance("bn", subject(net, {"all": ["stem", "up"]})).ties == {"stem": 3.5}
    maps = MapNorm()
    filled(maps.norm.weight, [[[0.0, -2.0 * i] * 4] for i in range(6)])
    of = subject(maps)
    assert per_tie(find_criterion("bn").measure(of)) == {("conv", "norm"): [0, 1, 2, 3, 4, 5]}
    assert set(per_tie(find_criterion("weight").measure(of))) == {("conv", "conv")}  # a scale is no filter


def test_a_group_without_scales_and_a_network_without_norm_layers_are_told_what_to_do() -> None:
    with pytest.raises(peel.PeelError, match=r"nothing in group rest \(c\).*another criterion"):
        importance("bn", subject(Dense(), {"both": ["a", "b"], "rest": ["c"]}))
    with pytest.raises(peel.PeelError, match='criterion="weight"'):
        importance("bn", subject(Grouped()))


# Weights


def test_weights_count_by_the_mean_of_each_filter() -> None:
    net = Chain()
    filled(net.conv1.weight, [[[[(-1.0) ** i * i]]] for i in range(8)])
    filled(net.conv2.weight, [[[[float(i % 3)]]] for i in range(12)])
    found = importance("weight", subject(net, {"first": ["conv1"], "second": ["conv2"]}))
    assert found.groups == {"first": 3.5, "second": 1.0}


def test_filters_lie_along_the_second_axis_of_a_transposed_convolution() -> None:
    net = Decoder()
    filled(net.up.weight, [[[[float(i)]] for i in range(4)]] * 8)  # two groups, each writes four channels
    filled(net.spread.weight, [[[[float(10 * i)]]] for i in range(6)])  # depthwise
    found = per_tie(find_criterion("weight").measure(subject(net)))
    assert found["up", "up"] == [0, 1, 2, 3]
    assert found["dw", "spread"] == [0, 10, 20, 30, 40, 50]


# Gradients


def loss(net: nn.Module, split: InMemoryImages) -> float:
    with torch.no_grad():
        pictures, labels = seen(split)
        return float(F.cross_entropy(net(pictures).double(), labels))


def effect(
    net: nn.Module, split: InMemoryImages, scaled: list[tuple[Tensor, int | slice]], step: float = 2e-2
) -> float:
    """By how much the loss moves, per unit, when some entries are scaled."""

    def moved(factor: float) -> float:
        for tensor, which in scaled:
            tensor.data[which] *= factor
        value = loss(net, split)
        for tensor, which in scaled:
            tensor.data[which] /= factor
        return value

    return (moved(1 + step) - moved(1 - step)) / (2 * step)


def trained_chain() -> Chain:
    torch.manual_seed(1)
    net = Chain()
    with torch.no_grad():
        net.bn.weight.uniform_(-2, 2)
        net.bn.running_mean.normal_()
        net.bn.running_var.uniform_(0.5, 2)
        net.fc.weight.mul_(4)
    return net.eval()


def test_the_gradient_of_a_channel_is_what_scaling_it_does_to_the_loss() -> None:
    net, split = trained_chain(), images(32)
    found = per_tie(Gradient(batches=1, batch_size=32).measure(subject(net, train=split)))
    assert set(found) == {
        ("conv1", "bn"),
        ("conv2", "conv2"),
    }  # the scale where there is one, else the filter
    by_scale = [abs(effect(net, split, [(net.bn.weight, i)])) for i in range(8)]
    by_filter = [abs(effect(net, split, [(net.conv2.weight, i)])) for i in range(12)]
    assert found["conv1", "bn"] == pytest.approx(by_scale, rel=0.02, abs=2e-4)
    assert found["conv2", "conv2"] == pytest.approx(by_filter, rel=0.02, abs=2e-4)
    assert max(by_scale) > 20 * min(by_scale)


def test_the_sum_over_a_group_is_the_effect_of_scaling_all_of_it() -> None:
    net, split = trained_chain(), images(32)
    # Channels alike pull the same way, so that their effects add up.
    for tensor in (net.conv1.weight, net.conv1.bias, net.bn.weight, net.bn.running_mean, net.bn.running_var):
        tensor.data[:] = tensor.data[:1].clone()
    net.conv2.weight.data[:] = net.conv2.weight.data[:, :1].clone()
    found = importance(Gradient(1, 32), subject(net, {"first": ["conv1"], "second": ["conv2"]}, split), "sum")
    assert found.groups["first"] == pytest.approx(
        abs(effect(net, split, [(net.bn.weight, slice(None))], 5e-3)), rel=0.02
    )


def test_gradients_are_averaged_over_batches_without_their_signs() -> None:
    net, split = trained_chain(), images(2)
    alone = [Gradient(1, 1).measure(subject(net, train=split.subset(torch.tensor([i])))) for i in range(2)]
    together = Gradient(2, 1).measure(subject(net, train=split))
    for first, second, both in zip(*alone, together):
        assert torch.allclose((first.values + second.values) / 2, both.values, rtol=1e-4, atol=1e-7)


def test_measuring_leaves_the_network_as_it_was() -> None:
    net = Normed().train()
    before = copy.deepcopy(net.state_dict())
    of = subject(net)
    for criterion in (
        *map(find_criterion, ("bn", "weight", "gradient", "reconstruction")),
        Legr(evaluations=2),
    ):
        criterion.measure(of)
        assert net.training
        assert all(parameter.grad is None for parameter in net.parameters())
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert not any(module._forward_pre_hooks for module in net.modules())


# What is made of the numbers


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_groups_that_are_alike_are_said_to_be(reduce: str) -> None:
    graph = peel.trace(Rivals(), torch.randn(1, 3, 8, 8)).regroup({"loud": ["loud"], "quiet": ["quiet"]})

    def found(loud: list[float], quiet: list[float]) -> Importance:
        return summarise(
            [
                LayerScores("loud", "loud", torch.tensor(loud)),
                LayerScores("quiet", "quiet", torch.tensor(quiet)),
            ],
            graph,
            reduce,
        )

    equal = found([1.0] * 8, [1.02] * 8)
    assert not equal.distinct
    assert "cannot be told apart" in equal.note
    assert "loud 49.5%, quiet 50.5%" in equal.note
    noisy = found([0.1, 2, 0.1, 2, 0.1, 2, 0.1, 2], [0.2, 2.4, 0.2, 2.4, 0.2, 2.4, 0.2, 2.4])
    assert not noisy.distinct
    assert "cannot be told apart" in noisy.note
    assert "spread" in noisy.note
    clear = found([1.0, 1.1] * 4, [2.0, 2.1] * 4)
    assert clear.distinct
    assert "groups differ" in clear.note
    many = found([0.7, 1.3] * 4, [1.2, 1.8] * 4)  # channels overlap, but there are enough of them
    assert many.distinct
    nothing = found([0.0] * 8, [0.0] * 8)
    assert not nothing.distinct
    assert "zero" in nothing.note


def test_fresh_scales_say_nothing_and_a_single_group_cannot_differ() -> None:
    fresh = importance("bn", subject(Normed(), NORMED))
    assert fresh.groups == {"early": 1.0, "late": 1.0}
    assert not fresh.distinct
    one = importance("bn", subject(Normed(), {"all": ["stem", "late"]}))
    assert not one.distinct
    assert "one group only" in one.note
    assert importance("bn", subject(normed(), NORMED)).groups["early"] > 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused_with_the_layer_they_came_from(value: float) -> None:
    net = normed()
    filled(net.bn3.weight, [1.0, value])
    with pytest.raises(peel.PeelError, match="bn3 holds numbers that are not finite"):
        importance("bn", subject(net, NORMED))


OF_IMAGES = [kind for kind in NETS if len(kind.shape) == 3 and kind.expected]


@pytest.mark.parametrize("kind", OF_IMAGES, ids=lambda kind: kind.__name__)
def test_weights_and_gradients_can_be_measured_on_any_network(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    split = images(8, kind.shape)
    of = CriterionInput(net, graph, split, split, CrossEntropy(), CPU, 0)
    for criterion in ("weight", "gradient"):
        found = find_criterion(criterion).measure(of)
        assert {item.tie for item in found} == set(kind.expected)
        assert all(bool((item.values >= 0).all()) for item in found)


def test_what_is_no_criterion_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        peel.PeelError, match=r"Did you mean gradient\? .*bn, weight, legr, reconstruction, gradient"
    ):
        find_criterion("gradients")
    with pytest.raises(peel.PeelError, match="mean"):
        summarise([], peel.trace(Chain(), torch.randn(1, 3, 8, 8)), "median")
    for wrong in (
        lambda: Gradient(batches=0),
        lambda: Reconstruction(places=0),
        lambda: Legr(evaluations=0),
        lambda: Legr(target=1.0),
    ):
        with pytest.raises(peel.PeelError):
            wrong()


# The penalty


def test_the_penalty_adds_exactly_its_part_of_the_scales() -> None:
    net = normed()
    of = subject(net, NORMED)
    pictures, labels = seen(images(16))
    scales = list(norm_scales(net, of.graph))
    plain = CrossEntropy(0.1)(net, Batch(pictures, labels))
    whole = WithL1(CrossEntropy(0.1), scales, 0.01)(net, Batch(pictures, labels))
    assert float((whole.total - plain.total).detach()) == pytest.approx(0.01 * (10 + 2 + 1 + 3), rel=1e-5)
    assert float(whole.terms["sparsity"]) == pytest.approx(0.16)
    assert float(whole.terms["cross_entropy"]) == float(plain.total.detach())
    with_term, without = (torch.autograd.grad(losses.total, net.bn1.weight)[0] for losses in (whole, plain))
    assert torch.allclose(with_term - without, 0.01 * torch.tensor([1.0, -1.0, 1.0, -1.0]), atol=1e-6)
    for nothing in (WithL1(CrossEntropy(0.1), scales, 0.0), WithL1(CrossEntropy(0.1), [], 0.01)):
        assert nothing(net, Batch(pictures, labels)).total == plain.total


class Aside(Net):
    """A norm layer whose output does not reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc = nn.BatchNorm2d(3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3))) + 0 * self.bn(x).mean()


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"momentum": 0.0, "nesterov": False},
        {"nesterov": False},
        {"schedule": "steps"},
        {"lr": 0.02, "warmup_from": 0.01},
    ],
)
def test_a_pull_moves_scales_by_as_much_over_the_schedule(changed: dict[str, object]) -> None:
    l1_strength = 0.6
    recipe = Recipe(
        epochs=30, batch_size=4, lr=0.1, warmup_epochs=3, augment="none", weight_decay=0.1
    ).changed(**changed)
    net, split = Aside(), images(32)
    filled(net.bn.weight, [1.0, -1.0, 1.0])
    fit(
        net,
        WithL1(CrossEntropy(), ["bn.weight"], l1_coefficient_for(l1_strength, recipe, 8)),
        split,
        recipe,
        engine=CPU,
        seed=0,
    )
    assert net.bn.weight.tolist() == pytest.approx(
        [1 - l1_strength, l1_strength - 1, 1 - l1_strength], abs=0.05 * l1_strength
    )


def test_the_penalty_of_the_paper_pulls_by_twelve_and_a_half() -> None:
    steps = 1_281_167 // 512
    assert l1_coefficient_for(12.5, RECIPES["imagenet-backbone"], steps) == pytest.approx(1e-4, rel=0.01)

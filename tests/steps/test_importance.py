"""Step 2: each criterion against values that are known by other means, and the importance of groups."""

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
from helpers.criteria import CPU, TwoBranches, by_tie, filled, images, importance, make_inputs, normalized
from helpers.graphs import traced_net
from helpers.nets import NETS, Chain, ChannelsLast, Decoder, Dense, Grouped, MapNorm, Net
from peel.data.batch import Batch
from peel.data.in_memory import InMemoryImages
from peel.graph.parameters import norm_scales
from peel.steps.criteria import CRITERIA, find_criterion, measure_layers
from peel.steps.criteria.gradient import Gradient, Taylor
from peel.steps.criteria.legr import Legr
from peel.steps.importance import (
    CriterionInput,
    Importance,
    LayerScores,
    WithL1,
    l1_coefficient_for,
    summarize,
)
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe, backbone_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

# Scales of norm layers


class Normed(Net):
    """A depthwise convolution on the channels of the stem, and a projection; each has a norm of its own."""

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


def test_bn_takes_the_absolute_scales_of_every_norm_layer() -> None:
    inputs = make_inputs(normed(), NORMED)
    assert importance("bn", inputs).groups == {
        "early": (1 + 2 + 3 + 4 + 4 * 0.5) / 8,
        "late": (0.25 + 0.75 + 2 + 1) / 4,
    }
    assert importance("bn", inputs, "sum").groups == {"early": 12.0, "late": 4.0}
    assert importance("bn", inputs, "sum").ties == {"stem": 1.5, "late": 1.0}


def test_bn_ignores_scales_of_fixed_channels() -> None:
    net = Dense()  # its norm layer reads the image itself (3 channels), a (4) and b (6)
    filled(net.bn.weight, [100.0] * 3 + [1.0] * 4 + [2.0] * 6)
    found = importance("bn", make_inputs(net, {"all": ["a", "b", "c"]}))
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


def test_bn_finds_the_channels_of_each_tie_in_a_norm_layer() -> None:
    net = Doubled()
    filled(net.bn.weight, [1.0, 2.0] * 4 + [5.0] * 5)
    assert importance("bn", make_inputs(net, {"all": ["expand", "side"]})).ties == {
        "expand": 1.5,
        "side": 5.0,
    }


def test_bn_works_with_all_kinds_of_norm_layers() -> None:
    net = ChannelsLast()
    filled(net.norm.weight, [float(i) for i in range(8)])
    assert importance("bn", make_inputs(net, {"all": ["stem", "up"]})).ties == {"stem": 3.5}
    maps = MapNorm()
    filled(maps.norm.weight, [[[0.0, -2.0 * i] * 4] for i in range(6)])
    inputs = make_inputs(maps)
    assert by_tie(find_criterion("bn").measure(inputs)) == {("conv", "norm"): [0, 1, 2, 3, 4, 5]}
    assert set(by_tie(find_criterion("weight").measure(inputs))) == {("conv", "conv")}  # a scale is no filter


def test_bn_without_norm_layers_names_other_criteria() -> None:
    with pytest.raises(peel.PeelError, match=r"nothing in group rest \(c\).*another criterion"):
        importance("bn", make_inputs(Dense(), {"both": ["a", "b"], "rest": ["c"]}))
    with pytest.raises(peel.PeelError, match='criterion="weight"'):
        importance("bn", make_inputs(Grouped()))


# Weights


def test_weight_takes_the_mean_of_each_filter() -> None:
    net = Chain()
    filled(net.conv1.weight, [[[[(-1.0) ** i * i]]] for i in range(8)])
    filled(net.conv2.weight, [[[[float(i % 3)]]] for i in range(12)])
    found = importance("weight", make_inputs(net, {"first": ["conv1"], "second": ["conv2"]}))
    assert found.groups == {"first": 3.5, "second": 1.0}


def test_filters_of_a_transposed_convolution_are_along_its_second_axis() -> None:
    net = Decoder()
    filled(net.up.weight, [[[[float(i)]] for i in range(4)]] * 8)  # two groups, each writes four channels
    filled(net.spread.weight, [[[[float(10 * i)]]] for i in range(6)])  # depthwise
    found = by_tie(find_criterion("weight").measure(make_inputs(net)))
    assert found["up", "up"] == [0, 1, 2, 3]
    assert found["dw", "spread"] == [0, 10, 20, 30, 40, 50]


# Gradients


def loss(net: nn.Module, split: InMemoryImages) -> float:
    with torch.no_grad():
        pictures, labels = normalized(split)
        return float(F.cross_entropy(net(pictures).double(), labels))


def effect(
    net: nn.Module, split: InMemoryImages, scaled: list[tuple[Tensor, int | slice]], step: float = 2e-2
) -> float:
    """The derivative of the loss by a factor on some entries."""

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


def test_gradient_is_the_effect_of_scaling_a_channel_on_the_loss() -> None:
    net, split = trained_chain(), images(32)
    found = by_tie(Gradient(batches=1, batch_size=32).measure(make_inputs(net, train=split)))
    assert set(found) == {
        ("conv1", "bn"),
        ("conv2", "conv2"),
    }  # the scale where there is one, else the filter
    by_scale = [abs(effect(net, split, [(net.bn.weight, i)])) for i in range(8)]
    by_filter = [abs(effect(net, split, [(net.conv2.weight, i)])) for i in range(12)]
    assert found["conv1", "bn"] == pytest.approx(by_scale, rel=0.02, abs=2e-4)
    assert found["conv2", "conv2"] == pytest.approx(by_filter, rel=0.02, abs=2e-4)
    assert max(by_scale) > 20 * min(by_scale)


def test_taylor_is_the_squared_effect_of_scaling_a_channel_with_its_shift_on_the_loss() -> None:
    net, split = trained_chain(), images(32)
    net.bn.bias.data.uniform_(-1, 1)
    found = by_tie(Taylor(batches=1, batch_size=32).measure(make_inputs(net, train=split)))
    assert set(found) == {("conv1", "bn"), ("conv2", "conv2")}
    for layer, channels in (("bn", 8), ("conv2", 12)):
        module = net.get_submodule(layer)
        effects = [effect(net, split, [(module.weight, i), (module.bias, i)]) for i in range(channels)]
        assert found["conv1" if layer == "bn" else layer, layer] == pytest.approx(
            [value**2 for value in effects], rel=0.05, abs=1e-4
        )


class ByHand(Net):
    """Two channels that are 1 before their norm layer. The logits are 3 - 3 = 0 and four zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2, eps=0.0), nn.Linear(2, 5)
        filled(self.conv.weight, 0.0)
        filled(self.conv.bias, 1.0)
        filled(self.bn.weight, [2.0, 1.0])
        filled(self.bn.bias, [1.0, 2.0])
        filled(self.fc.weight, [[1.0, -1.0]] + [[0.0, 0.0]] * 4)
        filled(self.fc.bias, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.conv(x)))


def test_gradient_and_taylor_by_hand() -> None:
    """Every class has the probability 0.2, so the first logit has the gradient 0.2 - 1 where it is right."""
    split = images(6)
    inputs = make_inputs(ByHand().eval(), train=replace(split, labels=torch.zeros(6, dtype=torch.long)))
    assert by_tie(Gradient(3, 2).measure(inputs))["conv", "bn"] == pytest.approx([0.8 * 2, 0.8 * 1])
    assert by_tie(Taylor(3, 2).measure(inputs))["conv", "bn"] == pytest.approx([(0.8 * 3) ** 2] * 2)


def test_gradient_summed_over_a_group_is_an_upper_bound_of_the_effect_of_scaling_the_group() -> None:
    net, split = trained_chain(), images(32)

    def bound_and_effect() -> tuple[float, float]:
        inputs = make_inputs(net, {"first": ["conv1"], "second": ["conv2"]}, split)
        found = importance(Gradient(1, 32), inputs, "sum").groups["first"]
        return found, abs(effect(net, split, [(net.bn.weight, slice(None))], 5e-3))

    bound, whole = bound_and_effect()
    assert bound > 1.05 * whole
    # Equal channels have effects of the same sign, which add up.
    for tensor in (net.conv1.weight, net.conv1.bias, net.bn.weight, net.bn.running_mean, net.bn.running_var):
        tensor.data[:] = tensor.data[:1].clone()
    net.conv2.weight.data[:] = net.conv2.weight.data[:, :1].clone()
    bound, whole = bound_and_effect()
    assert bound == pytest.approx(whole, rel=0.02)


def test_gradient_averages_absolute_effects_over_batches() -> None:
    net, split = trained_chain(), images(2)
    alone = [
        Gradient(1, 1).measure(make_inputs(net, train=split.subset(torch.tensor([i])))) for i in range(2)
    ]
    together = Gradient(2, 1).measure(make_inputs(net, train=split))
    for first, second, both in zip(*alone, together):
        assert torch.allclose((first.values + second.values) / 2, both.values, rtol=1e-4, atol=1e-7)


def test_measuring_does_not_change_the_network() -> None:
    net = Normed().train()
    before = copy.deepcopy(net.state_dict())
    inputs = make_inputs(net)
    for criterion in (
        *map(find_criterion, ("bn", "weight", "gradient", "taylor", "reconstruction")),
        Legr(evaluations=2),
    ):
        measure_layers(criterion, inputs)
        assert net.training
        assert all(parameter.grad is None for parameter in net.parameters())
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert not any(module._forward_pre_hooks for module in net.modules())


# Gates


class GatedBranch(Net):
    """A map of the size of the input, with a squeeze-excite gate that has a norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.squeeze, self.norm, self.excite = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        gate = F.relu(self.norm(self.squeeze(x.mean((2, 3), keepdim=True))))
        return self.head(x * torch.sigmoid(self.excite(gate)))


#: Settings that make a criterion fast.
FEW = {"legr": {"evaluations": 60, "population": 20, "tournament": 5}}


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_gates_carry_no_importance(criterion: str, size: int) -> None:
    shape = (3, size, size)
    inputs = make_inputs(GatedBranch().eval(), train=images(16, shape), shape=shape)
    settings = {"evaluations": 1} if criterion == "legr" else {}  # what is measured, not how well
    found = measure_layers(find_criterion(criterion, **settings), inputs)
    assert {item.tie for item in found} == {"conv"}
    assert {item.layer for item in found} <= {"conv", "bn"}


# A planted truth


class Deciding(Net):
    """Two branches that are alike. The labels depend on the color that the first one sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.norm_b = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.relu(self.norm_a(self.a(x[:, :1]))), F.relu(self.norm_b(self.b(x[:, 2:])))
        return self.head(torch.cat([a, b], 1))


@functools.cache
def deciding() -> CriterionInput:
    split = images(400)
    brightness = torch.linspace(0.2, 1.0, 5)[split.labels]
    split.pixels[..., 0] = (split.pixels[..., 0] * brightness[:, None, None]).to(torch.uint8)
    torch.manual_seed(0)
    net = Deciding()
    inputs = make_inputs(net, {"deciding": ["a"], "idle": ["b"]}, split)
    recipe = Recipe(epochs=12, batch_size=20, lr=0.1, augment="none", weight_decay=1e-2)
    l1 = l1_coefficient_for(1.0, [recipe], 20)
    fit(net, WithL1(CrossEntropy(), list(inputs.graph.scales), l1), split, recipe, engine=CPU, seed=0)
    net.eval()
    return inputs


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_finds_the_branch_that_decides(criterion: str) -> None:
    chosen, inputs = find_criterion(criterion, **FEW.get(criterion, {})), deciding()
    found = summarize(measure_layers(chosen, inputs), inputs.graph).groups
    assert found["deciding"] > 1.2 * found["idle"]


# The importance of groups


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_note_says_whether_groups_can_be_told_apart(reduce: str) -> None:
    graph = peel.trace(TwoBranches(), torch.randn(1, 3, 8, 8)).regroup(
        {"large": ["large"], "small": ["small"]}
    )

    def found(large: list[float], small: list[float]) -> Importance:
        return summarize(
            [
                LayerScores("large", "large", torch.tensor(large)),
                LayerScores("small", "small", torch.tensor(small)),
            ],
            graph,
            reduce,
        )

    equal = found([1.0] * 8, [1.02] * 8)
    assert not equal.distinct
    assert "cannot be told apart" in equal.note
    assert "large 49.5%, small 50.5%" in equal.note
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


def test_fresh_scales_and_a_single_group_are_not_distinct() -> None:
    fresh = importance("bn", make_inputs(Normed(), NORMED))
    assert fresh.groups == {"early": 1.0, "late": 1.0}
    assert not fresh.distinct
    one = importance("bn", make_inputs(Normed(), {"all": ["stem", "late"]}))
    assert not one.distinct
    assert "one group only" in one.note
    assert importance("bn", make_inputs(normed(), NORMED)).groups["early"] > 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused_with_the_layer(value: float) -> None:
    net = normed()
    filled(net.bn3.weight, [1.0, value])
    with pytest.raises(peel.PeelError, match="NormScale, layer bn3: some values are not finite"):
        importance("bn", make_inputs(net, NORMED))


OF_IMAGES = [kind for kind in NETS if len(kind.shape) == 3 and kind.expected]


@pytest.mark.parametrize("kind", OF_IMAGES, ids=lambda kind: kind.__name__)
def test_weight_and_gradient_work_on_all_networks(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    split = images(8, kind.shape)
    inputs = CriterionInput(net, graph, split, split, CrossEntropy(), CPU, 0)
    for criterion in ("weight", "gradient", "taylor"):
        found = find_criterion(criterion).measure(inputs)
        assert {item.tie for item in found} == set(kind.expected) - {"squeeze"}  # inside of a gate
        assert all(bool((item.values >= 0).all()) for item in found)


# The L1 term


def test_the_l1_term_is_the_coefficient_times_the_sum_of_absolute_scales() -> None:
    net = normed()
    inputs = make_inputs(net, NORMED)
    pictures, labels = normalized(images(16))
    scales = list(norm_scales(net, inputs.graph))
    plain = CrossEntropy(0.1)(net, Batch(pictures, labels))
    whole = WithL1(CrossEntropy(0.1), scales, 0.01)(net, Batch(pictures, labels))
    assert float((whole.total - plain.total).detach()) == pytest.approx(0.01 * (10 + 2 + 1 + 3), rel=1e-5)
    assert float(whole.terms["l1"]) == pytest.approx(0.16)
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
def test_l1_strength_is_how_far_scales_move_over_the_schedule(changed: dict[str, object]) -> None:
    l1_strength = 0.6
    recipe = Recipe(
        epochs=30, batch_size=4, lr=0.1, warmup_epochs=3, augment="none", weight_decay=0.1
    ).changed(**changed)
    net, split = Aside(), images(32)
    filled(net.bn.weight, [1.0, -1.0, 1.0])
    fit(
        net,
        WithL1(CrossEntropy(), ["bn.weight"], l1_coefficient_for(l1_strength, [recipe], 8)),
        split,
        recipe,
        engine=CPU,
        seed=0,
    )
    assert net.bn.weight.tolist() == pytest.approx(
        [1 - l1_strength, l1_strength - 1, 1 - l1_strength], abs=0.05 * l1_strength
    )


def test_the_coefficient_of_the_paper_has_a_strength_of_12_5() -> None:
    steps = 1_281_167 // 512
    assert l1_coefficient_for(12.5, [backbone_recipe("imagenet-resnet")], steps) == pytest.approx(
        1e-4, rel=0.01
    )

"""Step 5: the distillation term, and a student that shares its weights with a wider network."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import peel
from helpers.graphs import traced_net
from helpers.nets import NETS, AuxiliaryHead, Chain, ChannelsLast, Dense, Depthwise, Net, Shuffled
from peel.data.batch import Batch
from peel.data.in_memory import InMemoryImages
from peel.steps.distillation import Distillation, InPlace, Pair, distillation_loss, in_place_pair
from peel.surgery import info_of
from peel.train.engine import Engine
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = Engine(torch.device("cpu"))

rows = st.lists(st.lists(st.floats(-8, 8), min_size=4, max_size=4), min_size=3, max_size=3)


def images(count: int = 64) -> InMemoryImages:
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 8, 8, 3), generator=rng, dtype=torch.uint8)
    return InMemoryImages(pixels, torch.randint(5, (count,), generator=rng), (0.5,) * 3, (0.3,) * 3)


def batch(count: int = 16) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=rng), torch.randint(5, (count,), generator=rng)


# The loss


def soft_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    return distillation_loss(student, teacher, temperature=temperature)


@given(rows, rows, st.floats(0.5, 8))
def test_the_soft_loss_is_the_kl_divergence(
    student: list[list[float]], teacher: list[list[float]], temperature: float
) -> None:
    def probabilities(scores: list[float]) -> list[float]:
        powers = [math.exp(score / temperature) for score in scores]
        return [power / sum(powers) for power in powers]

    total = 0.0
    for given_scores, wanted_scores in zip(student, teacher):
        total += sum(
            p * math.log(p / q) for p, q in zip(probabilities(wanted_scores), probabilities(given_scores))
        )
    found = soft_loss(torch.tensor(student), torch.tensor(teacher), temperature)
    assert float(found) == pytest.approx(temperature**2 * total / 3, rel=1e-3, abs=1e-4)


@given(rows, st.floats(0.5, 8), st.floats(-5, 5))
def test_the_soft_loss_of_equal_logits_is_zero(
    scores: list[list[float]], temperature: float, shift: float
) -> None:
    assert float(soft_loss(torch.tensor(scores) + shift, torch.tensor(scores), temperature)) == pytest.approx(
        0, abs=1e-4
    )


def test_gradients_keep_their_size_at_any_temperature() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(8, 5, requires_grad=True), torch.randn(8, 5)
    sizes = [
        float(torch.autograd.grad(soft_loss(student, teacher, temperature), student)[0].norm())
        for temperature in (1, 4, 16, 64)
    ]
    assert max(sizes) < 2 * min(sizes)


# A teacher


def test_the_teacher_adds_its_term_and_gets_no_gradients() -> None:
    torch.manual_seed(0)
    student, teacher = Chain(), Chain().eval()
    pictures, labels = batch()
    plain = CrossEntropy(0.1)(student, Batch(pictures, labels))
    losses = Distillation(CrossEntropy(0.1), teacher, 0.3, 2.0)(student, Batch(pictures, labels))
    with torch.no_grad():
        term = soft_loss(student(pictures), teacher(pictures), 2.0)
    assert float(losses.total.detach()) == pytest.approx(float(plain.total.detach() + 0.3 * term), rel=1e-5)
    assert float(losses.terms["distillation"]) == pytest.approx(float(term), rel=1e-5)
    assert float(losses.terms["cross_entropy"]) == float(plain.total.detach())
    losses.total.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_a_weight_of_zero_trains_as_without_a_teacher() -> None:
    torch.manual_seed(0)
    student, teacher = Chain(), Chain().eval()
    recipe = Recipe(epochs=2, batch_size=16, lr=0.05, augment="none")
    taught, alone = copy.deepcopy(student), copy.deepcopy(student)
    fit(taught, Distillation(CrossEntropy(), teacher, 0.0), images(), recipe, engine=CPU, seed=0)
    fit(alone, CrossEntropy(), images(), recipe, engine=CPU, seed=0)
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in taught.state_dict().items())


def test_a_student_approaches_its_teacher() -> None:
    torch.manual_seed(0)
    student, teacher = Chain(), Chain().eval()
    teacher.fc.weight.data *= 5
    recipe = Recipe(epochs=8, batch_size=16, lr=0.05, augment="none", weight_decay=0.0)
    ends = []
    for weight in (0.0, 20.0):
        history = fit(
            copy.deepcopy(student),
            Distillation(CrossEntropy(), teacher, weight),
            images(),
            recipe,
            engine=CPU,
            seed=0,
        )
        ends.append(history[-1].train["distillation"])
    assert ends[1] < 0.3 * history[0].train["distillation"]
    assert ends[1] < 0.3 * ends[0]


def test_the_first_output_of_a_teacher_with_two_heads_is_used() -> None:
    torch.manual_seed(0)
    teacher = AuxiliaryHead().train()
    pictures, labels = batch()
    losses = Distillation(CrossEntropy(), teacher)(Chain(), Batch(pictures, labels))
    assert math.isfinite(float(losses.total.detach()))


# A student inside a wider network


def widths_of(graph: peel.ChannelGraph) -> dict[str, int]:
    """Some ties narrower than the original, others wider, some wider than 1.5 times the original."""
    factors = (0.5, 2.0, 0.75, 1.0)
    return {
        name: max(1, int(width * factors[i % 4] / graph.steps[name])) * graph.steps[name]
        for i, (name, width) in enumerate(graph.widths.items())
    }


def first_channels(pair: Pair, graph: peel.ChannelGraph, widths: dict[str, int]) -> nn.Module:
    """The wide network cut to its first channels."""
    wide = graph.at(info_of(pair.wide).widths)
    order = {tie: -torch.arange(width, dtype=torch.float32) for tie, width in wide.widths.items()}
    return peel.slim(pair.wide, widths, graph=wide, weights="inherit", scores=order)


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_the_student_is_the_first_channels_of_the_wide_network(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    widths = widths_of(graph)
    torch.manual_seed(0)
    pair = in_place_pair(net, graph, widths).eval()
    for parameter in pair.parameters():
        nn.init.normal_(parameter)
    pictures = torch.randn(2, *kind.shape)
    student = pair.student()
    assert torch.allclose(pair(pictures), student(pictures), rtol=1e-4, atol=1e-4)
    if kind is Shuffled:
        return  # scores select channels of the first layer, not those that a shuffle combines with them
    cut = dict(first_channels(pair, graph, widths).named_parameters())
    norms = {name.rpartition(".")[0] for name in graph.scales}
    for name, parameter in student.named_parameters():
        if name.rpartition(".")[0] not in norms:
            assert torch.equal(parameter, cut[name]), name


def test_the_wide_network_is_1_5_times_the_original_or_as_wide_as_the_student() -> None:
    net, graph = traced_net(Dense)  # a 4, b 6, c 8
    pair = in_place_pair(net, graph, {"a": 2, "b": 15})
    assert [pair.wide.get_submodule(name).out_channels for name in "abc"] == [6, 15, 12]
    assert [pair.student().get_submodule(name).out_channels for name in "abc"] == [2, 15, 8]
    assert [
        in_place_pair(net, graph, {"a": 2}, factor=1.0).wide.get_submodule(name).out_channels
        for name in "abc"
    ] == [4, 6, 8]


def test_changing_the_first_channels_of_the_wide_network_changes_the_student() -> None:
    net, graph = traced_net(Depthwise)
    pair = in_place_pair(net, graph, {"expand": 6, "squeeze": 3}).eval()
    pictures, _ = batch(4)
    with torch.no_grad():
        before = pair(pictures)
        pair.wide.expand.weight[6:] += 1
        pair.wide.depthwise.weight[12:] += 1  # two outputs per channel
        pair.wide.squeeze.weight[3:] += 1
        pair.wide.fc.weight[:, 12:] += 1
        assert torch.equal(pair(pictures), before)
        for name, first in (("expand", 6), ("depthwise", 12), ("squeeze", 3), ("excite", 12)):
            pair.wide.get_submodule(name).weight[first - 1] += 1
            after = pair(pictures)
            assert not torch.equal(after, before), name
            before = after


def test_a_student_reads_its_channels_of_each_part_of_a_concatenation() -> None:
    net, graph = traced_net(Dense)  # c reads the image (3), a (4) and b (6)
    pair = in_place_pair(net, graph, {"a": 2, "b": 3, "c": 8})
    wide, student = pair.wide.c.weight, pair.student().c.weight
    assert wide.shape[1] == 3 + 6 + 9
    assert torch.equal(student, wide[:8, [0, 1, 2, 3, 4, 9, 10, 11]])


def test_norm_layers_are_the_students_own() -> None:
    net, graph = traced_net(Dense)
    pair = in_place_pair(net, graph, {"a": 2, "b": 3, "c": 8}).train()
    pictures, _ = batch()
    pair(pictures)
    student = pair.student()
    assert int(student.bn.num_batches_tracked) == 1
    assert float(student.bn.running_mean.abs().sum()) > 0
    assert int(pair.wide.bn.num_batches_tracked) == 0
    with torch.no_grad():
        pair.wide.bn.weight.fill_(7)
    assert float(pair.student().bn.weight.detach().max()) == 1


def test_every_weight_is_trained_and_saved_once() -> None:
    net, graph = traced_net(Dense)
    pair = in_place_pair(net, graph, {"a": 2, "b": 3})
    own = 2 * (3 + 2 + 3)
    assert sum(p.numel() for p in pair.parameters()) == sum(p.numel() for p in pair.wide.parameters()) + own
    other = in_place_pair(net, graph, {"a": 2, "b": 3})
    pictures, _ = batch()
    pair(pictures)
    other.load_state_dict(pair.state_dict())
    assert torch.equal(pair.eval()(pictures), other.eval()(pictures))


@pytest.mark.parametrize("kind", [Chain, Dense, Depthwise, ChannelsLast], ids=lambda kind: kind.__name__)
def test_gradients_of_the_student_reach_its_channels_of_the_wide_network(kind: type[Net]) -> None:
    torch.manual_seed(1)  # by chance, both channels of a gate may be dead
    net, graph = traced_net(kind)
    widths = {name: width // 2 for name, width in graph.widths.items()}
    pair = in_place_pair(net, graph, widths)
    pictures, labels = batch()
    F.cross_entropy(pair(pictures), labels).backward()
    student = dict(pair.student().named_parameters())
    shared = [name for name, parameter in pair.wide.named_parameters() if parameter.grad is not None]
    assert {name for name in shared if name.endswith("weight")} >= {"fc.weight"}
    for name in shared:
        gradient = pair.wide.get_parameter(name).grad
        assert gradient is not None
        assert 0 < int((gradient != 0).sum()) <= student[name].numel()
    assert all(parameter.grad is not None for parameter in pair.own.values())


def test_in_place_losses() -> None:
    net, graph = traced_net(Dense)
    torch.manual_seed(0)
    pair = in_place_pair(net, graph, {"a": 2, "b": 3}).eval()
    pictures, labels = batch()
    losses = InPlace(CrossEntropy(0.1), weight=0.7, temperature=2.0)(pair, Batch(pictures, labels))
    hard = CrossEntropy(0.1)(pair.wide, Batch(pictures, labels)).total
    own = CrossEntropy(0.1)(pair, Batch(pictures, labels))
    soft = soft_loss(pair(pictures), pair.wide(pictures).detach(), 2.0)
    assert float(losses.total.detach()) == pytest.approx(float((hard + 0.7 * soft).detach()), rel=1e-5)
    assert torch.equal(losses.output, own.output)
    assert float(losses.terms["distillation"]) == pytest.approx(float(soft.detach()), rel=1e-5)
    both = InPlace(CrossEntropy(0.1), weight=0.7, hard_weight=0.5, temperature=2.0)(
        pair, Batch(pictures, labels)
    )
    assert float((both.total - losses.total).detach()) == pytest.approx(
        0.5 * float(own.total.detach()), rel=1e-4
    )
    # Weights beyond the student's learn from the labels alone.
    found, alone = (torch.autograd.grad(total, pair.wide.fc.weight)[0] for total in (losses.total, hard))
    assert torch.allclose(found[:, 8:], alone[:, 8:])
    assert not torch.allclose(found[:, :8], alone[:, :8])


def test_in_place_training_improves_both_networks() -> None:
    net, graph = traced_net(Dense)
    torch.manual_seed(0)
    widths = {"a": 3, "b": 4, "c": 12}
    pair = in_place_pair(net, graph, widths)
    recipe = Recipe(epochs=40, batch_size=8, lr=0.2, augment="none", weight_decay=0.0)
    history = fit(pair, InPlace(CrossEntropy()), images(8), recipe, engine=CPU, seed=0)
    first, last = history[0].train, history[-1].train
    assert last["wide"] < 0.5 * first["wide"]
    assert last["cross_entropy"] < 0.5 * first["cross_entropy"]  # of the student, which learns without labels
    student = pair.student()
    assert not student.training
    pictures, _ = batch()
    assert torch.allclose(student(pictures), pair(pictures), rtol=1e-4, atol=1e-4)
    assert peel.trace(student, pictures[:1]).macs() == graph.macs(widths)


def test_training_the_pair_does_not_change_a_copied_student() -> None:
    net, graph = traced_net(Chain)
    pair = in_place_pair(net, graph, {"conv1": 3}).eval()
    pictures, labels = batch()
    student = pair.student()
    before = student(pictures)
    fit(pair, InPlace(CrossEntropy()), images(), Recipe(epochs=1, batch_size=16), engine=CPU, seed=0)
    assert torch.equal(student(pictures), before)
    later = pair.student()
    assert torch.equal(student(pictures), before)
    assert not torch.equal(later(pictures), before)
    F.cross_entropy(later(pictures), labels).backward()
    assert all(parameter.grad is not None for parameter in later.parameters())


def test_a_pair_has_the_record_of_its_student_and_checks_its_widths() -> None:
    net, graph = traced_net(Chain)
    assert info_of(in_place_pair(net, graph, {"conv1": 3})).widths == {"conv1": 3, "conv2": 12}
    with pytest.raises(peel.WidthsError, match="conv9"):
        in_place_pair(net, graph, {"conv9": 3})


def test_parameters_that_came_frozen_are_trained() -> None:
    torch.manual_seed(0)
    net = Dense().requires_grad_(False)
    pair = in_place_pair(net, peel.trace(net, torch.randn(1, 3, 8, 8)), {"a": 2})
    before = copy.deepcopy(dict(pair.named_parameters()))
    fit(pair, InPlace(CrossEntropy()), images(), Recipe(epochs=1, batch_size=16), engine=CPU, seed=0)
    assert not any(torch.equal(parameter, before[name]) for name, parameter in pair.named_parameters())
    assert all(parameter.requires_grad for parameter in pair.student().parameters())
    assert not any(parameter.requires_grad for parameter in net.parameters())

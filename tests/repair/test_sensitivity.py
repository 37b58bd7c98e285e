"""Sensitivity: how much the output of a trained network changes when channels are cut and it is refitted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import peel
from helpers.nets import Dense, Depthwise, Flattened, Gated, Grouped, Net, Residual, Shuffled
from peel.errors import DataError
from peel.repair.sensitivity import Sensitivity, measure_sensitivity


class Perceptron(nn.Module):
    """Linear in its hidden channels, so that the effect of a cut can be computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def measured(model: nn.Module, images: Tensor) -> Sensitivity:
    return measure_sensitivity(model, peel.trace(model, images[:2]), images)


def refit_error(model: Perceptron, x: Tensor, kept: Tensor) -> float:
    """Least squares from the kept hidden channels to the output, over the variance of the output."""
    with torch.no_grad():
        hidden, output = torch.tanh(model.first(x)).double()[:, kept], model(x).double()
    rows = torch.cat([hidden, torch.ones(len(x), 1)], 1)
    fitted = rows @ torch.linalg.lstsq(rows, output).solution
    return float((output - fitted).square().mean() / output.var(correction=0))


def test_the_change_is_that_of_a_refitted_layer() -> None:
    torch.manual_seed(0)
    model, x = Perceptron().eval(), torch.randn(8192, 6)
    found = measured(model, x)
    (tie,) = found.change
    order = found.scores[tie].argsort(descending=True)
    for count in (4, 8, 12):
        wanted = refit_error(model, x, order[:count])
        # A prediction of all hidden channels is a little worse than a fit of the three outputs.
        assert wanted * 0.85 <= float(found.change[tie][count]) <= 3 * wanted
    assert float(found.change[tie][8]) == pytest.approx(float(predicted_error(model, x, order[:8])), rel=0.15)


def predicted_error(model: Perceptron, x: Tensor, kept: Tensor) -> Tensor:
    """The change of the output if the other hidden channels are predicted from the kept ones."""
    with torch.no_grad():
        hidden = torch.tanh(model.first(x)).double()
        rows = torch.cat([hidden[:, kept], torch.ones(len(x), 1)], 1)
        predicted = rows @ torch.linalg.lstsq(rows, hidden).solution
        output, weight = model(x).double(), model.second.weight.double()
        return ((hidden - predicted) @ weight.T).square().mean() / output.var(correction=0)


def test_copies_of_channels_cost_nothing_and_are_cut_first() -> None:
    torch.manual_seed(0)
    model = Perceptron().eval()
    with torch.no_grad():
        model.first.weight[8:], model.first.bias[8:] = model.first.weight[:8], model.first.bias[:8]
    found = measured(model, torch.randn(8192, 6))
    (tie,) = found.change
    change = found.change[tie]
    assert float(change[8]) < 0.1 * float(change[4])
    first = set((found.scores[tie].argsort(descending=True)[:8] % 8).tolist())
    assert first == set(range(8))


def test_as_many_images_as_channels_do_not_explain_everything() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)).eval()
    found = measured(model, torch.randn(64, 64))
    (tie,) = found.change
    change = found.change[tie]
    assert float(change[48]) > 0.05 * float(change[0]), "64 independent channels, 64 images"


class Uneven(nn.Module):
    """Two branches of the same cost; the output hardly needs the second."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(32, 8, 1))
        self.two = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(32, 8, 1))
        self.head = nn.Linear(8, 5)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((self.one(x) + self.factor * self.two(x)).mean((2, 3)))


def test_what_the_output_needs_least_is_cut_first() -> None:
    torch.manual_seed(0)
    images = torch.randn(64, 3, 8, 8)
    found = measured(Uneven(0.1).eval(), images)
    widths = found.widths("60%", divisor=1)
    assert widths["two.0"] < widths["one.0"] / 2
    assert found.graph.macs(widths) <= 0.6 * found.graph.macs()


def test_the_model_is_not_changed_and_the_result_repeats() -> None:
    torch.manual_seed(0)
    model, images = Uneven(0.5).train(), torch.randn(40, 3, 8, 8)
    model.stem.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    first = measured(model, images)
    torch.rand(3)
    second = measured(model, images)
    for tie, change in first.change.items():
        assert torch.equal(change, second.change[tie]) and torch.equal(first.scores[tie], second.scores[tie])
    assert model.training and not model.stem.weight.requires_grad and model.head.weight.requires_grad
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("net", [Dense, Depthwise, Flattened, Gated, Grouped, Residual, Shuffled])
def test_networks_of_every_kind_meet_the_budget(net: type[Net]) -> None:
    torch.manual_seed(0)
    model = net().eval()
    images = torch.randn(16, *model.shape)
    found = measured(model, images)
    for change in found.change.values():
        assert torch.isfinite(change).all() and (change.diff() <= 0).all()
    widths = found.widths("60%", divisor=1)
    small = peel.slim(model, widths, graph=found.graph, weights="inherit", scores=found.scores)
    peel.repair(small, model, images, graph=found.graph)
    assert found.graph.macs(widths) <= 0.6 * found.graph.macs()
    assert torch.isfinite(small.eval()(images)).all()


@pytest.mark.parametrize("net", [Flattened, Gated, Grouped, Shuffled])
def test_channels_that_come_in_several_slices_have_scores(net: type[Net]) -> None:
    torch.manual_seed(0)
    model = net().eval()
    images = torch.randn(16, *model.shape)
    graph = peel.trace(model, images[:1])
    scores = peel.explain_scores(model, graph, images)
    assert scores and all(len(values) == graph.widths[tie] for tie, values in scores.items())
    small = peel.slim(
        model, peel.uniform(graph, "60%", divisor=1), graph=graph, weights="inherit", scores=scores
    )
    assert small.eval()(images).shape == model(images).shape


def test_a_loss_beside_the_logits_does_not_count() -> None:
    class WithLoss(Perceptron):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            logits = super().forward(x)
            return {"logits": logits, "loss": logits.square().mean()}

    torch.manual_seed(0)
    model, plain, images = WithLoss().eval(), Perceptron().eval(), torch.randn(64, 6)
    plain.load_state_dict(model.state_dict())
    found, expected = measured(model, images), measured(plain, images)
    for tie, change in expected.change.items():
        assert torch.equal(found.change[tie], change)


def test_batches_of_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = nn.Linear(6, 16), nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(torch.relu(self.left(a) + self.right(b)))

    torch.manual_seed(0)
    model = Two().eval()
    inputs = [(torch.randn(16, 6), torch.randn(16, 4)) for _ in range(4)]
    graph = peel.trace(model, inputs[0])
    found = measure_sensitivity(model, graph, [(some, torch.zeros(16)) for some in inputs])
    assert graph.macs(found.widths("50%")) <= graph.macs() / 2


def test_a_network_without_floating_point_output_is_refused() -> None:
    class Labels(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(1)

    model = Labels().eval()
    graph = peel.trace(Perceptron(), torch.randn(2, 6))
    with pytest.raises(DataError, match="no floating-point output"):
        measure_sensitivity(model, graph, torch.randn(16, 6))


def test_images_that_do_not_fit_are_refused() -> None:
    model = Uneven(0.5).eval()
    graph = peel.trace(model, torch.randn(1, 3, 8, 8))
    for images in (torch.randn(8, 1, 8, 8), torch.full((8, 3, 8, 8), torch.nan)):
        with pytest.raises(DataError, match=r"cannot take these images|values that are not finite"):
            measure_sensitivity(model, graph, images)


class Logarithm(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log()


def test_outputs_that_are_not_finite_give_no_curves() -> None:
    torch.manual_seed(0)
    with pytest.raises(DataError, match="not finite on these images"):
        measured(Logarithm().eval(), torch.randn(64, 6))

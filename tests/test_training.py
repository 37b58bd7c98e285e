"""The training loop and its recipes."""

from __future__ import annotations

import copy
import logging
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peel.errors import ConfigError, DataError, DivergedError
from peel.train import pace as pace_module
from peel.train.batch import Batch
from peel.train.chance import epoch_order
from peel.train.checkpoint import Checkpoints
from peel.train.data import Split
from peel.train.history import Epoch
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy, Losses, class_scores
from peel.train.pace import Pace
from peel.train.recipe import RECIPES, Recipe, backbone_recipe, named_recipe
from peel.train.resident import Resident
from peel.train.stop import Stopped, listening
from peel.train.view import AS_IT_IS
from small import CPU, Small, few_digits, same_weights

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = Recipe(epochs=3, batch_size=50, lr=0.05, augment="none", label_smoothing=0.0)


def fresh(seed: int = 0, **settings: Any) -> Small:
    torch.manual_seed(seed)
    return Small(**settings)


def trained(recipe: Recipe = PLAIN, seed: int = 0, model: nn.Module | None = None, **settings: Any) -> tuple[nn.Module, list[Epoch]]:
    model = model if model is not None else fresh()
    history = fit(model, CrossEntropy(recipe.label_smoothing), few_digits().train, recipe, engine=CPU, seed=seed, **settings)
    return model, history


# The learning rate


def rates(recipe: Recipe, steps: int) -> list[float]:
    return [recipe.rate(step, steps) for step in range(recipe.epochs * steps)]


def test_the_rate_warms_up_in_a_line_and_falls_to_zero_in_a_cosine() -> None:
    found = rates(Recipe(epochs=5, lr=0.2, warmup_epochs=1), 10)
    assert found[:10] == pytest.approx([0.02 * i for i in range(1, 11)])
    assert found[10] == pytest.approx(0.2)
    assert found[30] == pytest.approx(0.1)
    assert found[10:] == sorted(found[10:], reverse=True)
    assert 0 < found[-1] < 0.2 * 0.002
    # A cosine is as far above its middle before it as below it after it.
    assert [0.2 - rate for rate in found[11:]] == pytest.approx(found[:10:-1])


def test_the_rate_can_start_from_any_value_or_without_a_warm_up() -> None:
    warm = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=1, warmup_from=0.2), 4)
    assert warm[:4] == pytest.approx([0.25, 0.3, 0.35, 0.4])
    cold = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=0), 4)
    assert cold[0] == pytest.approx(0.4)
    fraction = rates(Recipe(epochs=3, lr=0.4, warmup_epochs=0.5), 4)
    assert fraction[:3] == pytest.approx([0.2, 0.4, 0.4])


def test_a_warm_up_longer_than_the_training_never_exceeds_the_rate() -> None:
    assert max(rates(Recipe(epochs=2, lr=0.4, warmup_epochs=5), 3)) == pytest.approx(0.4)


def test_the_rate_falls_in_steps_at_the_milestones() -> None:
    found = rates(Recipe(epochs=10, lr=1.0, warmup_epochs=0, schedule="steps", milestones=(0.3, 0.6, 0.8), gamma=0.2), 10)
    expected = [1.0] * 30 + [0.2] * 30 + [0.04] * 20 + [0.008] * 20
    assert found == pytest.approx(expected)


def test_the_sum_of_rates_is_the_distance_under_a_constant_gradient() -> None:
    recipe = Recipe(epochs=4, lr=0.3, momentum=0.9, nesterov=False, weight_decay=0.0)
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimiser = torch.optim.SGD([weight], lr=0.0, momentum=0.9)
    for step in range(4 * 500):
        optimiser.param_groups[0]["lr"] = recipe.rate(step, 500)
        weight.grad = torch.ones_like(weight)
        optimiser.step()
    assert -float(weight.detach()) == pytest.approx(recipe.rate_sum(500) / 0.1, rel=1e-2)


def test_the_rate_that_training_uses_is_the_recipes() -> None:
    _, history = trained(replace(PLAIN, epochs=3))
    assert [record.lr for record in history] == pytest.approx([PLAIN.rate(step, 4) for step in (3, 7, 11)])


# Named recipes, as published (methods.md, section 12)

PAPER = {
    "batch_size": 512, "lr": 0.2, "warmup_epochs": 1, "schedule": "cosine", "momentum": 0.9, "nesterov": True, "decay_norms": False,
    "label_smoothing": 0.1,
}  # fmt: skip
FPGM = {"batch_size": 128, "lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("imagenet-resnet", {**PAPER, "epochs": 100, "weight_decay": 1e-4}),
        ("imagenet-mobilenet", {**PAPER, "epochs": 250, "weight_decay": 4e-5}),
        ("imagenet-backbone", {**PAPER, "epochs": 50, "weight_decay": 1e-4}),
        ("imagenet-mobilenet-backbone", {**PAPER, "epochs": 50, "weight_decay": 4e-5}),
        ("cifar", {**FPGM, "epochs": 200, "schedule": "cosine"}),
        ("cifar-steps", {**FPGM, "epochs": 200, "schedule": "steps", "milestones": (60 / 200, 120 / 200, 160 / 200), "gamma": 0.2}),
        ("cifar-backbone", {**FPGM, "epochs": 50}),
    ],
)
def test_named_recipes_are_the_published_ones(name: str, expected: dict[str, Any]) -> None:
    recipe = named_recipe(name)
    assert {field: getattr(recipe, field) for field in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_shorter_one_for_the_backbone(name: str) -> None:
    backbone = backbone_recipe(name)
    assert backbone.epochs < named_recipe(name).epochs
    assert (backbone.batch_size, backbone.lr, backbone.weight_decay) == (
        named_recipe(name).batch_size,
        named_recipe(name).lr,
        named_recipe(name).weight_decay,
    )


def test_the_papers_backbone_trains_for_50_epochs() -> None:
    assert {name: backbone_recipe(name).epochs for name in ("imagenet-resnet", "imagenet-mobilenet", "cifar", "cifar-steps")} == {
        "imagenet-resnet": 50, "imagenet-mobilenet": 50, "cifar": 50, "cifar-steps": 50,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "epochs must be a whole number of at least 1, not 0"),
        ("epochs", 2.5, "epochs must be a whole number"),
        ("batch_size", True, "batch_size must be a whole number"),
        ("lr", -0.1, "lr must be a number from 0"),
        ("lr", math.nan, "lr must be a number"),
        ("lr", "fast", "not 'fast'"),
        ("momentum", 1.0, "momentum must be a number from 0 to below 1"),
        ("label_smoothing", 1.0, "label_smoothing"),
        ("schedule", "cosin", "Did you mean cosine"),
        ("augment", "crop-flop", "Did you mean crop-flip"),
        ("milestones", (0.5, 1.5), r"milestones .* \(0.5, 1.5\)"),
        ("momentum", 0.0, "nesterov needs a momentum"),
        ("epoch", 3, "no field 'epoch'.* Did you mean epochs"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PLAIN.changed(**{field: value})


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'imagenet-resnett'\. Did you mean imagenet-resnet"):
        named_recipe("imagenet-resnett")


# Weight decay


@dataclass(frozen=True)
class Nothing:
    """A loss whose gradient is zero everywhere."""

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        scores = class_scores(model(batch.images))
        loss = 0.0 * sum(parameter.sum() for parameter in model.parameters())
        return Losses(loss, {}, scores)


@pytest.mark.parametrize("decay_norms", [False, True])
def test_norms_and_biases_decay_only_where_asked(decay_norms: bool) -> None:
    recipe = replace(PLAIN, epochs=1, lr=0.1, weight_decay=0.01, warmup_epochs=0, decay_norms=decay_norms, momentum=0.0, nesterov=False)
    model = fresh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    fit(model, Nothing(), few_digits().train, recipe, engine=CPU, seed=0)
    left = math.prod(1 - recipe.rate(step, 4) * 0.01 for step in range(4))
    assert left < 0.999
    for name, parameter in model.named_parameters():
        expected = left if name in ("conv1.weight", "conv2.weight", "conv3.weight", "conv4.weight", "fc.weight") or decay_norms else 1.0
        assert parameter.detach().mean().item() == pytest.approx(expected, rel=1e-5), name


# The loss and the scores


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothed_labels_are_spread_over_all_classes(smoothing: float) -> None:
    model, images, labels = fresh().eval(), torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 9, 9, 4])
    losses = CrossEntropy(smoothing)(model, Batch(images, labels))
    soft = torch.full((6, 10), smoothing / 10)
    soft[torch.arange(6), labels] += 1 - smoothing
    expected = -(soft * model(images).log_softmax(1)).sum(1).mean()
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert losses.terms["cross_entropy"].item() == pytest.approx(expected.item(), rel=1e-6)


class Known(nn.Module):
    """Scores read off the image: no weights, nothing to compute."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def test_top_1_and_top_5_count_what_a_person_would_count() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (57, 1, 12, 1), dtype=torch.uint8)
    labels = torch.randint(0, 12, (57,))
    split = Resident(pixels, labels, (0.5,), (0.25,))
    scores = evaluate(Known(), split, CPU, batch_size=10)
    first = among = 0
    for row, label in zip(pixels.flatten(1).tolist(), labels.tolist()):
        above = sum(value > row[label] for value in row)
        assert row.count(row[label]) == 1 or above > 5 or above + row.count(row[label]) <= 5, "a tie would make this ambiguous"
        first, among = first + (above == 0), among + (above < 5)
    assert scores.top1 == first / 57
    assert scores.top5 == among / 57
    assert 0 < first < among < 57


def test_top_5_of_three_classes_is_certain() -> None:
    split = Resident(torch.randint(0, 256, (8, 1, 3, 1), dtype=torch.uint8), torch.arange(8) % 3, (0.5,), (0.25,))
    assert evaluate(Known(), split, CPU).top5 == 1.0


def test_evaluation_leaves_the_network_as_it_was() -> None:
    model = fresh(dropout=0.5).train()
    before = copy.deepcopy(model)
    first = evaluate(model, few_digits().test, CPU)
    assert model.training
    assert same_weights(model, before)
    assert evaluate(model, few_digits().test, CPU) == first


# Training


def test_training_reduces_the_loss_and_learns_the_digits() -> None:
    recipe = Recipe(epochs=12, batch_size=50, lr=0.1, augment="none", label_smoothing=0.0)
    model, history = trained(recipe, test=few_digits().test)
    assert [record.epoch for record in history] == list(range(1, 13))
    assert history[-1].train["loss"] < 0.25 * history[0].train["loss"]
    assert history[-1].test is not None
    assert history[-1].test["top1"] > 0.75
    assert history[-1].test["top1"] == evaluate(model, few_digits().test, CPU).top1
    assert not model.training


def test_training_is_what_a_plain_loop_of_sgd_does() -> None:
    recipe = replace(PLAIN, epochs=2, weight_decay=0.01, label_smoothing=0.1)
    model, _ = trained(recipe)
    reference, data = fresh(), few_digits().train
    weights = [parameter for parameter in reference.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in reference.parameters() if parameter.ndim <= 1]
    optimiser = torch.optim.SGD([{"params": weights, "weight_decay": 0.01}, {"params": others}], lr=1.0, momentum=0.9, nesterov=True)
    for epoch in range(2):
        for step, index in enumerate(epoch_order(200, 0, epoch).split(50)):
            images, labels, _ = next(iter(data.batches(index, 50, AS_IT_IS, CPU.device)))
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate(4 * epoch + step, 4)
            optimiser.zero_grad()
            nn.functional.cross_entropy(reference(images), labels, label_smoothing=0.1).backward()
            optimiser.step()
    expected = reference.state_dict()
    assert all(torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-5) for name, tensor in model.state_dict().items())


def test_the_recorded_loss_is_the_mean_over_the_batches() -> None:
    # Without learning, the batches in training mode have the same losses every time.
    recipe = replace(PLAIN, epochs=1, lr=0.0)
    _, history = trained(recipe)
    seen: list[float] = []

    class Noting(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            losses = super().__call__(model, batch)
            seen.append(float(losses.total.detach()))
            return losses

    fit(fresh(), Noting(), few_digits().train, recipe, engine=CPU, seed=0)
    assert len(seen) == 4
    assert history[0].train["loss"] == pytest.approx(sum(seen) / 4)


def test_each_epoch_sees_every_image_at_most_once_and_whole_batches_only() -> None:
    seen: list[Tensor] = []

    class Noting(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            seen.append(batch.images.detach().clone())
            return super().__call__(model, batch)

    fit(fresh(), Noting(), few_digits().train, replace(PLAIN, epochs=2, batch_size=60), engine=CPU, seed=0)
    assert [len(batch) for batch in seen] == [60] * 6
    for epoch in (seen[:3], seen[3:]):
        assert len({image.contiguous().numpy().tobytes() for batch in epoch for image in batch}) == 180


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    recipe = replace(PLAIN, epochs=1, augment="crop")
    first, second, other = (fresh(dropout=0.3) for _ in range(3))
    trained(recipe, model=first)
    torch.rand(17)
    trained(recipe, model=second)
    trained(recipe, seed=1, model=other)
    assert same_weights(first, second)
    assert not same_weights(first, other)


def test_a_batch_as_large_as_the_set_is_one_step_and_a_larger_one_is_refused() -> None:
    _, history = trained(replace(PLAIN, epochs=1, batch_size=200))
    assert len(history) == 1
    with pytest.raises(DataError, match=r"a batch of 201 images is larger than the training set of 200.* at most 200"):
        trained(replace(PLAIN, batch_size=201))


def test_what_is_found_at_the_end_of_an_epoch_is_kept_in_its_record() -> None:
    _, history = trained(each_epoch=lambda model: {"scale": float(model.get_parameter("norm1.weight").detach().abs().mean())})
    assert len({record.extra["scale"] for record in history}) == 3


# Divergence


class Poisoned:
    """The training images, with a batch that holds no numbers at one step of one epoch."""

    def __init__(self, split: Split, batch: int, epoch: int) -> None:
        self.split, self.batch, self.epoch, self.seen = split, batch, epoch, 0
        self.size, self.labels, self.shape = split.size, split.labels, split.shape

    def batches(self, *arguments: Any) -> Any:
        turn, self.seen = self.seen, self.seen + 1
        for number, batch in enumerate(self.split.batches(*arguments)):
            yield batch._replace(images=batch.images * math.nan) if (turn, number) == (self.epoch, self.batch) else batch


@pytest.mark.parametrize("seconds", [600.0, 0.0])
def test_a_loss_that_is_no_number_stops_the_training_and_keeps_the_last_good_checkpoint(seconds: float, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "peel")
    poisoned: Any = Poisoned(few_digits().train, 1, 1)
    with pytest.raises(DivergedError, match=r"\(epoch 2, step \d\).*kept in .*lower lr"):
        fit(
            fresh(), CrossEntropy(), poisoned, PLAIN, engine=CPU, seed=0, test=few_digits().test,
            checkpoints=checkpoints, checkpoint_seconds=seconds,
        )  # fmt: skip
    state = checkpoints.newest()
    assert state is not None
    assert (state["epoch"], state["step"]) == (1, 0 if seconds else 1)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["model"].values())
    # The images mended, the same call ends as if nothing had happened.
    mended, history = trained(checkpoints=checkpoints)
    straight, _ = trained()
    assert len(history) == 3
    assert same_weights(mended, straight)


def test_a_last_step_that_breaks_the_weights_is_noticed_although_its_loss_was_a_number(tmp_path: Path) -> None:
    """The loss of a step is computed before its weights change: the damage of the last one shows in no loss of the epoch."""

    class Breaking(CrossEntropy):
        calls = 0

        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            Breaking.calls += 1
            losses = super().__call__(model, batch)
            # The square root of zero: a finite value with an infinite gradient.
            bad = (model.get_parameter("fc.bias") * 0).abs().sqrt().sum() if Breaking.calls == 8 else 0.0
            return Losses(losses.total + bad, losses.terms, losses.scores)

    checkpoints = Checkpoints(tmp_path, "peel")
    with pytest.raises(DivergedError, match="epoch 2, step 4"):
        fit(fresh(), Breaking(), few_digits().train, replace(PLAIN, epochs=2), engine=CPU, seed=0, checkpoints=checkpoints)
    state = checkpoints.newest()
    assert state is not None
    assert state["epoch"] == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["model"].values())


def test_a_loss_that_is_no_number_is_noticed_although_the_weights_are() -> None:
    class Undefined(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            losses = super().__call__(model, batch)
            return Losses(losses.total + math.inf, losses.terms, losses.scores)

    with pytest.raises(DivergedError):
        fit(fresh(), Undefined(), few_digits().train, PLAIN, engine=CPU, seed=0)


def test_a_rate_far_too_high_is_an_error_not_a_result() -> None:
    with pytest.raises(DivergedError):
        trained(replace(PLAIN, lr=1e18, warmup_epochs=0))


# Order of calls that others rely on


class Listening:
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def begin(self, history: Sequence[Epoch]) -> None:
        self.heard.append(("begin", len(history)))

    def step(self, done: int, total: int, images: int) -> None:
        self.heard.append(("step", done, total, images))

    def epoch(self, epoch: Epoch) -> None:
        self.heard.append(("epoch", epoch.epoch))


def test_a_watcher_hears_of_every_step_and_epoch_in_order() -> None:
    watcher = Listening()
    trained(replace(PLAIN, epochs=2), watcher=watcher)
    steps = [("step", done, 8, 50) for done in range(1, 9)]
    assert watcher.heard == [("begin", 0), *steps[:4], ("epoch", 1), *steps[4:], ("epoch", 2)]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("stop_at", [1, 4, 5, 7, 11])
def test_training_stopped_at_any_step_goes_on_with_the_same_bits(stop_at: int, dropout: float, tmp_path: Path) -> None:
    class Stopping(Listening):
        def step(self, done: int, total: int, images: int) -> None:
            if done == stop_at + 1:
                raise KeyboardInterrupt

    recipe = replace(PLAIN, augment="crop")
    arguments: dict[str, Any] = {"test": few_digits().test, "each_epoch": lambda model: {"scale": float(model.norm1.weight.detach().sum())}}
    straight, expected = trained(recipe, model=fresh(dropout=dropout), **arguments)
    checkpoints = Checkpoints(tmp_path, "peel")
    with pytest.raises(KeyboardInterrupt):
        trained(recipe, model=fresh(dropout=dropout), checkpoints=checkpoints, checkpoint_seconds=0.0, watcher=Stopping(), **arguments)
    torch.rand(5)
    watcher = Listening()
    resumed, history = trained(
        recipe, model=fresh(1, dropout=dropout), checkpoints=checkpoints, checkpoint_seconds=0.0, watcher=watcher, **arguments
    )
    assert watcher.heard[0] == ("begin", stop_at // 4)
    assert watcher.heard[1] == ("step", stop_at + 1, 12, 50), "finished steps are not repeated"
    assert same_weights(straight, resumed)
    timeless = [replace(record, seconds=0, images_per_second=0) for record in history]
    assert timeless == [replace(record, seconds=0, images_per_second=0) for record in expected]


def test_no_augmentation_shows_the_images_as_they_are() -> None:
    shown: list[Tensor] = []

    class Noting(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            shown.append(batch.images)
            return super().__call__(model, batch)

    train = few_digits().train
    plain = {
        image.contiguous().numpy().tobytes()
        for images, *_ in train.batches(torch.arange(200), 200, AS_IT_IS, CPU.device)
        for image in images
    }
    for augment, inside in (("none", 200), ("crop", 60)):
        shown.clear()
        fit(fresh(), Noting(), train, replace(PLAIN, epochs=1, augment=augment), engine=CPU, seed=0)
        same = sum(image.contiguous().numpy().tobytes() in plain for batch in shown for image in batch)
        assert same == 200 if augment == "none" else same < inside


# Going back after a divergence


def test_a_training_that_diverged_goes_back_and_on_with_half_the_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = replace(PLAIN, epochs=4, retries=1)
    split: Any = Poisoned(few_digits().train, 2, 2)
    model = fresh()
    with caplog.at_level(logging.WARNING, "peel"):
        history = fit(model, CrossEntropy(), split, recipe, engine=CPU, seed=0, checkpoints=Checkpoints(tmp_path, "a"))
    assert "on with 0.5 of the rate" in caplog.text
    assert [epoch.extra.get("slower") for epoch in history] == [None, None, 0.5, 0.5]
    assert history[2].lr == pytest.approx(0.5 * recipe.rate(11, 4))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_it_goes_back_to_its_beginning_where_nothing_was_kept_yet(tmp_path: Path) -> None:
    split: Any = Poisoned(few_digits().train, 1, 0)
    fit(fresh(), CrossEntropy(), split, replace(PLAIN, epochs=1, retries=1), engine=CPU, seed=0, checkpoints=Checkpoints(tmp_path, "a"))


def test_it_goes_back_only_as_often_as_it_was_asked_to(tmp_path: Path) -> None:
    class Never(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            return super().__call__(model, batch._replace(images=batch.images * math.nan))

    checkpoints = Checkpoints(tmp_path, "a")
    with pytest.raises(DivergedError):
        fit(fresh(), Never(), few_digits().train, replace(PLAIN, retries=2), engine=CPU, seed=0, checkpoints=checkpoints)


# Stopping while the test images are looked at


class Signalling:
    """Test images that ask the process to stop, the second time they are looked at."""

    def __init__(self, split: Split) -> None:
        self.split, self.size, self.labels, self.shape, self.times = split, split.size, split.labels, split.shape, 0

    def batches(self, *arguments: Any) -> Any:
        self.times += 1
        for batch in self.split.batches(*arguments):
            if self.times == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


def test_a_signal_during_the_evaluation_keeps_the_epoch(tmp_path: Path) -> None:
    data, recipe = few_digits(), replace(PLAIN, epochs=3)
    whole, first, second = fresh(), fresh(), fresh()
    straight = fit(whole, CrossEntropy(), data.train, recipe, engine=CPU, seed=0, test=data.test)
    checkpoints = Checkpoints(tmp_path, "a")
    test: Any = Signalling(data.test)
    with listening(), pytest.raises(Stopped):
        fit(first, CrossEntropy(), data.train, recipe, engine=CPU, seed=0, test=test, checkpoints=checkpoints)
    state = checkpoints.newest()
    assert state is not None
    assert (state["epoch"], state["step"]) == (1, 4)
    resumed = fit(second, CrossEntropy(), data.train, recipe, engine=CPU, seed=0, test=data.test, checkpoints=checkpoints)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in second.state_dict().items())
    assert [epoch.train for epoch in resumed] == [epoch.train for epoch in straight]
    assert [epoch.test for epoch in resumed] == [epoch.test for epoch in straight]


# Compiling


def test_compiling_waits_until_the_steps_that_are_left_repay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pace_module.time, "perf_counter", lambda: now[0])

    def asked(steps: int, seconds: float, compile: str = "auto") -> list[int]:
        """The steps before which the network would be compiled."""
        pace = Pace(replace(CPU, compile=compile))
        found = []
        for step in range(steps):
            if pace.repays_compiling(steps - step):
                found.append(step)
            now[0] += seconds
        return found

    assert asked(1000, 0.5) == []
    assert asked(1500, 0.5) == [49]
    assert asked(100_000, 0.001) == []
    assert asked(100, 0.5, "on") == [0]
    assert asked(100_000, 0.5, "off") == []


@pytest.mark.slow
def test_a_compiled_network_learns_the_same() -> None:
    plain, compiled = fresh(), fresh()
    recipe = replace(PLAIN, epochs=2)
    first = fit(plain, CrossEntropy(0.1), few_digits().train, recipe, engine=CPU, seed=0)
    second = fit(compiled, CrossEntropy(0.1), few_digits().train, recipe, engine=replace(CPU, compile="on"), seed=0)
    assert [epoch.train["loss"] for epoch in second] == pytest.approx([epoch.train["loss"] for epoch in first], rel=1e-4)
    assert set(compiled.state_dict()) == set(plain.state_dict())


def test_a_network_that_cannot_be_compiled_is_trained_as_it_is(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("there is no compiler here")

    plain, other = fresh(), fresh()
    first = fit(plain, CrossEntropy(), few_digits().train, PLAIN, engine=CPU, seed=0)
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile(self, backend=broken, **options))
    with caplog.at_level(logging.WARNING, "peel"):
        second = fit(other, CrossEntropy(), few_digits().train, PLAIN, engine=replace(CPU, compile="on"), seed=0)
    assert "cannot be compiled" in caplog.text
    assert "there is no compiler here" in caplog.text
    assert [epoch.train for epoch in second] == [epoch.train for epoch in first]
    assert same_weights(plain, other)


def test_short_epochs_are_kept_only_now_and_then_and_nothing_changes(tmp_path: Path) -> None:
    kept: list[int] = []

    class Noting(Checkpoints):
        def save(self, state: dict[str, Any], epoch: int, step: int) -> Path:
            kept.append(epoch)
            return super().save(state, epoch, step)

    whole, other = fresh(), fresh()
    recipe = replace(PLAIN, epochs=5)
    fit(whole, CrossEntropy(), few_digits().train, recipe, engine=CPU, seed=0)
    fit(other, CrossEntropy(), few_digits().train, recipe, engine=CPU, seed=0, checkpoints=Noting(tmp_path, "a"), epoch_seconds=600.0)
    assert kept == [5]
    assert same_weights(whole, other)

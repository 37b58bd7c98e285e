"""The training loop."""

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

from helpers.small import CPU, PLAIN, few_digits, fresh, same_weights, trained
from peel.data.augmentation import EVAL
from peel.data.batch import Batch
from peel.data.datasets import Split
from peel.data.in_memory import InMemoryImages
from peel.errors import CorruptFileError, DataError
from peel.train import auto_compile as pace_module
from peel.train.auto_compile import AutoCompile
from peel.train.checkpoint import Checkpoints
from peel.train.history import Epoch
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy, Losses, get_logits
from peel.train.recipe import Recipe
from peel.train.signals import Interrupted, handle_signals
from peel.utils.rng import epoch_order

pytestmark = pytest.mark.usefixtures("one_thread")


# Weight decay


@dataclass(frozen=True)
class Nothing:
    """A loss whose gradient is zero everywhere."""

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        scores = get_logits(model(batch.images))
        loss = 0.0 * sum(parameter.sum() for parameter in model.parameters())
        return Losses(loss, {}, scores)


@pytest.mark.parametrize("decay_norms", [False, True])
def test_norms_and_biases_decay_only_where_asked(decay_norms: bool) -> None:
    recipe = replace(
        PLAIN,
        epochs=1,
        lr=0.1,
        weight_decay=0.01,
        warmup_epochs=0,
        decay_norms=decay_norms,
        momentum=0.0,
        nesterov=False,
    )
    model = fresh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    fit(model, Nothing(), few_digits().train, recipe, engine=CPU, seed=0)
    left = math.prod(1 - recipe.rate(step, 4) * 0.01 for step in range(4))
    assert left < 0.999
    for name, parameter in model.named_parameters():
        expected = (
            left
            if name in ("conv1.weight", "conv2.weight", "conv3.weight", "conv4.weight", "fc.weight")
            or decay_norms
            else 1.0
        )
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
    split = InMemoryImages(pixels, labels, (0.5,), (0.25,))
    scores = evaluate(Known(), split, CPU, batch_size=10)
    first = among = 0
    for row, label in zip(pixels.flatten(1).tolist(), labels.tolist()):
        above = sum(value > row[label] for value in row)
        assert row.count(row[label]) == 1 or above > 5 or above + row.count(row[label]) <= 5, (
            "a tie would make this ambiguous"
        )
        first, among = first + (above == 0), among + (above < 5)
    assert scores.top1 == first / 57
    assert scores.top5 == among / 57
    assert 0 < first < among < 57


def test_top_5_of_three_classes_is_certain() -> None:
    split = InMemoryImages(
        torch.randint(0, 256, (8, 1, 3, 1), dtype=torch.uint8), torch.arange(8) % 3, (0.5,), (0.25,)
    )
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
    optimiser = torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.01}, {"params": others}], lr=1.0, momentum=0.9, nesterov=True
    )
    for epoch in range(2):
        for step, index in enumerate(epoch_order(200, 0, epoch).split(50)):
            images, labels, _ = next(iter(data.batches(index, 50, EVAL, CPU.device)))
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate(4 * epoch + step, 4)
            optimiser.zero_grad()
            nn.functional.cross_entropy(reference(images), labels, label_smoothing=0.1).backward()
            optimiser.step()
    expected = reference.state_dict()
    assert all(
        torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-5)
        for name, tensor in model.state_dict().items()
    )


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
    with pytest.raises(
        DataError, match=r"a batch of 201 images is larger than the training set of 200.* at most 200"
    ):
        trained(replace(PLAIN, batch_size=201))


def test_what_is_found_at_the_end_of_an_epoch_is_kept_in_its_record() -> None:
    _, history = trained(
        each_epoch=lambda model: {"scale": float(model.get_parameter("norm1.weight").detach().abs().mean())}
    )
    assert len({record.extra["scale"] for record in history}) == 3


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
def test_training_stopped_at_any_step_goes_on_with_the_same_bits(
    stop_at: int, dropout: float, tmp_path: Path
) -> None:
    class Stopping(Listening):
        def step(self, done: int, total: int, images: int) -> None:
            if done == stop_at + 1:
                raise KeyboardInterrupt

    recipe = replace(PLAIN, augment="crop")
    arguments: dict[str, Any] = {
        "test": few_digits().test,
        "each_epoch": lambda model: {"scale": float(model.norm1.weight.detach().sum())},
    }
    straight, expected = trained(recipe, model=fresh(dropout=dropout), **arguments)
    checkpoints = Checkpoints(tmp_path, "peel")
    with pytest.raises(KeyboardInterrupt):
        trained(
            recipe,
            model=fresh(dropout=dropout),
            checkpoints=checkpoints,
            checkpoint_seconds=0.0,
            watcher=Stopping(),
            **arguments,
        )
    torch.rand(5)
    watcher = Listening()
    resumed, history = trained(
        recipe,
        model=fresh(1, dropout=dropout),
        checkpoints=checkpoints,
        checkpoint_seconds=0.0,
        watcher=watcher,
        **arguments,
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
        for images, *_ in train.batches(torch.arange(200), 200, EVAL, CPU.device)
        for image in images
    }
    for augment, inside in (("none", 200), ("crop", 60)):
        shown.clear()
        fit(fresh(), Noting(), train, replace(PLAIN, epochs=1, augment=augment), engine=CPU, seed=0)
        same = sum(image.contiguous().numpy().tobytes() in plain for batch in shown for image in batch)
        assert same == 200 if augment == "none" else same < inside


# Stopping while the test images are looked at


class Signalling:
    """Test images that ask the process to stop, the second time they are looked at."""

    def __init__(self, split: Split) -> None:
        self.split, self.size, self.labels, self.shape, self.times = (
            split,
            split.size,
            split.labels,
            split.shape,
            0,
        )

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
    with handle_signals(), pytest.raises(Interrupted):
        fit(first, CrossEntropy(), data.train, recipe, engine=CPU, seed=0, test=test, checkpoints=checkpoints)
    state = checkpoints.newest()
    assert state is not None
    assert (state["epoch"], state["step"]) == (1, 4)
    resumed = fit(
        second,
        CrossEntropy(),
        data.train,
        recipe,
        engine=CPU,
        seed=0,
        test=data.test,
        checkpoints=checkpoints,
    )
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in second.state_dict().items())
    assert [epoch.train for epoch in resumed] == [epoch.train for epoch in straight]
    assert [epoch.test for epoch in resumed] == [epoch.test for epoch in straight]


# Compiling


def test_compiling_waits_until_the_steps_that_are_left_repay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pace_module.time, "perf_counter", lambda: now[0])

    def asked(steps: int, seconds: float, compile: str = "auto") -> list[int]:
        """The steps before which the network would be compiled."""
        pace = AutoCompile(replace(CPU, compile=compile))
        found = []
        for step in range(steps):
            if pace.should_compile(steps - step):
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
    second = fit(
        compiled, CrossEntropy(0.1), few_digits().train, recipe, engine=replace(CPU, compile="on"), seed=0
    )
    assert [epoch.train["loss"] for epoch in second] == pytest.approx(
        [epoch.train["loss"] for epoch in first], rel=1e-4
    )
    assert set(compiled.state_dict()) == set(plain.state_dict())


def test_a_network_that_cannot_be_compiled_is_trained_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("there is no compiler here")

    plain, other = fresh(), fresh()
    first = fit(plain, CrossEntropy(), few_digits().train, PLAIN, engine=CPU, seed=0)
    compile = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compile(self, backend=broken, **options)
    )
    with caplog.at_level(logging.WARNING, "peel"):
        second = fit(
            other, CrossEntropy(), few_digits().train, PLAIN, engine=replace(CPU, compile="on"), seed=0
        )
    assert "cannot be compiled" in caplog.text
    assert "there is no compiler here" in caplog.text
    assert [epoch.train for epoch in second] == [epoch.train for epoch in first]
    assert same_weights(plain, other)


def test_short_epochs_are_kept_only_now_and_then_and_nothing_changes(tmp_path: Path) -> None:
    kept: list[int] = []

    class Noting(Checkpoints):
        def save(self, state: dict[str, Any], epoch: int, step: int, **options: Any) -> Path:
            kept.append(epoch)
            return super().save(state, epoch, step, **options)

    whole, other = fresh(), fresh()
    recipe = replace(PLAIN, epochs=5)
    fit(whole, CrossEntropy(), few_digits().train, recipe, engine=CPU, seed=0)
    fit(
        other,
        CrossEntropy(),
        few_digits().train,
        recipe,
        engine=CPU,
        seed=0,
        checkpoints=Noting(tmp_path, "a"),
        epoch_seconds=600.0,
    )
    assert kept == [5]
    assert same_weights(whole, other)


def test_a_checkpoint_of_other_shapes_is_refused_in_words(tmp_path: Path) -> None:
    """As another version of peel may leave one, which pads widths to other numbers while it trains."""
    checkpoints = Checkpoints(tmp_path, "peel")
    trained(checkpoints=checkpoints)
    wider = fresh(num_classes=12)
    with pytest.raises(CorruptFileError, match="other shapes than the network"):
        trained(model=wider, checkpoints=checkpoints)


def test_a_checkpoint_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "peel")
    trained(checkpoints=checkpoints)
    state = checkpoints.newest()
    assert state is not None
    del state["steps"]
    checkpoints.save(state, 99, 0)
    with pytest.raises(CorruptFileError, match="not as this version of peel writes it"):
        trained(checkpoints=checkpoints)

"""The training loop and the evaluation."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.small import CPU, PLAIN, few_digits, fresh, same_weights, trained
from peel.data.augmentation import EVAL
from peel.data.batch import Batch
from peel.data.in_memory import InMemoryImages
from peel.errors import ConfigError, CorruptFileError, DataError
from peel.train.callbacks import Callback
from peel.train.checkpoint import Checkpoints
from peel.train.distributed import World
from peel.train.history import EpochRecord
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy, Losses
from peel.train.recipe import Recipe
from peel.train.state import local_batch_size
from peel.utils.rng import epoch_order

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_is_spread_over_all_classes(smoothing: float) -> None:
    model, images, labels = fresh().eval(), torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 9, 9, 4])
    losses = CrossEntropy(smoothing)(model, Batch(images, labels))
    soft = torch.full((6, 10), smoothing / 10)
    soft[torch.arange(6), labels] += 1 - smoothing
    expected = -(soft * model(images).log_softmax(1)).sum(1).mean()
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert losses.terms["cross_entropy"].item() == pytest.approx(expected.item(), rel=1e-6)


class PixelsAsLogits(nn.Module):
    """Its logits are the pixels of the image."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def test_top_1_and_top_5_count_correct_images() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (57, 1, 12, 1), dtype=torch.uint8)
    labels = torch.randint(0, 12, (57,))
    split = InMemoryImages(pixels, labels, (0.5,), (0.25,))
    metrics = evaluate(PixelsAsLogits(), split, CPU, batch_size=10)
    first = among = 0
    for row, label in zip(pixels.flatten(1).tolist(), labels.tolist()):
        above = sum(value > row[label] for value in row)
        assert row.count(row[label]) == 1 or above > 5 or above + row.count(row[label]) <= 5, (
            "equal logits would make this ambiguous"
        )
        first, among = first + (above == 0), among + (above < 5)
    assert metrics.top1 == first / 57
    assert metrics.top5 == among / 57
    assert 0 < first < among < 57


def test_top_5_of_three_classes_is_left_out() -> None:
    split = InMemoryImages(
        torch.randint(0, 256, (8, 1, 3, 1), dtype=torch.uint8), torch.arange(8) % 3, (0.5,), (0.25,)
    )
    assert evaluate(PixelsAsLogits(), split, CPU).top5 is None


def test_an_evaluation_does_not_change_the_network() -> None:
    model = fresh(dropout=0.5).train()
    before = copy.deepcopy(model)
    first = evaluate(model, few_digits().test, CPU)
    assert model.training
    assert same_weights(model, before)
    assert evaluate(model, few_digits().test, CPU) == first


def test_training_learns_the_digits() -> None:
    recipe = Recipe(epochs=12, batch_size=50, lr=0.1, augment="none", label_smoothing=0.0)
    model, history = trained(recipe, test=few_digits().test)
    assert [record.epoch for record in history] == list(range(1, 13))
    assert history[-1].train["loss"] < 0.25 * history[0].train["loss"]
    assert history[-1].test is not None
    assert history[-1].test["top1"] > 0.75
    assert history[-1].test["top1"] == evaluate(model, few_digits().test, CPU).top1
    assert not model.training


def test_training_equals_a_plain_loop_with_sgd() -> None:
    recipe = replace(PLAIN, epochs=2, weight_decay=0.01, label_smoothing=0.1)
    model, _ = trained(recipe)
    reference, data = fresh(), few_digits().train
    weights = [parameter for parameter in reference.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in reference.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.01}, {"params": others}], lr=1.0, momentum=0.9, nesterov=True
    )
    for epoch in range(2):
        for step, index in enumerate(epoch_order(200, 0, epoch).split(50)):
            images, labels, _ = next(iter(data.batches(index, 50, EVAL, CPU.device)))
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr_at(4 * epoch + step, 4)
            optimizer.zero_grad()
            nn.functional.cross_entropy(reference(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
    expected = reference.state_dict()
    assert all(
        torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-5)
        for name, tensor in model.state_dict().items()
    )


def test_the_recorded_loss_is_the_mean_over_the_batches() -> None:
    # With a learning rate of 0, the losses are the same every time.
    recipe = replace(PLAIN, epochs=1, lr=0.0)
    _, history = trained(recipe)
    seen: list[float] = []

    class Recording(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            losses = super().__call__(model, batch)
            seen.append(float(losses.total.detach()))
            return losses

    fit(fresh(), Recording(), few_digits().train, recipe, engine=CPU, seed=0)
    assert len(seen) == 4
    assert history[0].train["loss"] == pytest.approx(sum(seen) / 4)


def test_an_epoch_has_whole_batches_and_each_image_at_most_once() -> None:
    seen: list[Tensor] = []

    class Recording(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            seen.append(batch.inputs.detach().clone())
            return super().__call__(model, batch)

    fit(fresh(), Recording(), few_digits().train, replace(PLAIN, epochs=2, batch_size=60), engine=CPU, seed=0)
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


def test_a_batch_larger_than_the_training_set_is_refused() -> None:
    _, history = trained(replace(PLAIN, epochs=1, batch_size=200))
    assert len(history) == 1
    with pytest.raises(
        DataError, match=r"a batch of 201 images exceeds the training set of 200 images\. .*at most 200"
    ):
        trained(replace(PLAIN, batch_size=201))


def test_extra_metrics_of_callbacks_are_merged_into_the_record() -> None:
    _, history = trained(callbacks=[Listening(), Scale()])
    assert len({record.extra["scale"] for record in history}) == 3


class Scale(Callback):
    def extra_metrics(self, model: nn.Module) -> dict[str, Any]:
        return {"scale": float(model.get_parameter("norm1.weight").detach().sum())}


class Listening(Callback):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_train_begin(self, history: list[EpochRecord]) -> None:
        self.heard.append(("begin", len(history)))

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        self.heard.append(("step", step, total_steps, batch_size))

    def on_epoch_end(self, record: EpochRecord) -> None:
        self.heard.append(("epoch", record.epoch))


def test_callbacks_are_called_for_every_step_and_epoch_in_order() -> None:
    listening = Listening()
    trained(replace(PLAIN, epochs=2), callbacks=[listening])
    steps = [("step", done, 8, 50) for done in range(1, 9)]
    assert listening.heard == [("begin", 0), *steps[:4], ("epoch", 1), *steps[4:], ("epoch", 2)]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("stop_at", [1, 4, 5, 7, 11])
def test_training_resumes_from_any_step_with_the_same_bits(
    stop_at: int, dropout: float, tmp_path: Path
) -> None:
    class Stopping(Callback):
        def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
            if step == stop_at + 1:
                raise KeyboardInterrupt

    recipe = replace(PLAIN, augment="crop")
    arguments: dict[str, Any] = {"test": few_digits().test, "checkpoint_seconds": 0.0}
    straight, expected = trained(recipe, model=fresh(dropout=dropout), callbacks=[Scale()], **arguments)
    checkpoints = Checkpoints(tmp_path, "peel")
    with pytest.raises(KeyboardInterrupt):
        trained(
            recipe,
            model=fresh(dropout=dropout),
            checkpoints=checkpoints,
            callbacks=[Scale(), Stopping()],
            **arguments,
        )
    torch.rand(5)
    listening = Listening()
    resumed, history = trained(
        recipe,
        model=fresh(1, dropout=dropout),
        checkpoints=checkpoints,
        callbacks=[Scale(), listening],
        **arguments,
    )
    assert listening.heard[0] == ("begin", stop_at // 4)
    assert listening.heard[1] == ("step", stop_at + 1, 12, 50), "finished steps are not repeated"
    assert same_weights(straight, resumed)
    timeless = [replace(record, seconds=0, images_per_second=0) for record in history]
    assert timeless == [replace(record, seconds=0, images_per_second=0) for record in expected]


def test_without_augmentation_the_images_are_not_changed() -> None:
    shown: list[Tensor] = []

    class Recording(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            shown.append(batch.inputs)
            return super().__call__(model, batch)

    train = few_digits().train
    plain = {
        image.contiguous().numpy().tobytes()
        for images, *_ in train.batches(torch.arange(200), 200, EVAL, CPU.device)
        for image in images
    }
    for augment, inside in (("none", 200), ("crop", 60)):
        shown.clear()
        fit(fresh(), Recording(), train, replace(PLAIN, epochs=1, augment=augment), engine=CPU, seed=0)
        same = sum(image.contiguous().numpy().tobytes() in plain for batch in shown for image in batch)
        assert same == 200 if augment == "none" else same < inside


def test_short_epochs_are_not_saved_each(tmp_path: Path) -> None:
    kept: list[int] = []

    class Recording(Checkpoints):
        def save(self, state: dict[str, Any], epoch: int, step: int) -> Path:
            kept.append(epoch)
            return super().save(state, epoch, step)

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
        checkpoints=Recording(tmp_path, "a"),
        epoch_seconds=600.0,
    )
    assert kept == [5]
    assert same_weights(whole, other)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "peel")
    trained(checkpoints=checkpoints)
    wider = fresh(num_classes=12)
    with pytest.raises(CorruptFileError, match=r"written by other code.*(size mismatch|state_dict)"):
        trained(model=wider, checkpoints=checkpoints)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "peel")
    trained(checkpoints=checkpoints)
    state = checkpoints.newest()
    assert state is not None
    del state["optimizer"]
    checkpoints.save(state, 99, 0)
    with pytest.raises(CorruptFileError, match=r"written by other code.*optimizer"):
        trained(checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("batch_size", "processes", "micro_batches", "suggested"), [(50, 4, 1, 48), (2, 4, 1, 4), (8, 2, 5, 10)]
)
def test_a_batch_that_cannot_be_divided_is_refused(
    batch_size: int, processes: int, micro_batches: int, suggested: int
) -> None:
    engine = replace(CPU, world=World(0, processes), accumulation_steps=micro_batches)
    with pytest.raises(ConfigError, match=f"--train.batch-size {suggested}[.]"):
        local_batch_size(replace(PLAIN, batch_size=batch_size), engine)
    assert local_batch_size(replace(PLAIN, batch_size=suggested), engine) == suggested // processes

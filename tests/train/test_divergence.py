"""Divergence: a loss that is not finite stops training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.faults import inject
from helpers.small import CPU, PLAIN, few_digits, fresh, same_weights, small_run, trained
from peel.data.batch import Batch
from peel.data.datasets import Split
from peel.errors import DivergedError
from peel.train.checkpoint import Checkpoints
from peel.train.loop import fit
from peel.train.objective import CrossEntropy, Losses

pytestmark = pytest.mark.usefixtures("one_thread")


class Poisoned:
    """The training images, with a batch of NaN at one step of one epoch."""

    def __init__(self, split: Split, batch: int, epoch: int) -> None:
        self.split, self.batch, self.epoch, self.seen = split, batch, epoch, 0
        self.size, self.labels, self.shape = split.size, split.labels, split.shape

    def batches(self, *arguments: Any) -> Any:
        turn, self.seen = self.seen, self.seen + 1
        for number, batch in enumerate(self.split.batches(*arguments)):
            yield (
                batch._replace(inputs=batch.inputs * math.nan)
                if (turn, number) == (self.epoch, self.batch)
                else batch
            )


@pytest.mark.parametrize("seconds", [600.0, 0.0])
def test_a_loss_that_is_not_finite_stops_training_and_keeps_the_last_good_checkpoint(
    seconds: float, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, "peel")
    poisoned: Any = Poisoned(few_digits().train, 1, 1)
    with pytest.raises(DivergedError, match=r"\(epoch 2, step \d\).*checkpoints are in .*--train.lr"):
        fit(
            fresh(), CrossEntropy(), poisoned, PLAIN, engine=CPU, seed=0, test=few_digits().test,
            checkpoints=checkpoints, checkpoint_seconds=seconds,
        )  # fmt: skip
    state = checkpoints.newest()
    assert state is not None
    assert (state["epoch"], state["step"]) == (1, 0 if seconds else 1)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["model"].values())
    # With good images, the same call ends as an uninterrupted one.
    mended, history = trained(checkpoints=checkpoints)
    straight, _ = trained()
    assert len(history) == 3
    assert same_weights(mended, straight)


def test_weights_that_the_last_step_breaks_are_noticed_although_its_loss_is_finite(
    tmp_path: Path,
) -> None:
    """The loss of a step is computed before its update."""

    class Breaking(CrossEntropy):
        calls = 0

        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            Breaking.calls += 1
            losses = super().__call__(model, batch)
            # The square root of zero: a finite value with an infinite gradient.
            bad = (model.get_parameter("fc.bias") * 0).abs().sqrt().sum() if Breaking.calls == 8 else 0.0
            return Losses(losses.total + bad, losses.terms, losses.output)

    checkpoints = Checkpoints(tmp_path, "peel")
    with pytest.raises(DivergedError, match="epoch 2, step 4"):
        fit(
            fresh(),
            Breaking(),
            few_digits().train,
            replace(PLAIN, epochs=2),
            engine=CPU,
            seed=0,
            checkpoints=checkpoints,
        )
    state = checkpoints.newest()
    assert state is not None
    assert state["epoch"] == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["model"].values())


def test_an_infinite_loss_is_noticed_although_the_weights_are_finite() -> None:
    class Undefined(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Losses:
            losses = super().__call__(model, batch)
            return Losses(losses.total + math.inf, losses.terms, losses.output)

    with pytest.raises(DivergedError):
        fit(fresh(), Undefined(), few_digits().train, PLAIN, engine=CPU, seed=0)


def test_a_learning_rate_far_too_high_is_an_error() -> None:
    with pytest.raises(DivergedError):
        trained(replace(PLAIN, lr=1e18, warmup_epochs=0))


def test_a_loss_that_is_not_finite_is_noticed_within_a_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    inject("5:nan", monkeypatch)
    recipe = replace(PLAIN, epochs=1, batch_size=1, lr=0.01)
    with pytest.raises(DivergedError, match=r"epoch 1, step 100\)"):
        trained(recipe)


def test_a_diverged_run_resumes_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(DivergedError, match="epoch 2, step"):
        inject("4:nan", patch)
        small_run(output=tmp_path / "run")
    names = [path.name[:22] for path in (tmp_path / "run" / "checkpoints").glob("*.pt")]
    assert names == ["original-00001-0000000"]
    resumed, whole = small_run(output=tmp_path / "run").model, small_run().model
    assert resumed is not None
    assert whole is not None
    assert same_weights(resumed, whole)

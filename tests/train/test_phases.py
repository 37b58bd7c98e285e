"""Steps of several phases: what is computed, by whom, and that a killed training goes on to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.small import CPU, PLAIN, Small, few_digits, same_weights
from peel.data.batch import Batch
from peel.errors import ConfigError
from peel.train.callbacks import Callback
from peel.train.checkpoint import Checkpoints
from peel.train.loop import fit
from peel.train.objective import CrossEntropy, Losses
from peel.train.phases import Phase

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = replace(PLAIN, epochs=2)


def plain(net: nn.Module, batch: Batch) -> Iterator[Losses]:
    yield CrossEntropy()(net, batch)


def network(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def train(goal: Any, net: nn.Module, recipe: Any = RECIPE, **more: Any) -> Any:
    return fit(net, goal, few_digits().train, recipe, engine=more.pop("engine", CPU), seed=0, **more)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_one_phase_with_one_loss_is_a_plain_training(micro_batches: int) -> None:
    engine = replace(CPU, accumulation_steps=micro_batches)
    first, second = network(), network()
    histories = [
        train(goal, net, engine=engine) for goal, net in ((CrossEntropy(), first), ([Phase(plain)], second))
    ]
    assert same_weights(first, second)
    assert [epoch.train for epoch in histories[0]] == [epoch.train for epoch in histories[1]]


def test_the_gradients_of_several_losses_add_up() -> None:
    def halves(net: nn.Module, batch: Batch) -> Iterator[Losses]:
        for _ in range(2):
            losses = CrossEntropy()(net.eval(), batch)
            yield Losses(losses.total / 2, losses.terms, losses.output)

    def whole(net: nn.Module, batch: Batch) -> Iterator[Losses]:
        yield CrossEntropy()(net.eval(), batch)

    first, second = network(), network()
    history = train([Phase(halves)], first)
    train([Phase(whole)], second)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert "loss of phase 1.2" in history[0].train


def test_each_phase_trains_its_own_parameters_from_its_beginning() -> None:
    rates: list[float] = []

    def falling(progress: float) -> float:
        rates.append(progress)
        return 1 - progress

    phases = [
        Phase(plain),
        Phase(plain, ["fc.weight"], lambda some: torch.optim.Adam(some, lr=0.01), lr=falling, begin=0.5),
    ]
    net = network()
    before = {name: one.clone() for name, one in net.state_dict().items()}
    train(phases, net, replace(RECIPE, epochs=1))
    steps = 200 // RECIPE.batch_size
    assert rates == [number / steps for number in range(steps) if number / steps >= 0.5]
    after = net.state_dict()
    assert not torch.equal(after["fc.weight"], before["fc.weight"])
    assert not torch.equal(after["conv1.weight"], before["conv1.weight"])
    still = network()
    train([Phase(plain), replace(phases[1], begin=2.0)], still, replace(RECIPE, epochs=1))
    assert torch.equal(still.state_dict()["fc.weight"], before["fc.weight"]), "nobody else trains it"


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        if step == self.step:
            raise KeyboardInterrupt


def test_a_stopped_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    phases = [
        Phase(plain),
        Phase(plain, ["fc.weight", "fc.bias"], lambda some: torch.optim.Adam(some, lr=0.01)),
    ]
    whole, parts = network(), network()
    train(phases, whole)
    stored = {"checkpoints": Checkpoints(tmp_path, "phases"), "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        train(phases, parts, callbacks=[Stop(4)], **stored)
    resumed = network(1)
    train(phases, resumed, **stored)
    assert same_weights(whole, resumed), "weights, momentum of both optimizers, random numbers"


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ([Phase(plain, ["conv9.weight"])], "conv9.weight, which is no parameter"),
        ([Phase(plain, ["fc.bias"]), Phase(plain, ["fc.bias"])], "two phases train fc.bias"),
        ([Phase(plain), Phase(plain)], "two phases name no parameters"),
    ],
)
def test_wrong_phases_are_named(phases: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train(phases, network())

"""A training step: gradient accumulation, out of memory, compilation."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from helpers.faults import inject
from helpers.small import CPU, PLAIN, Pooled, Small, few_digits, fresh, same_weights, small_run, trained
from peel.cli.main import main
from peel.data.augmentation import EVAL
from peel.data.batch import Batch
from peel.errors import ConfigError, OutOfMemoryError
from peel.steps.distillation import in_place_pair
from peel.train.callbacks import Callback
from peel.train.checkpoint import Checkpoints
from peel.train.engine import Engine, retry_on_oom
from peel.train.loop import _should_compile, fit
from peel.train.objective import CrossEntropy, Losses, get_logits
from peel.train.recipe import Recipe
from peel.train.state import TrainingState
from peel.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("one_thread")

#: Two epochs of five steps.
FIVE_STEPS = Recipe(epochs=2, batch_size=40, lr=0.05, augment="crop")
TWO_MICRO_BATCHES = Engine(CPU.device, accumulation_steps=2)


# Gradient accumulation and weight decay


class Linear(nn.Module):
    """Without batch norm, micro-batches give exactly the gradients of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("accumulation_steps", [2, 3, 40])
def test_accumulated_gradients_are_those_of_the_whole_batch(accumulation_steps: int) -> None:
    batch = next(iter(few_digits().train.batches(torch.arange(40), 40, EVAL, CPU.device)))
    models = Linear(), Linear()
    for model, parts in zip(models, (1, accumulation_steps)):
        step = TrainStep(model, CrossEntropy(0.1), FIVE_STEPS, Engine(CPU.device, accumulation_steps=parts))
        step(batch, 0.1)
        assert float(step.sums["loss"]) == pytest.approx(
            float(CrossEntropy(0.1)(Linear(), batch).total.detach())
        )
    for first, second in zip(*(model.parameters() for model in models)):
        assert torch.allclose(first.grad, second.grad, rtol=1e-5, atol=1e-7)
        assert torch.allclose(first, second, rtol=1e-6, atol=1e-7)


class ZeroGradient:
    """A loss whose gradient is zero everywhere."""

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        loss = 0.0 * sum(parameter.sum() for parameter in model.parameters())
        return Losses(loss, {}, get_logits(model(batch.inputs)))  # type: ignore[arg-type]


@pytest.mark.parametrize("decay_norms", [False, True])
def test_norms_and_biases_decay_only_with_decay_norms(decay_norms: bool) -> None:
    recipe = replace(PLAIN, lr=0.1, weight_decay=0.01, decay_norms=decay_norms, momentum=0.0, nesterov=False)
    model = fresh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    batch = next(iter(few_digits().train.batches(torch.arange(50), 50, EVAL, CPU.device)))
    TrainStep(model, ZeroGradient(), recipe, CPU)(batch, 0.1)
    for name, parameter in model.named_parameters():
        expected = 0.999 if parameter.ndim > 1 or decay_norms else 1.0
        assert parameter.detach().mean().item() == pytest.approx(expected, rel=1e-6), name


class ManyAxes(nn.Module):
    """Norm layers whose scales have several axes, one of them written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm([3, 8, 8]), nn.Conv2d(3, 4, 3)
        self.scale, self.shift = (nn.Parameter(torch.zeros(1, 4, 1, 1)) for _ in range(2))
        self.fc = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(self.conv(self.norm(x))) * self.scale + self.shift
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("decay_norms", [False, True])
def test_scales_with_several_axes_decay_only_with_decay_norms(decay_norms: bool, in_place: bool) -> None:
    recipe = replace(PLAIN, lr=0.1, weight_decay=0.01, decay_norms=decay_norms, momentum=0.0, nesterov=False)
    net: nn.Module = ManyAxes()
    if in_place:
        net = in_place_pair(net, peel.trace(net, torch.randn(1, 3, 8, 8)), {"conv": 2})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    batch = next(iter(few_digits().train.batches(torch.arange(50), 50, EVAL, CPU.device)))
    TrainStep(net, ZeroGradient(), recipe, CPU)(batch, 0.1)
    decayed = {name for name, parameter in net.named_parameters() if float(parameter.detach().min()) < 1}
    weights = {name for name, _ in net.named_parameters() if name.endswith(("conv.weight", "fc.weight"))}
    assert decayed == ({name for name, _ in net.named_parameters()} if decay_norms else weights)


# Out of memory


class Tight(Small):
    """Its backward pass has memory for `room` images. With more it fails near its end.

    By then the forward pass has updated the batch-norm statistics, and most gradients exist.
    """

    def __init__(self, num_classes: int = 10, *, room: int = 0) -> None:
        super().__init__(num_classes)
        self.room = room
        self.conv1.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._allocate)

    def _allocate(self, gradient: Tensor) -> None:
        if len(gradient) > self.room:
            raise torch.OutOfMemoryError("the backward pass needs more memory than there is")


class Shrink(Callback):
    """From a step on, the network has memory for half a batch only."""

    def __init__(self, model: Tight, step: int) -> None:
        self.model, self.first = model, step

    def on_train_begin(self, history: Any) -> None:
        self.on_step_end(0, 0, 0)

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        self.model.room = FIVE_STEPS.batch_size // (1 if step < self.first else 2)


class Leave(Shrink):
    """Leaves the training right after that step, before its checkpoint."""

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        if step > self.first:
            raise InterruptedError


def train_tight(
    engine: Engine = CPU,
    callback: type[Shrink] | None = None,
    step: int = 0,
    checkpoints: Checkpoints | None = None,
) -> Tight:
    torch.manual_seed(0)
    model = Tight(room=FIVE_STEPS.batch_size)
    fit(
        model,
        CrossEntropy(),
        few_digits().train,
        FIVE_STEPS,
        engine=engine,
        seed=0,
        checkpoints=checkpoints,
        checkpoint_seconds=0,
        callbacks=[callback(model, step)] if callback is not None else [],
    )
    return model


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_is_retried_out_of_memory_leaves_no_trace(
    step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "peel"):
        short = train_tight(callback=Shrink, step=step)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "peel"]
    assert "out of memory: batches are now split into 2 micro-batches of about 20 images" in message
    # The same training with enough memory, resumed before that step with two micro-batches.
    checkpoints = Checkpoints(tmp_path, "peel")
    if step:
        with pytest.raises(InterruptedError):
            train_tight(callback=Leave, step=step, checkpoints=checkpoints)
    expected = train_tight(TWO_MICRO_BATCHES, checkpoints=checkpoints)
    assert same_weights(short, expected)
    assert short.norm1.num_batches_tracked == step + 2 * (10 - step)


def test_out_of_memory_in_a_forward_pass_doubles_the_accumulation_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        inject("0:oom", patch)
        short, _ = trained()
    expected = fresh()
    fit(expected, CrossEntropy(), few_digits().train, PLAIN, engine=TWO_MICRO_BATCHES, seed=0)
    assert same_weights(short, expected)


def test_a_micro_batch_of_one_image_that_does_not_fit_ends_the_command_with_code_5(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "--data": "digits",
        "--stages": "original",
        "--train.epochs": "1",
        "--train.batch-size": "32",
        "--device": "cpu",
        "--output": str(tmp_path / "run"),
    }
    words = [word for pair in options.items() for word in pair]
    assert main(["run", f"{__file__}:Tight", "--quiet", *words]) == 5
    assert "a micro-batch of 1 images does not fit into the memory of cpu" in capsys.readouterr().err
    splits = [parts for parts in (2, 4, 8, 16, 32) if f"split into {parts} micro-batches" in caplog.text]
    assert splits == [2, 4, 8, 16, 32]


def test_out_of_memory_errors_of_the_cpu_are_recognized() -> None:
    sizes = []

    def work(size: int) -> int:
        sizes.append(size)
        torch.empty(size * 2**50)
        return size

    with pytest.raises(OutOfMemoryError, match="a single image does not fit"):
        retry_on_oom(work, 4, torch.device("cpu"))
    assert sizes == [4, 2, 1]
    with pytest.raises(RuntimeError, match="size"):
        retry_on_oom(lambda size: torch.zeros(size) + torch.zeros(size + 1), 4, torch.device("cpu"))


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (8, 8), (8, 6)])
def test_a_norm_layer_that_sees_one_value_per_channel_is_explained(size: int, parts: int) -> None:
    with pytest.raises(ConfigError, match=f"{size} images are split into {parts} micro-batches. Choose"):
        small_run(Pooled(), stages=["original"], train={"epochs": 1, "batch_size": size}, accumulate=parts)


def test_public_out_of_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    inject("0:oom", monkeypatch)
    with pytest.raises(peel.OutOfMemoryError, match="a micro-batch of 1 images"):
        small_run(stages=["original"], train={"epochs": 1, "batch_size": 1})


# Compilation


def test_auto_compiles_when_enough_training_is_left() -> None:
    _, history = trained(replace(PLAIN, epochs=1))
    state = TrainingState(fresh(), CrossEntropy(), replace(PLAIN, epochs=11), CPU, None, 4)
    state.history, state.epoch = [replace(history[0], seconds=59.0)], 1

    def decides(compile: str) -> bool:
        state.engine = replace(CPU, compile=compile)
        return _should_compile(state)

    assert [decides(compile) for compile in ("on", "auto", "off")] == [True, False, False]
    state.history = [replace(history[0], seconds=61.0)]
    assert [decides(compile) for compile in ("on", "auto", "off")] == [True, True, False]
    state.history = []
    assert [decides(compile) for compile in ("on", "auto", "off")] == [True, False, False]


@pytest.mark.slow
def test_a_compiled_network_learns_the_same() -> None:
    plain, compiled = fresh(), fresh()
    data, recipe = few_digits().train, replace(PLAIN, epochs=2)
    first = fit(plain, CrossEntropy(0.1), data, recipe, engine=CPU, seed=0)
    second = fit(compiled, CrossEntropy(0.1), data, recipe, engine=replace(CPU, compile="on"), seed=0)
    assert [record.train["loss"] for record in second] == pytest.approx(
        [record.train["loss"] for record in first], rel=1e-4
    )
    assert set(compiled.state_dict()) == set(plain.state_dict())


def test_a_network_that_cannot_be_compiled_is_trained_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("there is no compiler here")

    plain, first = trained()
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda module, **options: compile(module, backend=broken, **options)
    )
    other = fresh()
    with caplog.at_level(logging.WARNING, "peel"):
        second = fit(
            other, CrossEntropy(), few_digits().train, PLAIN, engine=replace(CPU, compile="on"), seed=0
        )
    assert "cannot be compiled" in caplog.text
    assert "there is no compiler here" in caplog.text
    assert [record.train for record in second] == [record.train for record in first]
    assert same_weights(plain, other)

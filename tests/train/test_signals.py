"""Signals, short memory and losses that are no numbers: what is promised in docs/faults.md."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peel
from helpers.killing import command, exit_code
from helpers.small import CPU, Pooled, Small, few_digits, same_weights, small_run
from peel.cli.main import main
from peel.errors import ConfigError, OutOfMemoryError
from peel.train.checkpoint import Checkpoints
from peel.train.engine import Engine
from peel.train.loop import fit
from peel.train.memory import retry_on_oom
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe
from peel.train.signals import Interrupted, handle_signals

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = Recipe(epochs=2, batch_size=64, lr=0.05, augment="crop")

#: Two epochs of five steps, and the same in two parts each.
FIVE_STEPS = Recipe(epochs=2, batch_size=40, lr=0.05, augment="crop")
IN_TWO_PARTS = Engine(CPU.device, accumulation_steps=2)


OPTIONS = [
    "--train.epochs",
    "2",
    "--search.epochs",
    "1",
    "--train.batch-size",
    "128",
    "--device",
    "cpu",
    "--quiet",
    "--output",
]


def run(output: Path, **environment: str) -> tuple[int, str]:
    """Exit code of the command and what it said."""
    said = output.with_name(f"{output.name}.said")
    said.write_text("")
    return exit_code(
        command(["run", "helpers.small:Small", *OPTIONS, str(output)], said, **environment)
    ), said.read_text()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("term", signal.SIGTERM),
        pytest.param("usr1", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("int", signal.SIGINT, marks=pytest.mark.slow),  # test_faults.py has it from outside
    ],
)
def test_a_run_that_is_told_to_stop_keeps_its_state_and_goes_on_with_the_same_bits(
    name: str, number: int, tmp_path: Path
) -> None:
    code, said = run(tmp_path / "stopped", PEEL_FAULT=f"5:{name}")
    assert code == 128 + number
    assert "the state is kept" in said
    assert f"--output {tmp_path / 'stopped'}" in said
    assert list((tmp_path / "stopped" / "checkpoints").glob("original-00000-0000006-*.pt"))
    assert run(tmp_path / "stopped")[0] == 0
    assert run(tmp_path / "whole")[0] == 0
    assert (tmp_path / "stopped" / "slim.safetensors").read_bytes() == (
        tmp_path / "whole" / "slim.safetensors"
    ).read_bytes()


class Vanishing:
    """Python drops what is raised while an object is taken away."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_at_a_moment_when_nothing_can_be_raised_is_not_lost() -> None:
    """Neither where nobody asks for it, nor in a training that begins right after it."""
    with handle_signals(), pytest.raises(Interrupted, match="SIGTERM"):
        Vanishing()
        time.sleep(10)
    with handle_signals():
        Vanishing()
        with pytest.raises(Interrupted, match="SIGTERM"):
            fit(Small(), CrossEntropy(), few_digits().train, RECIPE, engine=CPU, seed=0)


def test_short_memory_halves_the_parts_and_the_batch_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PEEL_FAULT", "0:oom")
    monkeypatch.setenv("PEEL_FAULT_OOM", "")
    torch.manual_seed(0)
    short = Small()
    with caplog.at_level(logging.WARNING, "peel"):
        history = fit(short, CrossEntropy(), few_digits().train, RECIPE, engine=CPU, seed=0)
    assert "2 parts of about 32 images" in caplog.text
    assert len(history) == 2
    monkeypatch.setenv("PEEL_FAULT_OOM", "")
    torch.manual_seed(0)
    parts = Small()
    fit(
        parts,
        CrossEntropy(),
        few_digits().train,
        RECIPE,
        engine=type(CPU)(CPU.device, accumulation_steps=2),
        seed=0,
    )
    for (name, value), other in zip(short.named_parameters(), parts.parameters()):
        assert torch.equal(value, other), name


class Tight(Small):
    """A network whose backward pass has memory for so many images at a time. With more it fails near its end: the forward pass has moved
    the running statistics by then, and most gradients are there.
    """

    def __init__(self, num_classes: int = 10, *, room: int = 0) -> None:
        super().__init__(num_classes)
        self.room = room
        self.conv1.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._ask_for_memory)

    def _ask_for_memory(self, gradient: Tensor) -> None:
        if len(gradient) > self.room:
            raise torch.OutOfMemoryError("the backward pass asks for more memory than there is")


class Shrinking:
    """From a step on, a network has room for half a batch only."""

    def __init__(self, model: Tight, step: int) -> None:
        self.model, self.first = model, step

    def begin(self, history: Any) -> None:
        self.step(0, 0, 0)

    def step(self, done: int, total: int, images: int) -> None:
        self.model.room = FIVE_STEPS.batch_size // (1 if done < self.first else 2)

    def epoch(self, epoch: Any) -> None:
        pass


class Leaving(Shrinking):
    """Leaves a training right after that step, before it is kept."""

    def step(self, done: int, total: int, images: int) -> None:
        if done > self.first:
            raise InterruptedError


def trained_tight(
    engine: Engine = CPU,
    watcher: type[Shrinking] | None = None,
    step: int = 0,
    checkpoints: Checkpoints | None = None,
) -> Tight:
    torch.manual_seed(0)
    model = Tight(room=FIVE_STEPS.batch_size)
    watching = watcher(model, step) if watcher is not None else None
    fit(
        model, CrossEntropy(), few_digits().train, FIVE_STEPS, engine=engine, seed=0,
        checkpoints=checkpoints, checkpoint_seconds=0, watcher=watching,
    )  # fmt: skip
    return model


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_whose_backward_pass_finds_too_little_memory_leaves_no_trace(
    step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "peel"):
        short = trained_tight(watcher=Shrinking, step=step)
    assert [record.getMessage() for record in caplog.records if record.name == "peel"] == [
        "memory is short: batches now go through in 2 parts of about 20 images. The batch is the same; batch norm sees the parts."
    ]
    # The same training with enough memory, taken up again before that step with twice as many parts.
    checkpoints = Checkpoints(tmp_path, "peel")
    if step:
        with pytest.raises(InterruptedError):
            trained_tight(watcher=Leaving, step=step, checkpoints=checkpoints)
    in_parts = trained_tight(IN_TWO_PARTS, checkpoints=checkpoints)
    assert same_weights(short, in_parts)
    assert short.norm1.num_batches_tracked == step + 2 * (10 - step)


def test_a_backward_pass_without_memory_for_one_image_ends_the_command_with_code_5(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "--steps": "original",
        "--train.epochs": "1",
        "--train.batch-size": "32",
        "--device": "cpu",
        "--output": str(tmp_path / "run"),
    }
    code = main(
        ["run", "test_stopping:Tight", "--quiet", *(word for pair in options.items() for word in pair)]
    )
    assert code == 5
    said = capsys.readouterr().err
    assert (
        "a part of 1 images does not fit into the memory of cpu. Choose a smaller batch, smaller images, or more parts (--parts)."
        in said
    )
    assert [parts for parts in (2, 4, 8, 16, 32) if f"go through in {parts} parts" in caplog.text] == [
        2,
        4,
        8,
        16,
        32,
    ]


def test_what_a_cpu_says_of_too_little_memory_is_understood() -> None:
    asked = []

    def work(size: int) -> int:
        asked.append(size)
        torch.empty(size * 2**50)
        return size

    with pytest.raises(OutOfMemoryError, match="not one image fits"):
        retry_on_oom(work, 4, torch.device("cpu"))
    assert asked == [4, 2, 1]
    with pytest.raises(RuntimeError, match="size"):
        retry_on_oom(lambda size: torch.zeros(size) + torch.zeros(size + 1), 4, torch.device("cpu"))


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (8, 8), (8, 6)])
def test_a_norm_layer_that_would_see_one_value_is_explained(size: int, parts: int) -> None:
    with pytest.raises(
        ConfigError,
        match=f"sees {size} images of a batch in {parts} parts. Choose a larger batch or fewer parts",
    ):
        small_run(Pooled(), steps=["original"], train={"epochs": 1, "batch_size": size}, parts=parts)


def test_short_memory_does_not_end_in_parts_that_a_norm_layer_cannot_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PEEL_FAULT", "0:oom")
    monkeypatch.setenv("PEEL_FAULT_OOM", "")
    with pytest.raises(
        OutOfMemoryError, match=r"2 images do not fit .* one image is too small for a batch norm"
    ):
        small_run(Pooled(), steps=["original"], train={"epochs": 1, "batch_size": 2})


def test_memory_for_not_even_one_image_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEEL_FAULT_OOM", "1")
    with pytest.raises(peel.OutOfMemoryError, match="1 images does not fit"):
        small_run()


def test_a_loss_that_is_no_number_stops_the_run_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEEL_FAULT", "4:nan")
    with pytest.raises(peel.DivergedError, match="epoch 2, step"):
        small_run(output=tmp_path / "run")
    monkeypatch.setenv("PEEL_FAULT", "")
    assert [path.name[:22] for path in (tmp_path / "run" / "checkpoints").glob("*.pt")] == [
        "original-00001-0000000"
    ]
    small_run(output=tmp_path / "run")
    small_run(output=tmp_path / "whole")
    assert (tmp_path / "run" / "slim.safetensors").read_bytes() == (
        tmp_path / "whole" / "slim.safetensors"
    ).read_bytes()

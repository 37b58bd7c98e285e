"""Tests that need a GPU: `CUDA_VISIBLE_DEVICES=0 pytest tests/test_gpu.py`. Skipped without one."""

from __future__ import annotations

import copy
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peel
from helpers import own_data
from helpers.small import Small, few_digits, same_weights, small_run, taught
from peel import zoo
from peel.data.augmentation import (
    EVAL,
    View,
    border_color,
    color_jitter_and_flip,
    crop_windows,
    draw_color_jitter,
    draw_windows,
)
from peel.data.batch import Batch
from peel.data.datasets import load_data
from peel.data.image_folder import ImageFolder
from peel.data.in_memory import InMemoryImages
from peel.repair.layer_calls import LayerCall
from peel.repair.repair import _Refit
from peel.steps.distillation import Distillation
from peel.surgery.padding import fast_widths, pad
from peel.train.callbacks import Callback
from peel.train.checkpoint import Checkpoints
from peel.train.engine import Engine, make_engine
from peel.train.history import EpochRecord
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe
from peel.train.signals import Interrupted, handle_signals
from peel.train.step import TrainStep
from peel.train.teacher_cache import CachedTeacher, make_logit_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

RECIPE = Recipe(epochs=2, batch_size=100, lr=0.1, augment="crop-flip", warmup_epochs=0.5)


@pytest.fixture
def engine() -> Engine:
    return make_engine("cuda", workers=2)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    if torch.cuda.get_sync_debug_mode():
        set_sync_debug_mode("default")


def set_sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


def pictures(count: int = 3000, size: int = 32, seed: int = 0) -> InMemoryImages:
    """Images that can be learnt: each class has a color, with noise."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=chance)
    colors = torch.randint(0, 256, (10, 1, 1, 3), generator=torch.Generator().manual_seed(5))
    noise = torch.randint(-60, 60, (count, size, size, 3), generator=chance)
    return InMemoryImages(
        (colors[labels] + noise).clamp(0, 255).to(torch.uint8), labels, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    )


def network(name: str = "cifar_resnet20", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return zoo.create(name, num_classes=10)


def losses(history: list[EpochRecord]) -> list[float]:
    return [record.train["loss"] for record in history]


@pytest.mark.parametrize("augment", ["none", "crop", "crop-flip"])
@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (12, 20, 3)])
def test_the_kernel_shows_what_the_cpu_shows(augment: str, shape: tuple[int, int, int]) -> None:
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (500, *shape), dtype=torch.uint8, generator=chance)
    mean, std = (0.4,) * shape[2], (0.21,) * shape[2]
    split = InMemoryImages(pixels, torch.arange(500), mean, std)
    order = torch.randperm(500, generator=chance)[:300]
    view = View(augment, 2**61 + 77)
    there = list(split.to(torch.device("cuda")).batches(order, 128, view, torch.device("cuda")))
    here = list(split.batches(order, 128, view, torch.device("cpu")))
    for mine, theirs in zip(there, here, strict=True):
        assert mine.inputs.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(mine.targets.cpu(), theirs.targets)
        assert torch.allclose(mine.inputs.cpu(), theirs.inputs, atol=1e-6)
    border = border_color(view, torch.tensor(mean) * 255)
    plain = crop_windows(draw_windows(order[:128], view, shape[0]), pixels[order[:128]], border)
    assert torch.allclose(
        (there[0].inputs.cpu().permute(0, 2, 3, 1) * 0.21 + 0.4) * 255, plain.float(), atol=1e-3
    )


class ForbidSync(Callback):
    """Makes torch raise an error at every synchronization with the GPU, between two steps."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.seen = first, last, 0

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        if step == self.first:
            set_sync_debug_mode("error")
        elif step == self.last:
            set_sync_debug_mode("default")
        self.seen += self.first < step <= self.last


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("teacher_mode", ["none", "online", "cached"])
def test_no_step_waits_for_the_gpu(engine: Engine, graphs: bool, teacher_mode: str) -> None:
    images = pictures(8000).to(engine.device)
    objective: Any = CrossEntropy(0.1)
    split: Any = images
    if teacher_mode != "none":
        teacher = engine.prepare(network(seed=1)).eval()
        objective = Distillation(objective, teacher)
        if teacher_mode == "cached":
            cache = make_logit_cache(teacher, images, "crop-flip", 10, engine)
            assert cache is not None
            split = CachedTeacher(images, cache)
    callback = ForbidSync(10, 78)
    # Training synchronizes at every hundredth step and at the end of an epoch only.
    fit(
        network(),
        objective,
        split,
        replace(RECIPE, epochs=1),
        engine=replace(engine, cuda_graphs=graphs),
        seed=0,
        callbacks=[callback],
    )
    assert callback.seen == 68


def test_a_step_that_waits_for_the_gpu_is_noticed(engine: Engine) -> None:
    class Waiting(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Batch) -> Any:
            found = super().__call__(model, batch)
            found.total.item()
            return found

    images, slow = pictures(8000).to(engine.device), replace(engine, cuda_graphs=False)
    with pytest.raises(RuntimeError, match="synchronizing"):
        fit(
            network(),
            Waiting(),
            images,
            replace(RECIPE, epochs=1),
            engine=slow,
            seed=0,
            callbacks=[ForbidSync(10, 78)],
        )


#: In bfloat16, rounding soon makes two trainings differ; with this learning rate and float32 they agree.
GENTLE = replace(RECIPE, lr=0.02)


@pytest.fixture
def exact(engine: Engine) -> Iterator[Engine]:
    """The engine in float32, without TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield replace(engine, bf16=False)
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_cuda_graphs_and_compiled_steps_learn_what_eager_ones_learn(exact: Engine, compile: str) -> None:
    images = pictures().to(exact.device)
    plain = fit(
        network(),
        CrossEntropy(0.1),
        images,
        GENTLE,
        engine=replace(exact, cuda_graphs=False, compile="off"),
        seed=0,
    )
    fast = fit(network(), CrossEntropy(0.1), images, GENTLE, engine=replace(exact, compile=compile), seed=0)
    assert losses(fast) == pytest.approx(losses(plain), rel=0.02)
    assert losses(plain)[1] < losses(plain)[0] - 0.1, "there is something to learn"


@pytest.mark.parametrize("compile", ["off", "on"])
def test_mixed_precision_learns_as_well_as_float32(exact: Engine, compile: str) -> None:
    images = pictures().to(exact.device)
    means = []
    for engine in (
        replace(exact, cuda_graphs=False, compile="off"),
        replace(exact, bf16=True, compile=compile),
    ):
        runs = [
            fit(network(seed=seed), CrossEntropy(0.1), images, RECIPE, engine=engine, seed=seed)
            for seed in range(3)
        ]
        means.append(torch.tensor([losses(run) for run in runs]))
    gap = (means[0].mean(0) - means[1].mean(0)).abs()
    spread = means[0].max(0).values - means[0].min(0).values + means[1].max(0).values - means[1].min(0).values
    assert (gap < spread).all(), (means, "the mean of three seeds lies within their spread")


def test_many_widths_in_one_process_are_all_compiled(engine: Engine) -> None:
    """Dynamo stops compiling a function after eight recompiles, and only warns."""
    from torch._dynamo.utils import counters

    model = network("cifar_resnet20")
    graph = peel.trace(model, torch.zeros(1, 3, 32, 32))
    images = pictures(300).to(engine.device)
    for number in range(10):
        counters.clear()
        widths = dict.fromkeys(graph.widths, 8 + 2 * number)
        slimmed = peel.slim(model, widths, graph=graph)
        fit(
            slimmed,
            CrossEntropy(),
            images,
            replace(RECIPE, epochs=1),
            engine=replace(engine, compile="on", cuda_graphs=False),
            seed=0,
        )
        assert counters["stats"]["unique_graphs"] == 1, f"network {number} was not compiled"


def test_padded_channels_do_not_change_training(exact: Engine) -> None:
    model = network("cifar_resnet20")
    graph = peel.trace(model, torch.zeros(1, 3, 32, 32))
    widths = peel.uniform(graph, "40%")
    images = pictures().to(exact.device)
    small = exact.prepare(peel.slim(model, widths, graph=graph))
    padded = pad(copy.deepcopy(small), graph.at(widths), fast_widths(small, graph.at(widths)))
    assert padded is not None
    first = fit(small, CrossEntropy(0.1), images, GENTLE, engine=exact, seed=0)
    second = fit(padded.model, CrossEntropy(0.1), images, GENTLE, engine=exact, seed=0)
    assert losses(second) == pytest.approx(losses(first), rel=0.01)
    back = padded.unpadded()
    batch = next(iter(images.batches(torch.arange(100), 100, EVAL, exact.device)))
    with torch.no_grad():
        assert torch.allclose(
            back.eval()(batch.inputs), padded.model.eval()(batch.inputs), rtol=1e-3, atol=1e-3
        )


def test_out_of_memory_doubles_the_accumulation_steps(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    images = pictures(2048).to(engine.device)
    recipe = replace(RECIPE, epochs=1, batch_size=1024)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fit(network("cifar_resnet18"), CrossEntropy(), images, recipe, engine=engine, seed=0)
    needed = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        0.6 * needed / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        with caplog.at_level(logging.WARNING, "peel"):
            history = fit(network("cifar_resnet18"), CrossEntropy(), images, recipe, engine=engine, seed=0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory" in caplog.text
    assert torch.isfinite(torch.tensor(losses(history))).all()


def test_cached_logits_are_those_of_the_teacher(engine: Engine) -> None:
    images = pictures(2000).to(engine.device)
    teacher = network("cifar_resnet18", seed=1)
    fit(teacher, CrossEntropy(), images, replace(RECIPE, epochs=1), engine=engine, seed=3)
    cache = make_logit_cache(teacher.eval(), images, "crop-flip", 10, engine)
    assert cache is not None
    cached = CachedTeacher(images, cache)
    sizes = set[int]()
    hook = teacher.register_forward_pre_hook(lambda _, inputs: sizes.add(len(inputs[0])))
    for epoch in range(3):
        cached.fill(torch.arange(2000), View.of_epoch("crop-flip", 0, epoch))
    hook.remove()
    assert len(sizes) == 1, "a new size of a batch is slow"
    for epoch in range(3):
        view = View.of_epoch("crop-flip", 0, epoch)
        for batch in cached.batches(torch.randperm(2000), 128, view, engine.device):
            with torch.no_grad(), engine.autocast():
                online = teacher(batch.inputs).float()
            assert batch.teacher_logits is not None
            assert (batch.teacher_logits - online).abs().max() < 2e-2 * online.abs().max().clamp_min(1)
            assert (batch.teacher_logits.argmax(1) == online.argmax(1)).float().mean() > 0.98
    computed = cache.computed
    list(cached.batches(torch.arange(2000), 128, View.of_epoch("crop-flip", 0, 0), engine.device))
    assert cache.computed == computed, "nothing is computed twice"


def test_mobile_networks_are_padded_on_the_gpu_too(engine: Engine) -> None:
    """The check of the padding must tolerate the rounding of bfloat16."""
    model = network("cifar_mobilenet_v2")
    graph = peel.trace(model, torch.zeros(1, 3, 32, 32))
    widths = peel.uniform(graph, "50%")
    small = engine.prepare(peel.slim(model, widths, graph=graph))
    assert pad(small, graph.at(widths), fast_widths(small, graph.at(widths))) is not None


def test_a_whole_run_on_the_gpu() -> None:
    result = small_run(device="cuda", distill="teacher")
    assert result.model is not None
    assert [row.name for row in result.rows] == ["original", "uniform", "peel"]
    assert any("--deterministic" in note for note in result.notes)
    assert not any("zero channels" in note for note in result.notes)


@pytest.mark.parametrize("method", ["sensitivity", "peel", "taylor"])
def test_a_trained_network_that_is_given_on_the_cpu(method: str) -> None:
    result = small_run(
        data=few_digits(600, 300), weights=taught(), device="cuda", method=method, budget="60%"
    )
    assert [row.name for row in result.rows] == ["original", "uniform", method]


@pytest.mark.parametrize("net", ["small", "cifar_resnet20"])
def test_deterministic_runs_have_the_same_bits(net: str) -> None:
    results = []
    for _ in range(2):
        model = Small() if net == "small" else zoo.create(net, num_classes=10)
        torch.manual_seed(0)
        results.append(small_run(model, device="cuda", deterministic=True, weights="train"))
    assert results[0].model is not None
    assert results[1].model is not None
    assert same_weights(results[0].model, results[1].model)
    assert not any("--deterministic" in note for note in results[0].notes)


class StopAt(Callback):
    """Interrupts its own process at a step."""

    def __init__(self, step: int) -> None:
        self.stop_at = step

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        if step == self.stop_at:
            signal.raise_signal(signal.SIGTERM)


def test_an_interrupted_training_on_the_gpu_resumes_with_the_same_bits(tmp_path: Path) -> None:
    engine = make_engine("cuda", deterministic=True)
    images = few_digits().train.to(engine.device)
    recipe = Recipe(epochs=3, batch_size=50, augment="crop")
    torch.manual_seed(0)
    whole = Small()
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    common: dict[str, Any] = {"engine": engine, "seed": 0}
    fit(whole, CrossEntropy(), images, recipe, **common)
    with handle_signals(), pytest.raises(Interrupted):
        fit(
            first,
            CrossEntropy(),
            images,
            recipe,
            **common,
            checkpoints=Checkpoints(tmp_path, "a"),
            callbacks=[StopAt(7)],
        )
    fit(second, CrossEntropy(), images, recipe, **common, checkpoints=Checkpoints(tmp_path, "a"))
    assert same_weights(whole, second)


INTERRUPTED = """
import sys
import torch
from test_gpu import RECIPE, StopAt, network, pictures
from peel.train.engine import make_engine
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.signals import Interrupted, handle_signals

engine = make_engine("cuda")
try:
    with handle_signals():
        images = pictures().to(engine.device)
        fit(network(), CrossEntropy(), images, RECIPE, engine=engine, seed=0, callbacks=[StopAt(20)])
except Interrupted as stop:
    sys.exit(128 + stop.signal_number)
"""


def test_interrupted_processes_that_share_the_gpu_exit_without_a_crash() -> None:
    """They are in the middle of replaying a CUDA graph."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    processes = [subprocess.Popen([sys.executable, "-c", INTERRUPTED], env=environment) for _ in range(6)]
    assert [process.wait(200) for process in processes] == [128 + signal.SIGTERM] * 6


@pytest.fixture
def photographs(tmp_path: Path) -> ImageFolder:
    from PIL import Image

    chance = torch.Generator().manual_seed(0)
    paths = []
    for number in range(70):
        small = torch.randint(0, 256, (6, 8, 3), dtype=torch.uint8, generator=chance).numpy()
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(small).resize((160, 120), Image.Resampling.BICUBIC).save(paths[-1])
    return ImageFolder(
        [str(path) for path in paths], torch.arange(70), (3, 96, 96), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2)
    )


def test_images_from_a_folder_arrive_on_the_gpu_as_on_the_cpu(photographs: ImageFolder) -> None:
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    for view in (View("imagenet", 5), View("none"), View("crop-flip", 5)):
        there = list(photographs.batches(order, 16, view, torch.device("cuda"), 2))
        here = list(photographs.batches(order, 16, view, torch.device("cpu"), 0))
        for mine, theirs in zip(there, here, strict=True):
            assert torch.equal(mine.targets.cpu(), theirs.targets)
            # Rounding to a level of brightness may fall to either side.
            assert (mine.inputs.cpu() - theirs.inputs).abs().max() <= 1.01 / 255 / 0.2
            assert (mine.inputs.cpu() - theirs.inputs).abs().mean() < 0.01


def test_memory_does_not_grow_from_epoch_to_epoch(photographs: ImageFolder) -> None:
    reserved = []
    for epoch in range(8):
        for batch in photographs.batches(
            torch.arange(70), 16, View.of_epoch("imagenet", 0, epoch), torch.device("cuda"), 2
        ):
            batch.inputs.square().sum()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]


def test_small_images_may_be_augmented_as_large_ones(engine: Engine) -> None:
    images, order, view = pictures(64), torch.arange(64), View("imagenet", 5)
    there = next(iter(images.to(engine.device).batches(order, 32, view, engine.device)))
    here = next(iter(images.batches(order, 32, view, torch.device("cpu"))))
    assert (there.inputs.cpu() - here.inputs).abs().mean() < 0.01


def test_the_color_kernel_matches_the_cpu() -> None:
    images = torch.randint(
        0, 256, (100, 224, 224, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    index, mean, scale = torch.arange(100) * 3, torch.tensor([120.0, 110.0, 100.0]), torch.full((3,), 0.02)
    wanted = color_jitter_and_flip(images.permute(0, 3, 1, 2), index, 5).permute(0, 2, 3, 1)
    from peel.data.color_kernel import fused_color_jitter

    made = fused_color_jitter(images.cuda(), draw_color_jitter(index.cuda(), 5), mean.cuda(), scale.cuda())
    gap = (made.cpu() / scale + mean - wanted).abs()
    assert gap.max() < 1.01
    assert (gap > 0.01).float().mean() < 1e-3


def test_the_default_engine_learns_the_digits() -> None:
    engine = make_engine("cuda")
    data = load_data("digits").to(engine.device)
    model = network()
    history = fit(
        model,
        CrossEntropy(0.1),
        data.train,
        Recipe(epochs=12, batch_size=64, lr=0.1, augment="crop"),
        engine=engine,
        seed=0,
        test=data.test,
    )
    assert history[-1].test is not None
    assert history[-1].test["top1"] > 0.95


def test_the_optimizer_is_fused_and_weights_are_channels_last(engine: Engine) -> None:
    model = engine.prepare(network())
    step = TrainStep(model, CrossEntropy(), RECIPE, engine)
    assert step.optimizer.defaults["fused"]
    assert all(
        weight.is_contiguous(memory_format=torch.channels_last)
        for weight in model.parameters()
        if weight.ndim == 4
    )


def test_repair_on_a_gpu_gives_what_the_cpu_gives() -> None:
    torch.manual_seed(0)
    model, images = Small().eval(), torch.randn(64, 3, 8, 8)
    graph = peel.trace(model, images[:1])
    widths = {"conv1": 5, "conv2": 6, "conv3": 11, "conv4": 12}
    outputs = []
    for device in ("cpu", "cuda"):
        original, inputs = copy.deepcopy(model).to(device), images.to(device)
        scores = peel.explain_scores(original, graph, inputs)
        small = peel.slim(original, widths, graph=graph, weights="inherit", scores=scores)
        peel.repair(small, original, images, graph=graph)  # moved to the device of the model
        outputs.append(small.eval()(inputs).detach().cpu())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.02, atol=0.02)


def test_no_layer_waits_for_the_gpu_when_it_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = network("cifar_mobilenet_v2").cuda().eval(), torch.randn(64, 3, 32, 32).cuda()
    graph = peel.trace(model, images[:1])
    small = peel.slim(model, peel.uniform(graph, "30%"), graph=graph, weights="inherit")
    again, seen = copy.deepcopy(small), []
    peel.repair(small, model, images, graph=graph)  # constants are moved to the GPU once
    at_layer = _Refit.at_layer

    def watched(self: _Refit, name: str, index: int, call: LayerCall, run: Any) -> Any:
        set_sync_debug_mode("error")
        seen.append(name)
        try:
            return at_layer(self, name, index, call, run)
        finally:
            set_sync_debug_mode("default")

    monkeypatch.setattr(_Refit, "at_layer", watched)
    report = peel.repair(again, model, images, graph=graph)
    assert len(report.refitted) == len(seen) > 50


@pytest.mark.parametrize("workers", [0, 2])
def test_data_and_loss_of_ones_own(workers: int) -> None:
    data = own_data.vectors(192), own_data.vectors(48, seed=5)
    result = peel.prune(
        Small(3),
        data,
        weights="train",
        loss=own_data.bce,
        metric=own_data.hits,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        train={"epochs": 6},
        backbone={"epochs": 1},
        workers=workers,
        device="cuda",
        bench_seconds=0.1,
    )
    assert all(row.metric is not None and row.metric > 0.7 for row in result.rows)
    assert result.rows[-1].speedup is not None
    (note,) = [note for note in result.notes if "Left off" in note]
    assert "CUDA graphs" in note
    assert "the teacher cache" in note

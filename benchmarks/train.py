"""How fast training is on a GPU, as ratios measured side by side in one process.

    python benchmarks/train.py                          all parts that need no --data; five minutes on an H200
    python benchmarks/train.py --parts small slim       some parts
    python benchmarks/train.py --data CIFAR_FOLDER --parts curves

small    32 pixels: images/s of the real loop (data, augmentation, the loss of every stage) over the ceiling,
         and over a plain loop (DataLoader, torchvision transforms, float32)
slim     images/s of slim networks over the full one, beside the ratio of their MACs
others   the same for networks that were not used to choose the padding rule of surgery/padding.py
layers   the same for the convolutions of ResNet-18 alone
memory   GPU memory of training the backbone and of distillation, beside that of the original
large    224 pixels from JPEG files: images/s of the real loop over the ceiling, and over decoding alone
curves   losses and accuracy of the fast loop and the plain loop over several seeds (needs --data)
repeats  difference of two trainings with the same seed, by default and with --deterministic (needs --data)

The ceiling is the same network on one batch that never leaves the GPU: bfloat16, channels-last, fused SGD,
the step replayed as a CUDA graph. With --compiled, it is also measured with torch.compile. Timing starts
after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import peel
from peel import zoo
from peel.data.augmentation import View
from peel.data.datasets import IMAGENET_MEAN, IMAGENET_STD, Data, load_data
from peel.data.image_folder import ImageFolder, find_images
from peel.data.in_memory import InMemoryImages
from peel.steps.distillation import Distillation
from peel.steps.importance import WithL1
from peel.surgery.padding import fast_widths, pad
from peel.train.engine import Engine, make_engine
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy, Objective
from peel.train.recipe import Recipe
from peel.train.teacher_cache import CachedTeacher, make_logit_cache
from plain_loop import plain_loop
from stopwatch import replayed, timed

PARTS = ["small", "slim", "others", "layers", "memory", "large", "curves", "repeats"]

#: For the parts that train on CIFAR-10.
CIFAR_RECIPE = Recipe(
    epochs=4, batch_size=512, lr=0.1, augment="crop-flip", weight_decay=5e-4, label_smoothing=0.1
)

#: Labels of rows that are named in two places.
PADDED = "padded as in training"
CACHED = "cached teacher logits"
ONLINE = "teacher at every step"

UNITS = dict.fromkeys(PARTS, "images/s") | {
    "memory": "MiB",
    "curves": "fast minus plain, means",
    "repeats": "difference of weights, %",
}

#: Decimal places in the tables.
DIGITS = {"curves": 3, "repeats": 2}

#: Fields of a line of the results that are not ratios.
NO_RATIOS = ("part", "what", "rate", "by_seed", "device", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=1024, help="batch size at 32 pixels")
    parser.add_argument("--large-batch", type=int, default=256, help="batch size at 224 pixels")
    parser.add_argument("--images", type=int, default=50_000, help="number of images of 32 pixels")
    parser.add_argument(
        "--files",
        type=int,
        default=1_500,
        help="number of JPEG files; each is read several times per epoch",
    )
    parser.add_argument("--reads", type=int, default=40_000, help="images read per epoch at 224 pixels")
    parser.add_argument("--workers", type=int, help="data loader workers; the default is that of training")
    parser.add_argument("--data", help="a CIFAR-10 folder, or cifar10, for curves and repeats")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="at least two, for curves")
    parser.add_argument("--epochs", type=int, default=2, help="for curves")
    parser.add_argument(
        "--cudnn-benchmark",
        action="store_true",
        help="let cuDNN try all kernels for each shape",
    )
    parser.add_argument(
        "--compiled", action="store_true", help="also measure compiled networks; takes minutes longer"
    )
    parser.add_argument(
        "--results", type=Path, help="append the measurements to this file, one JSON object per line"
    )
    parser.add_argument(
        "--render", type=Path, help="write the tables of --results into this file, between its markers"
    )
    options = parser.parse_args()
    if len(options.seeds) < 2:
        parser.error("--seeds needs at least two seeds, to measure the spread of the curves")
    if options.render is not None:
        render(options.results, options.render)
        return
    engine = make_engine(options.device, compile="off", workers=options.workers)
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    bench = Bench(engine, options)
    print(f"{engine.description}, torch {torch.__version__}", flush=True)
    for part in options.parts:
        getattr(bench, part)()


class Bench:
    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options

    def report(
        self,
        part: str,
        what: str,
        rate: float,
        by_seed: dict[str, list[float]] | None = None,
        **ratios: float,
    ) -> None:
        """Print a measurement and append it to the results; `by_seed` holds the values behind the means."""
        what += ", cudnn.benchmark" if self.options.cudnn_benchmark else ""
        text = ", ".join(
            f"{name.replace('_', ' ')} {value:.{DIGITS.get(part, 2)}f}" for name, value in ratios.items()
        )
        print(f"{part:7} {what:58} {rate:12,.{DIGITS.get(part, 1)}f}   {text}", flush=True)
        if self.options.results is not None:
            line: dict[str, Any] = {"part": part, "what": what, "rate": rate, **ratios}
            if by_seed:
                line["by_seed"] = by_seed
            line |= {"device": self.engine.description, "torch": torch.__version__}
            with self.options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")

    # 32 pixels

    def small(self) -> None:
        batch = self.options.batch
        images = noise(self.options.images, 32).to(self.engine.device)
        for name in ("cifar_resnet18", "cifar_mobilenet_v2"):
            ceiling = self.ceiling(classifier(name), batch, 32)
            self.report("small", f"{name}: ceiling", ceiling)
            for what, (objective, split) in self.stages(name, images).items():
                rate = self.loop(classifier(name), objective, split, batch)
                self.report("small", f"{name}: loop, {what}", rate, of_ceiling=rate / ceiling)
            if name == "cifar_resnet18":
                rate = self.plain(classifier(name), images, batch)
                self.report("small", f"{name}: plain loop, float32", rate, of_ceiling=rate / ceiling)
                if self.options.compiled:
                    self.small_compiled(name, images, ceiling)

    def small_compiled(self, name: str, images: InMemoryImages, ceiling: float) -> None:
        batch, engine = self.options.batch, replace(self.engine, compile="on")
        compiled = self.ceiling(classifier(name), batch, 32, compiled=True)
        self.report("small", f"{name}: ceiling, compiled", compiled, of_ceiling=compiled / ceiling)
        for what, (objective, split) in self.stages(name, images).items():
            rate = self.loop(classifier(name), objective, split, batch, engine=engine)
            self.report("small", f"{name}: loop, compiled, {what}", rate, of_compiled_ceiling=rate / compiled)

    def stages(self, name: str, images: InMemoryImages) -> dict[str, tuple[Objective, Any]]:
        """The objective of each stage and its images."""
        graph = peel.trace(classifier(name), torch.zeros(1, 3, 32, 32))
        teacher = self.engine.prepare(classifier(name)).eval().requires_grad_(False)
        distillation = Distillation(CrossEntropy(0.1), teacher)
        cache = make_logit_cache(teacher, images, "crop-flip", 10, self.engine)
        assert cache is not None
        return {
            "labels": (CrossEntropy(0.1), images),
            "labels and L1 term": (WithL1(CrossEntropy(0.1), graph.scales, 1e-4), images),
            CACHED: (distillation, CachedTeacher(images, cache)),
            ONLINE: (distillation, images),
        }

    def loop(
        self,
        model: nn.Module,
        objective: Objective,
        split: Any,
        batch: int,
        epochs: int = 3,
        engine: Engine | None = None,
    ) -> float:
        """Images per second of the real loop in its last epoch, with a full teacher cache if there is one."""
        augment = "imagenet" if isinstance(split, ImageFolder) else "crop-flip"
        recipe = Recipe(epochs=epochs, batch_size=batch, lr=0.1, augment=augment)
        if isinstance(split, CachedTeacher):
            # Fills the cache for the last epoch, as an earlier student would.
            view = View.of_epoch(augment, 0, epochs - 1)
            next(iter(split.batches(torch.arange(split.size), batch, view, self.engine.device)))
        history = fit(model, objective, split, recipe, engine=engine or self.engine, seed=0)
        return history[-1].images_per_second

    def ceiling(
        self, model: nn.Module, batch: int, size: int, *, compiled: bool = False, steps: int = 30
    ) -> float:
        """Images per second on one batch that stays on the device."""
        device = self.engine.device
        model = model.to(device).to(memory_format=torch.channels_last).train()
        images = torch.randn(batch, 3, size, size, device=device).contiguous(
            memory_format=torch.channels_last
        )
        labels = torch.randint(0, 10, (batch,), device=device)
        if compiled:
            torch.compiler.reset()
            model.compile(dynamic=False)
        on_gpu = device.type == "cuda"
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=on_gpu or None
        )

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.engine.bf16):
                loss = nn.functional.cross_entropy(model(images).float(), labels)
            loss.backward()
            optimizer.step()

        if not on_gpu:
            return batch / timed(step, 2, 1, device)
        return batch / timed(replayed(step, device), 10, steps, device)

    def plain(self, model: nn.Module, images: InMemoryImages, batch: int, steps: int = 20) -> float:
        """Images per second of the plain loop, without its first five steps."""
        losses_and_seconds = plain_loop(
            model,
            images,
            Recipe(epochs=1, batch_size=batch, lr=0.1),
            self.engine.device,
            0,
            self.engine.workers,
            steps + 5,
        )
        times = [seconds for _, seconds in losses_and_seconds]
        times = times[5:] or times
        return batch * len(times) / sum(times)

    # Slim networks

    def slim(self) -> None:
        images = noise(self.options.images, 32).to(self.engine.device)
        batch = self.options.batch
        for name, size in (
            ("cifar_resnet18", batch),
            ("cifar_resnet18", batch // 8),
            ("cifar_mobilenet_v2", batch),
        ):
            rate_of = partial(self.loop, objective=CrossEntropy(0.1), split=images, batch=size)
            self.slimmed("slim", f"{name}, batch {size}", name, 32, rate_of)
        size = self.options.large_batch // 2
        # The ceiling only: the speed of decoding is measured by `large`.
        rate_of = partial(self.ceiling, batch=size, size=224, steps=10)
        self.slimmed("slim", f"resnet50 at 224 pixels, batch {size}", "resnet50", 224, rate_of)
        if self.options.compiled:
            compiling = replace(self.engine, compile="on")
            rate_of = partial(
                self.loop, objective=CrossEntropy(0.1), split=images, batch=batch, engine=compiling
            )
            self.slimmed(
                "slim", f"cifar_resnet18, batch {batch}, compiled", "cifar_resnet18", 32, rate_of, [PADDED]
            )

    def others(self) -> None:
        batch = self.options.large_batch
        for name, size in (
            ("repvgg_a1", batch),
            ("dla34", batch),
            ("wide_resnet50_2", batch // 2),
            ("densenet121", batch // 2),
            ("regnet_y_400mf", batch),
        ):
            rate_of = partial(self.ceiling, batch=size, size=224, steps=10)
            self.slimmed("others", f"{name} at 224 pixels, batch {size}", name, 224, rate_of)

    def slimmed(
        self,
        part: str,
        what: str,
        name: str,
        pixels: int,
        rate_of: Callable[[nn.Module], float],
        forms: list[str] | None = None,
    ) -> None:
        model = classifier(name)
        graph = peel.trace(model, torch.zeros(1, 3, pixels, pixels))
        full = rate_of(classifier(name))
        self.report(part, f"{what}: full", full)
        for budget in ("70%", "50%", "25%"):
            widths = peel.uniform(graph, budget)
            network = self.engine.prepare(peel.slim(model, widths, graph=graph))
            own = graph.at(widths)
            eights = {}
            for tie, width in own.widths.items():
                step = math.lcm(8, own.steps[tie])
                eights[tie] = -(-width // step) * step
            raised = {
                "unpadded": own.widths,
                "multiples of 8": peel.Widths(eights),
                PADDED: fast_widths(network, own),
            }
            measured: dict[peel.Widths, float] = {}
            for form in forms or raised:
                if raised[form] not in measured:
                    padded = pad(network, own, raised[form])
                    measured[raised[form]] = rate_of(
                        padded.model if padded is not None else peel.slim(model, widths, graph=graph)
                    )
                times, ratio = measured[raised[form]] / full, graph.macs() / graph.macs(widths)
                ratios = {"times_full": times, "macs_ratio": ratio, "of_proportion": times / ratio}
                self.report(part, f"{what}: {budget} of MACs, {form}", measured[raised[form]], **ratios)

    def layers(self) -> None:
        """Forward and backward of a 3x3 convolution with as many channels in as out."""
        for size, channels in ((32, 64), (16, 128), (8, 256), (4, 512)):
            full = self.layer(channels, size)
            self.report("layers", f"{size} x {size} pixels, {channels} channels", full)
            for count in range(channels // 2, channels, channels // 16):
                rate, ratio = self.layer(count, size), (channels / count) ** 2
                ratios = {
                    "times_full": rate / full,
                    "macs_ratio": ratio,
                    "of_proportion": rate / full / ratio,
                }
                self.report(
                    "layers", f"{size} x {size} pixels, {count} of {channels} channels", rate, **ratios
                )

    def layer(self, channels: int, size: int) -> float:
        device, batch = self.engine.device, self.options.batch
        layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False, device=device).to(
            memory_format=torch.channels_last
        )
        kind = torch.bfloat16 if self.engine.bf16 else torch.float32
        layer = layer.to(kind)
        images = torch.randn(batch, channels, size, size, device=device, dtype=kind).to(
            memory_format=torch.channels_last
        )
        images.requires_grad_()

        def step() -> None:
            output = layer(images)
            torch.autograd.grad(output, (images, layer.weight), output)

        return batch / timed(replayed(step, device), 10, 50, device)

    # Memory

    def memory(self) -> None:
        if self.engine.device.type != "cuda":
            print("memory  is measured on a GPU only")
            return
        images = noise(4 * self.options.batch, 32).to(self.engine.device)
        name, batch = "cifar_resnet18", self.options.batch
        model = classifier(name)
        graph = peel.trace(model, torch.zeros(1, 3, 32, 32))
        backbone = peel.backbone(graph, "50%")
        stages = self.stages(name, images)
        original = 0.0
        half = peel.uniform(graph, "50%")
        for what, widths, stage in (
            ("original", graph.widths, "labels"),
            ("backbone for 50 % of the MACs, L1 term", backbone, "labels and L1 term"),
            (f"slim at 50 %, {CACHED}", half, CACHED),
            (f"slim at 50 %, {ONLINE}", half, ONLINE),
        ):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            objective, split = stages[stage]
            self.loop(self.as_trained(model, graph, widths), objective, split, batch, epochs=2)
            peak = (torch.cuda.max_memory_allocated() - base) / 2**20
            original = original or peak
            self.report("memory", f"{what}: MiB at batch {batch}", peak, of_original=peak / original)

    def as_trained(self, model: nn.Module, graph: peel.ChannelGraph, widths: peel.Widths) -> nn.Module:
        """A new network at these widths, padded as in training."""
        network, own = self.engine.prepare(peel.slim(model, widths, graph=graph)), graph.at(widths)
        padded = pad(network, own, fast_widths(network, own))
        return network if padded is None else padded.model

    # 224 pixels

    def large(self) -> None:
        batch, size = self.options.large_batch, 224
        with tempfile.TemporaryDirectory() as folder:
            split = self.files(Path(folder), size)
            decoded = self.decoding(split, batch)
            self.report("large", f"decoding alone, {self.engine.workers} workers", decoded)
            for compile, word in (("off", ""), ("on", ", compiled"))[: 1 + self.options.compiled]:
                is_compiled = compile == "on"
                ceiling = self.ceiling(classifier("resnet50"), batch, size, compiled=is_compiled, steps=10)
                self.report("large", f"resnet50: ceiling{word}", ceiling)
                engine = replace(self.engine, compile=compile)
                objective, network = CrossEntropy(0.1), classifier("resnet50")
                rate = self.loop(network, objective, split, batch, epochs=2, engine=engine)
                limit = "decoding is the limit" if decoded < ceiling else "decoding keeps up"
                ratios = {
                    "of_ceiling": rate / ceiling,
                    "of_decoding": rate / decoded,
                    "of_the_lower": rate / min(ceiling, decoded),
                }
                self.report("large", f"resnet50: loop{word} ({limit})", rate, **ratios)

    def files(self, folder: Path, size: int) -> ImageFolder:
        """Synthetic photographs of about ImageNet's size as JPEG files, each several times in the list."""
        count = self.options.files
        with ProcessPoolExecutor() as pool:
            list(pool.map(draw_photograph, [(folder, number) for number in range(count)], chunksize=8))
        paths, labels, _ = find_images(folder)
        times = max(1, self.options.reads // count)
        names = [str(path) for path in paths] * times
        return ImageFolder(names, torch.tensor(labels * times), (3, size, size), IMAGENET_MEAN, IMAGENET_STD)

    def decoding(self, split: ImageFolder, batch: int) -> float:
        """Images per second of the data loader alone, over a hundred batches without the first fifth."""
        order = torch.randperm(split.size)[: 100 * batch]
        view = View.of_epoch("imagenet", 0, 0)
        batches = split.batches(order, batch, view, self.engine.device, self.engine.workers)
        times = [time.perf_counter() for _ in batches]
        first = len(times) // 5
        return batch * (len(times) - 1 - first) / (times[-1] - times[first])

    # Same results

    def curves(self) -> None:
        data, epochs = self.cifar("curves"), self.options.epochs
        watched = {f"loss of epoch {n} of {epochs}": n - 1 for n in sorted({1, (epochs + 1) // 2, epochs})}
        top1 = f"top-1 in %, after epoch {epochs}"
        found: dict[str, dict[str, list[float]]] = {}
        for seed in self.options.seeds:
            for kind, (losses, accuracy) in self.both_loops(data, epochs, seed).items():
                values = {what: losses[epoch] for what, epoch in watched.items()} | {top1: accuracy}
                for what, value in values.items():
                    found.setdefault(what, {"plain": [], "fast": []})[kind].append(value)
        for what, kinds in found.items():
            plain, fast = kinds["plain"], kinds["fast"]
            variance = statistics.variance(fast) + statistics.variance(plain)
            self.report(
                "curves",
                f"{what}, seeds {' '.join(map(str, self.options.seeds))}",
                statistics.mean(fast) - statistics.mean(plain),
                by_seed=kinds,
                standard_error=math.sqrt(variance / len(plain)),
                plain=statistics.mean(plain),
                fast=statistics.mean(fast),
                spread_plain=max(plain) - min(plain),
                spread_fast=max(fast) - min(fast),
            )

    def both_loops(self, data: Data, epochs: int, seed: int) -> dict[str, tuple[list[float], float]]:
        """Loss of each epoch and final top-1 in percent, of the fast and of the plain loop."""
        engine, device = self.engine, self.engine.device
        recipe = CIFAR_RECIPE.changed(epochs=epochs, lr=0.2)
        torch.manual_seed(seed)
        model = classifier("cifar_resnet18")
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        train, test = data.train.to(device), data.test.to(device)
        history = fit(model, CrossEntropy(0.1), train, recipe, engine=engine, seed=seed)
        fast = [epoch.train["loss"] for epoch in history], 100 * evaluate(model, test, engine).top1
        model.load_state_dict(weights)
        steps = train.size // recipe.batch_size
        assert isinstance(data.train, InMemoryImages)
        losses = [x for x, _ in plain_loop(model, data.train, recipe, device, seed, engine.workers, None)]
        means = [statistics.mean(losses[i : i + steps]) for i in range(0, len(losses), steps)]
        return {"fast": fast, "plain": (means, 100 * evaluate(model, test, engine).top1)}

    def repeats(self) -> None:
        """The same training twice. `--deterministic` comes last, as it changes global settings of torch."""
        data = self.cifar("repeats")
        default_speed: dict[str, float] = {}
        for what in ("by default", "with --deterministic"):
            is_default = what == "by default"
            engine = self.engine if is_default else make_engine(self.options.device, deterministic=True)
            for name in ("cifar_resnet18", "cifar_vgg16_bn", "cifar_mobilenet_v2"):
                first, top1, speed = self.trained(name, data, engine)
                second, other_top1, _ = self.trained(name, data, engine)
                ratio = speed / default_speed.setdefault(name, speed)
                label = f"{name} {what}: top-1 {top1:.2%} and {other_top1:.2%}"
                difference = float((first - second).norm() / first.norm())
                self.report("repeats", label, 100 * difference, of_default_speed=ratio)

    def trained(self, name: str, data: Data, engine: Engine) -> tuple[Tensor, float, float]:
        """Four epochs with seed 0: all weights, top-1, and images per second of the last epoch."""
        torch.manual_seed(0)
        model = classifier(name)
        train, test = data.train.to(engine.device), data.test.to(engine.device)
        history = fit(model, CrossEntropy(0.1), train, CIFAR_RECIPE, engine=engine, seed=0)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return weights, evaluate(model, test, engine).top1, history[-1].images_per_second

    def cifar(self, part: str) -> Data:
        if self.options.data is None:
            raise SystemExit(f"the part {part} needs --data: a CIFAR-10 folder, or cifar10")
        return load_data(self.options.data)


def render(results: Path, target: Path) -> None:
    """Write one table per part. Of several lines with the same label, the last counts."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for text in results.read_text().splitlines():
        line = json.loads(text)
        found.setdefault(line["part"], {})[line["what"]] = line
    page = target.read_text()
    for part, lines in found.items():
        ratios = list(dict.fromkeys(key for line in lines.values() for key in line if key not in NO_RATIOS))
        rows = [
            f"| | {UNITS[part]} | " + " | ".join(key.replace("_", " ") for key in ratios) + " |",
            "|---" * (len(ratios) + 2) + "|",
        ]
        for what, line in lines.items():
            cells = [f"{line[key]:.{DIGITS.get(part, 2)}f}" if key in line else "" for key in ratios]
            rows.append(f"| {what} | {line['rate']:,.{DIGITS.get(part, 0)}f} | " + " | ".join(cells) + " |")
        before, opening, rest = page.partition(f"<!-- {part} -->\n")
        _, closing, after = rest.partition(f"<!-- /{part} -->")
        if not opening or not closing:
            raise SystemExit(f"{target} has no markers <!-- {part} --> and <!-- /{part} -->")
        page = before + opening + "\n".join(rows) + "\n" + closing + after
    target.write_text(page)


def classifier(name: str) -> nn.Module:
    return zoo.create(name, num_classes=10)


def noise(count: int, size: int) -> InMemoryImages:
    """Random images with random labels."""
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=rng)
    labels = torch.randint(0, 10, (count,), generator=rng)
    return InMemoryImages(pixels, labels, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def draw_photograph(task: tuple[Path, int]) -> None:
    """Write a JPEG of 500 x 375 pixels and about 100 KB: large shapes, small shapes and grain."""
    import numpy as np
    from PIL import Image

    root, number = task
    rng = np.random.default_rng(number)
    image = np.zeros((375, 500, 3))
    for cells, strength in ((4, 120), (40, 60), (150, 40)):
        layer = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        layer = layer.resize((500, 375), Image.Resampling.BICUBIC)
        image += np.asarray(layer, dtype=np.float64) / 255 * strength
    folder = root / f"class{number % 10}"
    folder.mkdir(exist_ok=True)
    Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=92)


if __name__ == "__main__":
    main()

"""How fast training is on a GPU, as ratios measured side by side in one run.

    python benchmarks/train.py                          every part; some five minutes on an H200
    python benchmarks/train.py --parts small slim       some of them
    python benchmarks/train.py --data CIFAR_FOLDER --parts curves

small    32 pixels: images/s of the real loop (data, augmentation and every stage's loss) over the ceiling of the same network, which trains
         on one batch that never leaves the GPU; and over a plain loop (DataLoader, torchvision transforms, float32)
slim     images/s of slimmed networks over the full one, beside the ratio of their MACs
others   the same for networks that the rule of train/fast_widths.py was not chosen by
layers   the same for the convolutions of ResNet-18 alone: what a GPU makes of fewer channels, whatever the rest of a step does
memory   GPU memory of the search stage and of training with a teacher, beside that of the original
large    224 pixels from JPEG files: images/s of the real loop over the ceiling, and over what can be decoded
curves   losses and accuracy of the fast loop and of the plain one, with several seeds each: the same but for chance (needs --data)
repeats  how far apart two trainings with the same seed end, by default and with --deterministic (needs --data)

The ceiling is written here on its own: bfloat16, channels-last, fused SGD, the step replayed as a CUDA graph; with `compiled`, compiled by
torch before that. Nothing here is timed before the kernels are warm.
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
from peel.data.datasets import Data, load_data
from peel.data.image_folder import ImageFolder, find_images
from peel.data.in_memory import InMemoryImages
from peel.steps.distillation import Distillation
from peel.steps.importance import WithL1
from peel.surgery import record_of
from peel.surgery.padding import fast_widths, pad
from peel.train.engine import Engine, make_engine
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy, Objective
from peel.train.recipe import Recipe
from peel.train.teacher_cache import CachedTeacher, make_logit_cache
from plain_loop import plain_loop
from stopwatch import replayed, timed

PARTS = ["small", "slim", "others", "layers", "memory", "large", "curves", "repeats"]

#: What training does to odd widths.
PADDED = "padded as in training"

UNITS = dict.fromkeys(PARTS, "images/s") | {
    "memory": "MiB",
    "curves": "fast minus plain, means",
    "repeats": "weights apart, %",
}

#: After the point, in the tables.
DIGITS = {"curves": 3, "repeats": 2}

#: What a line of the results has besides its ratios.
NO_RATIOS = ("part", "what", "rate", "of_each", "device", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=1024, help="for 32 pixels")
    parser.add_argument("--large-batch", type=int, default=256, help="for 224 pixels")
    parser.add_argument("--images", type=int, default=50_000, help="images of 32 pixels")
    parser.add_argument(
        "--files",
        type=int,
        default=1_500,
        help="JPEG files of 224 pixels and more; each is read several times",
    )
    parser.add_argument(
        "--reads", type=int, default=40_000, help="how many images of 224 pixels an epoch reads"
    )
    parser.add_argument(
        "--workers", type=int, help="processes that decode images; by default as many as training would use"
    )
    parser.add_argument("--data", help="CIFAR-10 as a folder, or the word cifar10, for the curves")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="two or more, for the curves")
    parser.add_argument("--epochs", type=int, default=2, help="for the curves")
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="cuDNN tries all its kernels for each shape and takes the fastest",
    )
    parser.add_argument("--compiled", action="store_true", help="with compiled networks too; minutes longer")
    parser.add_argument(
        "--results", type=Path, help="append what was measured to this file, one JSON object per line"
    )
    parser.add_argument(
        "--render", type=Path, help="write the tables of --results into this file, between its markers"
    )
    options = parser.parse_args()
    if len(options.seeds) < 2:
        parser.error("--seeds needs two seeds or more: the curves are told apart by how far they spread")
    if options.render is not None:
        render(options.results, options.render)
        return
    engine = make_engine(options.device, compile="off", workers=options.workers)
    torch.backends.cudnn.benchmark = options.tuned
    bench = Bench(engine, options)
    print(f"{engine.description}, torch {torch.__version__}", flush=True)
    for part in options.parts:
        getattr(bench, part)()


class Bench:
    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options

    def say(
        self,
        part: str,
        what: str,
        rate: float,
        of_each: dict[str, list[float]] | None = None,
        **ratios: float,
    ) -> None:
        """Print a line and keep it in the results, where `of_each` holds what its means are of."""
        what += ", tuned" if self.options.tuned else ""
        text = ", ".join(
            f"{name.replace('_', ' ')} {value:.{DIGITS.get(part, 2)}f}" for name, value in ratios.items()
        )
        print(f"{part:7} {what:58} {rate:12,.{DIGITS.get(part, 1)}f}   {text}", flush=True)
        if self.options.results is not None:
            measured = {"part": part, "what": what, "rate": rate, **ratios} | (
                {"of_each": of_each} if of_each else {}
            )
            line = {**measured, "device": self.engine.description, "torch": torch.__version__}
            with self.options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")

    # 32 pixels

    def small(self) -> None:
        batch = self.options.batch
        images = noise(self.options.images, 32).to(self.engine.device)
        for name in ("cifar_resnet18", "cifar_mobilenet_v2"):
            ceiling = self.ceiling(zoo.create(name, num_classes=10), batch, 32)
            self.say("small", f"{name}: ceiling", ceiling)
            for what, (objective, split) in self.stages(name, images).items():
                rate = self.loop(zoo.create(name, num_classes=10), objective, split, batch)
                self.say("small", f"{name}: loop, {what}", rate, of_ceiling=rate / ceiling)
            if name == "cifar_resnet18":
                rate = self.plain(zoo.create(name, num_classes=10), images, batch)
                self.say("small", f"{name}: plain loop, float32", rate, of_ceiling=rate / ceiling)
            if self.options.compiled and name == "cifar_resnet18":
                highest = self.ceiling(zoo.create(name, num_classes=10), batch, 32, compiled=True)
                self.say("small", f"{name}: ceiling, compiled", highest, of_ceiling=highest / ceiling)
                compiling = replace(self.engine, compile="on")
                for what, (objective, split) in self.stages(name, images).items():
                    rate = self.loop(
                        zoo.create(name, num_classes=10), objective, split, batch, engine=compiling
                    )
                    self.say(
                        "small", f"{name}: loop, compiled, {what}", rate, of_compiled_ceiling=rate / highest
                    )

    def stages(self, name: str, images: InMemoryImages) -> dict[str, tuple[Objective, Any]]:
        """The losses of the stages, with the images that each of them sees."""
        graph = peel.trace(zoo.create(name, num_classes=10), torch.zeros(1, 3, 32, 32))
        teacher = self.engine.prepare(zoo.create(name, num_classes=10)).eval().requires_grad_(False)
        taught = Distillation(CrossEntropy(0.1), teacher)
        answers = make_logit_cache(teacher, images, "crop-flip", 10, self.engine)
        assert answers is not None
        return {
            "labels": (CrossEntropy(0.1), images),
            "labels and L1 term": (WithL1(CrossEntropy(0.1), graph.scales, 1e-4), images),
            "teacher from its table": (taught, CachedTeacher(images, answers)),
            "teacher online": (taught, images),
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
        """Images per second of the real loop, in its last epoch; a table of answers is filled for it before, as for a second student."""
        recipe = Recipe(
            epochs=epochs,
            batch_size=batch,
            lr=0.1,
            augment="imagenet" if isinstance(split, ImageFolder) else "crop-flip",
        )
        if isinstance(split, CachedTeacher):
            next(
                iter(
                    split.batches(
                        torch.arange(split.size),
                        batch,
                        View.of_epoch(recipe.augment, 0, epochs - 1),
                        self.engine.device,
                    )
                )
            )
        history = fit(model, objective, split, recipe, engine=engine or self.engine, seed=0)
        return history[-1].images_per_second

    def ceiling(
        self, model: nn.Module, batch: int, size: int, *, compiled: bool = False, steps: int = 30
    ) -> float:
        """Images per second on one batch that is always there."""
        device = self.engine.device
        model = model.to(device).to(memory_format=torch.channels_last).train()
        images = torch.randn(batch, 3, size, size, device=device).contiguous(
            memory_format=torch.channels_last
        )
        labels = torch.randint(0, 10, (batch,), device=device)
        if compiled:
            torch._dynamo.reset()
            model.compile(dynamic=False)
        on_gpu = device.type == "cuda"
        optimiser = torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=on_gpu or None
        )

        def step() -> None:
            optimiser.zero_grad(set_to_none=False)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.engine.bf16):
                loss = nn.functional.cross_entropy(model(images).float(), labels)
            loss.backward()
            optimiser.step()

        if not on_gpu:
            return batch / timed(step, 2, 1, device)
        return batch / timed(replayed(step, device), 10, steps, device)

    def plain(self, model: nn.Module, images: InMemoryImages, batch: int, steps: int = 20) -> float:
        """As in torchvision's reference script: worker processes, transforms image by image, float32, a look at the loss each step."""
        epochs = plain_loop(
            model,
            images,
            Recipe(epochs=1, batch_size=batch, lr=0.1),
            self.engine.device,
            0,
            self.engine.workers,
            steps + 5,
        )
        times = [seconds for _, seconds in epochs]
        return (
            batch * (len(times) - 5) / sum(times[5:]) if len(times) > 5 else batch * len(times) / sum(times)
        )

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
        # On a batch that is always there: how fast images are decoded is another question.
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
        model = zoo.create(name, num_classes=10)
        graph = peel.trace(model, torch.zeros(1, 3, pixels, pixels))
        full = rate_of(zoo.create(name, num_classes=10))
        self.say(part, f"{what}: full", full)
        for budget in ("70%", "50%", "25%"):
            widths = peel.uniform(graph, budget)
            network = self.engine.prepare(peel.slim(model, widths, graph=graph))
            own = graph.at(widths)
            eights = peel.Widths(
                {
                    tie: -(-width // math.lcm(8, own.steps[tie])) * math.lcm(8, own.steps[tie])
                    for tie, width in own.widths.items()
                }
            )
            raised = {"as it is": own.widths, "multiples of 8": eights, PADDED: fast_widths(network, own)}
            measured: dict[peel.Widths, float] = {}
            for form in forms or raised:
                if raised[form] not in measured:
                    padded = pad(network, own, raised[form])
                    measured[raised[form]] = rate_of(
                        padded.model if padded is not None else peel.slim(model, widths, graph=graph)
                    )
                times, ratio = measured[raised[form]] / full, graph.macs() / graph.macs(widths)
                ratios = {"times_full": times, "macs_ratio": ratio, "of_proportion": times / ratio}
                self.say(part, f"{what}: {budget} of MACs, {form}", measured[raised[form]], **ratios)

    def layers(self) -> None:
        """Forward and backward of a 3x3 convolution with as many channels in as out."""
        for size, channels in ((32, 64), (16, 128), (8, 256), (4, 512)):
            full = self.layer(channels, size)
            self.say("layers", f"{size} x {size} pixels, {channels} channels", full)
            for count in range(channels // 2, channels, channels // 16):
                rate, ratio = self.layer(count, size), (channels / count) ** 2
                ratios = {
                    "times_full": rate / full,
                    "macs_ratio": ratio,
                    "of_proportion": rate / full / ratio,
                }
                self.say("layers", f"{size} x {size} pixels, {count} of {channels} channels", rate, **ratios)

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
        model = zoo.create(name, num_classes=10)
        graph = peel.trace(model, torch.zeros(1, 3, 32, 32))
        backbone = peel.backbone(graph, "50%")
        stages = self.stages(name, images)
        original = 0.0
        for what, network, stage in (
            ("original", lambda: zoo.create(name, num_classes=10), "labels"),
            (
                "search: backbone for 50 % of the MACs, L1 term",
                lambda: peel.slim(model, backbone, graph=graph),
                "labels and L1 term",
            ),
            (
                "slim at 50 %, teacher from its table",
                lambda: peel.slim(model, peel.uniform(graph, "50%"), graph=graph),
                "teacher from its table",
            ),
            (
                "slim at 50 %, teacher online",
                lambda: peel.slim(model, peel.uniform(graph, "50%"), graph=graph),
                "teacher online",
            ),
        ):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            objective, split = stages[stage]
            self.loop(self.padded(network(), graph), objective, split, batch, epochs=2)
            peak = (torch.cuda.max_memory_allocated() - base) / 2**20
            original = original or peak
            self.say("memory", f"{what}: MiB at batch {batch}", peak, of_original=peak / original)

    def padded(self, network: nn.Module, graph: peel.ChannelGraph) -> nn.Module:
        """The network as it is trained."""
        widths = record_of(network).widths
        if not widths:
            return network
        own = graph.at({tie: widths[tie] for tie in graph.widths})
        padded = pad(self.engine.prepare(network), own, fast_widths(network, own))
        return network if padded is None else padded.model

    # 224 pixels

    def large(self) -> None:
        batch, size = self.options.large_batch, 224
        with tempfile.TemporaryDirectory() as place:
            split = self.files(Path(place), size)
            decoded = self.decoding(split, batch)
            self.say("large", f"decoding alone, {self.engine.workers} processes", decoded)
            for compiled in [False, True] if self.options.compiled else [False]:
                word = ", compiled" if compiled else ""
                ceiling = self.ceiling(
                    zoo.create("resnet50", num_classes=10), batch, size, compiled=compiled, steps=10
                )
                self.say("large", f"resnet50: ceiling{word}", ceiling)
                engine = replace(self.engine, compile="on" if compiled else "off")
                rate = self.loop(
                    zoo.create("resnet50", num_classes=10),
                    CrossEntropy(0.1),
                    split,
                    batch,
                    epochs=2,
                    engine=engine,
                )
                limit = "decoding is the limit" if decoded < ceiling else "decoding keeps up"
                ratios = {
                    "of_ceiling": rate / ceiling,
                    "of_decoding": rate / decoded,
                    "of_the_lower": rate / min(ceiling, decoded),
                }
                self.say("large", f"resnet50: loop{word} ({limit})", rate, **ratios)

    def files(self, place: Path, size: int) -> ImageFolder:
        """Photographs of about ImageNet's size, as files, each several times in the list."""
        from peel.data.datasets import IMAGENET_MEAN, IMAGENET_STD

        count = self.options.files
        with ProcessPoolExecutor() as pool:
            list(pool.map(draw_photograph, [(place, number) for number in range(count)], chunksize=8))
        paths, labels, _ = find_images(place)
        times = max(1, self.options.reads // count)
        return ImageFolder(
            [str(path) for path in paths] * times,
            torch.tensor(labels * times),
            (3, size, size),
            IMAGENET_MEAN,
            IMAGENET_STD,
        )

    def decoding(self, split: ImageFolder, batch: int) -> float:
        """Images per second that the worker processes make for someone who takes them at once, after the first of a hundred batches."""
        order = torch.randperm(split.size)[: 100 * batch]
        batches = split.batches(
            order, batch, View.of_epoch("imagenet", 0, 0), self.engine.device, self.engine.workers
        )
        times = [time.perf_counter() for _ in batches]
        first = len(times) // 5
        return batch * (len(times) - 1 - first) / (times[-1] - times[first])

    # Learning

    def curves(self) -> None:
        data = self.cifar("curves")
        epochs = self.options.epochs
        recipe = Recipe(
            epochs=epochs, batch_size=512, lr=0.2, augment="crop-flip", weight_decay=5e-4, label_smoothing=0.1
        )
        seen = {
            f"loss of epoch {epoch} of {epochs}": epoch - 1
            for epoch in sorted({1, (epochs + 1) // 2, epochs})
        }
        top1 = f"top-1 in %, after epoch {epochs}"
        found: dict[str, dict[str, list[float]]] = {what: {"plain": [], "fast": []} for what in (*seen, top1)}

        def note(kind: str, losses: list[float], model: nn.Module) -> None:
            for what, epoch in seen.items():
                found[what][kind].append(losses[epoch])
            found[top1][kind].append(
                100 * evaluate(model, data.test.to(self.engine.device), self.engine).top1
            )

        for seed in self.options.seeds:
            torch.manual_seed(seed)
            model = zoo.create("cifar_resnet18", num_classes=10)
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            history = fit(
                model,
                CrossEntropy(0.1),
                data.train.to(self.engine.device),
                recipe,
                engine=self.engine,
                seed=seed,
            )
            note("fast", [epoch.train["loss"] for epoch in history], model)
            model.load_state_dict(weights)
            steps = data.train.size // recipe.batch_size
            assert isinstance(data.train, InMemoryImages)
            each = [
                loss
                for loss, _ in plain_loop(
                    model, data.train, recipe, self.engine.device, seed, self.engine.workers, None
                )
            ]
            note("plain", [statistics.mean(each[i : i + steps]) for i in range(0, len(each), steps)], model)
        for what, kinds in found.items():
            plain, fast = kinds["plain"], kinds["fast"]
            self.say(
                "curves",
                f"{what}, seeds {' '.join(map(str, self.options.seeds))}",
                statistics.mean(fast) - statistics.mean(plain),
                of_each=kinds,
                standard_error=math.sqrt(
                    (statistics.variance(fast) + statistics.variance(plain)) / len(plain)
                ),
                plain=statistics.mean(plain),
                fast=statistics.mean(fast),
                spread_plain=max(plain) - min(plain),
                spread_fast=max(fast) - min(fast),
            )

    def repeats(self) -> None:
        """The same training twice with the same seed; `--deterministic` comes last, as it changes how torch computes from then on."""
        data = self.cifar("repeats")
        speeds: dict[str, float] = {}
        for what in ("by default", "with --deterministic"):
            engine = (
                self.engine if what == "by default" else make_engine(self.options.device, deterministic=True)
            )
            for name in ("cifar_resnet18", "cifar_vgg16_bn", "cifar_mobilenet_v2"):
                (first, score, speed), (second, other_score, _) = (
                    self.trained(name, data, engine) for _ in range(2)
                )
                apart = float((first - second).norm() / first.norm())
                top1 = f"top-1 {score:.2%} and {other_score:.2%}"
                self.say(
                    "repeats",
                    f"{name} {what}: {top1}",
                    100 * apart,
                    of_default_speed=speed / speeds.setdefault(name, speed),
                )

    def trained(self, name: str, data: Data, engine: Engine) -> tuple[Tensor, float, float]:
        """Four epochs with the seed 0: all weights, the accuracy, and images per second of the last epoch."""
        recipe = Recipe(
            epochs=4, batch_size=512, lr=0.1, augment="crop-flip", weight_decay=5e-4, label_smoothing=0.1
        )
        torch.manual_seed(0)
        model = zoo.create(name, num_classes=10)
        history = fit(model, CrossEntropy(0.1), data.train.to(engine.device), recipe, engine=engine, seed=0)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return (
            weights,
            evaluate(model, data.test.to(engine.device), engine).top1,
            history[-1].images_per_second,
        )

    def cifar(self, part: str) -> Data:
        if self.options.data is None:
            raise SystemExit(f"the part {part} needs --data: a CIFAR-10 folder, or the word cifar10")
        return load_data(self.options.data)


def render(results: Path, target: Path) -> None:
    """One table per part; of what was measured twice under the same words, the last."""
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
            raise SystemExit(
                f"{target} has no place for the part {part}: <!-- {part} --> and <!-- /{part} -->"
            )
        page = before + opening + "\n".join(rows) + "\n" + closing + after
    target.write_text(page)


def noise(count: int, size: int) -> InMemoryImages:
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=chance)
    return InMemoryImages(
        pixels, torch.randint(0, 10, (count,), generator=chance), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    )


def draw_photograph(task: tuple[Path, int]) -> None:
    """A JPEG of 500 x 375 pixels and some 100 KB: large shapes, small ones, and grain."""
    import numpy as np
    from PIL import Image

    place, number = task
    chance = np.random.default_rng(number)
    image = np.zeros((375, 500, 3))
    for cells, strength in ((4, 120), (40, 60), (150, 40)):
        layer = Image.fromarray(chance.integers(0, 256, (cells, cells, 3), dtype=np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        image += np.asarray(layer, dtype=np.float64) / 255 * strength
    folder = place / f"class{number % 10}"
    folder.mkdir(exist_ok=True)
    Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=92)


if __name__ == "__main__":
    main()

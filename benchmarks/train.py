"""How fast training is on a GPU, as ratios measured side by side in one process.

    python benchmarks/train.py                          all parts; minutes on an H200
    python benchmarks/train.py --parts small --compiled

small    32 pixels: images/s of the real loop (data, augmentation, the loss of every stage) over the ceiling
large    224 pixels from JPEG files: images/s of the real loop over the ceiling, and over decoding alone

The ceiling is the same network on one batch that never leaves the GPU: bfloat16, channels-last, fused SGD,
the step replayed as a CUDA graph. With --compiled, it is also measured with torch.compile. Timing starts
after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import peel
from peel import zoo
from peel.data.augmentation import View
from peel.data.datasets import IMAGENET_MEAN, IMAGENET_STD
from peel.data.image_folder import ImageFolder, find_images
from peel.data.in_memory import InMemoryImages
from peel.steps.distillation import Distillation
from peel.steps.importance import WithL1
from peel.train.engine import Engine, make_engine
from peel.train.loop import fit
from peel.train.objective import CrossEntropy, Objective
from peel.train.recipe import Recipe
from peel.train.teacher_cache import CachedTeacher, make_logit_cache
from stopwatch import replayed, timed

PARTS = ["small", "large"]

CACHED = "cached teacher logits"
ONLINE = "teacher at every step"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
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
    parser.add_argument(
        "--compiled", action="store_true", help="also measure compiled networks; takes minutes longer"
    )
    parser.add_argument(
        "--results", type=Path, help="append the measurements to this file, one JSON object per line"
    )
    options = parser.parse_args()
    engine = make_engine(options.device, compile="off", workers=options.workers)
    bench = Bench(engine, options)
    print(f"{engine.description}, torch {torch.__version__}", flush=True)
    for part in options.parts:
        getattr(bench, part)()


class Bench:
    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options

    def report(self, part: str, what: str, rate: float, **ratios: float) -> None:
        """Print a measurement in images/s and append it to the results."""
        text = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in ratios.items())
        print(f"{part:7} {what:58} {rate:12,.1f}   {text}", flush=True)
        if self.options.results is not None:
            line = {"part": part, "what": what, "rate": rate, **ratios}
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
            if name == "cifar_resnet18" and self.options.compiled:
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

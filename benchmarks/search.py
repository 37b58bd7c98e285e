"""What `--method search` costs beside trainings, as ratios measured one after the other in one process.

    python benchmarks/search.py                     both networks at 10 % of the MACs; minutes on a GPU
    python benchmarks/search.py --budget 25% --divisor auto --results results.jsonl
    python benchmarks/search.py --networks resnet50 --budget 50% --divisor auto --size 224 --images 4096 \
        --epoch-images 1281167 --epochs 90          a schedule of ImageNet, estimated from few images

search     the whole plan: 65 networks cut, repaired and judged, the fit, and the sensitivity of layers
backbone   the published search: the training of the backbone (0.8 times the budget, the epochs of --epochs)
original   one training of the original
uniform    one training of the uniform network of the budget

The images are a pattern for each class, and noise. Trainings are timed over one epoch, after another that
warms up, and multiplied by the epochs, and by --epoch-images over --images. The search has the original after
these two epochs.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import peel
from peel import zoo
from peel.cost.widths import Widths
from peel.data.datasets import Data
from peel.methods.config import MethodConfig
from peel.methods.problem import Problem
from peel.methods.registry import find_method
from peel.surgery.padding import fast_widths, pad
from peel.train.engine import make_engine
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import named_recipe

CLASSES = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=["cifar_resnet18", "cifar_mobilenet_v2"])
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--divisor", default="1", help="a number, or auto")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image, a multiple of 4")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epoch-images", type=int, help="images of a whole epoch, where they are more")
    parser.add_argument("--epochs", type=int, default=24, help="of a training")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, help="append the measurements, one JSON object per line")
    options = parser.parse_args()
    for name in options.networks:
        problem = make_problem(name, options)
        backbone = peel.backbone(problem.graph, problem.budget, 0.8, divisor=problem.divisor)
        networks = {"original": problem.graph.widths, "backbone": backbone, "uniform": problem.uniform()}
        trained, times = {}, {}
        epochs = options.epochs * (options.epoch_images or options.images) / options.images
        for what, widths in networks.items():
            trained[what], seconds = time_epoch(problem, widths, options.batch_size)
            times[what] = epochs * seconds
        times["search"] = time_search(replace(problem, trained=trained["original"].eval()))
        line = {"network": name, "budget": options.budget, "divisor": options.divisor, "seconds": times}
        line |= {
            name: getattr(options, name)
            for name in ("epochs", "images", "epoch_images", "size", "batch_size")
        }
        line |= {"torch": torch.__version__}
        line |= {"device": problem.engine.description}
        ratios = ", ".join(f"{times['search'] / times[what]:.2f} of {what}" for what in networks)
        as_epochs = options.epochs * times["search"] / times["backbone"]
        print(f"{name}: the search takes {times['search']:.1f} s, {ratios}", end=", ")
        print(f"as long as {as_epochs:.1f} epochs of the backbone", flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def make_problem(name: str, options: argparse.Namespace) -> Problem:
    engine = make_engine(options.device, compile="off")
    model = zoo.create(name, num_classes=CLASSES)
    size = options.size
    graph = peel.trace(model, torch.zeros(1, 3, size, size))
    torch.manual_seed(0)
    labels = torch.arange(options.images) % CLASSES
    patterns = (127 * torch.rand(CLASSES, 4, 4, 3)).to(torch.uint8)
    patterns = patterns.repeat_interleave(size // 4, 1).repeat_interleave(size // 4, 2)
    pixels = torch.randint(0, 128, (len(labels), size, size, 3), dtype=torch.uint8) + patterns[labels]
    train, test = ((pixels[:some], labels[:some]) for some in (options.images, CLASSES))
    data = Data.from_tensors("patterns", tuple(map(str, range(CLASSES))), train, test, "crop-flip")
    return Problem(
        model=model,
        graph=graph,
        budget=peel.parse_budget(options.budget, graph.macs()),
        resource="macs",
        divisor="auto" if options.divisor == "auto" else int(options.divisor),
        freeze=zoo.FROZEN.get(f"cifar:{name}", ()),
        data=data.to(engine.device),
        backbone_recipe=named_recipe("cifar-fast"),
        engine=engine,
        seed=0,
    )


def time_search(problem: Problem) -> float:
    began = time.perf_counter()
    config = MethodConfig(budget=problem.budget, method="search")
    plan = find_method("search").plan(problem, config, None)  # type: ignore[arg-type]
    print(plan.rounds[-1].note)
    return time.perf_counter() - began


def time_epoch(problem: Problem, widths: Widths, batch_size: int) -> tuple[nn.Module, float]:
    """A network after two epochs of training, and the seconds of the second."""
    network = peel.slim(problem.model, widths, graph=problem.graph).requires_grad_(True)
    graph = problem.graph.at(widths)
    if problem.engine.pad_channels:
        padded = pad(problem.engine.prepare(network), graph, fast_widths(network, graph))
        network = network if padded is None else padded.model
    recipe = named_recipe("cifar-fast").changed(epochs=2, warmup_epochs=1.0, batch_size=batch_size)
    history = fit(network, CrossEntropy(0.1), problem.data.train, recipe, engine=problem.engine, seed=0)
    return network, history[-1].seconds


if __name__ == "__main__":
    main()

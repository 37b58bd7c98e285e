"""Which recipe fine-tunes a repaired network best when there are few images?

    python -m experiments.recipes images --archive cifar10.tar.xz --images cifar10.pt
    python -m experiments.recipes prepare --images cifar10.pt --work FOLDER [--stage confirm] [--shard 0/5]
    python -m experiments.recipes train --images cifar10.pt --work FOLDER [--stage confirm] [--shard 0/5]
    python -m experiments.recipes analyze [--stage confirm]
    python -m experiments.recipes product --images cifar10.pt --work FOLDER

Originals are trained on 20,000 images. Each is cut to half of its MACs by sensitivity, and repaired. Each
recipe then trains it on 2,000 to 20,000 of these images, for few or more epochs, with the original as
teacher. The loop here is the plain one that every PyTorch user writes, so the choice does not depend on
peel's own. All recipes but `plain` leave out a tenth of the images: on these, the repaired and the tuned
network are compared.

`product` checks the product itself: `peel.prune` with its defaults against the plain loop, both cut from the
same originals.

`--stage screen` chooses: two networks, seeds 0 and 1. `--stage confirm` judges the choice: three networks,
one of them new, seeds 2 to 4. `--shard I/N` does every Nth part of the work. Each training adds one line to
`--results`; what is there is not trained again.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import multiprocessing
import statistics
import tarfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from peel import zoo

RESULTS = Path(__file__).parent / "results" / "recipes.jsonl"

#: Images that an original is trained on, and how long.
ORIGINAL_IMAGES, ORIGINAL_EPOCHS = 20_000, 20

#: At most so many images judge whether the repaired or the tuned network is kept.
JUDGES = 1000

#: Images, epochs.
SIZES = ((2000, 4), (2000, 16), (10000, 3), (10000, 8))


@dataclass(frozen=True)
class Recipe:
    lr: float = 0.02
    batch: int = 128
    decay: float = 5e-4
    kd: float = 0.1
    temperature: float = 1.0
    hard: float = 1.0
    """The weight of the labels."""
    warmup: float = 0.0
    """Part of the steps in which the rate grows from 0."""
    padding: str = "mean"
    """Of the random crop: the mean color, black, or none (flips only)."""
    holds_out: bool = True


_WARM = Recipe(warmup=0.1)
_SOFT = Recipe(warmup=0.1, kd=1.0, temperature=4.0)

RECIPES = {
    "plain": Recipe(holds_out=False),
    "today": Recipe(lr=0.005, padding="black"),
    "rate-.005": Recipe(lr=0.005, warmup=0.1),
    "rate-.01": Recipe(lr=0.01, warmup=0.1),
    "rate-.02": _WARM,
    "rate-.05": Recipe(lr=0.05, warmup=0.1),
    "rate-.1": Recipe(lr=0.1, warmup=0.1),
    "black": replace(_WARM, padding="black"),
    "no-kd": replace(_WARM, kd=0.0),
    "kd-1": replace(_WARM, kd=1.0),
    "kd-1-rate-.01": Recipe(lr=0.01, warmup=0.1, kd=1.0),
    "kd-1-t-4": _SOFT,
    "kd-4": replace(_WARM, kd=4.0),
    "batch-64": replace(_WARM, batch=64),
    "decay-1e-4": replace(_WARM, decay=1e-4),
    "flip": replace(_WARM, padding="none"),
    # Around the best of the above.
    "kd-1-t-2": replace(_SOFT, temperature=2.0),
    "kd-1-t-8": replace(_SOFT, temperature=8.0),
    "kd-.3-t-4": replace(_SOFT, kd=0.3),
    "kd-3-t-4": replace(_SOFT, kd=3.0),
    "kd-3-t-4-rate-.01": replace(_SOFT, kd=3.0, lr=0.01),
    "only-kd-t-4": replace(_SOFT, hard=0.0),
    "kd-1-t-4-rate-.01": replace(_SOFT, lr=0.01),
    "kd-1-t-4-rate-.05": replace(_SOFT, lr=0.05),
    "kd-1-t-4-cold": replace(_SOFT, warmup=0.0),
    "kd-1-t-4-flip": replace(_SOFT, padding="none"),
}


class Inverted(nn.Module):
    """An inverted residual block, as in MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 3 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.is_residual else self.body(x)


class Gated(nn.Module):
    """Two convolutions with squeeze-excite; the first one halves the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.reduce, self.expand = nn.Linear(outputs, outputs // 4), nn.Linear(outputs // 4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(x))
        gate = self.expand(F.relu(self.reduce(y.mean((2, 3))))).sigmoid()
        return F.relu(x + y * gate[:, :, None, None])


def _stem(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]


def _head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def build(name: str) -> nn.Module:
    if name == "resnet20":  # 41M MACs
        return zoo.create("cifar_resnet20", num_classes=10)
    if name == "mobile":  # 6.5M MACs
        shapes = ((24, 24, 1), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 96, 1))
        return nn.Sequential(*_stem(24), *(Inverted(*shape) for shape in shapes), *_head(96))
    blocks = (Gated(32, 64), Gated(64, 96), Gated(96, 128))
    return nn.Sequential(*_stem(32), *blocks, *_head(128))  # gated: 7M MACs


#: Stage -> networks, seeds, and sizes. The gated network has no part in the choice.
STAGES = {
    "screen": (("resnet20", "mobile"), (0, 1), (*SIZES, (20000, 10))),
    "confirm": (("resnet20", "mobile", "gated"), (2, 3, 4), SIZES),
}


class Images:
    """Normalized on use; a batch may be augmented."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    def first(self, count: int, seed: int) -> Images:
        """So many images, drawn by the seed."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))[:count]
        order = order.to(self.labels.device)
        return Images(self.pixels[order], self.labels[order])

    def inputs(self, index: Tensor) -> Tensor:
        return ((self.pixels[index].float() / 255 - 0.47) / 0.25).permute(0, 3, 1, 2)

    def augmented(self, index: Tensor, padding: str) -> Tensor:
        x = self.inputs(index)
        flips = torch.rand(len(index), device=x.device) < 0.5
        x[flips] = x[flips].flip(3)
        if padding == "none":
            return x
        border = 0.0 if padding == "mean" else -0.47 / 0.25
        padded = F.pad(x, (4, 4, 4, 4), value=border)
        top, left = torch.randint(9, (2, len(x), 1, 1, 1), device=x.device)
        place = torch.arange(32, device=x.device)
        image, channel = torch.arange(len(x), device=x.device), torch.arange(3, device=x.device)
        moved = padded[image[:, None, None, None], channel[:, None, None], top + place[:, None], left + place]
        return moved.contiguous(memory_format=torch.channels_last)


def train(
    net: nn.Module, images: Images, recipe: Recipe, epochs: int, seed: int, teacher: nn.Module | None
) -> None:
    torch.manual_seed(seed)
    net.train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), recipe.lr, 0.9, weight_decay=recipe.decay, nesterov=True)
    steps = epochs * (len(images.labels) // recipe.batch)
    warm = max(1, round(recipe.warmup * steps))
    rates = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (warm + 1) if recipe.warmup else 1.0, 1.0, warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warm),
        ],
        [warm],
    )
    for _ in range(epochs):
        order = torch.randperm(len(images.labels), device=images.labels.device)
        for index in order.split(recipe.batch)[: len(order) // recipe.batch]:
            x, y = images.augmented(index, recipe.padding), images.labels[index]
            logits = net(x)
            loss = recipe.hard * F.cross_entropy(logits, y)
            if teacher is not None:
                with torch.no_grad():
                    wanted = F.log_softmax(teacher(x) / recipe.temperature, 1)
                given = F.log_softmax(logits / recipe.temperature, 1)
                term = F.kl_div(given, wanted, reduction="batchmean", log_target=True)
                loss = loss + recipe.kd * recipe.temperature**2 * term
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    net.eval()


@torch.no_grad()
def logits_of(net: nn.Module, images: Images) -> Tensor:
    net.eval()
    parts = torch.arange(len(images.labels), device=images.labels.device).split(500)
    return torch.cat([net(images.inputs(index)) for index in parts])


def change(before: nn.Module, after: nn.Module, images: Images) -> tuple[float, float]:
    """By how much the loss grows on these images, and its standard error."""
    first, second = (
        F.cross_entropy(logits_of(net, images), images.labels, reduction="none") for net in (before, after)
    )
    difference = second - first
    return round(difference.mean().item(), 5), round((difference.std() / len(difference) ** 0.5).item(), 5)


def judge(net: nn.Module, images: Images) -> tuple[float, float]:
    """Top-1 in percent, and the loss."""
    logits = logits_of(net, images)
    top1 = (logits.argmax(1) == images.labels).float().mean().item() * 100
    return round(top1, 2), round(F.cross_entropy(logits, images.labels).item(), 4)


def original(name: str, seed: int, images: Images, work: Path) -> nn.Module:
    path = work / f"{name}-{seed}.pt"
    torch.manual_seed(seed)
    net = build(name).to(images.labels.device)
    if path.exists():
        net.load_state_dict(torch.load(path))
        return net.eval()
    recipe = Recipe(lr=0.1, warmup=0.1)
    train(net, images.first(ORIGINAL_IMAGES, seed), recipe, ORIGINAL_EPOCHS, seed, None)
    torch.save(net.state_dict(), path)
    return net


def repaired(name: str, seed: int, net: nn.Module, few: Images, work: Path) -> nn.Module:
    """Half of the MACs, by sensitivity and repaired, on the images that the network is tuned with."""
    device = few.labels.device
    graph = peel.trace(net, torch.zeros(1, 3, 32, 32, device=device))
    path = work / f"{name}-{seed}-{len(few.labels)}-half.pt"
    if not path.exists():
        index = torch.arange(min(1024, len(few.labels)), device=device)
        inputs = few.inputs(index).contiguous()
        measured = peel.measure_sensitivity(net, graph, inputs)
        widths = measured.widths("50%")
        small = peel.slim(net, widths, graph=graph, weights="inherit", scores=measured.scores)
        peel.repair(small, net, inputs, graph=graph)
        torch.save({"widths": dict(widths), "state": small.state_dict()}, path)
    stored = torch.load(path)
    small = peel.slim(net, stored["widths"], graph=graph)
    small.load_state_dict(stored["state"])
    return small


def decode_archive(archive: Path, images: Path) -> None:
    """Decode JPEG files, train/CLASS/NAME and test/CLASS/NAME, into one file of tensors."""
    files: dict[str, dict[str, dict[str, bytes]]] = {"train": {}, "test": {}}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and len(parts) >= 3 and parts[-3] in files:
                file = tar.extractfile(member)
                assert file is not None
                files[parts[-3]].setdefault(parts[-2], {})[parts[-1]] = file.read()
    classes = sorted(files["train"])
    stored: dict[str, Any] = {"classes": classes}
    with multiprocessing.get_context("fork").Pool() as pool:
        for part, by_class in files.items():
            jpegs = [[jpeg for _, jpeg in sorted(by_class[label].items())] for label in classes]
            pixels = pool.map(decode, [jpeg for some in jpegs for jpeg in some], chunksize=256)
            labels = torch.tensor([i for i, some in enumerate(jpegs) for _ in some])
            stored[part] = torch.from_numpy(np.stack(pixels)), labels
    images.parent.mkdir(parents=True, exist_ok=True)
    torch.save(stored, images)


def decode(jpeg: bytes) -> np.ndarray[Any, Any]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))


def sharded(values: Iterable[Any], shard: str) -> list[Any]:
    number, count = map(int, shard.split("/"))
    return list(values)[number::count]


def load_images(options: argparse.Namespace) -> tuple[Images, Images]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stored = torch.load(options.images)
    train_images, test = (
        (pixels.to(device), labels.to(device)) for pixels, labels in (stored["train"], stored["test"])
    )
    return Images(*train_images), Images(*test)


def prepare(options: argparse.Namespace) -> None:
    """Train the originals, cut and repair them."""
    options.work.mkdir(parents=True, exist_ok=True)
    data, test = load_images(options)
    networks, seeds, sizes = STAGES[options.stage]
    for seed, name in sharded(product(seeds, options.networks or networks), options.shard):
        net = original(name, seed, data, options.work)
        for count in sorted({count for count, _ in sizes}):
            few = data.first(ORIGINAL_IMAGES, seed).first(count, seed + 1000)
            small = repaired(name, seed, net, few, options.work)
            print(name, seed, count, judge(net, test), judge(small, test), flush=True)


def run(options: argparse.Namespace) -> None:
    data, test = load_images(options)
    networks, seeds, sizes = STAGES[options.stage]
    done = read(options.results)
    for seed, name, (count, epochs), recipe_name in sharded(
        product(seeds, options.networks or networks, sizes, options.recipes), options.shard
    ):
        key = {"network": name, "seed": seed, "images": count, "epochs": epochs, "recipe": recipe_name}
        if any(all(line[item] == value for item, value in key.items()) for line in done):
            continue
        net = original(name, seed, data, options.work)
        few = data.first(ORIGINAL_IMAGES, seed).first(count, seed + 1000)
        start = repaired(name, seed, net, few, options.work)
        recipe, left = RECIPES[recipe_name], min(JUDGES, count // 10)
        judges = Images(few.pixels[:left], few.labels[:left])
        used = Images(few.pixels[left:], few.labels[left:]) if recipe.holds_out else few
        tuned, began = copy.deepcopy(start), time.perf_counter()
        train(tuned, used, recipe, epochs, seed, net)
        line = {
            **key,
            **asdict(recipe),
            "original": judge(net, test),
            "repaired": judge(start, test),
            "tuned": judge(tuned, test),
            "repaired_held_out": judge(start, judges),
            "tuned_held_out": judge(tuned, judges),
            "change_held_out": change(start, tuned, judges),
            "seconds": round(time.perf_counter() - began, 1),
        }
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(*key.values(), line["repaired"], line["tuned"], line["seconds"], flush=True)


#: What `product` runs: networks, seeds, sizes.
PRODUCT = (("mobile", "gated"), (2, 3), ((2000, 4), (10000, 3)))


def product_runs(options: argparse.Namespace) -> None:
    """`peel.prune` with its default recipe against the plain loop. Both start from the original."""
    options.work.mkdir(parents=True, exist_ok=True)
    data, test = load_images(options)
    classes = tuple(map(str, range(10)))
    for name, seed, (count, epochs) in product(*PRODUCT):
        net = original(name, seed, data, options.work)
        few = data.first(ORIGINAL_IMAGES, seed).first(count, seed + 1000)
        plain = repaired(name, seed, net, few, options.work)
        start = judge(plain, test)
        train(plain, few, RECIPES["plain"], epochs, seed, net)
        result = peel.prune(
            copy.deepcopy(net),
            peel.Data.from_tensors("CIFAR-10", classes, (few.pixels, few.labels), (test.pixels, test.labels)),
            budget="50%",
            train={"epochs": epochs},
            seed=seed,
            mean=(0.47,) * 3,
            std=(0.25,) * 3,
            bench_seconds=0,
        )
        line = {
            "network": name,
            "seed": seed,
            "images": count,
            "epochs": epochs,
            "original": judge(net, test)[0],
            "repaired": start[0],
            "plain": judge(plain, test)[0],
            "peel": {row.name: round(100 * row.top1, 2) for row in result.rows if row.top1 is not None},
            "notes": list(result.notes),
        }
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kept(line: dict[str, Any]) -> float:
    """Top-1 of the network that a run keeps: the repaired or the tuned one, by the images left out."""
    if not line["holds_out"]:
        return float(line["tuned"][0])
    is_tuned = line["tuned_held_out"][1] <= line["repaired_held_out"][1]
    return float(line["tuned" if is_tuned else "repaired"][0])


def analyze(options: argparse.Namespace) -> None:
    """Top-1 minus that of the plain loop, for each recipe and cell."""
    _, seeds, _ = STAGES[options.stage]
    lines = [line for line in read(options.results) if line["seed"] in seeds]
    axes = ("network", "images", "epochs", "seed")
    found = {(line["recipe"], *(line[axis] for axis in axes)): line for line in lines}
    cells = sorted(key[1:] for key in found if key[0] == "plain")
    rows = sorted({cell[:3] for cell in cells})
    print("top-1 minus that of the plain loop; originals, repaired networks and plain loop:")
    for row in rows:
        plain = [found["plain", *cell] for cell in cells if cell[:3] == row]
        means = [
            statistics.fmean(line[item][0] for line in plain) for item in ("original", "repaired", "tuned")
        ]
        print(f"  {row[0]:9} {row[1]:6} images {row[2]:2} epochs", *(f"{mean:6.2f}" for mean in means))
    print(
        f"{'recipe':14} cells   mean  worst |", *(f"{row[0][:6]}/{row[1] // 1000}k/{row[2]}" for row in rows)
    )
    for name in RECIPES:
        both = [cell for cell in cells if (name, *cell) in found]
        if not both:
            continue
        gains = {cell: kept(found[name, *cell]) - found["plain", *cell]["tuned"][0] for cell in both}
        parts = [statistics.fmean([gain for cell, gain in gains.items() if cell[:3] == row]) for row in rows]
        mean, worst = statistics.fmean(gains.values()), min(gains.values())
        print(f"{name:14} {len(gains):5} {mean:+6.2f} {worst:+6.2f} |", *(f"{part:+11.2f}" for part in parts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("images", "prepare", "train", "analyze", "product"))
    parser.add_argument("--archive", type=Path, help="an archive of train/CLASS/NAME and test/CLASS/NAME")
    parser.add_argument("--images", type=Path, default=Path("cifar10.pt"))
    parser.add_argument("--work", type=Path, default=Path("recipes"), help="originals and repaired networks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="`product` has recipes_product.jsonl")
    parser.add_argument("--stage", default="screen", choices=STAGES)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--networks", nargs="+", help="of the stage; all by default")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    options = parser.parse_args()
    if options.command == "images":
        decode_archive(options.archive, options.images)
    else:
        if options.command == "product" and options.results == RESULTS:
            options.results = RESULTS.with_name("recipes_product.jsonl")
        commands = {"prepare": prepare, "train": run, "analyze": analyze, "product": product_runs}
        commands[options.command](options)


if __name__ == "__main__":
    main()

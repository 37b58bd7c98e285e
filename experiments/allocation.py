"""How much there is to win by allocation: many allocations of one budget, each trained from scratch.

    python experiments/allocation.py prepare --archive tiny-imagenet-32.tar.xz --images images.pt
    python experiments/allocation.py time --images images.pt
    nvidia-cuda-mps-control -d     # several trainings share the GPU
    python experiments/allocation.py run --images images.pt --lanes 8 --deadline 550
    python experiments/allocation.py analyse
    python experiments/allocation.py plot

`prepare` splits the training images into 45,000 that are trained on and 5,000 that are held out, 50 of each
class; the test images are not read. `run` trains what its stages ask for, each `NAME:EPOCHS:BUDGET:SEEDS` or
`NAME:EPOCHS:BUDGET:SEEDS:NETWORK`: first every allocation with a short schedule, then some with a long one.
Every training is one line of the results; what is there already is not trained again, so a command that was
stopped goes on when it is repeated. What `analyse` and `plot` show are held-out losses and accuracies: they
say where to look, not how well it works on images that had no part in the choice.

The allocations of a network and a budget (lambda is the part of the budget that the uniform backbone keeps):

    uniform             one factor for all layers: what everything is compared with
    equal/0.5           lambda 0.5, the pool in equal shares to all groups
    32x32/0.5           the whole pool to one group; 32x32+8x8/0.5: one half each; the same with lambda 0.3
    random-00/0.5       shares drawn from a Dirichlet distribution with parameter 0.7
    fitted              the best point of a smooth fit of all these, as the short trainings left them

and, of MobileNetV2 alone, with other groups:

    fine stream-8/0.8   per resolution, the hidden (expanded) channels of blocks apart from the stream
    kind hidden/0.7     all hidden channels, or the whole stream; also with lambda 0.5
    free uniform        the last convolution, held at its width in all others, is free and a group of its own
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

# All that is used of peel.
import peel
from peel import zoo
from peel.allocation import round_to_budget
from peel.errors import DivergedError
from peel.graph import ChannelGraph
from peel.graph.padding import pad
from peel.train.chance import derive, draw_from
from peel.train.engine import Engine, find_engine
from peel.train.fast_widths import fast_widths
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import named_recipe
from peel.train.resident import Resident

Line = Mapping[str, Any]
"""A line of the results."""
Array = np.ndarray[Any, Any]

RESULTS = Path(__file__).parent / "results" / "allocation.jsonl"
PICTURE = Path(__file__).parent / "results" / "allocation_map.png"

NETWORKS = ("cifar_resnet18", "cifar_mobilenet_v2")
BUDGETS = ("10%", "25%")
CLASSES, HELD_OUT = 100, 50
"""Classes, and held-out images of each."""

RANDOM, CONCENTRATION = 14, 0.7
"""How many allocations have random shares, and the parameter of their Dirichlet distribution."""

#: Seeds of long trainings differ from those of short ones, so that luck is not carried over from the choice.
STAGES = [
    "uniform:8:all:0-3",
    "coarse:8:all:0",
    "uniform:24:10%:4-6",
    "picked:24:10%:4",
    "broad:24:10%:4",
    "fitted:24:10%:4-7:resnet",
    "fine:24:10%:4",
    "uniform:24:10%:7",
    "broad:24:10%:5-6",
    "picked:24:10%:5:resnet",
    "uniform:24:10%:8-9:resnet",
    "fitted:24:10%:8-9:resnet",
    "picked:24:10%:5:mobilenet",
    "uniform:24:10%:8-9:mobilenet",
]

TRIES = 2
"""How often a training is begun whose process dies."""

BEST, SPREAD = 3, 5
"""How many of the best of the short trainings are trained long, and how many from there to the worst."""

POWERS = (0.25, 0.5, 1.0, 2.0)
"""Exponents that the smooth fit may have."""


# Networks and allocations


class Network(NamedTuple):
    model: nn.Module
    graph: ChannelGraph
    hold: tuple[str, ...]


@cache
def network(name: str) -> Network:
    model = zoo.create(name, num_classes=CLASSES)
    graph = peel.trace(model, torch.zeros(1, 3, 32, 32))
    return Network(model, graph, tuple(zoo.HELD.get(model.peel_source["zoo"], ())))  # type: ignore[index]


@dataclass(frozen=True)
class Allocation:
    """Widths of one budget, and where they come from."""

    network: str
    budget: str
    allocation: str
    shares: dict[str, float] | None
    keep: float | None
    """Lambda."""
    widths: dict[str, int]
    macs: int
    params: int


@dataclass(frozen=True)
class Job:
    plan: Allocation
    epochs: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.plan.network, self.plan.budget, self.plan.allocation, self.epochs, self.seed

    @property
    def cell(self) -> tuple[str, str]:
        return self.plan.network, self.plan.budget


def key_of(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("network", "budget", "allocation", "epochs", "seed"))


def described(
    name: str,
    budget: str,
    allocation: str,
    widths: Mapping[str, int],
    shares: dict[str, float] | None = None,
    keep: float | None = None,
) -> Allocation:
    graph = network(name).graph
    return Allocation(
        name, budget, allocation, shares, keep, dict(widths), graph.macs(widths), graph.params(widths)
    )


def uniform(name: str, budget: str) -> Allocation:
    net = network(name)
    return described(name, budget, "uniform", peel.uniform(net.graph, budget, hold=net.hold))


def reallocated(
    name: str,
    budget: str,
    allocation: str,
    shares: dict[str, float],
    keep: float,
    graph: ChannelGraph | None = None,
    hold: Iterable[str] | None = None,
) -> Allocation:
    """The pool given to the groups by their shares; the groups are those of `graph`."""
    net = network(name)
    graph = graph or net.graph
    hold = net.hold if hold is None else tuple(hold)
    backbone = peel.backbone(graph, budget, keep, hold=hold)
    widths = peel.reallocate(graph, backbone, shares, budget, hold=hold)
    return described(name, budget, f"{allocation}/{keep:g}", widths, shares, keep)


@cache
def coarse(name: str, budget: str) -> tuple[Allocation, ...]:
    """Groups by resolution, as the method has them."""
    groups = list(network(name).graph.groups)
    ones = [(group, {group: 1.0}) for group in groups]
    pairs = [("+".join(pair), dict.fromkeys(pair, 0.5)) for pair in itertools.combinations(groups, 2)]
    drawn = np.random.default_rng(0).dirichlet([CONCENTRATION] * len(groups), RANDOM).round(4)
    chance = [
        (f"random-{i:02d}", dict(zip(groups, row.tolist(), strict=True))) for i, row in enumerate(drawn)
    ]
    equal = ("equal", dict.fromkeys(groups, 1 / len(groups)))
    return (
        uniform(name, budget),
        *(reallocated(name, budget, label, shares, 0.5) for label, shares in (equal, *ones, *pairs, *chance)),
        *(reallocated(name, budget, label, shares, 0.3) for label, shares in (*ones, *pairs)),
    )


def is_hidden(tie: str) -> bool:
    """Whether these are the expanded channels of a block of MobileNetV2."""
    return tie.endswith(".conv.0.0")


def fine_groups(name: str) -> dict[str, tuple[str, ...]]:
    """The groups by resolution; of MobileNetV2 hidden channels, the stream and the last convolution apart."""
    net = network(name)
    if not net.hold:
        return dict(net.graph.groups)
    parts: dict[str, tuple[str, ...]] = {}
    for group, ties in net.graph.groups.items():
        side = group.split("x")[0]
        parts[f"stream-{side}"] = tuple(tie for tie in ties if not is_hidden(tie) and tie not in net.hold)
        parts[f"hidden-{side}"] = tuple(tie for tie in ties if is_hidden(tie))
    return {**parts, "last": net.hold}


@cache
def broad(name: str, budget: str) -> tuple[Allocation, ...]:
    """All hidden channels against the whole stream, and the last convolution scaled as all others."""
    net = network(name)
    if not net.hold:
        return ()
    free = described(name, budget, "free uniform", peel.uniform(net.graph, budget))
    return *kinds(name, budget, 0.7), free


def kinds(name: str, budget: str, keep: float) -> list[Allocation]:
    net = network(name)
    ties: dict[str, list[str]] = {"stream": [], "hidden": []}
    for tie in net.graph.widths:
        ties["hidden" if is_hidden(tie) else "stream"].append(tie)
    graph = net.graph.regroup(ties)
    return [reallocated(name, budget, f"kind {kind}", {kind: 1.0}, keep, graph) for kind in ties]


@cache
def fine(name: str, budget: str) -> tuple[Allocation, ...]:
    """The whole pool to one of the finer groups, or to one resolution with the last convolution free."""
    net = network(name)
    if not net.hold:
        return ()
    parts = fine_groups(name)
    graph = net.graph.regroup(parts)
    apart = net.graph.regroup({**by_resolution(name), "last": net.hold})
    alone = [group for group in parts if group != "last"]
    return (
        *(reallocated(name, budget, f"fine {group}", {group: 1.0}, 0.8, graph) for group in alone),
        *(reallocated(name, budget, f"free {group}", {group: 1.0}, 0.7, apart, ()) for group in apart.groups),
        *kinds(name, budget, 0.5),
    )


# What is trained, in which order


class Stage(NamedTuple):
    """Allocations of some kind, to be trained for so many epochs: `NAME:EPOCHS:BUDGET:SEEDS[:NETWORK]`."""

    name: str
    epochs: int
    budgets: tuple[str, ...]
    seeds: tuple[int, ...]
    networks: tuple[str, ...]


def stage(text: str) -> Stage:
    """`coarse:8:all:0`, or `uniform:24:10%:4-6:resnet`."""
    name, epochs, budget, seeds, *part = text.split(":")
    first, _, last = seeds.partition("-")
    return Stage(
        name,
        int(epochs),
        BUDGETS if budget == "all" else (budget,),
        tuple(range(int(first), int(last or first) + 1)),
        tuple(network for network in NETWORKS if not part or part[0] in network),
    )


def jobs_of(stage: Stage, lines: Sequence[Line], short: int) -> list[Job]:
    """In an order in which a part of them is balanced."""
    kinds: dict[str, Callable[[str, str], Sequence[Allocation]]] = {
        "uniform": lambda name, budget: [uniform(name, budget)],
        "coarse": lambda name, budget: coarse(name, budget)[1:],
        "broad": broad,
        "fine": fine,
        "picked": lambda name, budget: picked(lines, name, budget, short),
        "fitted": lambda name, budget: fitted(lines, name, budget, short),
    }
    cells = itertools.product(stage.networks, stage.budgets)
    rows = list(itertools.zip_longest(*(kinds[stage.name](*cell) for cell in cells)))
    plans = [plan for row in rows for plan in row if plan is not None]
    return [Job(plan, stage.epochs, seed) for seed in stage.seeds for plan in plans]


def picked(lines: Sequence[Line], name: str, budget: str, epochs: int) -> list[Allocation]:
    """The best of the short trainings, and some at even distances down to the worst, once all are there."""
    known = {plan.allocation: plan for plan in coarse(name, budget)[1:]}
    scores = mean_scores(lines, name, budget, epochs)
    if not known.keys() <= scores.keys():
        return []
    ranked = sorted(known, key=lambda allocation: scores[allocation].loss)
    rest = np.linspace(BEST - 1, len(ranked) - 1, SPREAD + 1)[1:].round().astype(int).tolist()
    return [known[ranked[place]] for place in (*range(BEST), *rest)]


# Images


def prepare(archive: Path, target: Path, processes: int) -> None:
    """Decode the training images once, and say which of them are held out."""
    if target.exists():
        return
    files: dict[str, dict[str, bytes]] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and parts[-3] == "train":
                files.setdefault(parts[-2], {})[parts[-1]] = tar.extractfile(member).read()  # type: ignore[union-attr]
    classes = sorted(files)
    coded = [files[label][name] for label in classes for name in sorted(files[label])]
    labels = torch.tensor([i for i, label in enumerate(classes) for _ in files[label]])
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        pixels = np.concatenate(
            pool.map(decoded, np.array_split(np.array(coded, dtype=object), 16 * processes))
        )
    held = torch.zeros(len(labels), dtype=torch.bool)
    chance = torch.Generator().manual_seed(derive("held out"))
    for i in range(len(classes)):
        places = (labels == i).nonzero().flatten()
        held[places[torch.randperm(len(places), generator=chance)[:HELD_OUT]]] = True
    seen = pixels[~held.numpy()].reshape(-1, 3) / np.float32(255)
    mean, std = (
        tuple(round(float(x), 4) for x in numbers) for numbers in (seen.mean(0, np.float64), seen.std(0))
    )
    stored = {"pixels": torch.from_numpy(pixels), "labels": labels, "held": held, "mean": mean, "std": std}
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(stored, target)


def decoded(coded: Sequence[bytes]) -> Array:
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in coded])


class Images(NamedTuple):
    train: Resident
    held: Resident


def load(path: Path, device: torch.device, count: int | None = None) -> Images:
    """Both parts of the training images on the device; the first `count` of each only, for a try."""
    stored = torch.load(path)
    pixels, labels, held = stored["pixels"], stored["labels"], stored["held"]
    parts = [
        Resident(pixels[part][:count], labels[part][:count], stored["mean"], stored["std"]).to(device)
        for part in (~held, held)
    ]
    return Images(*parts)


# Training


def train(job: Job, images: Images, engine: Engine, batch_size: int | None = None) -> dict[str, Any]:
    """Train one allocation from scratch; the line of it. Odd widths are padded, as `peel run` does."""
    began = time.perf_counter()
    net = network(job.plan.network)
    draw_from(derive("init", job.plan.allocation, job.seed))
    model = peel.slim(net.model, job.plan.widths, graph=net.graph).requires_grad_(True)
    graph = net.graph.at(job.plan.widths)
    padded = pad(model, graph, fast_widths(model, graph)) if engine.pads else None
    model = model if padded is None else padded.model
    recipe = named_recipe("cifar-fast").changed(
        epochs=job.epochs, warmup_epochs=job.epochs / 10, augment="crop-flip"
    )
    if batch_size is not None:
        recipe = recipe.changed(batch_size=batch_size)
    line: dict[str, Any] = {**asdict(job.plan), "epochs": job.epochs, "seed": job.seed}
    try:
        history = fit(
            model,
            CrossEntropy(recipe.label_smoothing),
            images.train,
            recipe,
            engine=engine,
            seed=derive("order", job.seed),
        )
        scores = evaluate(model, images.held, engine)
        line |= {
            **asdict(scores),
            "train_loss": history[-1].train["loss"],
            "epoch_seconds": history[-1].seconds,
        }
    except DivergedError as error:
        line |= {"error": str(error)}
    line |= {"seconds": round(time.perf_counter() - began, 2), "padded": padded is not None}
    return line | {"torch": torch.__version__, "device": engine.description}


def lane(pipe: Connection, path: Path, count: int | None, batch_size: int | None) -> None:
    """A process that trains what it is given, one job after the other."""
    torch.set_num_threads(1)
    engine = find_engine(compile="off", workers=0)
    images = load(path, engine.device, count)
    for name in NETWORKS:
        network(name)
    pipe.send(None)
    while (job := pipe.recv()) is not None:
        pipe.send(train(job, images, engine, batch_size))
        gc.collect()
        torch.cuda.empty_cache()


class Lanes:
    """Processes that train side by side; one that dies is replaced."""

    def __init__(self, count: int, *arguments: Any) -> None:
        self.arguments = arguments
        self.context = multiprocessing.get_context("spawn")
        self.running: dict[Connection, Job | None] = {}
        for _ in range(count):
            self.start()

    def start(self) -> None:
        here, there = self.context.Pipe()
        self.context.Process(target=lane, args=(there, *self.arguments), daemon=True).start()
        there.close()
        self.running[here] = None

    def answers(self) -> Iterable[tuple[Connection, Job | None, dict[str, Any] | None]]:
        """Those that wait for a job, what they have just done, and the line of it (None: it died)."""
        for pipe in wait(list(self.running), timeout=1.0):
            assert isinstance(pipe, Connection)
            try:
                line = pipe.recv()
            except EOFError:
                line = None
                if (job := self.running.pop(pipe)) is not None:
                    yield pipe, job, None
                continue
            job, self.running[pipe] = self.running[pipe], None
            yield pipe, job, line

    def give(self, pipe: Connection, job: Job) -> None:
        self.running[pipe] = job
        pipe.send(job)

    def dismiss(self, pipe: Connection) -> None:
        del self.running[pipe]
        pipe.send(None)


def run(options: argparse.Namespace) -> None:
    """Train what is missing, as far as the time allows."""
    began = time.monotonic()
    lanes = Lanes(options.lanes, options.images, options.count, options.batch_size)
    lines = [line for path in {options.known, options.results} for line in read(path)]
    tries = {key_of(line): TRIES for line in lines}
    while lanes.running:
        for pipe, job, line in lanes.answers():
            if job is not None and line is not None:
                write(options.results, line)
                lines.append(line)
                tries[job.key] = TRIES
                report(line, time.monotonic() - began)
            if pipe not in lanes.running:
                print(
                    f"a process has died with {job.key if job else 'nothing'}; another takes over", flush=True
                )
                lanes.start()
                continue
            left = options.deadline - (time.monotonic() - began)
            busy = {job.key for job in lanes.running.values() if job is not None}
            missing = [job for job in in_order(lines, options) if tries.get(job.key, 0) < TRIES]
            wanted = [job for job in missing if job.key not in busy]
            chosen = next((job for job in wanted if expected_seconds(job, lines) < left), None)
            if chosen is None:
                lanes.dismiss(pipe)
                continue
            tries[chosen.key] = tries.get(chosen.key, 0) + 1
            lanes.give(pipe, chosen)
    print(f"{time.monotonic() - began:.0f} s, {len(lines)} lines", flush=True)


def in_order(lines: Sequence[Line], options: argparse.Namespace) -> list[Job]:
    """All that the stages ask for, as far as it is known by now."""
    return [job for text in options.stages for job in jobs_of(stage(text), lines, options.short)]


def expected_seconds(job: Job, lines: Sequence[Line]) -> float:
    """By the trainings of the same network and budget, if there are any, with a reserve."""
    alike = [line for line in lines if (line["network"], line["budget"]) == job.cell] or lines
    paces = [line["seconds"] / line["epochs"] for line in alike[-20:]]
    return 1.15 * job.epochs * statistics.median(paces) if paces else 0.0


def report(line: Line, elapsed: float) -> None:
    score = line["error"] if "error" in line else f"loss {line['loss']:.4f}, top-1 {line['top1']:.2%}"
    key = " ".join(map(str, key_of(line)))
    print(f"{elapsed:6.0f} s {key}: {score}, {line['seconds']:.1f} s", flush=True)


def measure(options: argparse.Namespace) -> None:
    """The time of an epoch of each uniform network, alone on the device."""
    torch.set_num_threads(1)
    engine = find_engine(compile="off", workers=0)
    images = load(options.images, engine.device, options.count)
    for name, budget in itertools.product(NETWORKS, BUDGETS):
        line = train(Job(uniform(name, budget), 3, 0), images, engine, options.batch_size)
        rest = line["seconds"] - 3 * line["epoch_seconds"]
        pace, each = images.train.size / line["epoch_seconds"], line["epoch_seconds"]
        print(
            f"{name} {budget}: {each:.3f} s an epoch, {pace:,.0f} images/s, {rest:.1f} s besides", flush=True
        )


def write(path: Path, line: Line) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; one that a stop has cut off does not count."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


# What it says


class Score(NamedTuple):
    loss: float
    top1: float
    seeds: int


def trained(lines: Iterable[Line], name: str, budget: str, epochs: int) -> dict[str, list[Line]]:
    """Allocation -> its lines, in the order of seeds."""
    found: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        if (line["network"], line["budget"], line["epochs"]) == (
            name,
            budget,
            epochs,
        ) and "error" not in line:
            found.setdefault(line["allocation"], []).append(line)
    return found


def mean_scores(lines: Iterable[Line], name: str, budget: str, epochs: int) -> dict[str, Score]:
    return {
        allocation: Score(
            statistics.mean(x["loss"] for x in some), statistics.mean(x["top1"] for x in some), len(some)
        )
        for allocation, some in trained(lines, name, budget, epochs).items()
    }


# A smooth fit: the loss is a constant plus a term for each group that falls with a power of its width


def by_resolution(name: str) -> dict[str, tuple[str, ...]]:
    """The groups of the method, without what is held."""
    net = network(name)
    return {group: tuple(t for t in ties if t not in net.hold) for group, ties in net.graph.groups.items()}


class Fit(NamedTuple):
    """loss = base + sum of weights[group] * ratio[group] ** -power; ratios are widths over uniform ones."""

    groups: tuple[str, ...]
    power: float
    base: float
    weights: tuple[float, ...]
    explained: float
    """Part of the variance of allocations that had no part in the fit (each left out once)."""


def log_ratios(
    groups: Mapping[str, Sequence[str]], widths: Mapping[str, int], base: Mapping[str, int]
) -> list[float]:
    return [statistics.mean(math.log(widths[tie] / base[tie]) for tie in ties) for ties in groups.values()]


def solve(logs: Array, loss: Array, power: float) -> Array:
    """Least squares; of weights below zero, the lowest is set to zero until there are none."""
    columns = np.column_stack([np.ones(len(logs)), np.exp(-power * logs)])
    active = list(range(columns.shape[1]))
    found = np.zeros(columns.shape[1])
    while True:
        part = np.linalg.lstsq(columns[:, active], loss, rcond=None)[0]
        lowest = min(range(1, len(active)), key=lambda i: part[i], default=None)
        if lowest is None or part[lowest] >= 0:
            found[active] = part
            return found
        del active[lowest]


def predict(solution: Array, logs: Array, power: float) -> Array:
    values: Array = solution[0] + np.exp(-power * logs) @ solution[1:]
    return values


def fit_loss(groups: Mapping[str, Sequence[str]], lines: Sequence[Line], base: Mapping[str, int]) -> Fit:
    """The fit with the power that predicts best what was left out."""
    logs = np.array([log_ratios(groups, line["widths"], base) for line in lines])
    loss = np.array([line["loss"] for line in lines])
    names = np.array([line["allocation"] for line in lines])
    errors = {}
    for power in POWERS:
        guessed = np.empty(len(loss))
        for name in dict.fromkeys(names.tolist()):
            out = names == name
            guessed[out] = predict(solve(logs[~out], loss[~out], power), logs[out], power)
        errors[power] = float(((guessed - loss) ** 2).mean())
    power = min(errors, key=lambda power: errors[power])
    solution = solve(logs, loss, power)
    return Fit(
        tuple(groups),
        power,
        float(solution[0]),
        tuple(solution[1:].tolist()),
        1 - errors[power] / float(loss.var()),
    )


def best_point(
    fit: Fit,
    cost: Callable[[list[Array]], Any],
    ties: Sequence[tuple[float, int]],
    limits: Array,
    target: int,
) -> Array:
    """The log ratios at which the fit is lowest within the budget, by the cross-entropy method.

    `ties` holds for each tie its uniform width and the place of its group (-1: its width stays).
    """
    chance = np.random.default_rng(0)
    mean, spread = np.zeros(len(fit.groups)), np.full(len(fit.groups), 0.3)
    low, high = limits

    def spent(logs: Array) -> Any:
        return cost(
            [
                width * np.exp(logs[:, place]) if place >= 0 else np.full(len(logs), float(width))
                for width, place in ties
            ]
        )

    for _ in range(60):
        drawn = mean + spread * chance.standard_normal((400, len(mean)))
        below, above = np.full(len(drawn), -3.0), np.full(len(drawn), 3.0)
        for _ in range(30):
            middle = (below + above) / 2
            fits = spent(np.clip(drawn + middle[:, None], low, high)) <= target
            below, above = np.where(fits, middle, below), np.where(fits, above, middle)
        logs = np.clip(drawn + below[:, None], low, high)
        value = predict(np.array([fit.base, *fit.weights]), logs, fit.power)
        value[spent(logs) > target] = np.inf
        best = logs[np.argsort(value)[:40]]
        mean, spread = best.mean(0), best.std(0) + 1e-3
    result: Array = best[0]
    return result


@cache
def fitted_once(name: str, budget: str, losses: tuple[tuple[str, float], ...]) -> Allocation:
    net, base = network(name), uniform(name, budget)
    widths = {plan.allocation: plan.widths for plan in coarse(name, budget)}
    rows = [{"allocation": plan, "widths": widths[plan], "loss": loss} for plan, loss in losses]
    found = fitted_widths(net.graph, by_resolution(name), net.hold, rows, base)
    return described(name, budget, "fitted", found)


def fitted(lines: Sequence[Line], name: str, budget: str, epochs: int) -> list[Allocation]:
    """The best point of the fit of the short trainings; none before all are there."""
    cell = name, budget, "fitted"
    for line in lines:
        if (line["network"], line["budget"], line["allocation"]) == cell:
            return [described(*cell, line["widths"])]
    found = trained(lines, name, budget, epochs)
    names = [plan.allocation for plan in coarse(name, budget)]
    if not found.keys() >= set(names):
        return []
    return [fitted_once(name, budget, tuple((plan, line["loss"]) for plan in names for line in found[plan]))]


def fitted_widths(
    graph: ChannelGraph,
    groups: Mapping[str, Sequence[str]],
    hold: Iterable[str],
    rows: Sequence[Line],
    base: Allocation,
) -> Mapping[str, int]:
    """No group goes more than half of the way, in logarithms, to its narrowest, nor beyond its widest."""
    logs = np.array([log_ratios(groups, line["widths"], base.widths) for line in rows])
    limits = np.stack([logs.min(0) / 2, logs.max(0)])
    place = {tie: i for i, ties in enumerate(groups.values()) for tie in ties}
    ties = [(base.widths[tie] / graph.steps[tie], place.get(tie, -1)) for tie in graph.widths]
    target = math.floor(graph.macs() * float(base.budget.rstrip("%")) / 100)
    found = best_point(fit_loss(groups, rows, base.widths), graph.mac_cost.total, ties, limits, target)
    factors = {tie: math.exp(found[place[tie]]) if tie in place else 1.0 for tie in graph.widths}
    ideal = {tie: base.widths[tie] * factor for tie, factor in factors.items()}
    return round_to_budget(graph, ideal, base.budget, hold=hold)


class Worth(NamedTuple):
    """What a group costs and is worth at the uniform network, each as a part of the sum over all groups."""

    group: str
    cost: float
    """By how much the multiply-adds grow with the logarithm of its widths."""
    worth: float
    """By how much the fitted loss falls. At the best allocation, cost and worth are the same."""
    low: float
    high: float
    """Worth over cost: its 95 % bootstrap interval, over allocations."""


def worths(groups: Mapping[str, Sequence[str]], lines: Sequence[Line], base: Allocation) -> list[Worth]:
    graph = network(base.network).graph
    costs = np.array([slope(graph, base.widths, set(ties)) for ties in groups.values()])
    costs /= costs.sum()
    logs = np.array([log_ratios(groups, line["widths"], base.widths) for line in lines])
    loss = np.array([line["loss"] for line in lines])
    names = np.array([line["allocation"] for line in lines])
    found = fit_loss(groups, lines, base.widths)
    worth = np.array(found.weights) / sum(found.weights)
    chance = np.random.default_rng(0)
    every = sorted(set(names.tolist()))
    drawn = []
    for _ in range(400):
        rows = np.concatenate([np.flatnonzero(names == name) for name in chance.choice(every, len(every))])
        weights = solve(logs[rows], loss[rows], found.power)[1:]
        drawn.append(weights / weights.sum() / costs)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return [Worth(*row) for row in zip(groups, costs, worth, low, high, strict=True)]


def slope(graph: ChannelGraph, widths: Mapping[str, int], ties: set[str], step: float = 1e-4) -> float:
    """By how much the multiply-adds grow with the logarithm of these widths."""

    def spent(factor: float) -> float:
        units = {tie: widths[tie] / graph.steps[tie] for tie in graph.widths}
        return float(graph.mac_cost.total([n * factor if tie in ties else n for tie, n in units.items()]))

    return (spent(1 + step) - spent(1)) / step


# Tables


def noise_of(lines: Iterable[Line], name: str, epochs: int, field: str) -> tuple[float, int]:
    """The deviation over seeds, from all allocations and budgets of a network; degrees of freedom."""
    squares, freedom = 0.0, 0
    for budget in BUDGETS:
        for some in trained(lines, name, budget, epochs).values():
            squares += (len(some) - 1) * (
                statistics.variance(line[field] for line in some) if len(some) > 1 else 0.0
            )
            freedom += len(some) - 1
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def highest_of(count: int) -> float:
    """How far the highest of so many normal numbers lies above their mean, in deviations."""
    drawn = np.random.default_rng(0).standard_normal((4000, count))
    return float(drawn.max(1).mean())


def ranks(values: Sequence[float]) -> Array:
    array = np.asarray(values)
    return (array[:, None] > array).sum(1) + ((array[:, None] == array).sum(1) - 1) / 2


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    a, b = ranks(first), ranks(second)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else math.nan


def spearman_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """The rank correlation with its 95 % bootstrap interval over allocations."""
    a, b = np.asarray(first), np.asarray(second)
    chance = np.random.default_rng(0)
    drawn = [spearman(a[some], b[some]) for some in chance.integers(0, len(a), (4000, len(a)))]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return spearman(first, second), float(low), float(high)


def schedules(lines: Iterable[Line]) -> list[int]:
    return sorted({line["epochs"] for line in lines})


def quantile_95(freedom: int) -> float:
    """Of Student's t distribution, by the first terms of its expansion around the normal one."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def analyse(options: argparse.Namespace) -> None:
    lines = read(options.results)
    for epochs, name, budget in itertools.product(schedules(lines), NETWORKS, BUDGETS):
        found = trained(lines, name, budget, epochs)
        if "uniform" in found and len(found) > 1:
            print(f"\n## {name}, {budget}, {epochs} epochs: {len(found) - 1} allocations beside uniform\n")
            print_summary(lines, name, budget, epochs)
            print_allocations(lines, name, budget, epochs, options.rows)
            print_worths(lines, name, budget, epochs)
    if len(schedules(lines)) > 1:
        print_prediction(lines)


def print_summary(lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    """Uniform, the noise, how much allocations differ, and what the best of them would be by luck alone."""
    found = trained(lines, name, budget, epochs)
    for field, unit in (("loss", -1.0), ("top1", 100.0)):
        deviation, freedom = noise_of(lines, name, epochs, field)
        noise = abs(unit) * deviation
        base = [unit * line[field] for line in found["uniform"]]
        zero = statistics.mean(base)
        text = f"uniform {abs(zero):.4f}, deviation {statistics.stdev(base):.4f} over {len(base)} seeds"
        print(f"- {field}: {text}; {noise:.4f} over all ({freedom} degrees of freedom)")
        once = [unit * some[0][field] for plan, some in found.items() if plan != "uniform" and len(some) == 1]
        if len(once) < 6:
            continue
        variance = statistics.variance(once)
        luck, true = noise * highest_of(len(once)), max(0.0, 1 - noise**2 / variance)
        text = f"deviation {math.sqrt(variance):.4f}, {true:.0%} of the variance is not noise"
        print(f"  - {len(once)} allocations of one seed: {text};")
        print(f"    the best is {max(once) - zero:+.4f} from uniform, by luck alone {luck:+.4f}")


def print_allocations(lines: Sequence[Line], name: str, budget: str, epochs: int, count: int) -> None:
    """The best and the worst, with their differences to uniform."""
    scores = mean_scores(lines, name, budget, epochs)
    zero = scores["uniform"]
    noises = {field: noise_of(lines, name, epochs, field) for field in ("loss", "top1")}
    ranked = sorted(scores, key=lambda allocation: scores[allocation].loss)
    hidden = set(ranked[count:-count]) - {"uniform"} if len(ranked) > 2 * count + 2 else set()
    print(
        "\n| allocation | seeds | loss - uniform (95 %) | top-1 - uniform, points (95 %) |\n|---|---|---|---|"
    )
    for allocation in (plan for plan in ranked if plan not in hidden):
        score = scores[allocation]
        texts = []
        for field, unit, digits in (("loss", 1, 3), ("top1", 100, 2)):
            noise, freedom = noises[field]
            gain = unit * (getattr(score, field) - getattr(zero, field))
            half = unit * quantile_95(freedom) * noise * math.sqrt(1 / score.seeds + 1 / zero.seeds)
            texts.append(f"{gain:+.{digits}f} ± {half:.{digits}f}" if allocation != "uniform" else "")
        print(f"| {allocation} | {score.seeds} | {texts[0]} | {texts[1]} |")
    if hidden:
        print(f"\n{len(hidden)} others lie between.")


def print_worths(lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    """Which groups deserve more: what they are worth over what they cost."""
    base = uniform(name, budget)
    every = [line for some in trained(lines, name, budget, epochs).values() for line in some]
    other = [line for line in every if kind_of(line["allocation"]) in OTHER]
    kinds = [(by_resolution(name), [line for line in every if line not in other])]
    if other:
        kinds.append((fine_groups(name), every))
    for groups, rows in kinds:
        if len({line["allocation"] for line in rows}) < 2 * len(groups):
            continue
        found = fit_loss(groups, rows, base.widths)
        part = f"{found.explained:.0%} of what was left out"
        print(f"\nFit of {len(rows)} trainings, power {found.power:g}; explains {part}.\n")
        print("| group | part of the cost | part of the worth | worth over cost (95 %) |\n|---|---|---|---|")
        for group, cost, worth, low, high in worths(groups, rows, base):
            print(f"| {group} | {cost:.2f} | {worth:.2f} | {worth / cost:.2f} ({low:.2f} to {high:.2f}) |")


def print_prediction(lines: Sequence[Line]) -> None:
    """How well short trainings, and their fit, rank allocations as long ones do."""
    short, *longer = schedules(lines)
    print("\n## How well short trainings predict long ones: rank correlations (95 %)\n")
    print("| network, budget | allocations | epochs | by | of losses | of top-1 |\n|---|---|---|---|---|---|")
    for epochs, name, budget in itertools.product(longer, NETWORKS, BUDGETS):
        first, second = (mean_scores(lines, name, budget, count) for count in (short, epochs))
        common = sorted(first.keys() & second.keys())
        if len(common) < 5:
            continue
        texts = []
        for field in ("loss", "top1"):
            pairs = [[getattr(scores[plan], field) for plan in common] for scores in (first, second)]
            texts.append("{:.2f} ({:.2f} to {:.2f})".format(*spearman_interval(*pairs)))
        start = f"| {name}, {budget} | {len(common)} | {short} and {epochs}"
        print(f"{start} | one training | {texts[0]} | {texts[1]} |")
        widths = {plan.allocation: plan.widths for plan in coarse(name, budget)}
        guesses = guessed(lines, name, budget, short, {plan: widths[plan] for plan in common})
        texts = []
        for field, sign in (("loss", 1), ("top1", -1)):
            values = [sign * getattr(second[plan], field) for plan in common]
            texts.append("{:.2f} ({:.2f} to {:.2f})".format(*spearman_interval(guesses, values)))
        print(f"{start} | the fit of losses | {texts[0]} | {texts[1]} |")


def guessed(
    lines: Sequence[Line], name: str, budget: str, epochs: int, plans: Mapping[str, Any]
) -> list[float]:
    """What the fit of all other trainings says about each of these allocations (name -> widths)."""
    found, groups, base = (
        trained(lines, name, budget, epochs),
        by_resolution(name),
        uniform(name, budget).widths,
    )
    guesses = []
    for plan, widths in plans.items():
        rest = [line for other, some in found.items() if other != plan for line in some]
        fit = fit_loss(groups, rest, base)
        logs = np.array([log_ratios(groups, widths, base)])
        guesses.append(float(predict(np.array([fit.base, *fit.weights]), logs, fit.power)[0]))
    return guesses


# Picture


OTHER = {"fine": "tab:green", "kind": "tab:red", "free": "tab:purple"}
COLOURS = {"uniform": "black", "fitted": "magenta", "0.5": "tab:blue", "0.3": "tab:orange", **OTHER}


def kind_of(allocation: str) -> str:
    """The kind of an allocation, or its lambda."""
    first = allocation.split()[0]
    return first if first in COLOURS else allocation.rpartition("/")[2]


def plot(options: argparse.Namespace) -> None:
    """The map of the short trainings; how their fit predicts long ones; what groups are worth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = read(options.results)
    short, *longer = schedules(lines)
    figure, axes = plt.subplots(2, 4, figsize=(15, 7.5), constrained_layout=True)
    for axis, (name, budget) in zip(axes[0], itertools.product(NETWORKS, BUDGETS), strict=True):
        draw_map(axis, lines, name, budget, short)
    for name, (left, right) in zip(NETWORKS, (axes[1, :2], axes[1, 2:]), strict=True):
        draw_prediction(left, lines, name, BUDGETS[0], short, longer[-1])
        draw_worths(right, lines, name)
    shown = [kind for kind in COLOURS if kind not in OTHER]
    handles = [
        plt.Line2D([], [], color=COLOURS[kind], marker="o", linestyle="", label=kind) for kind in shown
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), title="lambda", fontsize=8)
    figure.savefig(options.picture, dpi=80)


def draw_map(axis: Any, lines: Sequence[Line], name: str, budget: str, epochs: int) -> None:
    scores = mean_scores(lines, name, budget, epochs)
    ranked = sorted(scores, key=lambda allocation: scores[allocation].loss)
    zero, noise = scores["uniform"].loss, noise_of(lines, name, epochs, "loss")[0]
    axis.axhspan(-2 * noise, 2 * noise, color="0.9")
    axis.axhline(0, color="black", linewidth=0.8)
    values = [scores[allocation].loss - zero for allocation in ranked]
    colours = [COLOURS[kind_of(allocation)] for allocation in ranked]
    axis.scatter(range(len(ranked)), values, c=colours, s=18, zorder=3)
    for place in (0, len(ranked) - 3, len(ranked) - 2, len(ranked) - 1):
        side, shift = ("left", 6) if place == 0 else ("right", -6)
        point = place, values[place]
        axis.annotate(
            ranked[place], point, fontsize=7, ha=side, xytext=(shift, -3), textcoords="offset points"
        )
    axis.set_title(f"{name}, {budget}, {epochs} epochs", fontsize=9)
    axis.set_xlabel("rank (grey: two deviations over seeds)", fontsize=8)
    axis.set_ylabel("held-out loss minus uniform", fontsize=8)


def draw_prediction(axis: Any, lines: Sequence[Line], name: str, budget: str, short: int, long: int) -> None:
    """Accuracies of long trainings against what the fit of the short ones, without this allocation, says."""
    scores = mean_scores(lines, name, budget, long)
    found = trained(lines, name, budget, long)
    plans = {plan: some[0]["widths"] for plan, some in found.items() if kind_of(plan) not in OTHER}
    guesses = dict(zip(plans, guessed(lines, name, budget, short, plans), strict=True))
    noise = noise_of(lines, name, long, "top1")[0]
    axis.axhline(0, color="black", linewidth=0.8)
    for plan, guess in guesses.items():
        x, y = guess - guesses["uniform"], 100 * (scores[plan].top1 - scores["uniform"].top1)
        reach = 100 * noise / math.sqrt(scores[plan].seeds)
        axis.errorbar(x, y, reach, fmt="o", markersize=5, color=COLOURS[kind_of(plan)], elinewidth=0.8)
        axis.annotate(plan, (x, y), fontsize=6, xytext=(5, 2), textcoords="offset points")
    pairs = [*zip(*((guesses[plan], -scores[plan].top1) for plan in plans if plan != "fitted"), strict=True)]
    text = "rank correlation {:.2f} ({:.2f} to {:.2f})".format(*spearman_interval(*pairs))
    axis.set_title(f"{name.removeprefix('cifar_')}, {budget}: {text}", fontsize=8)
    axis.margins(x=0.15)
    axis.set_xlabel(f"loss minus uniform, by the fit of {short} epochs", fontsize=8)
    axis.set_ylabel(f"top-1 minus uniform, points, {long} epochs", fontsize=8)


def draw_worths(axis: Any, lines: Sequence[Line], name: str) -> None:
    """Worth over cost of the groups by resolution, with intervals."""
    groups = by_resolution(name)
    axis.axhline(1, color="black", linewidth=0.8)
    cells = [(budget, count) for count in schedules(lines) for budget in BUDGETS]
    names = {plan.allocation for plan in coarse(name, BUDGETS[0])} | {"fitted"}
    for shift, (budget, count) in enumerate(cells):
        found = trained(lines, name, budget, count)
        rows = [line for plan, some in found.items() if plan in names for line in some]
        if len({line["allocation"] for line in rows}) < 2 * len(groups):
            continue
        for place, one in enumerate(worths(groups, rows, uniform(name, budget))):
            x, ratio = place + 0.2 * shift - 0.3, one.worth / one.cost
            label = f"{budget}, {count} epochs" if place == 0 else None
            reach = [[max(0.0, ratio - one.low)], [max(0.0, one.high - ratio)]]
            axis.errorbar(x, ratio, reach, fmt="o", markersize=4, color=f"C{shift}", label=label)
    axis.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axis.set_title(f"{name.removeprefix('cifar_')}: above 1, a group deserves more", fontsize=8)
    axis.set_ylabel("worth over cost", fontsize=8)
    axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["prepare", "time", "run", "analyse", "plot"])
    parser.add_argument("--archive", type=Path, default=Path("tiny-imagenet-32.tar.xz"))
    parser.add_argument("--images", type=Path, default=Path("images.pt"), help="the decoded images")
    parser.add_argument("--processes", type=int, default=16, help="that decode images")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are added")
    parser.add_argument("--known", type=Path, default=RESULTS, help="lines that are not trained again")
    parser.add_argument("--lanes", type=int, default=6, help="trainings at a time")
    parser.add_argument("--stages", nargs="+", default=STAGES, help="what is trained, in this order")
    parser.add_argument(
        "--short", type=int, default=8, help="epochs of the trainings that others are picked by"
    )
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds; nothing later is begun")
    parser.add_argument("--count", type=int, help="images of each part, for a try")
    parser.add_argument("--batch-size", type=int, help="for a try")
    parser.add_argument("--rows", type=int, default=6, help="of the best and of the worst in tables")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.archive, options.images, options.processes)
    else:
        {"time": measure, "run": run, "analyse": analyse, "plot": plot}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())

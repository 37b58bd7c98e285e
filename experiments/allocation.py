"""How much there is to win by allocation: many allocations of one budget, each trained from scratch.

    python experiments/allocation.py prepare --archive tiny-imagenet-32.tar.xz --images images.pt
    python experiments/allocation.py time --images images.pt
    nvidia-cuda-mps-control -d     # several trainings share the GPU
    python experiments/allocation.py run --images images.pt --lanes 6 --deadline 550
    python experiments/allocation.py analyse
    python experiments/allocation.py plot

`prepare` splits the training images into 45,000 that are trained on and 5,000 that are held out, 50 of each class; the test images are
not read. `run` trains every allocation of the map with a short schedule, then the uniform network, some allocations from the best to
the worst, and the best point of a smooth fit with a long one, at the tightest budget first. Every training is one line of the results;
what is there already is not trained again, so that a command that was stopped goes on when it is repeated. What `analyse` and `plot`
show are held-out losses and accuracies: they say where to look, not how well it works on images that had no part in the choice.

The allocations of a network and a budget (lambda is the part of the budget that the uniform backbone keeps):

    uniform             one factor for all layers: what everything is compared with
    equal/0.5           lambda 0.5, the pool in equal shares to all groups
    32x32/0.5           the whole pool to one group; 32x32+8x8/0.5: one half each; the same with lambda 0.3
    random-00/0.5       shares drawn from a Dirichlet distribution with parameter 0.7

and, of MobileNetV2 alone, with other groups:

    fine stream-8/0.5   per resolution, the hidden (expanded) channels of blocks apart from the residual stream
    kind hidden/0.5     all hidden channels, or the whole stream; also with lambda 0.7
    free uniform        the last convolution, which is held at its width in all others, is free and a group of its own
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import multiprocessing
import statistics
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peel.graph.padding import pad
from peel.train.chance import derive, draw_from
from peel.train.fast_widths import fast_widths
from peel.train.resident import Resident
from torch import nn

# All that is used of peel.
import peel
from peel import zoo
from peel.errors import DivergedError
from peel.graph import ChannelGraph
from peel.train.engine import Engine, find_engine
from peel.train.loop import evaluate, fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import named_recipe

RESULTS = Path(__file__).parent / "results" / "allocation.jsonl"
PICTURE = Path(__file__).parent / "results" / "allocation_map.png"

NETWORKS = ("cifar_resnet18", "cifar_mobilenet_v2")
BUDGETS = ("10%", "25%")
CLASSES, HELD_OUT = 100, 50
"""Classes, and held-out images of each."""

RANDOM, CONCENTRATION = 14, 0.7
"""How many allocations have random shares, and the parameter of their Dirichlet distribution."""

SHORT_SEEDS, LONG_SEEDS = (0, 1, 2, 3), (4, 5, 6, 7, 8, 9)
"""Short trainings have the first seed (uniform: all of them); long ones have other seeds, so that luck is not carried over."""

BEST, SPREAD = 3, 5
"""How many of the best allocations of the short trainings are trained long, and how many between those and the worst."""

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


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
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
    """The groups by resolution, those of MobileNetV2 divided into hidden channels, the stream, and the last convolution."""
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
def fine(name: str, budget: str) -> tuple[Allocation, ...]:
    """Other groups than those by resolution, where a network has them."""
    net = network(name)
    if not net.hold:
        return ()
    parts = fine_groups(name)
    graph = net.graph.regroup(parts)
    kinds = {
        "stream": [tie for tie in graph.widths if not is_hidden(tie)],
        "hidden": filter(is_hidden, graph.widths),
    }
    by_kind = net.graph.regroup(kinds)
    by_size = {
        group: [tie for tie in ties if tie not in net.hold] for group, ties in net.graph.groups.items()
    }
    apart = net.graph.regroup({**by_size, "last": net.hold})
    alone = [(group, {group: 1.0}) for group in parts if group != "last"]
    return (
        *(reallocated(name, budget, f"fine {group}", shares, 0.5, graph) for group, shares in alone),
        *(
            reallocated(name, budget, f"kind {kind}", {kind: 1.0}, keep, by_kind)
            for keep in (0.7, 0.5)
            for kind in kinds
        ),
        described(name, budget, "free uniform", peel.uniform(net.graph, budget)),
        *(reallocated(name, budget, f"free {group}", {group: 1.0}, 0.5, apart, ()) for group in apart.groups),
    )


# What is trained, in which order


def short_jobs(epochs: int) -> list[Job]:
    """The map, in an order in which a part of it is balanced."""
    cells = list(itertools.product(NETWORKS, BUDGETS))
    first, *others = SHORT_SEEDS
    jobs = [Job(uniform(*cell), epochs, seed) for seed in (first, *others) for cell in cells]
    rows = zip(*(coarse(*cell)[1:] for cell in cells), strict=True)
    jobs += [Job(plan, epochs, first) for row in rows for plan in row]
    jobs += [
        Job(plan, epochs, first) for budget in BUDGETS for name in NETWORKS for plan in fine(name, budget)
    ]
    return jobs


def long_jobs(lines: Sequence[Mapping[str, Any]], short: int, epochs: int) -> list[Job]:
    """Uniform, the best points of the fits, and allocations from the best to the worst of the short trainings."""
    jobs: list[Job] = []
    for budget in BUDGETS:
        bases = [uniform(name, budget) for name in NETWORKS]
        fits = [plan for name in NETWORKS for plan in fitted(lines, name, budget, short)]
        picks = [
            plan
            for row in itertools.zip_longest(*(picked(lines, name, budget, short) for name in NETWORKS))
            for plan in row
            if plan
        ]
        early, later = LONG_SEEDS[:2], LONG_SEEDS[2:]
        jobs += [Job(plan, epochs, seed) for seed in LONG_SEEDS[:3] for plan in bases]
        jobs += [Job(plan, epochs, seed) for seed in early for plan in (*fits, *picks)]
        jobs += [Job(plan, epochs, seed) for seed in later for plan in (*bases, *fits)]
    return list({job.key: job for job in jobs}.values())


def picked(lines: Sequence[Mapping[str, Any]], name: str, budget: str, epochs: int) -> list[Allocation]:
    """The best allocations, and some at even distances down to the worst."""
    known = {plan.allocation: plan for plan in (*coarse(name, budget)[1:], *fine(name, budget))}
    scores = mean_scores(lines, name, budget, epochs)
    ranked = sorted(
        (allocation for allocation in scores if allocation in known),
        key=lambda allocation: scores[allocation].loss,
    )
    if len(ranked) < BEST + SPREAD:
        return []
    places = [*range(BEST), *np.linspace(BEST, len(ranked) - 1, SPREAD + 1)[1:].round().astype(int).tolist()]
    return [known[ranked[place]] for place in places]


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
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"classes": classes, "pixels": torch.from_numpy(pixels), "labels": labels, "held": held}, target
    )


def decoded(coded: Sequence[bytes]) -> np.ndarray[Any, Any]:
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in coded])


class Images(NamedTuple):
    train: Resident
    held: Resident


def load(path: Path, device: torch.device, count: int | None = None) -> Images:
    """Both parts of the training images on the device; the first `count` of each only, for a try."""
    stored = torch.load(path)
    pixels, labels, held = stored["pixels"], stored["labels"], stored["held"]
    seen = pixels[~held].float() / 255
    mean, std = (
        tuple(round(float(x), 4) for x in numbers) for numbers in (seen.mean((0, 1, 2)), seen.std((0, 1, 2)))
    )
    parts = [
        Resident(pixels[part][:count], labels[part][:count], mean, std).to(device) for part in (~held, held)
    ]
    return Images(*parts)


# Training


def train(job: Job, images: Images, engine: Engine, batch_size: int | None = None) -> dict[str, Any]:
    """Train one allocation from scratch; the line of it. Odd widths are padded while training, as `peel run` does."""
    began = time.perf_counter()
    net = network(job.plan.network)
    draw_from(derive("init", job.plan.allocation, job.seed))
    model = peel.slim(net.model, job.plan.widths, graph=net.graph).requires_grad_(True)
    graph = net.graph.at(job.plan.widths)
    padded = pad(engine.prepare(model), graph, fast_widths(model, graph)) if engine.pads else None
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
        """Those that wait for a job, what they have just done, and the line of it (None: the process died)."""
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
    lines = [*read(options.known), *read(options.results)]
    tries: dict[tuple[Any, ...], int] = {}
    for line in lines:
        tries[key_of(line)] = 2
    while lanes.running:
        for pipe, job, line in lanes.answers():
            if job is not None and line is not None:
                write(options.results, line)
                lines.append(line)
                tries[job.key] = 2
                report(line, time.monotonic() - began)
            if pipe not in lanes.running:
                print(
                    f"a lane has died with {job.key if job else 'nothing'}; another takes its place",
                    flush=True,
                )
                lanes.start()
                continue
            elapsed = time.monotonic() - began
            left = options.deadline - elapsed
            busy = {job.key for job in lanes.running.values() if job is not None}
            wanted = [
                job
                for job in in_order(lines, options, elapsed)
                if tries.get(job.key, 0) < 2 and job.key not in busy
            ]
            chosen = next((job for job in wanted if expected_seconds(job, lines) < left), None)
            if chosen is None:
                lanes.dismiss(pipe)
                continue
            tries[chosen.key] = tries.get(chosen.key, 0) + 1
            lanes.give(pipe, chosen)
    print(f"{time.monotonic() - began:.0f} s, {len(lines)} lines", flush=True)


def in_order(lines: Sequence[Mapping[str, Any]], options: argparse.Namespace, elapsed: float) -> list[Job]:
    """What there is to train; after `--turn` seconds the long trainings come first."""
    short = short_jobs(options.short)
    if options.only is not None:
        return [job for job in short if job.plan.allocation in options.only]
    done = {key_of(line) for line in lines}
    if elapsed < options.turn and any(job.key not in done for job in short):
        waiting = [job for job in short if job.key not in done]
        # While the last short trainings are under way, lanes go on with what does not depend on them.
        return [
            *waiting,
            *(
                Job(uniform(name, BUDGETS[0]), options.long, seed)
                for seed in LONG_SEEDS[:3]
                for name in NETWORKS
            ),
        ]
    return [*long_jobs(lines, options.short, options.long), *short]


def expected_seconds(job: Job, lines: Sequence[Mapping[str, Any]]) -> float:
    """By the trainings of the same network and budget, if there are any, with a reserve."""
    alike = [line for line in lines if (line["network"], line["budget"]) == job.cell] or lines
    paces = [line["seconds"] / line["epochs"] for line in alike[-20:]]
    return 1.15 * job.epochs * statistics.median(paces) if paces else 0.0


def report(line: Mapping[str, Any], elapsed: float) -> None:
    score = line["error"] if "error" in line else f"loss {line['loss']:.4f}, top-1 {line['top1']:.2%}"
    print(
        f"{elapsed:6.0f} s {' '.join(map(str, key_of(line)))}: {score}, {line['seconds']:.1f} s", flush=True
    )


def measure(options: argparse.Namespace) -> None:
    """The time of an epoch of each uniform network, alone on the device."""
    torch.set_num_threads(1)
    engine = find_engine(compile="off", workers=0)
    images = load(options.images, engine.device, options.count)
    for name, budget in itertools.product(NETWORKS, BUDGETS):
        line = train(Job(uniform(name, budget), 3, 0), images, engine, options.batch_size)
        rest = line["seconds"] - 3 * line["epoch_seconds"]
        pace = images.train.size / line["epoch_seconds"]
        print(
            f"{name} {budget}: {line['epoch_seconds']:.3f} s an epoch, {pace:,.0f} images/s, {rest:.1f} s besides",
            flush=True,
        )


def write(path: Path, line: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; one that was being written when the program was stopped does not count."""
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


def trained(
    lines: Iterable[Mapping[str, Any]], name: str, budget: str, epochs: int
) -> dict[str, list[Mapping[str, Any]]]:
    """Allocation -> its lines, in the order of seeds."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        if (line["network"], line["budget"], line["epochs"]) == (
            name,
            budget,
            epochs,
        ) and "error" not in line:
            found.setdefault(line["allocation"], []).append(line)
    return found


def mean_scores(lines: Iterable[Mapping[str, Any]], name: str, budget: str, epochs: int) -> dict[str, Score]:
    return {
        allocation: Score(
            statistics.mean(x["loss"] for x in some), statistics.mean(x["top1"] for x in some), len(some)
        )
        for allocation, some in trained(lines, name, budget, epochs).items()
    }


# A smooth fit: the loss is a constant plus a term for each group that falls with a power of its width


class Fit(NamedTuple):
    """loss = base + sum of weights[group] * ratio[group] ** -power, ratios being widths over those of the uniform network."""

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


def solve(logs: np.ndarray[Any, Any], loss: np.ndarray[Any, Any], power: float) -> np.ndarray[Any, Any]:
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


def predict(solution: np.ndarray[Any, Any], logs: np.ndarray[Any, Any], power: float) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = solution[0] + np.exp(-power * logs) @ solution[1:]
    return values


def fit_loss(
    groups: Mapping[str, Sequence[str]], lines: Sequence[Mapping[str, Any]], base: Mapping[str, int]
) -> Fit:
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
    cost: Callable[[list[np.ndarray[Any, Any]]], Any],
    ties: Sequence[tuple[float, int]],
    limits: np.ndarray[Any, Any],
    target: int,
) -> np.ndarray[Any, Any]:
    """The log ratios at which the fit is lowest within the budget, by the cross-entropy method.

    `ties` holds for each tie its uniform width and the place of its group (-1: its width stays).
    """
    chance = np.random.default_rng(0)
    mean, spread = np.zeros(len(fit.groups)), np.full(len(fit.groups), 0.3)
    low, high = limits

    def spent(logs: np.ndarray[Any, Any]) -> Any:
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
    result: np.ndarray[Any, Any] = best[0]
    return result


_FITTED: dict[tuple[Any, ...], Allocation] = {}


def fitted(lines: Sequence[Mapping[str, Any]], name: str, budget: str, epochs: int) -> list[Allocation]:
    """The best points of the fits of the short trainings: with groups by resolution, and with finer ones where there are any."""
    net, base = network(name), uniform(name, budget)
    names = {plan.allocation for plan in coarse(name, budget)}
    free = {group: [tie for tie in ties if tie not in net.hold] for group, ties in net.graph.groups.items()}
    kinds = [("fit coarse", free, net.hold, names)]
    if net.hold:
        kinds.append(
            ("fit fine", fine_groups(name), (), names | {plan.allocation for plan in fine(name, budget)})
        )
    plans = []
    for label, groups, hold, used in kinds:
        kept = next(
            (
                line
                for line in lines
                if (line["network"], line["budget"], line["allocation"]) == (name, budget, label)
            ),
            None,
        )
        rows = [
            line
            for group in trained(lines, name, budget, epochs).values()
            for line in group
            if line["allocation"] in used
        ]
        if kept is not None:
            plans.append(described(name, budget, label, kept["widths"]))
        elif len({line["allocation"] for line in rows}) >= 0.9 * len(used):
            key = name, budget, label, len(rows)
            if key not in _FITTED:
                _FITTED[key] = described(
                    name, budget, label, fitted_widths(net.graph, groups, hold, rows, base)
                )
            plans.append(_FITTED[key])
    return plans


def fitted_widths(
    graph: ChannelGraph,
    groups: Mapping[str, Sequence[str]],
    hold: Iterable[str],
    rows: Sequence[Mapping[str, Any]],
    base: Allocation,
) -> Mapping[str, int]:
    """No group goes further down than half of the way, in logarithms, to the narrowest of the map, nor up beyond the widest."""
    logs = np.array([log_ratios(groups, line["widths"], base.widths) for line in rows])
    limits = np.stack([logs.min(0) / 2, logs.max(0)])
    place = {tie: i for i, ties in enumerate(groups.values()) for tie in ties}
    ties = [(base.widths[tie] / graph.steps[tie], place.get(tie, -1)) for tie in graph.widths]
    target = math.floor(graph.macs() * float(base.budget.rstrip("%")) / 100)
    found = best_point(fit_loss(groups, rows, base.widths), graph.mac_cost.total, ties, limits, target)
    ideal = {
        tie: base.widths[tie] * (math.exp(found[place[tie]]) if tie in place else 1.0) for tie in graph.widths
    }
    return round_to_budget(graph, ideal, base.budget, hold=hold)


# Tables


def noise_of(lines: Iterable[Mapping[str, Any]], name: str, epochs: int, field: str) -> tuple[float, int]:
    """The deviation over seeds of one allocation, of all allocations and budgets of a network together; degrees of freedom."""
    squares, freedom = 0.0, 0
    for budget in BUDGETS:
        for some in trained(lines, name, budget, epochs).values():
            squares += (len(some) - 1) * (
                statistics.variance(line[field] for line in some) if len(some) > 1 else 0.0
            )
            freedom += len(some) - 1
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def highest_of(count: int) -> float:
    """How far the highest of so many numbers from a normal distribution lies above their mean, in deviations."""
    drawn = np.random.default_rng(0).standard_normal((4000, count))
    return float(drawn.max(1).mean())


def ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
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


def schedules(lines: Iterable[Mapping[str, Any]]) -> list[int]:
    return sorted({line["epochs"] for line in lines})


def analyse(options: argparse.Namespace) -> None:
    lines = read(options.results)
    for epochs, name, budget in itertools.product(schedules(lines), NETWORKS, BUDGETS):
        scores = mean_scores(lines, name, budget, epochs)
        if "uniform" in scores and len(scores) > 1:
            print_cell(lines, name, budget, epochs, scores)
    if len(schedules(lines)) > 1:
        print_prediction(lines)


def print_cell(
    lines: Sequence[Mapping[str, Any]], name: str, budget: str, epochs: int, scores: Mapping[str, Score]
) -> None:
    base = trained(lines, name, budget, epochs)["uniform"]
    print(f"\n## {name}, {budget}, {epochs} epochs: {len(scores) - 1} allocations beside uniform\n")
    for field, unit, sign in (("loss", 1, -1), ("top1", 100, 1)):
        noise, freedom = noise_of(lines, name, epochs, field)
        values = [unit * line[field] for line in base]
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        ones = [
            getattr(score, field) * unit
            for allocation, score in scores.items()
            if allocation != "uniform" and score.seeds == 1
        ]
        text = f"{field}: uniform {statistics.mean(values):.4f} (sd {spread:.4f}, {len(values)} seeds); noise {unit * noise:.4f} ({freedom} df)"
        if len(ones) > 5:
            variance = statistics.variance(ones)
            true = max(0.0, 1 - (unit * noise) ** 2 / variance)
            best = max(sign * (value - statistics.mean(values)) for value in ones)
            text += (
                f"; sd over {len(ones)} allocations {math.sqrt(variance):.4f}, {true:.0%} of the variance is not noise; "
                f"the best is {best:+.4f} better than uniform; if all were alike, {unit * noise * highest_of(len(ones)):+.4f} were expected"
            )
        print(f"- {text}")
    print("\n| allocation | loss - uniform | top-1 - uniform, points | seeds |\n|---|---|---|---|")
    ranked = sorted(scores, key=lambda allocation: scores[allocation].loss)
    shown = ranked if len(ranked) <= 24 else [*ranked[:12], "", *ranked[-8:]]
    for allocation in [*shown, *(["uniform"] if "uniform" not in shown else [])]:
        if not allocation:
            print("| ... | | | |")
            continue
        score, zero = scores[allocation], scores["uniform"]
        print(
            f"| {allocation} | {score.loss - zero.loss:+.4f} | {100 * (score.top1 - zero.top1):+.2f} | {score.seeds} |"
        )
    if len(scores) > 20:
        print_fits(lines, name, budget, epochs)


def print_fits(lines: Sequence[Mapping[str, Any]], name: str, budget: str, epochs: int) -> None:
    net, base = network(name), uniform(name, budget).widths
    names = {plan.allocation for plan in coarse(name, budget)}
    every = [line for some in trained(lines, name, budget, epochs).values() for line in some]
    free = {group: [tie for tie in ties if tie not in net.hold] for group, ties in net.graph.groups.items()}
    kinds = [("by resolution", free, [line for line in every if line["allocation"] in names])]
    if net.hold:
        kinds.append(("finer", fine_groups(name), every))
    for label, groups, rows in kinds:
        found = fit_loss(groups, rows, base)
        parts = ", ".join(
            f"{group} {weight:.3f}" for group, weight in zip(found.groups, found.weights, strict=True)
        )
        print(
            f"\nfit, groups {label}: {parts}; power {found.power:g}; explains {found.explained:.0%} of what was left out ({len(rows)} lines)"
        )


def print_prediction(lines: Sequence[Mapping[str, Any]]) -> None:
    short, *longer = schedules(lines)
    print("\n## How well short trainings predict long ones\n")
    print(
        "| network | budget | epochs | allocations | rank correlation of losses (95 %) | of top-1 (95 %) |\n|---|---|---|---|---|---|"
    )
    for epochs, name, budget in itertools.product(longer, NETWORKS, BUDGETS):
        first, second = (mean_scores(lines, name, budget, count) for count in (short, epochs))
        common = sorted(set(first) & set(second))
        if len(common) < 5:
            continue
        texts = []
        for field in ("loss", "top1"):
            pairs = [
                [getattr(scores[allocation], field) for allocation in common] for scores in (first, second)
            ]
            texts.append("{:.2f} ({:.2f} to {:.2f})".format(*spearman_interval(*pairs)))
        print(f"| {name} | {budget} | {short} and {epochs} | {len(common)} | {texts[0]} | {texts[1]} |")


# Picture


COLOURS = {
    "uniform": "black",
    "0.5": "tab:blue",
    "0.3": "tab:orange",
    "fine": "tab:green",
    "kind": "tab:red",
    "free": "tab:purple",
}


def kind_of(allocation: str) -> str:
    first = allocation.split()[0]
    return first if first in COLOURS else allocation.rpartition("/")[2] if "/" in allocation else "uniform"


def plot(options: argparse.Namespace) -> None:
    """The map of the short trainings, and what became of some in the long ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = read(options.results)
    short, *longer = schedules(lines)
    figure, axes = plt.subplots(2, 4, figsize=(15, 7), constrained_layout=True)
    for axis, (name, budget) in zip(axes[0], itertools.product(NETWORKS, BUDGETS), strict=True):
        draw_map(axis, lines, name, budget, short)
    for axis, (name, budget) in zip(axes[1], itertools.product(NETWORKS, BUDGETS), strict=True):
        if longer:
            draw_prediction(axis, lines, name, budget, short, longer[-1])
    handles = [
        plt.Line2D([], [], color=colour, marker="o", linestyle="", label=label)
        for label, colour in COLOURS.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        title="lambda, or other groups (MobileNetV2)",
    )
    figure.savefig(options.picture, dpi=80)


def draw_map(axis: Any, lines: Sequence[Mapping[str, Any]], name: str, budget: str, epochs: int) -> None:
    scores = mean_scores(lines, name, budget, epochs)
    ranked = sorted(scores, key=lambda allocation: scores[allocation].loss)
    zero, noise = scores["uniform"].loss, noise_of(lines, name, epochs, "loss")[0]
    axis.axhspan(-2 * noise, 2 * noise, color="0.9")
    axis.axhline(0, color="black", linewidth=0.8)
    values = [scores[allocation].loss - zero for allocation in ranked]
    axis.scatter(
        range(len(ranked)), values, c=[COLOURS[kind_of(allocation)] for allocation in ranked], s=18, zorder=3
    )
    for place in (0, 1, 2, len(ranked) - 2, len(ranked) - 1):
        side = "left" if place < 3 else "right"
        axis.annotate(
            ranked[place],
            (place, values[place]),
            fontsize=7,
            ha=side,
            xytext=(5 if place < 3 else -5, -2),
            textcoords="offset points",
        )
    axis.set_title(f"{name}, {budget}, {epochs} epochs", fontsize=9)
    axis.set_xlabel("rank (grey: two deviations over seeds)", fontsize=8)
    axis.set_ylabel("held-out loss minus uniform", fontsize=8)


def draw_prediction(
    axis: Any, lines: Sequence[Mapping[str, Any]], name: str, budget: str, short: int, long: int
) -> None:
    first, second = (mean_scores(lines, name, budget, epochs) for epochs in (short, long))
    common = sorted(set(first) & set(second))
    if len(common) < 3:
        axis.axis("off")
        return
    axis.axhline(0, color="black", linewidth=0.8)
    axis.axvline(0, color="black", linewidth=0.8)
    for allocation in common:
        x, y = (
            first[allocation].loss - first["uniform"].loss,
            second[allocation].loss - second["uniform"].loss,
        )
        axis.scatter(x, y, color=COLOURS[kind_of(allocation)], s=22, zorder=3)
        axis.annotate(allocation, (x, y), fontsize=6, xytext=(4, 2), textcoords="offset points")
    found = [[scores[allocation].loss for allocation in common] for scores in (first, second)]
    axis.set_title(
        "{}, {}: rank correlation {:.2f} ({:.2f} to {:.2f})".format(name, budget, *spearman_interval(*found)),
        fontsize=8,
    )
    axis.set_xlabel(f"loss minus uniform, {short} epochs", fontsize=8)
    axis.set_ylabel(f"loss minus uniform, {long} epochs", fontsize=8)


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
    parser.add_argument("--short", type=int, default=8, help="epochs of a short training")
    parser.add_argument("--long", type=int, default=30, help="epochs of a long one")
    parser.add_argument(
        "--turn", type=float, default=math.inf, help="after so many seconds, long trainings come first"
    )
    parser.add_argument(
        "--deadline", type=float, default=math.inf, help="start nothing that would not end by then (seconds)"
    )
    parser.add_argument("--only", nargs="+", help="only these allocations, short")
    parser.add_argument("--count", type=int, help="images of each part, for a try")
    parser.add_argument("--batch-size", type=int, help="for a try")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.archive, options.images, options.processes)
    else:
        {"time": measure, "run": run, "analyse": analyse, "plot": plot}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())

"""The tables of the docs, printed in Markdown from the stored results alone.

    python -m experiments.tables          # the names, and the pages that show them
    python -m experiments.tables NAME...

Intervals are 95 %. experiments/README.md says what is in each file, and which code made it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any

import numpy as np

Line = Mapping[str, Any]
Table = tuple[Sequence[str], Iterable[Sequence[str]]]
"""Heads and rows."""
Pair = tuple[Sequence[float], Sequence[float]]
"""Values of a method and of what it is compared with, one per seed."""

RESULTS = Path(__file__).parent / "results"
TABLES: dict[str, tuple[str, Callable[[], Iterator[Table]]]] = {}

NAMES = {
    "cifar_mobilenet_v2": "MobileNetV2",
    "cifar_resnet18": "ResNet-18",
    "cifar_vgg16_bn": "VGG-16",
    "cifar_resnet56": "ResNet-56",
    "se_resnet": "squeeze-excite",
    "tiny-imagenet-32": "Tiny-ImageNet-32",
    "cifar10": "CIFAR-10",
    "resnet20": "ResNet-20",
    "mobile": "small MobileNetV2",
    "gated": "squeeze-excite",
    "tp-local": "Torch-Pruning, local",
    "tp-global": "Torch-Pruning, global",
    "peel": "`peel`, stale",
    **{name: f"`{name}`" for name in ("sensitivity", "magnitude", "taylor")},
}

#: Quantiles of Student's t for 95 % intervals, by degrees of freedom.
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

#: Splits of seeds that a permutation test enumerates; beyond them it draws as many.
SPLITS = 200_000


def shown(pages: str) -> Callable[[Callable[[], Iterator[Table]]], Callable[[], Iterator[Table]]]:
    """Register a function that makes tables, with the pages that show them."""

    def register(function: Callable[[], Iterator[Table]]) -> Callable[[], Iterator[Table]]:
        TABLES[function.__name__] = pages, function
        return function

    return register


@cache
def read(name: str) -> list[dict[str, Any]]:
    """The lines of a file that have no error, ordered by seed where they have one."""
    lines = [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
    return sorted((line for line in lines if "error" not in line), key=lambda line: line.get("seed", 0))


def pick(lines: Iterable[Line], **wanted: Any) -> list[Line]:
    return [line for line in lines if all(line[key] == value for key, value in wanted.items())]


def name_of(value: str) -> str:
    return NAMES.get(value, value).replace("%", " %")


# Statistics


def t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t, to 1 % from 3 degrees of freedom on (Cornish-Fisher)."""
    z = 1.959964
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + first + second + third


def difference(pairs: Sequence[Pair], scale: float = 100, digits: int = 2) -> str:
    """The mean over pairs of the difference of means, with its interval (Welch). Seeds are not paired."""
    center = mean(mean(ours) - mean(base) for ours, base in pairs)
    groups = [some for pair in pairs for some in pair]
    errors = [variance(some) / len(some) / len(pairs) ** 2 for some in groups]
    parts = [error**2 / (len(some) - 1) for error, some in zip(errors, groups, strict=True)]
    freedom = max(1.0, sum(errors) ** 2 / max(sum(parts), 1e-300))
    half = t_quantile(freedom) * math.sqrt(sum(errors))
    return f"{scale * center:+.{digits}f} ± {scale * half:.{digits}f}"


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """The mean in points, with its interval over seeds where there are several."""
    text = f"{100 * mean(values):{sign}.2f}"
    if len(values) < 2:
        return text
    half = T95[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return f"{text} ± {100 * half:.2f}"


def gain_text(ours: Sequence[float], base: Sequence[float]) -> str:
    """The mean difference, paired by seed."""
    return mean_text([a - b for a, b in zip(ours, base, strict=True)], "+")


def permutation_p(pairs: Sequence[Pair]) -> float:
    """Two-sided, within pairs: the fraction of splits of the seeds whose mean difference is as large."""
    rng, total, observed, drawn = np.random.default_rng(0), np.zeros(1), 0.0, 1
    for ours, base in pairs:
        everything, size = np.array([*ours, *base]), len(ours)
        if len(pairs) == 1 and math.comb(len(everything), size) <= SPLITS:
            chosen, drawn = np.array(list(itertools.combinations(range(len(everything)), size))), 0
        else:
            chosen = np.argsort(rng.random((SPLITS, len(everything))), axis=1)[:, :size]
        sums = everything[chosen].sum(1)
        total = total + sums / size - (everything.sum() - sums) / (len(everything) - size)
        observed += float(np.mean(ours) - np.mean(base))
    reached = (np.abs(total) >= abs(observed) - 1e-12).sum()
    return float((drawn + reached) / (drawn + len(total)))


def holm(chances: Mapping[Any, float], family: int) -> dict[Any, float]:
    """Corrected for so many tests, step by step from the smallest."""
    corrected, largest = dict[Any, float](), 0.0
    for place, key in enumerate(sorted(chances, key=lambda key: chances[key])):
        largest = max(largest, min(1.0, (family - place) * chances[key]))
        corrected[key] = largest
    return corrected


def p_text(chance: float) -> str:
    if chance < 1e-4:
        return "< 0.0001"
    return f"{chance:.{4 if chance < 1e-3 else 3 if chance < 1e-2 else 2}f}"


# Trained from scratch: the confirmation

CELLS = [(net, budget) for net in list(NAMES)[:3] for budget in ("25%", "10%")]
ROWS = [
    (net, budget, data, teacher)
    for net, budget in CELLS
    for data in ("tiny-imagenet-32", "cifar10")
    for teacher in (False, True)
    if (net, data) != ("cifar_vgg16_bn", "cifar10")
]
#: Those that have the controls `profile` and `divided`.
CONTROLLED = [row for row in ROWS if row[1] == "10%" and not row[3]]


def scores(row: tuple[Any, ...], method: str, field: str = "top1") -> list[float]:
    network, budget, data, teacher = row
    lines = read("confirmation/train.jsonl")
    wanted = {"network": network, "budget": budget, "data": data, "teacher": teacher, "method": method}
    return [line[field] for line in pick(lines, **wanted)]


def pair(row: tuple[Any, ...], method: str, base: str = "uniform", field: str = "top1") -> Pair:
    return scores(row, method, field), scores(row, base, field)


@shown("results.md")
def divided() -> Iterator[Table]:
    """Uniform groups, divided among their layers by sensitivity, minus uniform."""
    heads = ["row", "uniform", "divided", "difference", "p", "test loss"]
    rows = []
    for row in CONTROLLED:
        means = [f"{100 * mean(scores(row, name)):.2f}" for name in ("uniform", "divided")]
        top1, loss = (pair(row, "divided", field=field) for field in ("top1", "loss"))
        texts = [difference([top1]), p_text(permutation_p([top1])), difference([loss], 1, 3)]
        rows.append([f"{name_of(row[0])}, {name_of(row[2])}", *means, *texts])
    both = [row for row in CONTROLLED if row[0] == "cifar_mobilenet_v2"]
    for label, some in (("all five", CONTROLLED), ("MobileNetV2, both", both)):
        pairs = [pair(row, "divided") for row in some]
        rows.append([label, "", "", difference(pairs), p_text(permutation_p(pairs)), ""])
    yield heads, rows


@shown("archive/search.md")
def primary() -> Iterator[Table]:
    """Means over data sets and teachers, for each network and budget."""
    rows_of = {cell: [row for row in sorted(ROWS) if row[:2] == cell] for cell in CELLS}
    chances = {cell: permutation_p([pair(row, "search") for row in rows]) for cell, rows in rows_of.items()}
    corrected = holm(chances, len(CELLS))
    pairs = (("search", "uniform"), ("peel", "uniform"))
    table = []
    for cell, rows in {**rows_of, ("all", ""): ROWS}.items():
        texts = [difference([pair(row, *names) for row in rows]) for names in pairs]
        chance = p_text(corrected[cell]) if cell in corrected else ""
        table.append([name_of(cell[0]), name_of(cell[1]), str(len(rows)), texts[0], chance, texts[1]])
    heads = ["network", "budget", "rows", "search minus uniform", "its p, Holm"]
    yield [*heads, "PEEL minus uniform (5 seeds)"], table


@shown("archive/search.md")
def confirmation() -> Iterator[Table]:
    """The twenty rows of the confirmation."""
    chances = {row: permutation_p([pair(row, "search")]) for row in ROWS}
    corrected = holm(chances, len(ROWS))
    rows = []
    for row in ROWS:
        label = ", ".join([*map(name_of, row[:3]), "teacher" if row[3] else "no teacher"])
        base = f"{100 * mean(scores(row, 'uniform')):.2f}"
        texts = [difference([pair(row, name)]) for name in ("search", "peel")]
        rows.append([label, base, texts[0], p_text(corrected[row]), texts[1]])
    heads = ["row", "uniform", "search minus uniform", "its p, Holm", "PEEL minus uniform (5 seeds)"]
    yield heads, rows


@shown("archive/search.md")
def controls() -> Iterator[Table]:
    """Two controls without a search: a fixed profile of groups, and uniform groups; both divided."""
    pairs = [(name, "uniform") for name in ("search", "profile", "divided")]
    pairs += [("search", "profile"), ("search", "divided")]
    some = {f"{name_of(row[0])}, {name_of(row[2])}": [row] for row in CONTROLLED} | {"all five": CONTROLLED}
    rows = [
        [label, *(difference([pair(row, *names) for row in part]) for names in pairs)]
        for label, part in some.items()
    ]
    yield ["row", *(f"{ours} minus {base}" for ours, base in pairs)], rows


@shown("results.md")
def cifar10() -> Iterator[Table]:
    """Plans of PEEL minus uniform on CIFAR-10, paired by seed."""
    lines = [line for line in read("cifar10.jsonl") if line["plan"] != "original"]
    rows = []
    for net, budget, kind in itertools.product(list(NAMES)[:2], ("50%", "25%"), ("none", "teacher")):
        plans = ("uniform", "peel", "gradient")
        cells = [pick(lines, net=net, budget=budget, distill=kind, plan=plan) for plan in plans]
        base, *others = ([line["top1"] for line in cell] for cell in cells)
        texts = [gain_text(some, base) for some in others]
        spread = f"{100 * mean(base):.2f} ± {100 * stdev(base):.2f}"
        rows.append([name_of(net), name_of(budget), kind, spread, *texts])
    heads = ["network", "budget", "distillation", "uniform, mean ± sd", "`peel` minus uniform"]
    yield [*heads, "`gradient` minus uniform"], rows


# Trained from scratch: the exploration

ALLOCATIONS = "allocation.jsonl"
BUDGETS = [(net, budget) for net in ("cifar_resnet18", "cifar_mobilenet_v2") for budget in ("10%", "25%")]


def by_allocation(file: str, network: str, budget: str, epochs: int) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in pick(read(file), network=network, budget=budget, epochs=epochs):
        found.setdefault(line["allocation"], []).append(line)
    return found


@shown("archive/exploration.md")
def long_trainings() -> Iterator[Table]:
    """Allocations minus uniform after 24 epochs. One table for each file of results."""
    fields = (("top1", 100, 2), ("loss", 1, 3), ("train_loss", 1, 3))
    heads = ["allocation", "seeds, uniform", "top-1", "held-out loss", "training loss"]
    files = ("allocation", "allocation_fan_out", "distilled", "sensitivity_trained", "searched_trained")
    for file in files:
        rows = []
        for network, budget in BUDGETS:
            found = by_allocation(f"{file}.jsonl", network, budget, 24)
            later = "allocation_fan_out.jsonl" if "mobile" in network else ALLOCATIONS
            base = found.pop("uniform", []) or by_allocation(later, network, budget, 24)["uniform"]
            for allocation, some in found.items():
                if min(len(some), len(base)) >= 4:
                    texts = [
                        difference([([line[f] for line in some], [line[f] for line in base])], *scale)
                        for f, *scale in fields
                    ]
                    size = mean(line["params"] for line in some) / base[0]["params"] - 1
                    label = f"{name_of(network)}, {name_of(budget)}"
                    counts = f"{len(some)}, {len(base)}"
                    rows.append([label, f"`{allocation}`", counts, *texts, f"{100 * size:+.0f} %"])
        yield [f"{file}.jsonl", *heads, "parameters"], rows


@shown("archive/exploration.md")
def predictors() -> Iterator[Table]:
    """Rank correlation of losses with trainings of 8 epochs, of networks that were not trained."""
    rows = []
    for network, budget in BUDGETS:
        trained = {
            one: mean(line["loss"] for line in some)
            for one, some in sorted(by_allocation(ALLOCATIONS, network, budget, 8).items())
            if not one.startswith(("free", "trial", "repair"))
        }
        predicted: dict[str, dict[str, float]] = {}
        for label in ("repaired", "recalibrated"):
            lines = pick(read("repair.jsonl"), predictor=label, network=network, budget=budget)
            zero = {line["original"]: line["loss"] for line in pick(lines, allocation="uniform")}
            losses: dict[str, list[float]] = {}
            for line in lines:
                losses.setdefault(line["allocation"], []).append(line["loss"] - zero[line["original"]])
            predicted[label] = {one: mean(some) for one, some in losses.items()}
        sizes = pick(read(ALLOCATIONS), network=network, budget=budget)
        predicted["parameters"] = {line["allocation"]: -line["params"] for line in sizes}
        texts = [
            correlation([(losses[a], loss) for a, loss in trained.items()]) for losses in predicted.values()
        ]
        rows.append([f"{name_of(network)}, {name_of(budget)}", str(len(trained)), *texts])
    yield ["network, budget", "allocations", "repaired", "recalibrated only", "parameters"], rows


def correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Spearman's, with its bootstrap interval."""
    values = np.array(pairs)

    def rank_correlation(some: Any) -> float:
        ranks = [(x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2 for x in some.T]
        return float(np.corrcoef(ranks)[0, 1])

    drawn = np.random.default_rng(0).integers(0, len(values), (4000, len(values)))
    low, high = np.nanpercentile([rank_correlation(values[index]) for index in drawn], [2.5, 97.5])
    return f"{rank_correlation(values):.2f} ({low:.2f} to {high:.2f})"


# Trained networks

TRAINED = ("cifar_resnet56", "cifar_mobilenet_v2", "se_resnet")
PEERS = ("tp-local", "tp-global")


def tuned(network: str, budget: str, method: str, start: str = "", **other: Any) -> list[Line]:
    """The lines of one way to make a network, ordered by seed."""
    start = start or ("cut" if method in PEERS else "repaired")
    recipe = {"lr": 0.2, "batch_size": 256} if start == "fresh" else {"lr": 0.005, "batch_size": 128}
    wanted = {"network": network, "budget": budget, "method": method, "start": start, **recipe}
    wanted |= {"resource": "macs", "teacher": True, "epochs": 10, **other}
    return pick(read("trained/finetune.jsonl"), **wanted)


def final(lines: Sequence[Line]) -> list[float]:
    return [line["top1"][-1] for line in lines]


def speed_up(lines: Sequence[Line]) -> str:
    """Measured in ONNX Runtime, for networks of the same widths once."""
    times = {
        (line["network"], line["architecture"]): line["speedup"] for line in read("trained/latency.jsonl")
    }
    keys = [hashlib.sha256(json.dumps(line["widths"], sort_keys=True).encode()) for line in lines]
    found = [times[line["network"], key.hexdigest()[:16]] for line, key in zip(lines, keys, strict=True)]
    return f"{mean(found):.2f}"


def share(lines: Sequence[Line], cost: str, digits: int) -> str:
    return f"{100 * mean(line[cost] / line[f'original_{cost}'] for line in lines):.{digits}f} %"


def original_of(network: str) -> str:
    top1 = pick(read("trained/finetune.jsonl"), network=network)[0]["original_top1"]
    return f"{name_of(network)}, {100 * top1:.2f} %"


@shown("trained_results.md, trained.md")
def finetuned() -> Iterator[Table]:
    """Top-1 after ten epochs of fine-tuning, parameters and speed-up."""
    for network in TRAINED:
        rows = []
        for method in ("sensitivity", "magnitude", "taylor", "peel", "uniform", *PEERS):
            cells = []
            for lines in (tuned(network, budget, method) for budget in ("50%", "25%")):
                cells += [mean_text(final(lines)), share(lines, "params", 0), speed_up(lines)]
            rows.append([name_of(method), *cells])
        parts = ["top-1 at 50 %", "params", "speed-up", "top-1 at 25 %", "params", "speed-up"]
        yield [original_of(network), *parts], rows


@shown("results.md")
def better() -> Iterator[Table]:
    """`sensitivity` minus uniform, and minus the better ranking of Torch-Pruning, paired by seed."""
    rows = []
    for network, budget in itertools.product(TRAINED, ("50%", "25%")):
        lines = {name: final(tuned(network, budget, name)) for name in ("sensitivity", "uniform", *PEERS)}
        peer = max(PEERS, key=lambda name: mean(lines[name]))
        gains = [gain_text(lines["sensitivity"], lines[base]) for base in ("uniform", peer)]
        top1 = f"{100 * mean(lines['sensitivity']):.2f}"
        rows.append([original_of(network), name_of(budget), top1, *gains])
    heads = ["network, original", "budget", "`sensitivity`", "minus uniform", "minus the better ranking"]
    yield heads, rows


@shown("trained_results.md")
def epochs() -> Iterator[Table]:
    """Top-1 after the steps of surgery and after each epoch, seed 0."""
    for network in TRAINED:
        rows = []
        for budget, method in itertools.product(("90%", "70%", "50%", "30%"), ("sensitivity", *PEERS)):
            (line,) = tuned(network, budget, method, seed=0)
            before = [line["before"][step] for step in ("cut", "recalibrated", "repaired")]
            texts = [f"{100 * value:.1f}" for value in (*before, *line["top1"])]
            texts[2] = "" if method in PEERS else texts[2]
            rows.append([f"{name_of(budget)}, {name_of(method)}", *texts])
        heads = ["cut", "recalibrated", "repaired", *map(str, range(1, 11))]
        yield [original_of(network), *heads], rows


@shown("trained_results.md")
def repair_gain() -> Iterator[Table]:
    """Repaired minus plainly cut after each epoch, seed 0."""
    rows = []
    for network, budget, method in itertools.product(
        TRAINED, ("90%", "70%", "50%", "30%", "25%"), ("uniform", "sensitivity")
    ):
        starts = [tuned(network, budget, method, start, seed=0) for start in ("repaired", "cut")]
        if all(starts):
            tops = (some[0]["top1"] for some in starts)
            gains = [f"{100 * (ours - cut):+.1f}" for ours, cut in zip(*tops, strict=True)]
            rows.append([f"{name_of(network)}, {name_of(budget)}, {method}", *gains])
    yield ["", *map(str, range(1, 11))], rows


@shown("trained_results.md")
def scratch() -> Iterator[Table]:
    """The same widths from fresh weights and repaired, seed 0."""
    ways = [(method, start) for method in ("uniform", "sensitivity") for start in ("fresh", "repaired")]
    rows = []
    for network, budget in itertools.product(TRAINED, ("50%", "25%")):
        tops = [final(tuned(network, budget, *way, seed=0))[0] for way in ways]
        rows.append([f"{name_of(network)}, {name_of(budget)}", *(f"{100 * top:.1f}" for top in tops)])
    yield ["", *(", ".join(way) for way in ways)], rows


@shown("trained_results.md")
def published() -> Iterator[Table]:
    """ResNet-56 at the reductions of the literature. Torch-Pruning's published figures are on the page."""
    rows = []
    for budget, method in itertools.product(("47.62%", "39.22%"), ("sensitivity", "uniform", *PEERS)):
        lines = tuned("cifar_resnet56", budget, method)
        fewer = mean(line["original_macs"] / line["macs"] for line in lines)
        tops = ", ".join(f"{100 * top:.2f}" for top in final(lines))
        changes = ", ".join(f"{100 * (line['top1'][-1] - line['original_top1']):.2f}" for line in lines)
        label = name_of(method) if method in PEERS else f"{name_of(method)}, repaired"
        rows.append([f"{fewer:.2f} times fewer", label, "10", f"89.98 to {tops}", changes])
    yield ["MACs", "network", "epochs", "top-1", "change"], rows


@shown("trained_results.md")
def latency_budgets() -> Iterator[Table]:
    """PEEL with a budget of latency against one of MACs, seed 0."""
    rows = []
    for network, budget in itertools.product(TRAINED, ("50%", "25%")):
        both = [tuned(network, budget, "peel", resource=name, seed=0) for name in ("macs", "latency")]
        cells = [(share(some, "macs", 1), mean_text(final(some)), speed_up(some)) for some in both]
        rows.append([name_of(network), *cells[0], *cells[1], gain_text(*map(final, reversed(both)))])
    parts = ("MACs", "top-1", "speed-up")
    heads = [f"{kind} budget: {part}" for kind in ("MACs", "latency") for part in parts]
    yield ["network", *heads, "difference in top-1"], rows


@shown("repair.md, results.md")
def curve() -> Iterator[Table]:
    """Cut / recalibrated / repaired, without training."""
    budgets = ("90%", "70%", "50%", "30%")
    for network in TRAINED:
        rows = []
        for method in ("sensitivity", "uniform", "streams", "magnitude", "taylor", *PEERS):
            cells = []
            for budget in budgets:
                (line,) = pick(read("trained/curve.jsonl"), network=network, budget=budget, method=method)
                cells.append(" / ".join(f"{100 * step:.1f}" for step in line["before"].values()))
            rows.append([name_of(method), *cells])
        yield [original_of(network), *map(name_of, budgets)], rows


@shown("repair.md")
def efficientnet() -> Iterator[Table]:
    """EfficientNet-Lite0 with ImageNet weights: cut, recalibrated and repaired with few photographs."""
    ways = {
        "uniform widths, cut (channels by norm scale)": ("norm", "cut", 100),
        "recalibrated": ("norm", "recalibrated", 100),
        "repaired, channels by norm scale": ("norm", "repaired", 100),
        "repaired, channels by `explain_scores`": ("explain", "repaired", 100),
        "the same, only hidden widths cut": ("hidden", "repaired", 100),
        "`explain_scores`, streams rotated to their principal components first": ("rotated", "repaired", 100),
        "widths and channels by sensitivity, repaired": ("sensitivity", "repaired", 100),
        "the same, streams rotated": ("rotated sensitivity", "repaired", 100),
        "by sensitivity, repaired, 250 photographs calibrate": ("sensitivity", "repaired", 250),
    }
    budgets, rows = (0.95, 0.9, 0.8, 0.7, 0.5), []
    for label, (select, step, count) in ways.items():
        lines = pick(read("repair_efficientnet.jsonl"), select=select, calibrate=count)
        found = {line["budget"]: f"{line[step]:.1f}" for line in lines}
        rows.append([label, *(found.get(budget, "") for budget in budgets)])
    yield ["top-1, %", *(f"{100 * budget:.0f} %" for budget in budgets)], rows


@shown("trained.md")
def recipes() -> Iterator[Table]:
    """The recipe `finetune` against a plain loop: means of three seeds of the confirmation."""

    def kept(line: Line) -> float:
        tuned_is_better = line["tuned_held_out"][1] <= line["repaired_held_out"][1]
        return float(line["tuned" if tuned_is_better else "repaired"][0])

    rows, gains = [], []
    for images, length in ((2000, 4), (2000, 16), (10000, 3), (10000, 8)):
        cells = []
        for network in ("resnet20", "mobile", "gated"):
            lines = pick(read("recipes.jsonl"), network=network, images=images, epochs=length)
            lines = [line for line in lines if line["seed"] >= 2]
            plain, soft = (pick(lines, recipe=name) for name in ("plain", "only-kd-t-4"))
            tops = [[line["repaired"][0] for line in plain], [line["tuned"][0] for line in plain]]
            tops.append([kept(line) for line in soft])
            gains += [ours - base for ours, base in zip(tops[2], tops[1], strict=True)]
            cells += [f"{mean(some):.2f}" for some in tops]
        rows.append([f"{images:,}, {length}", *cells])
    heads = [f"{name_of(net)}: repaired" for net in ("resnet20", "mobile", "gated")]
    yield ["images, epochs", *(text for head in heads for text in (head, "plain loop", "`finetune`"))], rows
    above = f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
    yield (
        ["above the plain loop", "mean", "worst"],
        [[above, f"{mean(gains):+.2f}", f"{min(gains):+.2f}"]],
    )


def main(names: Sequence[str]) -> None:
    for name, (pages, function) in TABLES.items():
        if not names:
            print(f"{name:16} {pages}: {function.__doc__}")
        elif name in names:
            for heads, rows in function():
                print(
                    "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)), "\n"
                )
    if unknown := set(names) - set(TABLES):
        sys.exit(f"There is no table {', '.join(sorted(unknown))}.")


if __name__ == "__main__":
    main(sys.argv[1:])

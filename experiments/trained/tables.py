"""The tables, in Markdown: means over seeds with standard deviations and 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..allocation.results import Line, read
from .latency import architecture
from .networks import NETWORKS
from .peer import PEERS, fraction
from .work import FINETUNE, METHODS, PUBLISHED

#: Quantiles of Student's t for 95 % intervals, by degrees of freedom; beyond them, that of the normal.
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

#: ResNet-56 on the original pixels, as Torch-Pruning publishes it from 93.53 %: our budget -> how many times
#: fewer MACs, how, top-1. Its figures are those of the best epoch on the test images.
TORCH_PRUNING_BASELINE = 93.53
TORCH_PRUNING_RESNET56 = {
    "47.62%": ((2.13, "sparse training", 93.77), (2.11, "no sparse training", 93.46)),
    "39.22%": ((2.57, "sparse training", 93.64), (2.51, "no sparse training", 93.36)),
}

#: A network counts as fast as another up to this factor.
AS_FAST = 1.02


class Stat(NamedTuple):
    """Of values over seeds."""

    mean: float
    deviation: float
    half: float
    """Half of the 95 % interval of the mean."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Stat:
        count = len(values)
        deviation = statistics.stdev(values) if count > 1 else math.nan
        quantile = T95[count - 1] if count <= len(T95) else 1.96
        return cls(statistics.mean(values), deviation, quantile * deviation / math.sqrt(count), count)

    @property
    def text(self) -> str:
        """Mean and interval, in points."""
        half = "" if math.isnan(self.half) else f" ± {100 * self.half:.2f}"
        return f"{100 * self.mean:.2f}{half}"

    @property
    def signed(self) -> str:
        return ("+" if self.mean >= 0 else "") + self.text

    @property
    def full(self) -> str:
        """Mean, standard deviation, interval and number of seeds."""
        deviation = "" if self.count < 2 else f"sd {100 * self.deviation:.2f}, "
        return f"{self.text} ({deviation}n {self.count})"


class Arm(NamedTuple):
    """A way to make a network, over all seeds."""

    network: str
    budget: str
    method: str
    resource: str
    start: str
    teacher: bool
    epochs: int
    batch_size: int
    lr: float

    @property
    def label(self) -> str:
        start = "" if self.method in PEERS and self.start == "cut" else f", {self.start}"
        start = start if self.resource == "macs" else f"{start}, budget of latency"
        usual = (self.batch_size, self.lr) == (FINETUNE.batch_size, FINETUNE.lr)
        return f"{self.method}{start}{'' if usual else f', rate {self.lr:g}, batch {self.batch_size}'}"

    @classmethod
    def of(cls, line: Line) -> Arm:
        return cls(*(line[name] for name in cls._fields))


Lines = dict[Arm, list[Line]]


def analyze(folder: Path, epochs: int) -> None:
    lines = [line for line in read(folder / "finetune.jsonl") if "error" not in line]
    arms: Lines = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        arms.setdefault(Arm.of(line), []).append(line)
    times = {(line["network"], line["architecture"]): line for line in read(folder / "latency.jsonl")}
    print_originals(read(folder / "originals.jsonl"))
    print_curves(read(folder / "curve.jsonl"))
    for teacher in (True, False):
        chosen = {arm: some for arm, some in arms.items() if arm.epochs == epochs and arm.teacher == teacher}
        print_finetuned(chosen, times, f"{epochs} epochs, {'with the' if teacher else 'without a'} teacher")
        print_best(chosen)
        print_best_latency(chosen, times)
    print_repair_gain(arms)
    print_latency_budgets(arms, times)
    print_schedules(arms)
    print_published(arms)
    errors = [line for line in read(folder / "finetune.jsonl") if "error" in line]
    for text in sorted(
        {f"{line['network']} {line['budget']} {line['method']}: {line['error']}" for line in errors}
    ):
        print(f"\nNot possible: {text}")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def print_originals(lines: Sequence[Line]) -> None:
    groups: dict[tuple[str, str, int], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["network"], line["recipe"], line["epochs"]), []).append(line)
    if not groups:
        return
    print("\n## Originals")
    rows = [
        [*map(str, key), Stat.of([line["top1"][-1] for line in some]).full, f"{some[0]['train_loss']:.3f}"]
        for key, some in sorted(groups.items())
    ]
    table(["network", "recipe", "epochs", "top-1", "training loss"], rows)


def print_curves(lines: Sequence[Line]) -> None:
    """Top-1 without training: rows are methods, columns are budgets and steps of surgery."""
    lines = [line for line in lines if "error" not in line]
    budgets = sorted({line["budget"] for line in lines}, key=fraction, reverse=True)
    for name in NETWORKS:
        own = [line for line in lines if line["network"] == name]
        if not own:
            continue
        top1 = Stat.of([line["original_top1"] for line in own if line["method"] == own[0]["method"]])
        print(f"\n## Without training: {name}, original {100 * top1.mean:.2f} %")
        print("\nTop-1 cut / recalibrated / repaired, mean over seeds; in brackets the MACs.")
        rows = []
        for method in METHODS:
            cells = [_at(own, method, budget) for budget in budgets]
            if any(cells):
                rows.append([method, *map(_curve_cell, cells)])
        table(["method", *budgets], rows)
        _print_losses(name, own, budgets)


def _at(lines: Sequence[Line], method: str, budget: str) -> list[Line]:
    return [line for line in lines if (line["method"], line["budget"]) == (method, budget)]


def _curve_cell(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    steps = [100 * statistics.mean(line["before"][step] for line in lines) for step in lines[0]["before"]]
    share = statistics.mean(line["macs"] / line["original_macs"] for line in lines)
    return f"{' / '.join(f'{step:.1f}' for step in steps)} ({share:.1%})"


def _print_losses(name: str, lines: Sequence[Line], budgets: Sequence[str]) -> None:
    """The best repaired network of peel at each budget: how far it is from the original."""
    for budget in budgets:
        found: dict[str, list[float]] = {}
        for line in lines:
            if line["budget"] == budget and line["method"] not in PEERS:
                loss = line["before"]["repaired"] - line["original_top1"]
                found.setdefault(line["method"], []).append(loss)
        if found:
            best = max(found, key=lambda method: statistics.mean(found[method]))
            print(f"\n{name} at {budget}: best repaired {best}, {Stat.of(found[best]).signed} points.")


def print_finetuned(arms: Lines, times: dict[tuple[str, str], Line], title: str) -> None:
    for network, budget in dict.fromkeys((arm.network, arm.budget) for arm in sorted(arms, key=_order)):
        chosen = {arm: arms[arm] for arm in sorted(arms, key=_order) if arm[:2] == (network, budget)}
        originals = [line["original_top1"] for some in chosen.values() for line in some]
        print(f"\n## {network}, {budget} of the MACs, {title}")
        print(f"\nOriginal {100 * statistics.mean(originals):.2f} %. Intervals are 95 % over seeds.")
        peer = _best(chosen, is_peer)
        rows = [
            _finetuned_row(arm, some, chosen.get(peer) if peer else None, times)
            for arm, some in chosen.items()
        ]
        heads = ["method", "MACs", "params", "before training", "1 epoch", "top-1", "sd", "n", "change"]
        table([*heads, "against best Torch-Pruning", "latency ms", "speed-up"], rows)


def _order(arm: Arm) -> tuple[Any, ...]:
    place = list(NETWORKS).index(arm.network), -fraction(arm.budget), METHODS.index(arm.method)
    return *place, arm.start, -arm.batch_size, arm.lr


def _finetuned_row(
    arm: Arm, lines: Sequence[Line], peer: Sequence[Line] | None, times: dict[tuple[str, str], Line]
) -> list[str]:
    final = Stat.of([line["top1"][-1] for line in lines])
    change = Stat.of([line["top1"][-1] - line["original_top1"] for line in lines])
    timed = _times(lines, times)
    return [
        arm.label,
        f"{statistics.mean(line['macs'] / line['original_macs'] for line in lines):.1%}",
        f"{statistics.mean(line['params'] / line['original_params'] for line in lines):.1%}",
        f"{100 * statistics.mean(line['before'][arm.start] for line in lines):.1f}",
        f"{100 * statistics.mean(line['top1'][0] for line in lines):.1f}",
        final.text,
        "" if final.count < 2 else f"{100 * final.deviation:.2f}",
        str(final.count),
        change.signed,
        "" if peer is None else paired(lines, peer),
        f"{statistics.mean(one['milliseconds'] for one in timed):.3f}" if timed else "",
        f"{statistics.mean(one['speedup'] for one in timed):.2f}" if timed else "",
    ]


def _times(lines: Sequence[Line], times: dict[tuple[str, str], Line]) -> list[Line]:
    found = [times.get((line["network"], architecture(line))) for line in lines]
    return [one for one in found if one is not None]


def paired(lines: Sequence[Line], others: Sequence[Line], epoch: int = -1) -> str:
    """The difference of top-1 over the seeds that both have; empty where there is none."""
    second = {line["seed"]: line["top1"][epoch] for line in others}
    values = [line["top1"][epoch] - second[line["seed"]] for line in lines if line["seed"] in second]
    return Stat.of(values).signed if values and lines is not others else ""


def _best(arms: Lines, wanted: Callable[[Arm], bool]) -> Arm | None:
    chosen = [arm for arm in arms if wanted(arm)]
    return max(chosen, key=lambda arm: Stat.of(_final(arms[arm])).mean, default=None)


def _final(lines: Sequence[Line]) -> list[float]:
    return [line["top1"][-1] for line in lines]


def is_ours(arm: Arm) -> bool:
    """Cut by peel to a budget of MACs."""
    return arm.method not in PEERS and arm.resource == "macs" and arm.start != "fresh"


def is_peer(arm: Arm) -> bool:
    """Torch-Pruning as it is; repaired, its networks are ours."""
    return arm.method in PEERS and arm.start == "cut"


def print_best(arms: Lines) -> None:
    """The best of peel against the best of Torch-Pruning at the same MACs."""
    rows = []
    for cell in dict.fromkeys(arm[:2] for arm in sorted(arms, key=_order)):
        chosen = {arm: some for arm, some in arms.items() if arm[:2] == cell}
        ours, peer = _best(chosen, is_ours), _best(chosen, is_peer)
        if ours and peer:
            scores = [f"{arm.label} {Stat.of(_final(chosen[arm])).text}" for arm in (ours, peer)]
            rows.append([*cell, *scores, paired(chosen[ours], chosen[peer])])
    if rows:
        print("\n### Best at equal MACs")
        print("\nThe test images choose the best arm of each side, of more arms on ours.")
        table(["network", "budget", "peel", "Torch-Pruning", "difference"], rows)


def print_best_latency(arms: Lines, times: dict[tuple[str, str], Line]) -> None:
    """For each network of Torch-Pruning: the best of peel that is measured to be as fast, at any budget."""
    speed = {}
    for arm, some in arms.items():
        if timed := _times(some, times):
            speed[arm] = statistics.mean(1 / one["speedup"] for one in timed)
    rows = []
    for peer in sorted(filter(is_peer, speed), key=_order):
        fast = {
            arm: arms[arm]
            for arm, latency in speed.items()
            if arm.network == peer.network and arm.method not in PEERS and latency <= AS_FAST * speed[peer]
        }
        ours = _best(fast, lambda arm: True)
        row = [peer.network, f"{peer.label} {peer.budget}", f"{speed[peer]:.1%}"]
        row.append(Stat.of(_final(arms[peer])).text)
        if ours is None:
            rows.append([*row, "none is as fast", "", "", ""])
        else:
            score = Stat.of(_final(arms[ours])).text
            difference = paired(arms[ours], arms[peer])
            rows.append([*row, f"{ours.label} {ours.budget}", f"{speed[ours]:.1%}", score, difference])
    if rows:
        print("\n### Best at equal measured latency (relative to the original)")
        heads = ["network", "Torch-Pruning", "latency", "top-1", "peel", "latency", "top-1", "difference"]
        table(heads, rows)


def print_repair_gain(arms: Lines) -> None:
    """Repaired minus plainly cut, after every epoch of the same schedule."""
    rows, most = [], 0
    for arm in sorted(arms, key=_order):
        plain = arm._replace(start="cut")
        if arm.start == "repaired" and plain in arms:
            most = max(most, arm.epochs)
            gains = [paired(arms[arm], arms[plain], epoch) for epoch in range(arm.epochs)]
            taught = "yes" if arm.teacher else "no"
            rows.append([arm.network, arm.budget, arm.method, taught, str(arm.epochs), *gains])
    if rows:
        print("\n## Repaired minus cut, in points, after each epoch")
        heads = ["network", "budget", "method", "teacher", "epochs", *map(str, range(1, most + 1))]
        table(heads, [[*row, *[""] * (len(heads) - len(row))] for row in rows])


def print_latency_budgets(arms: Lines, times: dict[tuple[str, str], Line]) -> None:
    """Budgets of latency against budgets of MACs, at the same predicted latency."""
    rows = []
    for arm in sorted(arms, key=_order):
        other = arm._replace(resource="macs")
        if arm.resource == "latency" and other in arms:
            pair = [arms[other], arms[arm]]
            cells = [arm.network, arm.method, arm.budget]
            for some in pair:
                timed = _times(some, times)
                speed = f"{statistics.mean(one['speedup'] for one in timed):.2f}" if timed else ""
                cells += [Stat.of(_final(some)).text, speed]
            rows.append([*cells, paired(pair[1], pair[0])])
    if rows:
        print("\n## Budgets of latency against budgets of MACs, at the same predicted latency")
        heads = ["network", "method", "MACs", "top-1, MACs", "speed-up", "top-1, latency", "speed-up"]
        table([*heads, "difference"], rows)


def print_schedules(arms: Lines) -> None:
    """Top-1 at the end of schedules of several lengths."""
    lengths = sorted({arm.epochs for arm in arms})
    if len(lengths) < 2:
        return
    rows = []
    for arm in dict.fromkeys(arm._replace(epochs=0) for arm in sorted(arms, key=_order)):
        found = [arms.get(arm._replace(epochs=length)) for length in lengths]
        if sum(some is not None for some in found) > 1:
            cells = ["" if some is None else Stat.of(_final(some)).text for some in found]
            rows.append([arm.network, arm.budget, arm.label, "yes" if arm.teacher else "no", *cells])
    print("\n## Schedules of several lengths: top-1 at the end")
    table(["network", "budget", "method", "teacher", *(f"{length} epochs" for length in lengths)], rows)


def print_published(arms: Lines) -> None:
    """The change from the own baseline for ResNet-56 at the reductions that papers report."""
    rows: list[list[str]] = []
    for budget in PUBLISHED:
        for times, way, after in TORCH_PRUNING_RESNET56[budget]:
            before = TORCH_PRUNING_BASELINE
            text = f"{before:.2f} -> {after:.2f} ({after - before:+.2f})"
            rows.append([f"{times} times fewer", f"Torch-Pruning, published, {way}", "100", text, ""])
        for arm in sorted(arms, key=_order):
            if (arm.network, arm.budget) == ("cifar_resnet56", budget):
                lines = arms[arm]
                start = 100 * statistics.mean(line["original_top1"] for line in lines)
                change = Stat.of([line["top1"][-1] - line["original_top1"] for line in lines])
                end = 100 * Stat.of(_final(lines)).mean
                name = f"{arm.label}, {'teacher' if arm.teacher else 'no teacher'}"
                text = f"{start:.2f} -> {end:.2f} ({change.signed})"
                fewer = statistics.mean(line["original_macs"] / line["macs"] for line in lines)
                rows.append([f"{fewer:.2f} times fewer", name, str(arm.epochs), text, str(change.count)])
    if any((arm.network, arm.budget) == ("cifar_resnet56", budget) for arm in arms for budget in PUBLISHED):
        print("\n## ResNet-56 at the reductions of the literature")
        print("\nOurs are on images that were re-encoded as JPEG: compare the changes, not the levels.")
        print(
            "Ours are of the last epoch. Torch-Pruning publishes the best epoch on the test images, and its"
        )
        print("sparse training takes 100 epochs more.")
        table(["MACs", "network", "epochs", "top-1 (change)", "n"], rows)

"""PEEL against the uniform network of exactly the same budget, on CIFAR-10, over several seeds.

    python experiments/cifar10.py --data CIFAR_FOLDER --net cifar_resnet18 --results results.jsonl
    python experiments/cifar10.py --render docs/results.md --results results.jsonl

CIFAR_FOLDER holds train/CLASS/*.jpg and test/CLASS/*.jpg, or is the word cifar10 (torchvision downloads it).
One teacher is trained for each network. For each budget and seed there are these plans:

    uniform     one factor for all layers, the same budget: the baseline
    peel        as published: |gamma| with the L1 coefficient 1e-4, mean over a group, lambda 0.8
    peel-l1     the same with the L1 term as strong in all as with the paper's schedule (l1_strength 12.5)
    gradient    the gradient criterion, summed over a group, lambda 0.5, no L1 term

Each plan is trained from scratch without and with distillation, with the same recipe, seed and order of
images. The accuracy of the last epoch counts. An interrupted experiment resumes with the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

PLANS: dict[str, dict[str, Any]] = {
    "peel": {},
    "peel-l1": {"l1_strength": 12.5},
    "gradient": {"criterion": "gradient", "reduce": "sum", "backbone_ratio": 0.5},
}

#: What is stored of a plan.
PLAN_FIELDS = ("shares", "factors", "distinct", "widths")

#: Quantiles of Student's t for 95 % intervals, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--net", default="cifar_resnet18")
    parser.add_argument("--budgets", nargs="+", default=["50%", "25%"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--plans", nargs="+", default=["uniform", *PLANS])
    parser.add_argument("--distill", nargs="+", default=["none", "teacher"])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--backbone-epochs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="budgets and seeds at a time, on one GPU")
    parser.add_argument(
        "--teachers", type=Path, default=Path("teachers"), help="where the trained originals are kept"
    )
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"))
    parser.add_argument(
        "--deadline", type=float, default=math.inf, help="start no training after this many seconds"
    )
    parser.add_argument("--render", type=Path, help="write the table into this file, between its markers")
    parser.add_argument("--cell", nargs=2, metavar=("BUDGET", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.render is not None:
        render(options.results, options.render)
    elif options.cell is not None:
        run_cell(options, options.cell[0], int(options.cell[1]))
    else:
        run_all(options)


def run_all(options: argparse.Namespace) -> None:
    began = time.time()
    train_teacher(options)
    waiting = [(budget, str(seed)) for seed in options.seeds for budget in options.budgets]
    running: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while waiting or running:
            running = [process for process in running if process.poll() is None]
            while waiting and len(running) < options.jobs:
                left = options.deadline - (time.time() - began)
                running.append(
                    subprocess.Popen(
                        [sys.executable, *sys.argv, "--deadline", str(left), "--cell", *waiting.pop(0)]
                    )
                )
            time.sleep(0.2)
    finally:
        for process in running:
            process.terminate()


def load(options: argparse.Namespace) -> Any:
    """The data, decoded once: a folder of many small files is kept as one tensor file beside the results."""
    import torch

    from peel.data.datasets import Data, load_data
    from peel.data.in_memory import InMemoryImages

    kept = options.teachers / "images.pt"
    if not kept.exists():
        data = load_data(options.data)
        options.teachers.mkdir(parents=True, exist_ok=True)
        assert isinstance(data.train, InMemoryImages)
        assert isinstance(data.test, InMemoryImages)
        splits = [(split.pixels, split.labels) for split in (data.train, data.test)]
        torch.save(
            {"classes": list(data.classes), "splits": splits, "mean": data.train.mean, "std": data.train.std},
            kept,
        )
    stored = torch.load(kept)
    train, test = (
        InMemoryImages(pixels, labels, tuple(stored["mean"]), tuple(stored["std"]))
        for pixels, labels in stored["splits"]
    )
    return Data("cifar10", tuple(stored["classes"]), train, test, "crop-flip")


def settings(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "recipe": "cifar-fast",
        "train": {"epochs": options.epochs},
        "backbone": {"epochs": options.backbone_epochs},
    }


def train_teacher(options: argparse.Namespace) -> None:
    import peel

    folder = options.teachers / f"{options.net}-{options.epochs}"
    result = peel.prune(
        options.net,
        load(options),
        stages=["original"],
        output=folder,
        distill="none",
        **settings(options, 0),
    )
    row = result.rows[0]
    print(f"teacher {options.net}: {row.top1:.2%} in {row.seconds:.0f} s", flush=True)
    write(
        options, {"net": options.net, "plan": "original", "seed": 0, "epochs": options.epochs, **asdict(row)}
    )


def run_cell(options: argparse.Namespace, budget: str, seed: int) -> None:
    """Train all plans of one budget and seed that are not in the results."""
    import peel

    began = time.time()
    data = load(options)
    common = {"budget": budget, "divisor": 1, "grow": True, **settings(options, seed)}
    lines = read(options.results)
    done = {key_of(line) for line in lines}
    for name in options.plans:
        line = {"net": options.net, "epochs": options.epochs, "budget": budget, "seed": seed, "plan": name}
        missing = [kind for kind in options.distill if key_of({**line, "distill": kind}) not in done]
        if not missing or time.time() - began > options.deadline:
            continue
        plan = stored_plan(lines, line) or make_plan(options, data, name, common)
        for kind in missing:
            if time.time() - began > options.deadline:
                break
            result = peel.prune(
                options.net,
                data,
                plan=plan["widths"],
                stages=["original", "final"],
                teacher=options.teachers / f"{options.net}-{options.epochs}",
                distill=kind,
                **common,
            )
            row = asdict(result.rows[-1])
            write(options, {**line, "distill": kind, **row, "name": name, **plan, **hardware()})
            text = f"{options.net} {budget} seed {seed} {name} {kind}"
            print(f"{text}: {row['top1']:.2%} in {row['seconds']:.0f} s", flush=True)


def stored_plan(lines: list[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The plan of an earlier training with the other kind of distillation, if there is one."""
    for line in lines:
        if "widths" in line and all(line.get(key) == value for key, value in wanted.items()):
            return {key: line[key] for key in PLAN_FIELDS if key in line}
    return None


def make_plan(options: argparse.Namespace, data: Any, name: str, common: dict[str, Any]) -> dict[str, Any]:
    """Widths, with the shares and factors that led to them."""
    import torch

    import peel
    from peel import zoo

    if name == "uniform":
        network = zoo.create(options.net, num_classes=len(data.classes))
        graph = peel.trace(network, torch.zeros(1, *data.shape))
        freeze = zoo.FROZEN.get(network.peel_source["zoo"], ())
        return {"widths": dict(peel.uniform(graph, common["budget"], divisor=1, freeze=freeze))}
    stages = ["backbone", "plan"]
    plan = peel.prune(options.net, data, stages=stages, distill="none", **common, **PLANS[name]).plan
    assert plan is not None
    found = {**asdict(plan.rounds[0]), "widths": dict(plan.widths)}
    return {key: found[key] for key in PLAN_FIELDS if key in found}


def hardware() -> dict[str, str]:
    import torch

    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(key) for key in ("net", "epochs", "budget", "seed", "plan", "distill"))


def write(options: argparse.Namespace, line: dict[str, Any]) -> None:
    """Without the file of the weights, which stays on the machine that made it."""
    line = {key: value for key, value in line.items() if key != "file"}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def render(results: Path, target: Path) -> None:
    """The table: mean and deviation over seeds, and the paired difference to uniform with its interval."""
    lines = read(results)
    order = ["uniform", *PLANS]

    def place(cell: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
        net, budget, kind, plan = cell[0]
        return net, -float(budget.rstrip("%")), kind, order.index(plan)

    rows = [
        "| network | budget | distillation | plan | top-1, mean ± sd | seeds "
        "| minus uniform, paired (95 % interval) |",
        "|---|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[Any, ...], dict[int, float]] = {}
    for line in lines:
        if line["plan"] != "original":
            cell = line["net"], line["budget"], line["distill"], line["plan"]
            cells.setdefault(cell, {})[line["seed"]] = 100 * line["top1"]
    for (net, budget, kind, plan), scores in sorted(cells.items(), key=place):
        base = cells.get((net, budget, kind, "uniform"), {})
        pairs = [scores[seed] - base[seed] for seed in scores if seed in base]
        gain = "" if plan == "uniform" or len(pairs) < 2 else interval(pairs)
        spread = f" ± {statistics.stdev(scores.values()):.2f}" if len(scores) > 1 else ""
        rows.append(
            f"| {net} | {budget} | {kind} | {plan} | {statistics.mean(scores.values()):.2f}{spread} "
            f"| {len(scores)} | {gain} |"
        )
    text = target.read_text()
    before, _, rest = text.partition("<!-- cifar10 -->\n")
    _, _, after = rest.partition("<!-- /cifar10 -->")
    target.write_text(before + "<!-- cifar10 -->\n" + "\n".join(rows) + "\n<!-- /cifar10 -->" + after)


def interval(pairs: list[float]) -> str:
    mean, half = statistics.mean(pairs), T95[len(pairs) - 1] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    verdict = "better" if mean - half > 0 else "worse" if mean + half < 0 else "no difference shown"
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}): {verdict}"


if __name__ == "__main__":
    main()

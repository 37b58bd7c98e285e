"""PEEL on a trained network: its plan against uniform widths, cut, repaired and fine-tuned alike.

    python -m experiments.peel_on_trained --data FOLDER --seeds 0 1 2 --budgets 50% 25%

Each seed trains an original of its own for ten epochs on 2,000 images per class of a folder such as CIFAR-10,
in a process of its own. PEEL and uniform start from it at each budget. Each run adds a line to `--results`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import peel
from peel.data.datasets import balanced_order, load_data

RESULTS = Path(__file__).parent / "results" / "peel_on_trained.jsonl"


def run(options: argparse.Namespace, seed: int) -> None:
    data = load_data(options.data)
    few = data.train.subset(balanced_order(data.train, 0)[: options.images])
    data = replace(data, train=few, name=f"{data.name} ({options.images:,} images)")
    network = peel.zoo.create(options.network, num_classes=len(data.classes))
    settings: dict[str, Any] = {"seed": seed, "bench_seconds": 0, "device": options.device}
    trained = peel.prune(
        network,
        data,
        weights="train",
        recipe="cifar",
        train={"epochs": options.epochs},
        stages=["original"],
        output=options.work / f"original-{seed}",
        **settings,
    )
    weights = str(options.work / f"original-{seed}")
    for budget in options.budgets:
        result = peel.prune(
            network,
            data,
            weights=weights,
            budget=budget,
            method="peel",
            train={"epochs": options.epochs},
            **settings,
        )
        plan = result.plan
        assert plan is not None
        last = plan.rounds[-1]
        line = {
            "network": options.network,
            "images": options.images,
            "epochs": options.epochs,
            "seed": seed,
            "budget": budget,
            "original": trained.rows[0].top1,
            "rows": {
                row.name: {"top1": row.top1, "macs": row.macs, **row.before_training} for row in result.rows
            },
            "shares": last.shares,
            "factors": last.factors,
            "rounded_factors": last.rounded_factors,
            "widths": dict(plan.widths),
            "uniform": plan.uniform.widths,
            "repaired_losses": plan.repaired_losses,
            "notes": list(result.notes),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(seed, budget, line["rows"], line["rounded_factors"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a folder with train/CLASS and test/CLASS")
    parser.add_argument("--network", default="cifar_resnet20")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budgets", nargs="+", default=["50%", "25%"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("runs/peel_on_trained"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    with ProcessPoolExecutor(len(options.seeds), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(run, options), options.seeds))


if __name__ == "__main__":
    main()

"""Trained networks cut to a budget: peel against Torch-Pruning 1.6.1 on CIFAR-10.

    python -m experiments.trained prepare --archive cifar10.tar.xz --images images.pt
    nvidia-cuda-mps-control -d     # several trainings share the GPU
    python -m experiments.trained originals --images images.pt --originals originals --lanes 9
    python -m experiments.trained peers --images images.pt --originals originals --lanes 6
    python -m experiments.trained curve --images images.pt --originals originals --lanes 6
    python -m experiments.trained finetune --images images.pt --originals originals --lanes 8
    python -m experiments.trained latency --originals originals
    python -m experiments.trained analyze

`originals` trains the networks from scratch into originals/NETWORK-SEED/original.safetensors. `peers` lets
Torch-Pruning (pip install torch-pruning==1.6.1) choose channels. `curve` judges networks right after the
cut, recalibrated and repaired. `finetune` trains the stages of work.py, such as `main:0-2`; a line has top-1
after every epoch. A seed has an original of its own, or uses that of seed 0. `latency` times the networks of
`finetune` in ONNX Runtime, on one thread. `latency-models` fits the latency models that the stage `latency`
of `finetune` needs, for the same conditions.

Each job adds one line to a file of results. Jobs that are in the file are skipped, so the same command
resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .images import prepare
from .latency import latency, latency_models
from .networks import FOLDER, NETWORKS
from .tables import analyze
from .work import CURVE, METHODS, RECIPES, STAGES, curve, finetune, originals, peers


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.trained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="decode the images")
    command.add_argument("--archive", type=Path, default=Path("cifar10.tar.xz"))
    command.add_argument("--images", type=Path, default=Path("images.pt"), help="the decoded images")
    add_originals(commands)
    command = add_jobs(commands, "peers", "let Torch-Pruning choose channels", lanes=6)
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    command = add_jobs(commands, "curve", "judge networks that are not trained", lanes=6)
    add_training(command)
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    command.add_argument("--budgets", nargs="+", default=list(CURVE), help="fractions of the MACs: 50%%")
    command = add_jobs(commands, "finetune", "train the cut networks", lanes=8)
    add_training(command)
    command.add_argument("--stages", nargs="+", default=["main:0-2"], help=f"{', '.join(STAGES)}, and seeds")
    command.add_argument("--epochs", type=int, help="another number of epochs, for a test")
    command = commands.add_parser("latency", help="time the networks of finetune in ONNX Runtime")
    command.add_argument("--trained", type=Path, default=FOLDER / "finetune.jsonl", help="lines of finetune")
    command.add_argument("--results", type=Path, default=FOLDER / "latency.jsonl", help="the file of times")
    command.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    command.add_argument("--seconds", type=float, default=2.0, help="of timing for each network")
    command = commands.add_parser("latency-models", help="measure what the stage `latency` needs")
    command.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    command = commands.add_parser("analyze", help="print the tables")
    command.add_argument("--folder", type=Path, default=FOLDER, help="the files of results")
    command.add_argument("--epochs", type=int, default=10, help="epochs of the main table")
    options = vars(parser.parse_args())
    functions: dict[str, Callable[..., None]] = {
        "prepare": prepare,
        "originals": originals,
        "peers": peers,
        "curve": curve,
        "finetune": finetune,
        "latency": latency,
        "latency-models": latency_models,
        "analyze": analyze,
    }
    functions[options.pop("command")](**options)


def add_jobs(
    commands: argparse._SubParsersAction, name: str, text: str, lanes: int
) -> argparse.ArgumentParser:
    """A command with jobs in several processes."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    command.add_argument("--images", type=Path, default=Path("images.pt"), help="the decoded images")
    command.add_argument("--originals", type=Path, default=Path("originals"), help="the trained originals")
    command.add_argument("--results", type=Path, default=FOLDER / f"{name}.jsonl", help="the file of results")
    command.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    command.add_argument("--lanes", type=int, default=lanes, help="processes")
    command.add_argument("--count", type=int, help="use only so many images of each part, for a test")
    command.add_argument(
        "--deadline", type=float, default=math.inf, help="start nothing that would end after so many seconds"
    )
    return command


def add_training(command: argparse.ArgumentParser) -> None:
    command.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    command.add_argument("--divisor", type=divisor, default="auto", help="widths are multiples of this")
    command.add_argument("--batch-size", type=int, help="another batch size, for a test")


def add_originals(commands: Any) -> None:
    command = add_jobs(commands, "originals", "train originals from scratch", lanes=9)
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    command.add_argument("--recipe", default="smooth", choices=RECIPES)
    command.add_argument("--epochs", type=int, default=60)
    command.add_argument("--batch-size", type=int, help="another batch size, for a test")


def divisor(text: str) -> int | str:
    return text if text == "auto" else int(text)


if __name__ == "__main__":
    main()

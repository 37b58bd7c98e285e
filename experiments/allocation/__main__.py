"""How much there is to win by allocation: many allocations of one budget, each trained from scratch.

    python -m experiments.allocation prepare --archive tiny-imagenet-32.tar.xz --images images.pt
    python -m experiments.allocation time --images images.pt
    nvidia-cuda-mps-control -d     # several trainings share the GPU
    python -m experiments.allocation run --images images.pt --results results.jsonl --lanes 8
    python -m experiments.allocation originals --images images.pt --folder originals
    python -m experiments.allocation predict --images images.pt --folder originals --lanes 6
    python -m experiments.allocation analyze --results results.jsonl
    python -m experiments.allocation simulate --results results.jsonl
    python -m experiments.allocation plot --results results.jsonl --picture map.png

`prepare` splits the training images into 45,000 to train on and 5,000 held out, 50 of each class. It does not
read the test images. `run` trains the stages of jobs.py: first every allocation with a short schedule, then
some with a long one, then the trials of searches (trial.py) and their plans. Each training adds one line to
the results. Jobs that are in the results are skipped, so the same command resumes an interrupted run. The
allocations are described in allocations.py. `originals` and `predict` compare allocations without training
one (predict.py); `sensitivity` allocates by the sensitivity of an original (sensitivity.py);
`search` plans by the search of the package (searched.py). With
`originals --taught 24` and `run --teachers`, networks are trained with a teacher (teaching.py). `simulate`
compares designs of searches without training.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from .allocations import BUDGETS
from .images import prepare
from .jobs import STAGES
from .plot import PICTURE, plot
from .predict import EPOCHS, ORIGINALS, originals, predict
from .results import REPAIRS, RESULTS
from .searched import EPOCHS as SEARCH_EPOCHS
from .searched import search
from .sensitivity import sensitivity
from .simulate import simulate
from .tables import analyze
from .train import measure, run


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.allocation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    images = argparse.ArgumentParser(add_help=False)
    images.add_argument("--images", type=Path, default=Path("images.pt"), help="the decoded images")
    small = argparse.ArgumentParser(add_help=False)
    small.add_argument("--count", type=int, help="use only so many images of each part, for a test")
    small.add_argument("--batch-size", type=int, help="another batch size, for a test")
    results = argparse.ArgumentParser(add_help=False)
    results.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", parents=[images], help="decode the images")
    command.add_argument("--archive", type=Path, default=Path("tiny-imagenet-32.tar.xz"))
    commands.add_parser("time", parents=[images, small], help="time an epoch of each uniform network")
    command = commands.add_parser("run", parents=[images, small, results], help="train what is missing")
    command.add_argument("--lanes", type=int, default=6, help="trainings at a time")
    command.add_argument("--stages", nargs="+", default=STAGES, help="what is trained, in this order")
    command.add_argument(
        "--deadline", type=float, default=math.inf, help="start nothing that would end after so many seconds"
    )
    command.add_argument("--teachers", type=Path, help="train with the logits of these originals")
    command.add_argument("--weight", type=float, default=1.0, help="weight of the term of distillation")
    command.add_argument("--temperature", type=float, default=1.0, help="temperature of distillation")
    command.add_argument("--basis", type=Path, help="the trainings that allocations follow from, if others")
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--folder", type=Path, default=Path("originals"), help="the trained originals")
    command = commands.add_parser(
        "originals", parents=[images, small, results, folder], help="train originals"
    )
    command.add_argument("--networks", default="", help="a part of the names of networks")
    command.add_argument("--seeds", type=int, nargs="+", default=ORIGINALS)
    command.add_argument("--epochs", type=int, default=EPOCHS)
    command.add_argument("--taught", type=int, default=0, help="keep their logits for so many epochs")
    command = commands.add_parser("predict", parents=[images, small, folder], help="score repaired networks")
    command.add_argument("--results", type=Path, default=REPAIRS, help="the file of scores")
    command.add_argument("--lanes", type=int, default=6, help="processes")
    command.add_argument(
        "--deadline", type=float, default=math.inf, help="start nothing after so many seconds"
    )
    commands.add_parser("sensitivity", parents=[images, small, folder], help="allocate by sensitivity")
    command = commands.add_parser(
        "search", parents=[images, small, folder], help="plan by the search of the package"
    )
    command.add_argument("--networks", default="", help="a part of the names of networks")
    command.add_argument("--budget", default="", choices=["", *BUDGETS])
    command.add_argument("--epochs", type=int, default=SEARCH_EPOCHS, help="of the original")
    commands.add_parser("analyze", parents=[results], help="print the tables")
    commands.add_parser("simulate", parents=[results], help="compare designs of searches by trials")
    command = commands.add_parser("plot", parents=[results], help="draw the picture")
    command.add_argument("--picture", type=Path, default=PICTURE)
    options = vars(parser.parse_args())
    functions: dict[str, Callable[..., None]] = {
        "prepare": prepare,
        "time": measure,
        "run": run,
        "originals": originals,
        "predict": predict,
        "sensitivity": sensitivity,
        "search": search,
        "analyze": analyze,
        "simulate": simulate,
        "plot": plot,
    }
    functions[options.pop("command")](**options)


if __name__ == "__main__":
    main()

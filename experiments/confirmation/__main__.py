"""The confirmation of `--method search`, which was chosen on other seeds and held-out training images.

    for name in tiny-imagenet-32 cifar10; do
        python -m experiments.trained prepare --archive $name.tar.xz --images images/$name.pt
    done
    nvidia-cuda-mps-control -d     # several trainings share the GPU
    python -m experiments.confirmation originals --images images --originals originals
    python -m experiments.confirmation plans --images images --originals originals
    python -m experiments.confirmation logits --images images --originals originals
    python -m experiments.confirmation train --images images --originals originals
    python -m experiments.confirmation analyze
    python -m experiments.confirmation plot

`originals` trains each network on each data set. `plans` lets uniform, the search and PEEL with the published
settings plan, once for each network, data set and budget, and two controls without a search. `logits`
computes those of the originals, which the processes of `train` would compute each for itself. `train` trains
the plans from scratch with seeds 10 to 19 (PEEL: 10 to 14), without and with the original as teacher; lines
have top-1 on the test images after the last epoch. Tiny-ImageNet-32 is tested by left-out training images;
`given_top1` is that of its given test images. `all` does these four for one network and data set after the
other.
Jobs that are in the results are skipped, so the same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from .plot import PICTURE, plot
from .runner import Options, run, run_all
from .tables import FOLDER, analyze
from .work import DATA, NETWORKS, SEEDS, print_sharpness


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.confirmation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("originals", "train the originals"),
        ("plans", "let the methods plan"),
        ("logits", "compute the logits of the originals for their students"),
        ("train", "train the plans"),
        ("all", "these four, for one network and data set after the other"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--images", type=Path, default=Path("images"), help="folder of decoded images")
        command.add_argument("--originals", type=Path, default=Path("originals"))
        command.add_argument("--results", type=Path, default=FOLDER, help="the folder of results")
        command.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
        command.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
        command.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS)
        command.add_argument(
            "--teachers", type=int, nargs="+", default=[0, 1], choices=[0, 1], help="without, with"
        )
        command.add_argument("--lanes", type=int, default=8, help="processes")
        command.add_argument("--count", type=int, help="use only so many images of each part, for a test")
        command.add_argument("--epochs", type=int, help="another number of epochs, for a test")
        command.add_argument("--batch-size", type=int, help="another batch size, for a test")
        command.add_argument("--eager", dest="compiles", action="store_false", help="compile nothing")
        command.add_argument(
            "--deadline",
            type=float,
            default=math.inf,
            help="start nothing that would end after so many seconds",
        )
    command = commands.add_parser("sharpness", help="compare the pixels of training and test images")
    command.add_argument("--images", type=Path, default=Path("images"), help="folder of decoded images")
    command = commands.add_parser("analyze", help="print the tables")
    command.add_argument("--folder", type=Path, default=FOLDER, help="the files of results")
    command = commands.add_parser("plot", help="draw the differences to uniform")
    command.add_argument("--folder", type=Path, default=FOLDER, help="the files of results")
    command.add_argument("--picture", type=Path, default=PICTURE)
    options = vars(parser.parse_args())
    command = options.pop("command")
    if command == "analyze":
        analyze(**options)
        return
    if command == "plot":
        plot(**options)
        return
    if command == "sharpness":
        print_sharpness(options["images"])
        return
    options["teachers"] = [bool(one) for one in options["teachers"]]
    if command == "all":
        run_all(Options(**options))
    else:
        run(command, Options(**options))


if __name__ == "__main__":
    main()

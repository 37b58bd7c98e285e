"""Do two commits give the same bits? Final weights and plans of seven runs on a CPU, straight and killed.

    python benchmarks/same_weights.py --before FOLDER/src [--kill]

Each run is a process with one thread, on 600 images of the embedded digits. `--kill`: the new code is also
stopped by SIGKILL at a random moment of each run, three times, and resumed. Settings of PEEL are given in the
form that each of the two commits knows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHORT = {"train": {"epochs": 2, "batch_size": 64}, "bench_seconds": 0, "checkpoint_seconds": 0.0}
PEEL = {**SHORT, "method": "peel", "backbone": {"epochs": 2}}
PRETRAINED = "original"

RUNS: dict[str, dict[str, Any]] = {
    "sensitivity from scratch": {**SHORT},
    "peel from scratch": {**PEEL},
    "peel, two rounds, gradient": {**PEEL, "peel": {"rounds": 2, "criterion": "gradient"}},
    "peel, in-place distillation": {**PEEL, "distill": "in-place"},
    "sensitivity, trained weights": {**SHORT, "weights": PRETRAINED},
    "taylor, trained weights": {**SHORT, "weights": PRETRAINED, "method": "taylor"},
    "peel, trained weights": {**PEEL, "weights": PRETRAINED},
}

CHILD = """
import hashlib, json, sys, torch
import peel
torch.set_num_threads(1)
settings = json.loads(sys.argv[1])
own = settings.pop("peel", {})
if "method" in settings and hasattr(peel, "Needs"):
    settings["methods"] = {settings["method"]: own} if own else {}
else:
    settings |= own
peel.prune("cifar_resnet20", "digits", threads=1, output=sys.argv[2], **settings)
"""


def start(source: Path, settings: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", CHILD, json.dumps(settings), str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def finish(
    source: Path, settings: dict[str, Any], folder: Path, kills: int = 0, seconds: float = 10.0
) -> None:
    for _ in range(kills):
        process = start(source, settings, folder)
        time.sleep(random.uniform(2.5, max(3.0, seconds)))
        process.kill()
        process.wait()
    if start(source, settings, folder).wait():
        raise SystemExit(f"{settings} failed in {source}")


def digest(folder: Path) -> dict[str, str]:
    """Network -> hash of its tensors; and of the widths of the plan."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted([*folder.glob("stages/*.safetensors"), folder / "slim.safetensors"]):
        if path.stem in ("original", "uniform", "slim", "backbone", "backbone-2"):
            tensors = load_file(path)
            parts = b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors))
            found[path.stem] = hashlib.sha256(parts).hexdigest()[:12]
    found["plan"] = json.loads((folder / "plan.json").read_text())["slim"]["widths"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="src of the commit to compare with")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    now = Path(__file__).parents[1] / "src"
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        original = {**SHORT, "stages": ["original"], "train": {"epochs": 6, "batch_size": 64}}
        finish(now, original, work / PRETRAINED)
        for number, (name, settings) in enumerate(RUNS.items()):
            settings = dict(settings)
            if "weights" in settings:
                settings["weights"] = str(work / PRETRAINED / "stages" / "original.safetensors")
            began = time.perf_counter()
            finish(now, settings, work / f"{number}-now")
            seconds, result = time.perf_counter() - began, digest(work / f"{number}-now")
            line = [name]
            if options.before:
                finish(options.before.resolve(), settings, work / f"{number}-before")
                before = digest(work / f"{number}-before")
                same = [key for key in before if before[key] == result.get(key)]
                line.append(f"as before: {len(same)} of {len(before)}")
                line += [f"{key} differs" for key in before if key not in same]
            if options.kill:
                finish(now, settings, work / f"{number}-killed", kills=3, seconds=seconds)
                line.append(
                    "killed: same" if digest(work / f"{number}-killed") == result else "KILLED: OTHER BITS"
                )
            print("; ".join(line), flush=True)


if __name__ == "__main__":
    main()

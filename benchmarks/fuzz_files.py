"""Random changes of the files that peel writes: each must be loaded, or refused in one or two lines.

    python benchmarks/fuzz_files.py                                  all formats, about 10 minutes on one core
    python benchmarks/fuzz_files.py --only TOML --inputs 1000        some inputs of one format
    python benchmarks/fuzz_files.py --only TOML --number 1234        one input again, with its traceback

Formats: model file, weights, run JSON, ONNX metadata, TOML, latency file. The inputs and what reads them are
in tests/helpers/fuzzing.py. A finding is another exception than a `PeelError`, a longer message, a warning
or any other text on stderr, more than 10 s of the processor (or 60 s in all), or memory that grows by a GiB.
Each input has its own seed. The log has one line for each format.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

import peel
from helpers.fuzzing import FORMATS, Format, is_loaded, seeded

RESULTS = Path("benchmarks/results/fuzz_files.jsonl")
SECONDS, WALL_SECONDS, MEMORY = 10, 60, 2**30


class TooLongError(BaseException):
    """The watchdog. Not an `Exception`, which a reader may catch."""


def ring(*_: object) -> None:
    raise TooLongError(f"more than {SECONDS} s")


def set_alarm(cpu_seconds: float, seconds: float) -> None:
    """Other programs may hold the processor: its time counts. Both 0: no alarm."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def stderr_size() -> Iterator[Any]:
    """Send the process's stderr to a file, also what C++ writes. Yields a function: its size so far."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.fstat(file.fileno()).st_size
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            sys.stderr.write(file.read(20_000).decode(errors="replace"))


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def try_input(kind: Format, name: str, seed: int, number: int, written: Any) -> tuple[str, str, float]:
    """What refused an input (empty: it was loaded), what is wrong (empty: nothing), and the CPU seconds."""
    before, memory, began = written(), peak_memory(), time.process_time()
    refused = wrong = ""
    set_alarm(SECONDS, WALL_SECONDS)
    try:
        refused = is_loaded(kind, seeded(name, seed, number))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        wrong = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        set_alarm(0, 0)
    sys.stderr.flush()
    if written() > before:
        wrong = wrong or "text on stderr"
    if peak_memory() - memory > MEMORY:
        wrong = wrong or "more than a GiB of memory"
    return refused, wrong, time.process_time() - began


def text_of(message: str) -> str:
    """A message without what differs from input to input."""
    text = re.sub(r"\S*/\S+", "FILE", message.split("\n")[0])
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'?|\"[^\"]*\"?", "'...'", text))[:80]


def fuzz(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """The line of the log for one format."""
    errors: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    loaded, slowest = 0, 0.0
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        kind = FORMATS[name](Path(folder))
        is_loaded(kind, seeded(name, seed, -1))  # what is imported late
        with stderr_size() as written, warnings.catch_warnings():
            warnings.simplefilter("always")
            for number in range(inputs):
                refused, wrong, seconds = try_input(kind, name, seed, number, written)
                slowest = max(slowest, seconds)
                if wrong:
                    findings.append({"number": number, "wrong": wrong.replace(folder, "")})
                    print(f"{name} {number}: {wrong}", flush=True)
                elif refused:
                    errors[text_of(refused)] += 1
                else:
                    loaded += 1
    return {
        "format": name,
        "inputs": inputs,
        "loaded": loaded,
        "refused": errors.total(),
        "findings": findings,
        "slowest_cpu_seconds": round(slowest, 2),
        "cpu_seconds": round(time.process_time() - began),
        "seed": seed,
        "common_errors": dict(errors.most_common(10)),
        "versions": {
            "peel": peel.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def repeat(name: str, seed: int, number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(is_loaded(FORMATS[name](Path(folder)), seeded(name, seed, number)) or "loaded")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="repeat this input")
    parser.add_argument("--output", type=Path, default=None, help=f"such as {RESULTS}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("peel").addHandler(logging.NullHandler())
    if given.number is not None:
        repeat(given.only[0], given.seed, given.number)
        return 0
    signal.signal(signal.SIGALRM, ring)
    signal.signal(signal.SIGPROF, ring)
    lines = []
    for name in given.only:
        line = fuzz(name, given.inputs, given.seed)
        print(json.dumps(line, indent=1, ensure_ascii=False), flush=True)
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        if given.output is not None:
            given.output.write_text("".join(lines))
    return 1 if any(json.loads(line)["findings"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())

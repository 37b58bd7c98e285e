"""How much longer `peel run` takes beside a second `peel run` on the same CPU: at most 2.5 times as long.

    python benchmarks/shared_cpu.py                                 the default command; minutes on two cores
    python benchmarks/shared_cpu.py --repeats 3 -- --train.epochs 4       options after -- go to `peel run`
    OMP_WAIT_POLICY=ACTIVE python benchmarks/shared_cpu.py -- --threads 2   what torch does by itself

A run alone and two at the same time take turns. The ratio counts on an otherwise idle machine: its load
is shown. Processor seconds per run show what waiting threads waste, on a busy machine too.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 2.5


def seconds_of(count: int, options: list[str]) -> tuple[float, float]:
    """Wall-clock seconds of `count` runs that start together, and processor seconds; means over them."""
    before = processor_seconds()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        processes = []
        for number in range(count):
            output = str(Path(folder) / str(number))
            fixed = ["--quiet", "--device", "cpu", "--bench-seconds", "0"]
            command = [sys.executable, "-m", "peel", "run", *fixed, *options]
            command += ["--seed", str(number), "--output", output]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        ended: dict[int, float] = {}
        while len(ended) < count:
            time.sleep(0.05)
            for number, process in enumerate(processes):
                if number not in ended and process.poll() is not None:
                    ended[number] = time.perf_counter() - began
        if any(process.returncode for process in processes):
            raise SystemExit("a run failed")
    return statistics.mean(ended.values()), (processor_seconds() - before) / count


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(given.repeats):
        for count, name in ((1, "alone"), (2, "beside a second one")):
            load = os.getloadavg()[0]
            wall, processor = seconds_of(count, given.options)
            seconds[count].append(wall)
            print(f"{name}: {wall:.1f} s, {processor:.1f} of a processor, load {load:.1f} before", flush=True)
    ratio = statistics.median(seconds[2]) / statistics.median(seconds[1])
    print(f"{os.cpu_count()} cores: {ratio:.2f} times as long beside a second run (at most {LIMIT})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

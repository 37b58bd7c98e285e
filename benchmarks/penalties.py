"""The penalties of a repaired layer, fitted together and one after the other, measured side by side.

    python benchmarks/penalties.py                        on a GPU if there is one
    python benchmarks/penalties.py --features 360 720 --device cpu

A repair fits each layer with seven penalties. One penalty is a Cholesky factor of features x features, and a
solve for the outputs, in float64. `BATCH_BYTES` of repair/regression.py says which are fitted together.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from peel.repair import regression
from peel.train.engine import find_device


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=int, nargs="+", default=[64, 180, 360, 720, 1152, 1440, 2304])
    parser.add_argument("--outputs", type=int, default=160)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = find_device(options.device)
    for features in options.features:
        problem = make_problem(features, options.outputs, device)
        one_by_one, together = {}, {device.type: 2**40}
        times: dict[str, list[float]] = {"one by one": [], "together": []}
        for _ in range(5):
            for name, limits in (("one by one", one_by_one), ("together", together)):
                times[name].append(time_choice(problem, limits))
        # The first of each prepares the device.
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        ratio = medians["one by one"] / medians["together"]
        print(f"{features} features on {device.type}: together {ratio:.2f} times as fast", flush=True)


def make_problem(features: int, outputs: int, device: torch.device) -> regression.Regression:
    """A layer with as many rows as a repair takes."""
    torch.manual_seed(0)
    rows = max(8192, 8 * features)
    x, y = (torch.randn(1, rows, size, device=device) for size in (features, outputs))
    problem = regression.Regression(torch.randn(1, outputs, features, device=device), rows)
    problem.add(x, y, 3 * rows // 4)
    return problem


def time_choice(problem: regression.Regression, limits: dict[str, int]) -> float:
    """Seconds to choose the penalty of a layer."""
    regression.BATCH_BYTES = limits
    began = time.perf_counter()
    float(problem._choose(intercept=True))  # waits for a GPU
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

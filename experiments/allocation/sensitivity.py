"""Allocations by sensitivity: `peel.measure_sensitivity` of an original, without training an allocation.

    python -m experiments.allocation originals --images images.pt --folder originals --seeds 0
    python -m experiments.allocation sensitivity --images images.pt --folder originals

One line for each network, budget and variant: the widths as they are, half of the way (in logarithms) from
uniform to them, and with the residual stream at its uniform width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import peel
from peel.data.augmentation import EVAL
from peel.utils.rng import derive_seed

from .allocations import BUDGETS, NETWORKS, Candidate, candidate, is_hidden, network, uniform
from .fit import cost_function, on_budget, shifted, widths_at
from .predict import load_original
from .results import SENSITIVE, read, write
from .train import Lane

#: Unlabeled training images, as in `peel run`.
IMAGES = 1024


def sensitivity(
    images: Path,
    folder: Path,
    results: Path = SENSITIVE,
    count: int | None = None,
    batch_size: int | None = None,
) -> None:
    """Measure what is missing in the results."""
    lane = Lane.open(images, count, batch_size)
    known = {(line["network"], line["budget"]) for line in read(results)}
    for name in NETWORKS:
        missing = [budget for budget in BUDGETS if (name, budget) not in known]
        if not missing:
            continue
        began, net, train = time.perf_counter(), network(name), lane.images.train
        original = load_original(folder, name, 0, lane.engine.device)
        rng = torch.Generator().manual_seed(derive_seed("sensitivity", 0))
        index = torch.randperm(train.size, generator=rng)[:IMAGES]
        batch = next(iter(train.batches(index, IMAGES, EVAL, lane.engine.device)))
        measured = peel.measure_sensitivity(original, net.graph, batch.inputs)
        for budget in missing:
            widths = measured.widths(budget, divisor=1, freeze=net.freeze)
            for one in variants(name, budget, widths):
                write(results, asdict(one) | {"seconds": round(time.perf_counter() - began, 2)})
                print(name, budget, one.allocation, one.widths, flush=True)


def variants(name: str, budget: str, widths: peel.Widths) -> Iterator[Candidate]:
    yield candidate(name, budget, "sensitivity", widths)
    base, frozen = uniform(name, budget).widths, network(name).freeze
    ties = {tie: (tie,) for tie in widths if tie not in frozen}
    logs = np.array([[math.log(widths[tie] / base[tie]) for tie in ties]])
    [half] = on_budget(name, budget, ties, logs / 2)
    yield candidate(name, budget, "sensitivity half", widths_at(name, budget, ties, half))
    limit = np.array([math.inf if is_hidden(tie) else 0.0 for tie in ties])
    [hidden] = shifted(logs, cost_function(name, budget, ties), -limit, limit)
    yield candidate(name, budget, "sensitivity hidden", widths_at(name, budget, ties, hidden))

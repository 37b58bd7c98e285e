"""How well a latency model predicts networks that it has not seen, and whether latency budgets are met.

    pip install "peel-pruning[deploy,vision]"
    python benchmarks/latency_model.py [NETWORK ...] [--backends eager onnxruntime] [--output FILE.json]
    python benchmarks/latency_model.py --device cuda --batch 256 --backends eager compile

For each network and backend: `--fit` networks of other widths are timed and the model is fitted to them;
`--unseen` networks with other random widths, timed among them, judge it. Then the uniform networks at 75, 50
and 35 % of the latency are timed. Run it on an idle machine: the last column says what `peel` noticed. The
output file gets all widths and times. With `--refit FILE`, an output file, the model is fitted again to the
times in that file, and only the uniform networks are timed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import peel
from peel import zoo
from peel.cost.latency import Accuracy
from peel.cost.widths import Widths
from peel.deploy.latency import FACTORS, LatencyTimer, design
from peel.deploy.latency_fit import fit_latency

NETWORKS = ["resnet18", "mobilenet_v2", "efficientnet_b0"]
BUDGETS = ["75%", "50%", "35%"]


def main() -> None:
    options = _options()
    print(
        "| network | backend | batch | original | median | 95th percentile | own estimate | budgets | notes |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    known = json.loads(options.refit.read_text()) if options.refit is not None else []
    cells = {(cell["network"], cell["backend"]): cell for cell in known}
    found = []
    for name in options.networks:
        for backend in options.backends:
            found.append(_validate(name, backend, options, cells.get((name, backend))))
            print(_line(found[-1]), flush=True)
            if options.output is not None:
                options.output.write_text(json.dumps(found, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--backends", nargs="+", default=["eager", "onnxruntime"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=None, help="side of the images in pixels")
    parser.add_argument("--fit", type=int, default=64, help="networks that the model is fitted to")
    parser.add_argument("--unseen", type=int, default=30, help="networks that it is judged on")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each network")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--refit", type=Path, default=None, help="an output file: use its times")
    return parser.parse_args()


def _validate(
    name: str, backend: str, options: argparse.Namespace, known: dict[str, Any] | None
) -> dict[str, Any]:
    torch.manual_seed(0)
    channels, height, width = zoo.find(name).input_size
    model = zoo.create(name).eval()
    example = torch.randn(1, channels, options.size or height, options.size or width)
    graph = peel.trace(model, example)
    timer = LatencyTimer(
        model,
        graph,
        backend=backend,
        batch=options.batch,
        threads=options.threads,
        device=options.device,
        seconds=options.seconds,
    )
    if known is not None:
        (fitted, times), (unseen, judged) = (zip(*known[part], strict=True) for part in ("fit", "unseen"))
        conditions = known["conditions"]
    else:
        fitted = design(graph, options.fit)
        unseen = design(graph, options.unseen + len(FACTORS), seed=1)[len(FACTORS) :]
        times, judged = _interleaved(timer, fitted, unseen)
        conditions = timer.conditions
    notes = list(timer.notes)
    latency = fit_latency(graph, fitted, times, conditions)
    graph = graph.with_latency(latency)
    budgets = [peel.uniform(graph, budget, resource="latency") for budget in BUDGETS]
    original, *used = timer([graph.widths, *budgets])
    accuracy = Accuracy.of((graph.latency(widths) * 1e9 for widths in unseen), judged)
    return {
        "network": name,
        "backend": backend,
        "conditions": latency.conditions,
        "original_ms": original / 1e6,
        "median": accuracy.median,
        "p95": accuracy.p95,
        "own_median": latency.accuracy.median,
        "own_p95": latency.accuracy.p95,
        "budgets": {budget: time / original for budget, time in zip(BUDGETS, used, strict=True)},
        "notes": list(dict.fromkeys([*notes, *timer.notes])),
        "fit": [[dict(widths), time] for widths, time in zip(fitted, times, strict=True)],
        "unseen": [[dict(widths), time] for widths, time in zip(unseen, judged, strict=True)],
    }


def _interleaved(
    timer: LatencyTimer, first: list[Widths], second: list[Widths]
) -> tuple[list[float], list[float]]:
    """The times of both, measured in a random order: the speed of the machine drifts."""
    networks = [*first, *second]
    order = torch.randperm(len(networks)).tolist()
    times = dict(zip(order, timer([networks[i] for i in order]), strict=True))
    ordered = [times[i] for i in range(len(networks))]
    return ordered[: len(first)], ordered[len(first) :]


def _line(found: dict[str, Any]) -> str:
    cells = [
        found["network"],
        found["backend"],
        str(found["conditions"]["batch"]),
        f"{found['original_ms']:.3g} ms",
        f"{found['median']:.1%}",
        f"{found['p95']:.1%}",
        f"{found['own_median']:.1%}, {found['own_p95']:.1%}",
        ", ".join(f"{budget}: {used:.1%}" for budget, used in found["budgets"].items()),
        " ".join(found["notes"]) or "idle",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

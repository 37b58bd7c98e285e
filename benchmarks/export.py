"""Slim every network of networks.toml, export it to ONNX, and compare ONNX Runtime with torch.

    python benchmarks/export.py                              all networks, about an hour on two cores
    python benchmarks/export.py --only resnet18 swin_t       some networks
    python benchmarks/export.py --formats onnx pt2           also torch.export
    python benchmarks/export.py --jobs 8                     eight networks at a time
    python benchmarks/export.py --render docs/deploy.md      write the table of the stored results

A network with random weights is slimmed to 50 % of its MACs with uniform widths (to its smallest reachable
cost where that is more), its batch norms take the statistics of random images, and `peel.export` writes it
with a free batch. It is *exported* when the file runs
at the batches 1 and 5 and agrees with torch: largest difference below 1e-4 of the largest output, same best
class. A network that fails is tried again with a fixed batch of 1, which the table says.

Each network is exported in its own process, with limits on time and memory. Results are appended to a JSON
lines file; the same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from processes import CNNS, HYBRIDS, all_names, input_size, read, run_all, run_check, write_between

RESULTS = Path("benchmarks/results/export.jsonl")
TIME_LIMIT_S = 600
FORMATS = ("onnx", "pt2")


def check_export(name: str, suffix: str) -> dict[str, Any]:
    """Slim and export one network."""
    import torch

    import peel
    from peel import zoo

    torch.manual_seed(0)
    size = input_size(name)
    model = zoo.create(name).eval()
    example = torch.randn(1, *size)
    graph = peel.trace(model, example)
    small = settle(peel.slim(model, half(graph), graph=graph), size).eval()
    result: dict[str, Any] = {
        "macs_left": round(small.peel_info["costs"]["macs"] / graph.macs(), 4),
        "input": list(size),
        "torch": torch.__version__.split("+")[0],
    }
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for batch in (None, 1):
            try:
                made = peel.export(small, Path(folder) / f"model.{suffix}", example, batch=batch)
            except peel.ExportError as error:
                result.setdefault("problem", str(error)[:300])
                continue
            result |= {
                "difference": made.difference,
                "bytes": sum(file.stat().st_size for file in made.files),
                "batch": batch,
            }
            break
    result["export_s"] = round(time.perf_counter() - began, 1)
    return {**result, "ok": "problem" not in result}


def settle(model: Any, size: tuple[int, int, int]) -> Any:
    """Give batch norms the statistics of random images: else random weights can let activations explode."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(8, *size))
    return model


def half(graph: Any) -> Any:
    """Uniform widths at 50 % of the MACs, or at the smallest cost where that is more."""
    import peel

    smallest = graph.macs(graph.steps) / graph.macs()
    return peel.uniform(graph, "50%") if smallest < 0.5 else dict(graph.steps)


def render(results: Path) -> str:
    """The summary and the table for the docs."""
    rows = {(row["tool"], row["name"]): row for row in read(results)}
    formats = [suffix for suffix in FORMATS if any(tool == suffix for tool, _ in rows)]
    lines = []
    for suffix in formats:
        for kind, families in (("CNNs", CNNS), ("hybrids and transformers", HYBRIDS)):
            found = [rows[suffix, n] for names in families.values() for n in names if (suffix, n) in rows]
            if found:
                worst = max((row.get("difference", 0.0) for row in found if row["ok"]), default=0.0)
                count = f"{sum(row['ok'] for row in found)} of {len(found)}"
                lines.append(f"- {kind}: {count} as .{suffix}; largest difference {worst:.1e}")
    lines += ["", "| network | format | not exported because | with a batch of 1 |", "|---" * 4 + "|"]
    failed = [row for row in rows.values() if not row["ok"]]
    for row in failed:
        fixed = "yes" if "difference" in row else "no"
        problem = row["problem"].replace("|", "/")
        lines.append(f"| {row['name']} | .{row['tool']} | {problem} | {fixed} |")
    if not failed:
        lines.append("| none | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["onnx"])
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="write the table into this file, between its markers"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        suffix, name = options.one
        run_check(partial(check_export, suffix=suffix), name)
    elif options.render:
        table = render(options.results)
        write_between(options.render, "export", table)
        print(table.partition("|")[0])
    else:
        limits = dict.fromkeys(options.formats, TIME_LIMIT_S)
        run_all(__file__, options.only or all_names(), limits, options.results, options.jobs)


if __name__ == "__main__":
    main()

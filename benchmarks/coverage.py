"""Trace, slim and check every network of networks.toml, and prune it with Torch-Pruning for comparison.

    python benchmarks/coverage.py                                all networks, about an hour on two cores
    python benchmarks/coverage.py --only resnet18 densenet121    some networks
    python benchmarks/coverage.py --tools peel torch-pruning     also Torch-Pruning (torch-pruning==1.6.1)
    python benchmarks/coverage.py --jobs 8                       eight networks at a time
    python benchmarks/coverage.py --render docs/coverage.md      write the table of the stored results

A network with random weights is *handled* by peel when it can be traced and all of these hold:

- At 50 % of its MACs with uniform widths (if reachable), at random widths, and 1.25 times as wide: it runs
  forward and backward in training mode, keeps its output shape, and has exactly the predicted parameters and
  MACs (as torch.utils.flop_counter counts them).
- The checks of `peel.verify`: at full width with inherited weights the outputs are the same; with half of the
  channels cut they are those of the full network with these channels zeroed.

Torch-Pruning handles it when its high-level call with a ratio of 0.3, without the classifier, returns a
network that runs, keeps its output shape, and has fewer MACs.

Each network is checked in its own process, with limits on time and memory. Results are appended to a JSON
lines file; the same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from processes import CNNS, HYBRIDS, all_names, input_size, read, run_all, run_check, write_between

RESULTS = Path("benchmarks/results/coverage.jsonl")
TIME_LIMIT_S = {"peel": 420, "torch-pruning": 180}


def logits(output: Any) -> Any:
    output = getattr(output, "logits", output)
    return output[0] if isinstance(output, list | tuple) else output


def train_step(model: Any, size: tuple[int, int, int]) -> None:
    """One forward and backward pass in training mode."""
    import torch

    output = logits(model.train()(torch.randn(2, *size)))
    output.float().pow(2).mean().backward()


def find_problem(model: Any, graph: Any, widths: Any, size: tuple[int, int, int], shape: Any) -> str | None:
    """Build the network, count, train one step. The problem, or None."""
    import torch

    import peel
    from peel.cost.count import count_macs

    small = peel.slim(model, widths, graph=graph)
    macs = count_macs(small.eval(), (torch.randn(1, *size),), {})
    params = sum(parameter.numel() for parameter in small.parameters())
    predicted = graph.macs(widths), graph.params(widths)
    if (macs, params) != predicted:
        return f"counted {macs} MACs and {params} params, predicted {predicted[0]} and {predicted[1]}"
    if tuple(logits(small(torch.randn(2, *size))).shape) != shape:
        return "the output shape changed"
    train_step(small, size)
    return None


def check_peel(name: str) -> dict[str, Any]:
    """Check one network with peel."""
    import torch

    import peel
    from peel import zoo

    torch.manual_seed(0)
    model = zoo.create(name)
    size = input_size(name)
    example = torch.randn(1, *size)
    began = time.perf_counter()
    graph = peel.trace(model, example)
    result: dict[str, Any] = {
        "trace_s": round(time.perf_counter() - began, 2),
        "free_ties": len(graph.widths),
        "exact_ties": len(graph.widths) - len(graph.inexact),
        "free_fraction": round(graph.free_fraction, 4),
        "free_macs": round(1 - graph.macs(smallest(graph)) / graph.macs(), 4),
        "input": list(size),
        "torch": torch.__version__.split("+")[0],
        "reasons": sorted({reason.split(" in ")[0] for reason in graph.fixed.values()}),
    }
    problems = []
    with torch.no_grad():
        shape = tuple(logits(model.eval()(torch.randn(2, *size))).shape)
    generator = torch.Generator().manual_seed(1)
    candidates = {"random widths": random_widths(graph, generator), "1.25 times as wide": scaled(graph, 1.25)}
    reachable = result["free_macs"] > 0.5
    if reachable:
        candidates["50 % of the MACs"] = peel.uniform(graph, "50%")
        result["half"] = round(graph.macs(candidates["50 % of the MACs"]) / graph.macs(), 5)
    for label, widths in candidates.items():
        wrong = find_problem(model, graph, widths, size, shape)
        if wrong:
            problems.append(f"{label}: {wrong}")
    verification = peel.verify(model, example, graph=graph, seconds=200)
    problems += [f"{check.name}: {check.detail}" for check in verification.checks if check.passed is False]
    result["difference"] = (
        verification.checks[1].detail.split("difference ")[-1] if verification.checks[1].passed else None
    )
    result["ok"] = not problems
    result["problem"] = "; ".join(problems)
    return result


def smallest(graph: Any) -> dict[str, int]:
    return dict(graph.steps)


def scaled(graph: Any, factor: float) -> dict[str, int]:
    return {
        name: max(1, round(width * factor / graph.steps[name])) * graph.steps[name]
        for name, width in graph.widths.items()
    }


def random_widths(graph: Any, generator: Any) -> dict[str, int]:
    import torch

    factors = 0.2 + 0.8 * torch.rand(len(graph.widths), generator=generator)
    return {
        name: max(1, round(width * float(factor) / graph.steps[name])) * graph.steps[name]
        for (name, width), factor in zip(graph.widths.items(), factors, strict=True)
    }


def check_torch_pruning(name: str) -> dict[str, Any]:
    """Check one network with Torch-Pruning's high-level call, as in its documentation."""
    import torch
    import torch_pruning as tp

    from peel import zoo
    from peel.cost.count import count_macs

    torch.manual_seed(0)
    model = zoo.create(name).eval()
    size = input_size(name)
    example = torch.randn(1, *size)
    with torch.no_grad():
        shape = tuple(logits(model(example)).shape)
    before = count_macs(model, (example,), {})
    # Its documentation ignores the last linear layer. Here the same holds for convolutional classifiers.
    ignored = [
        m
        for m in model.modules()
        if shape[-1] in (getattr(m, "out_features", 0), getattr(m, "out_channels", 0))
    ]
    began = time.perf_counter()
    pruner = tp.pruner.MagnitudePruner(
        model,
        example,
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.3,
        ignored_layers=ignored,
    )
    pruner.step()
    seconds = time.perf_counter() - began
    with torch.no_grad():
        after_shape = tuple(logits(model(example)).shape)
    after = count_macs(model, (example,), {})
    problem = ""
    if after_shape != shape:
        problem = f"the output shape changed from {shape} to {after_shape}"
    elif after >= before:
        problem = "nothing was pruned"
    return {
        "ok": not problem,
        "problem": problem,
        "seconds": round(seconds, 2),
        "macs_left": round(after / before, 4),
    }


CHECKS = {"peel": check_peel, "torch-pruning": check_torch_pruning}


def render(results: Path) -> str:
    """The table for the docs."""
    rows = {(row["tool"], row["name"]): row for row in read(results)}
    lines = [
        "| family | network | peel | free channels | free MACs | ties, exact | cut = zeroed | trace "
        "| Torch-Pruning 1.6.1 |",
        "|---" * 9 + "|",
    ]
    for family, names in {**CNNS, **HYBRIDS}.items():
        for name in names:
            own, peer = rows.get(("peel", name)), rows.get(("torch-pruning", name))
            if own is None:
                continue
            cells = [family, name.replace("timm:", ""), "yes" if own["ok"] else f"no: {own['problem'][:80]}"]
            if "free_fraction" in own:
                cells += [
                    f"{own['free_fraction']:.0%}",
                    f"{own['free_macs']:.0%}",
                    f"{own['free_ties']}, {own['exact_ties']}",
                    own["difference"] or "-",
                    f"{own['trace_s']:.1f} s",
                ]
            else:
                cells += ["-"] * 5
            cells.append(
                "-"
                if peer is None
                else "yes"
                if peer["ok"]
                else f"no: {peer['problem'][:90]}".replace("|", "/")
            )
            lines.append("| " + " | ".join(cells) + " |")

    def handled(tool: str, families: dict[str, list[str]]) -> str:
        tried = [
            rows[tool, name]["ok"] for names in families.values() for name in names if (tool, name) in rows
        ]
        return f"{sum(tried)} of {len(tried)}"

    totals = "\n".join(
        f"- {kind}: peel {handled('peel', families)}, Torch-Pruning {handled('torch-pruning', families)}"
        for kind, families in (("CNNs", CNNS), ("hybrids and transformers", HYBRIDS))
    )
    return f"Handled:\n\n{totals}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--tools", nargs="+", choices=list(CHECKS), default=["peel"])
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="write the table into this file, between its markers"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        tool, name = options.one
        run_check(CHECKS[tool], name)
    elif options.render:
        table = render(options.results)
        write_between(options.render, "coverage", table)
        print(table.partition("|")[0])
    else:
        limits = {tool: TIME_LIMIT_S[tool] for tool in options.tools}
        run_all(__file__, options.only or all_names(), limits, options.results, options.jobs)


if __name__ == "__main__":
    main()

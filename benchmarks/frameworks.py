"""Trace, slim, train and save networks of real packages, as their users build them, with random weights.

    python benchmarks/frameworks.py                       every network that has no result yet
    python benchmarks/frameworks.py --only timm/resnet18  some networks
    python benchmarks/frameworks.py --render              what was found, in words

A network is *ok* when all of these hold:

- `peel.trace` finds free ties, and `peel.verify` passes.
- `peel.slim` to 60 % of every width gives a network that runs on the user's input, twice, with outputs of the
  same shapes, also after the original has run with gradients.
- It does a training step. Where that fails, the original must fail, too (detectors need targets).
- `peel.save` and `peel.load` into a newly built original give the same outputs.
- Deployment tools convert it, and compute the same outputs where they can run here.

A package that cannot be imported or a network that does not run by itself is *absent*, with the reason. Each
network runs in its own process, and its result is one line of JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from framework_networks import DISTRIBUTIONS, NETWORKS, TOOLS
from processes import read, run_all, run_check

RESULTS = Path("benchmarks/results/frameworks.jsonl")
TIME_LIMIT_S = 300
VERIFY_S = 40


def call(model: Any, example: Any) -> list[Any]:
    """The tensors that a model returns."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    if isinstance(example, dict):
        output = model(**example)
    else:
        output = model(*example) if isinstance(example, tuple) else model(example)
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def train_step(model: Any, example: Any) -> None:
    """Two samples, which batch norm needs."""
    import torch
    from torch.utils._pytree import tree_map

    pair = tree_map(lambda x: torch.cat([x, x]) if isinstance(x, torch.Tensor) and x.ndim else x, example)
    outputs = call(model.train(), pair)
    torch.stack([x.float().pow(2).mean() for x in outputs if x.requires_grad]).sum().backward()


def error_of(step: Any, *args: Any) -> str:
    try:
        step(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return ""


def check(name: str) -> dict[str, Any]:
    """Try one network."""
    import torch

    import peel

    package = name.partition("/")[0]
    result: dict[str, Any] = {
        "version": importlib.metadata.version(DISTRIBUTIONS.get(package, package)),
        "torch": torch.__version__.split("+")[0],
        "peel": peel.__version__,
        "ok": False,
    }
    torch.manual_seed(0)
    build = NETWORKS[name]
    try:
        model, example = build()
        shapes = [tuple(x.shape) for x in call(model.eval(), example)]
    except Exception as error:
        return {**result, "absent": True, "problem": f"{type(error).__name__}: {str(error)[:200]}"}
    graph = peel.trace(model, example)
    result |= {"free_ties": len(graph.widths), "fixed_ties": len(graph.fixed), "modules": list(graph.modules)}
    small = peel.slim(model, smaller(graph), graph=graph, weights="inherit").eval()
    result["macs_left"] = round(graph.macs(smaller(graph)) / graph.macs(), 3)
    problems = []
    with torch.no_grad():
        found = [[tuple(x.shape) for x in call(small, example)] for _ in range(2)]
    if found != [shapes, shapes]:
        problems.append(f"the output shapes changed to {found}")
    result["verify"] = {
        c.name: c.passed for c in peel.verify(model, example, graph=graph, seconds=VERIFY_S).checks
    }
    if not graph.widths or False in result["verify"].values():
        problems.append(f"verify: {result['verify']}")
    problems += saved_problems(build, small, example)
    if package in TOOLS:
        converted = error_of(TOOLS[package], small, example)
        if converted.startswith("ModuleNotFoundError"):
            return {**result, "absent": True, "problem": converted}
        problems += [converted] if converted else []
    result["training"] = error_of(train_step, small, example) or "ok"
    if result["training"] != "ok" and not error_of(train_step, model, example):
        problems.append(f"training: {result['training']}")
    return {**result, "ok": not problems, "problem": "; ".join(problems)}


def smaller(graph: Any) -> dict[str, int]:
    return {
        name: max(1, int(units * 0.6)) * graph.steps[name]
        for name, units in zip(graph.widths, graph.units(), strict=True)
    }


def saved_problems(build: Any, small: Any, example: Any) -> list[str]:
    import torch

    import peel

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        peel.save(small, Path(folder) / "slim")
        loaded = peel.load(Path(folder) / "slim", model=build()[0]).eval()
        pairs = zip(call(small, example), call(loaded, example), strict=True)
        is_same = all(torch.allclose(a.float(), b.float(), atol=1e-5, equal_nan=True) for a, b in pairs)
    return [] if is_same else ["the loaded network has other outputs"]


def render(results: Path) -> str:
    rows = read(results)
    tried = [row for row in rows if not row.get("absent")]
    packages = Counter(row["name"].partition("/")[0] for row in tried)
    ok = sum(row["ok"] for row in tried)
    lines = [f"{ok} of {len(tried)} networks of {len(packages)} packages are ok."]
    lines += [f"- {row['name']}: {row['problem'][:150]}" for row in tried if not row["ok"]]
    lines += [f"- {row['name']} (absent): {row['problem'][:150]}" for row in rows if row.get("absent")]
    return "\n".join(lines)


def in_turn(names: Iterable[str]) -> list[str]:
    """One network of each package, then a second: an interrupted run has seen most packages."""
    seen = Counter[str]()
    turns = {}
    for name in names:
        turns[name] = seen[name.partition("/")[0]]
        seen[name.partition("/")[0]] += 1
    return sorted(turns, key=turns.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_check(check, options.one[1])
    elif options.render:
        print(render(options.results))
    else:
        names = options.only or in_turn(NETWORKS)
        run_all(__file__, names, {"peel": TIME_LIMIT_S}, options.results, options.jobs)


if __name__ == "__main__":
    main()

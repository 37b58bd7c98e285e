"""Every network of a long list, traced, slimmed and checked; Torch-Pruning beside it in the same run.

    python benchmarks/coverage.py                                  all of them, about an hour on two cores
    python benchmarks/coverage.py --only resnet18 densenet121      some of them
    python benchmarks/coverage.py --tools peel torch-pruning       with Torch-Pruning beside (pip install torch-pruning==1.6.1)
    python benchmarks/coverage.py --jobs 8                         eight networks at a time
    python benchmarks/coverage.py --render docs/coverage.md        the table of the results kept so far

A network is *handled* when all of this holds, with weights drawn at random:
traced; at 50 % of its MACs by uniform widths, at random widths and 1.25 times as wide it runs forward and backward in training mode,
keeps its output shape, and has exactly the predicted MACs (as torch.utils.flop_counter counts them) and parameters; at full width with
inherited weights it gives the same outputs; and with half of its channels cut it gives the outputs of the full network with those
channels zeroed (relative difference below 1e-5; over the ties for which cutting is exactly zeroing).

For Torch-Pruning: its high-level call with a ratio of 0.3, the classifier ignored as its documentation shows, must return a network that
runs, gives outputs of the same shape, and has fewer MACs.

Each network is checked in a process of its own, with limits on time and memory. Results are kept in a JSON lines file, so a run that is
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

CNNS: dict[str, list[str]] = {
    "torchvision": [
        "alexnet", "vgg11", "vgg16_bn", "squeezenet1_0", "squeezenet1_1", "googlenet", "inception_v3", "resnet18", "resnet34", "resnet50",
        "wide_resnet50_2", "resnext50_32x4d", "densenet121", "densenet161", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large",
        "mnasnet0_5", "mnasnet1_0", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "efficientnet_b0", "efficientnet_b1", "efficientnet_v2_s",
        "regnet_x_400mf", "regnet_y_400mf", "regnet_y_1_6gf", "convnext_tiny",
    ],
    "cifar": ["cifar_resnet20", "cifar_resnet56", "cifar_resnet18", "cifar_mobilenet_v2", "cifar_vgg16_bn"],
    "ResNet": ["timm:resnet26", "resnet50d", "seresnet50", "ecaresnet50d", "ecaresnet26t", "gcresnet33ts", "resnetaa50", "resnetv2_50", "resnetrs50"],
    "ResNeXt": ["timm:resnext50_32x4d", "seresnext26d_32x4d", "bat_resnext26ts"],
    "Res2Net": ["res2net50_26w_4s", "res2next50"],
    "ResNeSt": ["resnest14d", "resnest50d_1s4x24d"],
    "SK": ["skresnet18", "skresnext50_32x4d"],
    "RegNet": ["regnetx_004", "regnety_004", "regnetz_b16"],
    "DenseNet": ["timm:densenet121", "densenetblur121d"],
    "DLA": ["dla34", "dla46x_c", "dla60_res2net"],
    "DPN": ["dpn68", "dpn68b"],
    "HRNet": ["hrnet_w18_small", "hrnet_w18_small_v2"],
    "Inception": ["timm:inception_v3", "inception_v4", "inception_resnet_v2"],
    "Xception": ["xception41", "legacy_xception", "xception41p"],
    "VGG": ["timm:vgg11_bn", "vgg16"],
    "MobileNet": ["mobilenetv2_100", "mobilenetv3_large_100", "mobilenetv3_small_075", "mobilenetv4_conv_small", "mobilenetv4_conv_medium"],
    "MNASNet": ["mnasnet_small", "semnasnet_100"],
    "FBNet": ["fbnetc_100", "fbnetv3_b"],
    "EfficientNet": [
        "timm:efficientnet_b0", "efficientnet_es", "efficientnetv2_rw_t", "tf_efficientnetv2_b0", "tf_efficientnet_lite0", "gc_efficientnetv2_rw_t",
    ],
    "MixNet": ["mixnet_s"],
    "HardCoRe": ["hardcorenas_a"],
    "SPNASNet": ["spnasnet_100"],
    "GhostNet": ["ghostnet_100", "ghostnetv2_100", "ghostnetv3_100"],
    "RexNet": ["rexnet_100", "rexnetr_200"],
    "LCNet": ["lcnet_050", "lcnet_100", "tinynet_a"],
    "HGNet": ["hgnet_tiny", "hgnetv2_b0"],
    "VoVNet": ["ese_vovnet19b_dw", "ese_vovnet39b"],
    "SelecSLS": ["selecsls42b", "selecsls60"],
    "CSP": ["cspresnet50", "cspresnext50", "cs3darknet_m", "cspdarknet53"],
    "DarkNet": ["darknet53", "darknetaa53"],
    "RepVGG": ["repvgg_a0", "repvgg_b1g4"],
    "MobileOne": ["mobileone_s0", "mobileone_s1"],
    "RepViT": ["repvit_m0_9", "repvit_m1"],
    "ConvNeXt": ["convnext_atto", "convnext_atto_ols", "convnextv2_atto"],
    "ConvMixer": ["convmixer_768_32", "convmixer_1024_20_ks9_p14"],
    "NFNet": ["dm_nfnet_f0", "nf_resnet50", "nf_regnet_b1", "eca_nfnet_l0"],
    "GerNet": ["gernet_s"],
    "StarNet": ["starnet_s1", "starnet_s4"],
    "InceptionNeXt": ["inception_next_atto", "inception_next_tiny"],
    "PoolFormer": ["poolformer_s12", "poolformerv2_s12"],
    "FasterNet": ["fasternet_t0"],
}  # fmt: skip

HYBRIDS: list[str] = [
    "swin_t", "vit_b_16", "maxvit_t", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "maxvit_pico_rw_256",
    "coatnet_pico_rw_224", "mobilevit_xxs", "mobilevitv2_050", "efficientformer_l1", "efficientformerv2_s0", "efficientvit_b0", "efficientvit_m0",
    "levit_128s", "pvt_v2_b0", "tiny_vit_5m_224", "edgenext_xx_small", "fastvit_t8", "mobilenetv4_hybrid_medium", "pit_ti_224", "xcit_nano_12_p16_224",
    "twins_pcpvt_small", "cait_xxs24_224", "volo_d1_224", "mixer_s32_224", "convit_tiny", "nextvit_small", "visformer_tiny", "botnet26t_256",
]  # fmt: skip

RESULTS = Path("benchmarks/results/coverage.jsonl")
TIME_LIMIT_S = {"peel": 420, "torch-pruning": 180}
MEMORY_LIMIT_GIB = 20
#: Inputs are made smaller where the network allows it: the channels do not depend on it.
SMALL = 128


def input_size(name: str) -> tuple[int, int, int]:
    from peel import zoo

    channels, height, width = zoo.find(name).input_size
    free = name not in HYBRIDS and not name.startswith(("inception_resnet", "inception_v", "timm:inception")) and name not in ("alexnet", "bat_resnext26ts")
    return (channels, min(height, SMALL), min(width, SMALL)) if free else (channels, height, width)


def logits(output: Any) -> Any:
    output = getattr(output, "logits", output)
    return output[0] if isinstance(output, list | tuple) else output


def train_step(model: Any, size: tuple[int, int, int]) -> list[str]:
    """One forward and backward pass in training mode; names of weights that got no gradient."""
    import torch

    output = logits(model.train()(torch.randn(2, *size)))
    output.float().pow(2).mean().backward()
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]


def built_as_predicted(model: Any, graph: Any, widths: Any, size: tuple[int, int, int], shape: Any) -> str | None:
    """Build, train one step, count. What is wrong, or None."""
    import torch

    import peel
    from peel.graph.count import count_macs

    small = peel.slim(model, widths, graph=graph)
    macs = count_macs(small.eval(), (torch.randn(1, *size),), {})
    params = sum(parameter.numel() for parameter in small.parameters())
    if (macs, params) != (graph.macs(widths), graph.params(widths)):
        return f"counted {macs} MACs and {params} params, predicted {graph.macs(widths)} and {graph.params(widths)}"
    if tuple(logits(small(torch.randn(2, *size))).shape) != shape:
        return "the output shape changed"
    train_step(small, size)
    return None


def check_peel(name: str) -> dict[str, Any]:
    """All that must hold, for one network."""
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
        "free_share": round(graph.free_share, 4),
        "free_macs": round(1 - graph.macs(smallest(graph)) / graph.macs(), 4),
        "input": list(size),
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
        wrong = built_as_predicted(model, graph, widths, size, shape)
        if wrong:
            problems.append(f"{label}: {wrong}")
    verification = peel.verify(model, example, graph=graph, seconds=200)
    problems += [f"{check.name}: {check.detail}" for check in verification.checks if check.passed is False]
    result["difference"] = verification.checks[1].detail.split("difference ")[-1] if verification.checks[1].passed else None
    result["ok"] = not problems
    result["problem"] = "; ".join(problems)
    return result


def smallest(graph: Any) -> dict[str, int]:
    return dict(graph.steps)


def scaled(graph: Any, factor: float) -> dict[str, int]:
    return {name: max(1, round(width * factor / graph.steps[name])) * graph.steps[name] for name, width in graph.widths.items()}


def random_widths(graph: Any, generator: Any) -> dict[str, int]:
    import torch

    factors = 0.2 + 0.8 * torch.rand(len(graph.widths), generator=generator)
    return {
        name: max(1, round(width * float(factor) / graph.steps[name])) * graph.steps[name]
        for (name, width), factor in zip(graph.widths.items(), factors, strict=True)
    }


def check_torch_pruning(name: str) -> dict[str, Any]:
    """The peer's high-level call, as its documentation shows it."""
    import torch
    import torch_pruning as tp

    from peel import zoo
    from peel.graph.count import count_macs

    torch.manual_seed(0)
    model = zoo.create(name).eval()
    size = input_size(name)
    example = torch.randn(1, *size)
    with torch.no_grad():
        shape = tuple(logits(model(example)).shape)
    before = count_macs(model, (example,), {})
    ignored = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == shape[-1]]
    began = time.perf_counter()
    pruner = tp.pruner.MagnitudePruner(
        model, example, importance=tp.importance.MagnitudeImportance(p=2), pruning_ratio=0.3, ignored_layers=ignored
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
    return {"ok": not problem, "problem": problem, "seconds": round(seconds, 2), "macs_left": round(after / before, 4)}


CHECKS = {"peel": check_peel, "torch-pruning": check_torch_pruning}


def run_one(tool: str, name: str) -> None:
    """In a process of its own: print the result as one line of JSON."""
    warnings.simplefilter("ignore")
    limit = MEMORY_LIMIT_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        result = CHECKS[tool](name)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        result = {"ok": False, "problem": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        result["where"] = f"{Path(where.filename).name}:{where.lineno}"
    print("RESULT " + json.dumps(result))


def run_all(names: list[str], tools: list[str], results: Path, jobs: int) -> None:
    done = {(row["tool"], row["name"]) for row in read(results)}
    results.parent.mkdir(parents=True, exist_ok=True)
    pending = [(tool, name) for tool in tools for name in names if (tool, name) not in done]
    with ThreadPoolExecutor(jobs) as pool:
        rows = [pool.submit(run_process, tool, name) for tool, name in pending]
        for i, row in enumerate((future.result() for future in as_completed(rows)), start=1):
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            verdict = "ok" if row["ok"] else f"NOT OK: {row['problem'][:200]} {row.get('where', '')}"
            print(f"[{i}/{len(pending)}] {row['tool']:14}{row['name']:32}{row['total_s']:7.1f} s  {verdict}", flush=True)


def run_process(tool: str, name: str) -> dict[str, Any]:
    """One check in a process of its own, within its limits."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--one", tool, name]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S[tool])
        line = next((line for line in output.stdout.splitlines() if line.startswith("RESULT ")), None)
        result = json.loads(line[7:]) if line else {"ok": False, "problem": f"the process ended with {output.returncode}"}
    except subprocess.TimeoutExpired:
        result = {"ok": False, "problem": f"no result after {TIME_LIMIT_S[tool]} s"}
    return {"tool": tool, "name": name, "total_s": round(time.perf_counter() - began, 1), **result}


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def render(results: Path) -> str:
    """The table of the docs."""
    rows = {(row["tool"], row["name"]): row for row in read(results)}
    lines = ["| family | network | peel | free channels | free MACs | ties, exact | cut = zeroed | trace | Torch-Pruning 1.6.1 |", "|---" * 9 + "|"]
    counts = {"peel": [0, 0], "torch-pruning": [0, 0]}
    for family, names in {**CNNS, "hybrids and transformers": HYBRIDS}.items():
        for name in names:
            own, peer = rows.get(("peel", name)), rows.get(("torch-pruning", name))
            if own is None:
                continue
            for tool, row in (("peel", own), ("torch-pruning", peer)):
                if row is not None:
                    counts[tool][0] += row["ok"]
                    counts[tool][1] += 1
            cells = [family, name.replace("timm:", ""), "yes" if own["ok"] else f"no: {own['problem'][:80]}"]
            if "free_share" in own:
                cells += [
                    f"{own['free_share']:.0%}",
                    f"{own['free_macs']:.0%}",
                    f"{own['free_ties']}, {own['exact_ties']}",
                    own["difference"] or "-",
                    f"{own['trace_s']:.1f} s",
                ]
            else:
                cells += ["-"] * 5
            cells.append("-" if peer is None else "yes" if peer["ok"] else f"no: {peer['problem'][:90]}".replace("|", "/"))
            lines.append("| " + " | ".join(cells) + " |")
    total = "; ".join(f"{tool}: {ok} of {tried}" for tool, (ok, tried) in counts.items() if tried)
    return f"Handled: {total}.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--tools", nargs="+", choices=list(CHECKS), default=["peel"])
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--render", type=Path, metavar="FILE", help="put the table between the markers of this file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(*options.one)
    elif options.render:
        table = render(options.results)
        before, _, rest = options.render.read_text().partition("<!-- coverage -->\n")
        after = rest.partition("<!-- /coverage -->")[2]
        options.render.write_text(f"{before}<!-- coverage -->\n{table}<!-- /coverage -->{after}")
        print(table.splitlines()[0])
    else:
        names = options.only or [name for family in CNNS.values() for name in family] + HYBRIDS
        run_all(names, options.tools, options.results, options.jobs)


if __name__ == "__main__":
    main()

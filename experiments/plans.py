"""The networks of the paper at every budget of its tables, with equal shares; nothing is trained.

python experiments/plans.py --render docs/plans.md
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

import peel
from peel import zoo
from peel.cost.budget import format_count
from peel.steps.reallocation import Growth, grow_by_shares

#: Network -> budgets of the paper's tables (multiply-adds).
BUDGETS = {
    "resnet18": ["1.33G", "1.04G"],
    "resnet50": ["3.0G", "2.2G", "1.8G", "1.1G"],
    "mobilenet_v2": ["300M", "211M", "87M", "59M"],
    "mobilenet_v3_small": ["49M"],
    "efficientnet_b0": ["346M"],
}


def table(name: str) -> list[str]:
    model = zoo.create(name)
    freeze = zoo.FROZEN.get(model.peel_source["zoo"], ())
    graph = peel.trace(model, torch.zeros(1, 3, 224, 224))
    lines = [f"## {name}", "", f"{graph.macs():,} MACs, {graph.params():,} parameters at full width.", ""]
    if freeze:
        lines += [f"Frozen: `{', '.join(freeze)}`.", ""]
    for budget in BUDGETS[name]:
        backbone = peel.backbone(graph, budget, freeze=freeze)
        growth = Growth(graph, backbone, freeze=frozenset(freeze))
        plan = grow_by_shares(growth, dict.fromkeys(graph.groups, 1.0), budget)
        uniform = peel.uniform(graph, budget, freeze=freeze)
        distances = [abs(plan.widths[tie] - ideal) / ideal for tie, ideal in plan.ideal_widths.items()]
        groups = [abs(plan.rounded_factors[group] / factor - 1) for group, factor in plan.factors.items()]
        lines += [
            f"**{budget}**: backbone {graph.macs(backbone):,} MACs; plan {graph.macs(plan.widths):,} MACs, "
            f"{graph.params(plan.widths):,} parameters; uniform {graph.macs(uniform):,} MACs, "
            f"{graph.params(uniform):,} parameters.",
            "",
            "| group | factor -> rounded | MACs: backbone, plan, uniform "
            "| widths of the plan: ideal -> rounded (original), in the order of `graph.groups` |",
            "|---|---|---|---|",
        ]
        costs = [graph.macs_by_group(widths) for widths in (backbone, plan.widths, uniform)]
        for group, ties in graph.groups.items():
            widths = ", ".join(
                f"{plan.ideal_widths[tie]:.1f} -> {plan.widths[tie]} ({graph.widths[tie]})" for tie in ties
            )
            spent = ", ".join(format_count(cost[group]) for cost in costs)
            factor = f"{plan.factors[group]:.3f} -> {plan.rounded_factors[group]:.3f}"
            lines.append(f"| {group} | {factor} | {spent} | {widths} |")
        above = [tie for tie in graph.widths if plan.widths[tie] > graph.widths[tie]]
        lines += [
            "",
            f"{len(above)} of {len(graph.widths)} widths are above the original. Distance of widths from the "
            f"ideal: mean {statistics.mean(distances):.1%}, largest {max(distances):.1%}; of groups: largest "
            f"{max(groups):.1%}. Unspent: {plan.unspent / (plan.cost + plan.unspent):.2%} of the budget.",
            *([plan.rounding_note] if plan.rounding_note else []),
            "",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--render", type=Path, required=True, help="write the tables into this file, between its markers"
    )
    options = parser.parse_args()
    lines = [line for name in BUDGETS for line in table(name)]
    before, _, rest = options.render.read_text().partition("<!-- plans -->\n")
    _, _, after = rest.partition("<!-- /plans -->")
    options.render.write_text(before + "<!-- plans -->\n" + "\n".join(lines) + "<!-- /plans -->" + after)


if __name__ == "__main__":
    main()

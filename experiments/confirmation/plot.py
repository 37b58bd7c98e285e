"""The picture of the confirmation: what each plan gains over uniform, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..allocation.results import read
from .tables import LEAST_SEEDS, Row, scores, welch

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "confirmation.png"

#: Method -> its label, color and place inside a row.
METHODS = {
    "search": ("search", "tab:blue", -0.3),
    "peel": ("PEEL, published settings", "tab:orange", -0.1),
    "profile": ("control: fixed profile, divided", "tab:gray", 0.1),
    "divided": ("control: uniform groups, divided", "tab:green", 0.3),
}

#: Field -> the label of its axis, and what it is multiplied by.
PANELS = {"top1": ("top-1 minus uniform, points", 100.0), "loss": ("test loss minus uniform", 1.0)}

NAMES = {"cifar_resnet18": "ResNet-18", "cifar_mobilenet_v2": "MobileNetV2", "cifar_vgg16_bn": "VGG-16"}
DATA_NAMES = {"tiny-imagenet-32": "Tiny-ImageNet-32", "cifar10": "CIFAR-10"}


def plot(folder: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in read(folder / "train.jsonl") if "error" not in line]
    found = {tuple(line[name] for name in ("data", "network", "budget", "teacher")) for line in lines}
    found = {row for row in found if len(scores(lines, row, "uniform")) >= LEAST_SEEDS}
    places = {name: place for place, name in enumerate([*NAMES, *DATA_NAMES])}
    rows = sorted(found, key=lambda row: (places[row[1]], row[2], places[row[0]], row[3]))
    figure, panels = pyplot.subplots(1, 2, sharey=True, figsize=(9, 1.2 + 0.36 * len(rows)))
    for axis, (field, (label, scale)) in zip(panels, PANELS.items(), strict=True):
        axis.axvline(0, color="black", linewidth=0.8)
        for place in range(0, len(rows), 2):
            axis.axhspan(place - 0.5, place + 0.5, color="0.95", zorder=-1)
        for place, row in enumerate(rows):
            draw_row(
                axis, place, {name: scores(lines, row, name, field) for name in ("uniform", *METHODS)}, scale
            )
        axis.set_xlabel(label)
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(rows)), [name_of(row) for row in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    handles = [
        pyplot.Line2D([], [], color=color, marker="o", markersize=4, label=text)
        for text, color, _ in METHODS.values()
    ]
    figure.legend(handles=handles, loc="upper center", ncols=len(METHODS), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / figure.get_figheight()))
    figure.savefig(picture, dpi=100)
    print(picture)


def draw_row(axis: Any, place: int, values: dict[str, list[float]], scale: float) -> None:
    """The difference of each method to uniform, with its 95 % interval."""
    uniform = values["uniform"]
    for name, (_, color, offset) in METHODS.items():
        if min(len(values[name]), len(uniform)) >= LEAST_SEEDS:
            difference, half = welch(values[name], uniform)
            axis.errorbar(
                scale * difference, place + offset, xerr=scale * half, color=color, marker="o", markersize=4
            )


def name_of(row: Row) -> str:
    data, network, budget, teacher = row
    taught = "teacher" if teacher else "no teacher"
    return f"{NAMES[network]}, {budget.replace('%', ' %')}, {DATA_NAMES[data]}, {taught}"

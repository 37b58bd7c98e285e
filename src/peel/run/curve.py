"""How much of a trained network can be cut without training: its accuracy at a list of budgets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from torch import Tensor, nn

from ..cost.rounding import Divisor
from ..data.augmentation import EVAL
from ..data.datasets import Data, Split, balanced_order
from ..errors import ConfigError, DataError
from ..graph import trace
from ..repair.curve import BUDGETS, CurvePoint, accuracy_curve
from ..train.engine import Engine, eval_batch_size
from ..train.history import standard_error
from ..train.objective import get_logits
from .config import Config, Numbers
from .original import why_it_fails
from .trained import load_trained_and_data

#: Called with a text, the number of networks that were judged and their total.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Curve:
    """Top-1 accuracies of a trained network and of networks cut from it."""

    model: str
    data: str
    images: int
    """Training images that calibrate; their labels are not used."""
    test_images: int
    original: float
    macs: int
    params: int
    points: tuple[CurvePoint, ...]
    notes: tuple[str, ...] = ()
    """What a user should know about the data."""

    @property
    def standard_error(self) -> float:
        """The largest of all accuracies."""
        cut = [(p.cut, p.recalibrated, p.repaired, p.repaired_by_sensitivity) for p in self.points]
        accuracies = [self.original, *(accuracy for point in cut for accuracy in point)]
        return max(standard_error(accuracy, self.test_images) for accuracy in accuracies)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "standard_error": self.standard_error}

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(CurvePoint.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(point) for point in self.points)
        return text.getvalue()


@dataclass(frozen=True)
class CurveConfig:
    """The settings of a curve."""

    weights: str
    """What the model was trained to: a file, a run folder with the trained original, or pretrained."""
    data: str
    """digits, cifar10, cifar100, fashion-mnist, or a folder of images."""
    budgets: Annotated[tuple[float | str, ...], Parameter(consume_multiple=True)] = BUDGETS
    """Fractions of the MACs, such as 0.5 or 50%."""
    images: int = 1000
    """Training images that calibrate. Their labels are not used."""
    test_images: int = 2000
    """Test images that judge."""
    divisor: Divisor = "auto"
    """Widths are multiples of this; auto: what kernels like."""
    image_size: int | None = None
    """Side of the images in pixels."""
    mean: Numbers | None = None
    """Mean of the pixels (0 to 1). Default: what the weights have, else of the data."""
    std: Numbers | None = None
    """Standard deviation of the pixels, likewise."""
    data_root: str | None = None
    """Where torchvision stores the data sets it downloads."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    seed: int = 0
    """Seed of the choice of images."""

    def __post_init__(self) -> None:
        self.fractions()
        for name in ("images", "test_images"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")

    def fractions(self) -> tuple[float, ...]:
        """The budgets as numbers between 0 and 1."""
        found = tuple(map(_fraction, self.budgets))
        wrong = [given for given, value in zip(self.budgets, found, strict=True) if not 0 < value < 1]
        if wrong or not found:
            given = wrong[0] if wrong else "none"
            raise ConfigError(
                f"budgets are fractions of the MACs between 0 and 1, such as 0.5 or 50%, not {given}."
            )
        return found


def _fraction(budget: float | str) -> float:
    """A number, or a percentage as text; nan for anything else."""
    try:
        return float(budget[:-1]) / 100 if isinstance(budget, str) and budget.endswith("%") else float(budget)
    except ValueError:
        return math.nan


def curve(model: str, config: CurveConfig, progress: Progress | None = None) -> Curve:
    """Load a trained network, cut it at each budget, repair it and judge it on test images."""
    report = progress or (lambda text, done, total: None)
    budgets, total = config.fractions(), len(config.budgets) + 2
    report("loading", 0, total)
    names = ("image_size", "mean", "std", "data_root")
    settings = Config(**{name: getattr(config, name) for name in names})
    network, loaded = load_trained_and_data(model, config.data, settings, config.weights)
    device = _device(config.device)
    network = network.to(device).eval()
    calibration = _images(loaded.train, config.images, config.seed, device)
    judge = _judge(loaded, config.test_images, config.seed, device)
    report("tracing", 1, total)
    graph = trace(network, calibration[:1])
    original = judge(network)
    if reason := why_it_fails(network, loaded, Engine(device), config.mean is not None):
        raise DataError(
            f"the network is right for only {original:.1%} of the test images of {loaded.name}. {reason}"
        )
    points: list[CurvePoint] = []
    notes = loaded.notes_for_trained()
    report(f"{budgets[0]:.0%} of the MACs", 2, total)
    for point in accuracy_curve(
        network,
        graph,
        calibration,
        judge,
        budgets=budgets,
        divisor=config.divisor,
        on_note=notes.append,
    ):
        points.append(point)
        if len(points) < len(budgets):
            report(f"{budgets[len(points)]:.0%} of the MACs", 2 + len(points), total)
    return Curve(
        model=model,
        data=loaded.name,
        images=len(calibration),
        test_images=min(config.test_images, loaded.test.size),
        original=original,
        macs=graph.macs(),
        params=graph.params(),
        points=tuple(points),
        notes=tuple(dict.fromkeys(notes)),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _images(split: Split, count: int, seed: int, device: torch.device) -> Tensor:
    """Training images of all classes, not augmented."""
    order = balanced_order(split, seed)[:count]
    batches = split.batches(order, eval_batch_size(split), EVAL, device)
    return torch.cat([batch.inputs.contiguous() for batch in batches])


def _judge(data: Data, count: int, seed: int, device: torch.device) -> Callable[[nn.Module], float]:
    """A function that gives the top-1 accuracy on some test images."""
    order = balanced_order(data.test, seed, in_proportion=True)[:count]
    size = eval_batch_size(data.test)

    @torch.inference_mode()
    def judge(network: nn.Module) -> float:
        hits = 0
        for images, labels, _ in data.test.batches(order, size, EVAL, device):
            hits += int((get_logits(network.eval()(images)).argmax(1) == labels).sum())
        return hits / len(order)

    return judge

"""`peel eval`: accuracy of a run, a saved model or an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..cost.budget import format_count
from ..utils.tables import make_table
from ..utils.terminal import make_console, print_json, print_notes, show_status

if TYPE_CHECKING:
    from rich.console import Console

    from ..data.datasets import Data
    from ..deploy.networks import Network
    from ..train.history import Metrics

Numbers = Annotated[tuple[float, ...], Parameter(consume_multiple=True, negative_iterable=())]


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """What is evaluated on which images."""

    data: str
    """digits, cifar10, cifar100, fashion-mnist, or a folder of images."""
    weights: str | None = None
    """Of a model by name or reference: a file, a run folder (its trained original), pretrained
    (torchvision's or timm's), or random (as its code builds it)."""
    image_size: int | None = None
    """Side of the images of such a model. Default: their own, and 224 for folders of large images."""
    mean: Numbers | None = None
    """Mean of the pixels (0 to 1). Default: as the network was trained, else of the data."""
    std: Numbers | None = None
    """Standard deviation of the pixels, likewise."""
    data_root: str | None = None
    """Where torchvision stores what it downloads."""
    skip_corrupt: bool = False
    """Leave out images that cannot be read instead of stopping."""
    model: str | None = None
    """What builds the original of your own saved model: path/to/file.py:callable."""


def evaluate(
    network: str,
    /,
    *,
    settings: Annotated[EvalSettings, Parameter(name="*")],
    device: str = "auto",
    workers: int | None = None,
    json: bool = False,
) -> int:
    """Accuracy of a network on the test images of the data, fed as it was trained.

    Parameters
    ----------
    network
        A run folder (its slim network), a saved model (slim.safetensors), a file .onnx, or the name or
        reference of a model.
    device
        auto, cpu, cuda, cuda:1, ... ONNX files run on the CPU.
    workers
        Data-loader workers for image folders.
    json
        Print JSON instead of a table.
    """
    from ..deploy.evaluation import evaluate_network

    notes = make_console(stderr=True)
    with show_status(notes, f"loading {network} and {settings.data}") as status:
        found, images = _load(network, settings)
        status.update(f"evaluating {network} on {images.test.size} images")
        values = _as_dict(found, images, evaluate_network(found, images, device=device, workers=workers))
    print_notes(images.notes_for_trained(), notes)
    if json:
        print_json(values)
    else:
        draw(values, make_console())
    return 0


def _load(reference: str, settings: EvalSettings) -> tuple[Network, Data]:
    """The network, and the images as it is fed."""
    from ..deploy.evaluation import load_data_for
    from ..deploy.networks import load_network, make_network
    from ..run.config import Config
    from ..run.trained import check_weights, load_trained_and_data

    check_weights(reference, settings.weights, image_size=settings.image_size)
    if settings.weights is None:
        found = load_network(reference, model=settings.model)
        images = load_data_for(
            found,
            settings.data,
            root=settings.data_root,
            skip_corrupt=settings.skip_corrupt,
            mean=settings.mean,
            std=settings.std,
        )
        return found, images
    names = ("image_size", "mean", "std", "data_root", "skip_corrupt")
    config = Config(**{name: getattr(settings, name) for name in names})
    model, images = load_trained_and_data(reference, settings.data, config, settings.weights)
    return make_network(reference, model, images.shape), images


def _as_dict(network: Network, data: Data, metrics: Metrics) -> dict[str, Any]:
    from ..train.history import standard_error

    values = {"network": network.name, "data": data.name, "images": data.test.size, **metrics.to_dict()}
    values |= {"macs": network.macs, "params": network.params}
    values |= {"mean": data.test.mean, "std": data.test.std}
    if metrics.top1 is not None:
        values["standard_error"] = standard_error(metrics.top1, data.test.size)
    return values


def draw(values: Mapping[str, Any], console: Console) -> None:
    table = make_table("network", "top-1", "top-5", "loss", "images", "MACs", "params")
    accuracies = (f"{values[name]:.2%}" if name in values else "-" for name in ("top1", "top5"))
    counts = ("-" if count is None else format_count(count) for count in (values["macs"], values["params"]))
    table.add_row(values["network"], *accuracies, f"{values['loss']:.4f}", f"{values['images']:,}", *counts)
    console.print(table)
    if "standard_error" in values:
        error = f"standard error of top-1 about {100 * values['standard_error']:.1f} points"
        console.print(f"{values['images']:,} test images: {error}", markup=False)

"""`peel eval`: accuracy of a run, a saved model or an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..cost.budget import format_count
from ..utils.tables import make_table
from .terminal import make_console, print_json, print_notes, show_status

if TYPE_CHECKING:
    from rich.console import Console

    from ..data.datasets import Data
    from ..deploy.networks import Network
    from ..train.history import Metrics

Numbers = Annotated[tuple[float, ...], Parameter(consume_multiple=True, negative_iterable=())]


def evaluate(
    network: str,
    /,
    *,
    data: str,
    data_root: str | None = None,
    model: str | None = None,
    mean: Numbers = (),
    std: Numbers = (),
    device: str = "auto",
    workers: int | None = None,
    skip_corrupt: bool = False,
    json: bool = False,
) -> int:
    """Accuracy of a network on the test images of the data, fed as it was trained.

    Parameters
    ----------
    network
        A run folder (its slim network), a saved model (slim.safetensors), or a file .onnx.
    data
        digits, cifar10, cifar100, fashion-mnist, or a folder of images.
    data_root
        Where torchvision stores what it downloads.
    model
        What builds the original of your own saved model: path/to/file.py:callable.
    mean
        Mean of the pixels (0 to 1). Default: as the network was trained, else of the data.
    std
        Standard deviation of the pixels, likewise.
    device
        auto, cpu, cuda, cuda:1, ... ONNX files run on the CPU.
    workers
        Data-loader workers for image folders.
    skip_corrupt
        Leave out images that cannot be read instead of stopping.
    json
        Print JSON instead of a table.
    """
    from ..deploy.evaluation import evaluate_network, load_data_for
    from ..deploy.networks import load_network

    notes = make_console(stderr=True)
    with show_status(notes, f"loading {network}") as status:
        found = load_network(network, model=model)
        status.update(f"loading {data}")
        images = load_data_for(
            found, data, root=data_root, skip_corrupt=skip_corrupt, mean=mean or None, std=std or None
        )
        status.update(f"evaluating {network} on {images.test.size} images")
        values = _as_dict(found, images, evaluate_network(found, images, device=device, workers=workers))
    told = images.notes_for_trained()
    if not (mean and std) and "mean" not in found.input:
        told.append(f"{network} has no mean and std: those of {data} are used.")
    print_notes(told, notes)
    if json:
        print_json(values)
    else:
        draw(values, make_console())
    return 0


def _as_dict(network: Network, data: Data, metrics: Metrics) -> dict[str, Any]:
    from ..train.history import standard_error

    values = {"network": network.name, "data": data.name, "images": data.test.size, **metrics.to_dict()}
    values |= {"macs": network.macs, "params": network.params}
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

"""`peel eval`: accuracy of a run, a saved model or an ONNX file."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ..cost.budget import format_count
from .terminal import make_console, make_table, print_json, show_status

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
        A run folder (its slim network), a saved model (slim.json), or a file .onnx.
    data
        digits, cifar10, cifar100, fashion-mnist, or a folder of images.
    data_root
        Where torchvision stores the data sets it downloads.
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
    from ..deploy.evaluation import evaluate_network, load_data_for, metrics_dict
    from ..deploy.networks import load_network

    notes = make_console(stderr=True)
    with show_status(notes, f"loading {network}") as status:
        found = load_network(network, model=model)
        status.update(f"loading {data}")
        images = load_data_for(
            found, data, root=data_root, skip_corrupt=skip_corrupt, mean=mean or None, std=std or None
        )
        status.update(f"evaluating {network} on {images.test.size} images")
        metrics = evaluate_network(found, images, device=device, workers=workers)
    if not (mean and std) and "mean" not in found.input:
        notes.print(
            f"note: {network} does not say how it was fed. Images have the mean and std of {data}; "
            "others: --mean, --std.",
            markup=False,
        )
    if json:
        print_json(dict(metrics_dict(found, images, metrics)))
        return 0
    table = make_table("network", "top-1", "top-5", "loss", "images", "MACs", "params")
    table.add_row(
        found.name,
        f"{metrics.top1:.2%}",
        "-" if metrics.top5 is None else f"{metrics.top5:.2%}",
        f"{metrics.loss:.4f}",
        f"{images.test.size:,}",
        *("-" if count is None else format_count(count) for count in (found.macs, found.params)),
    )
    make_console().print(table)
    return 0

"""`peel export`: a network as a file that runs elsewhere, checked by running it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..cost.budget import format_bytes
from ..errors import ConfigError, ExportError
from ..utils.files import check_target
from ..utils.tables import make_table
from ..utils.terminal import make_console, show_status
from .inspect import parse_shape

if TYPE_CHECKING:
    from rich.console import Console

    from ..deploy.export import Exported
    from ..deploy.networks import Network
    from ..deploy.quantization import Quantized


@dataclass(frozen=True, kw_only=True)
class Int8Options:
    """Settings of --int8."""

    data: str | None = None
    """Data for --int8: training images calibrate, test images give the accuracy."""
    data_root: str | None = None
    """Where torchvision stores the data sets it downloads."""
    images: int = 256
    """Images that calibrate --int8."""
    calibration: str = "minmax"
    """How --int8 chooses ranges: minmax, entropy, percentile."""
    seconds: float = 3.0
    """How long --int8 times each network."""


def export(
    network: str,
    /,
    *,
    to: Path,
    weights: str | None = None,
    num_classes: int | None = None,
    model: str | None = None,
    input: str | None = None,
    batch: int | None = None,
    int8: bool = False,
    options: Annotated[Int8Options | None, Parameter(name="*")] = None,
    verbose: bool = False,
) -> int:
    """A network as a file that runs elsewhere. It is checked by running it before it gets its name.

    Parameters
    ----------
    network
        A run folder (its slim network), a saved model (slim.safetensors), or a model by name or reference.
    to
        The file: .onnx, .pt2 (torch.export) or .safetensors.
    weights
        Of a model by name or reference: a file, a run folder (its trained original), pretrained
        (torchvision's or timm's), or random (as its code builds it).
    num_classes
        Number of classes, where the model takes that argument. Default: what the weights say.
    model
        What builds your own model before slimming: path/to/file.py:callable. Default: what the run used.
    input
        Shape of one input: channels,height,width. Default: what the network was trained or made for.
    batch
        Fix the batch. Default: any batch.
    int8
        Quantize to 8 bits for ONNX Runtime; needs --data.
    verbose
        After an error of the exporter, print all of it.
    """
    from ..deploy.export import check_path

    chosen = options or Int8Options()
    if int8 and chosen.data is None:
        raise ConfigError("--int8 needs images: name them with --data.")
    if int8 and batch is not None:
        raise ConfigError("--int8 takes any batch: leave --batch out.")
    check_path(to)
    check_target(to, "--to")
    shape = parse_shape(input)
    with show_status(make_console(stderr=True), f"loading {network}") as status:
        found = _load(network, weights, num_classes, model, shape)
        status.update(f"exporting {network}")
        if int8:
            quantized = _export_int8(found, to, chosen, status.update)
        else:
            made = _export(found, to, batch, verbose)
    if int8:
        draw_int8(quantized, make_console())
    else:
        draw(made, make_console())
    return 0


def _load(
    reference: str,
    weights: str | None,
    num_classes: int | None,
    model: str | None,
    shape: tuple[int, ...] | None,
) -> Network:
    from ..deploy.networks import known_shape, load_network, make_network, shape_of
    from ..run.trained import check_weights, load_trained
    from ..surgery.info import info_of

    check_weights(reference, weights, num_classes=num_classes)
    if weights is None:
        return load_network(reference, model=model, shape=shape)
    found = load_trained(reference, weights, num_classes)
    return make_network(reference, found, shape or shape_of(info_of(found)) or known_shape(reference))


def _export_int8(
    network: Network, to: Path, chosen: Int8Options, progress: Callable[[str], None]
) -> Quantized:
    from ..deploy.evaluation import load_data_for
    from ..deploy.quantization import export_int8

    return export_int8(
        network,
        to,
        load_data_for(network, chosen.data or "", root=chosen.data_root),
        images=chosen.images,
        calibration=chosen.calibration,
        seconds=chosen.seconds,
        progress=progress,
    )


def _export(network: Network, to: Path, batch: int | None, verbose: bool) -> Exported:
    import torch

    from ..deploy.export import export as run_export
    from ..deploy.onnx_model import OnnxModel

    if isinstance(network.model, OnnxModel):
        raise ExportError(f"{network.name} is an ONNX file already; --int8 can quantize it.")
    example = torch.zeros(1, *network.shape)
    try:
        return run_export(network.model, to, example, batch=batch)
    except ExportError as error:
        if verbose and error.__cause__ is not None:
            print(error.__cause__, file=sys.stderr)
        raise


def export_slim(folder: Path, to: Path, console: Console) -> None:
    """Export the slim network of a run folder, and say so."""
    from ..deploy.networks import load_network

    with show_status(make_console(stderr=True), f"exporting {to}"):
        made = _export(load_network(str(folder)), to, None, verbose=False)
    draw(made, console)


def draw(made: Exported, console: Console) -> None:
    sizes = ", ".join(f"{file} ({format_bytes(file.stat().st_size)})" for file in made.files)
    console.print(f"exported {sizes}", markup=False, soft_wrap=True)
    batches = " and ".join(map(str, made.batches))
    text = f"checked at batch {batches} against torch: largest relative difference {made.difference:.1e}"
    console.print(f"{text}, same classes", markup=False)


def draw_int8(made: Quantized, console: Console) -> None:
    table = make_table("", "top-1", "loss", "file", "ms per image", "p10 to p90")
    rows = (("float32", made.before, made.bytes_before), ("int8", made.after, made.bytes_after))
    for name, metrics, size in rows:
        time = made.seconds[name]
        table.add_row(
            name,
            f"{metrics.top1:.2%}",
            f"{metrics.loss:.4f}",
            format_bytes(size),
            f"{time.median * 1e3:.3g}",
            f"{time.p10 * 1e3:.3g} to {time.p90 * 1e3:.3g}",
        )
    console.print(table)
    speed = made.speedup
    console.print(
        f"int8 is {speed.median:.2f} times as fast (95 %: {speed.low:.2f} to {speed.high:.2f}): "
        f"{speed.verdict}; one image, one thread. Calibrated on {made.images} images.",
        markup=False,
    )
    console.print(f"exported {made.path} ({format_bytes(made.bytes_after)})", markup=False, soft_wrap=True)

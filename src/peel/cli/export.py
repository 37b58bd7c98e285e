"""`peel export`: a network as a file that runs elsewhere, checked by running it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..cost.budget import format_bytes
from ..errors import ConfigError, ExportError
from .terminal import make_console, make_table, show_status

if TYPE_CHECKING:
    from ..deploy.networks import Network


def export(
    network: str,
    /,
    *,
    to: Path,
    model: str | None = None,
    batch: int | None = None,
    int8: bool = False,
    data: str | None = None,
    data_root: str | None = None,
    images: int = 256,
    calibration: str = "minmax",
    verbose: bool = False,
) -> int:
    """A network as a file that runs elsewhere. It is checked by running it before it gets its name.

    Parameters
    ----------
    network
        A run folder (its slim network), or a saved model (slim.json).
    to
        The file: .onnx, .pt2 (torch.export), .safetensors with .json, or .py with both.
    model
        What builds your own model before slimming: path/to/file.py:callable. Default: what the run used.
    batch
        Fix the batch. Default: any batch.
    int8
        Quantize to 8 bits for ONNX Runtime; needs --data.
    data
        Data for --int8: training images calibrate, test images give the accuracy.
    data_root
        Where torchvision stores the data sets it downloads.
    images
        Images that calibrate --int8.
    calibration
        How --int8 chooses ranges: minmax, entropy, percentile.
    verbose
        After an error of the exporter, print all of it.
    """
    from ..deploy.export import export as run_export
    from ..deploy.networks import load_network
    from ..deploy.onnx_model import OnnxModel

    if int8 and data is None:
        raise ConfigError("--int8 needs images: name them with --data.")
    if int8 and batch is not None:
        raise ConfigError("--int8 takes any batch: leave --batch out.")
    with show_status(make_console(stderr=True), f"loading {network}") as status:
        found = load_network(network, model=model)
        if int8:
            assert data is not None
            return _export_int8(found, to, data, data_root, images, calibration, status)
        if isinstance(found.model, OnnxModel):
            raise ExportError(f"{network} is an ONNX file already; --int8 can quantize it.")
        status.update(f"exporting {network}")
        try:
            made = run_export(found.model, to, batch=batch, build=found.build)
        except ExportError as error:
            if verbose and error.__cause__ is not None:
                print(error.__cause__, file=sys.stderr)
            raise
    sizes = ", ".join(f"{file} ({format_bytes(file.stat().st_size)})" for file in made.files)
    batches = " and ".join(map(str, made.batches))
    console = make_console()
    console.print(f"exported {sizes}", markup=False, soft_wrap=True)
    text = f"checked at batch {batches} against torch: largest relative difference {made.difference:.1e}"
    console.print(f"{text}, same classes", markup=False)
    return 0


def _export_int8(
    network: Network, to: Path, data: str, root: str | None, images: int, calibration: str, status: object
) -> int:
    from ..deploy.evaluation import load_data_for
    from ..deploy.quantization import export_int8

    progress = status.update  # type: ignore[attr-defined]
    loaded = load_data_for(network, data, root=root)
    made = export_int8(network, to, loaded, images=images, calibration=calibration, progress=progress)
    console = make_console()
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
    return 0

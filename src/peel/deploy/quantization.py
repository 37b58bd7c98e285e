"""int8 networks by ONNX Runtime's static quantization, with what they cost in accuracy and gain in speed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..data.augmentation import EVAL
from ..data.datasets import Data, balanced_order
from ..errors import ExportError
from ..graph.capture import untouched
from ..train.history import Metrics
from ..utils.text import first_line
from .evaluation import evaluate_network
from .export import Exported, export, folder_beside, publish
from .networks import Network
from .onnx_model import OnnxModel, require
from .timing import Speedup, Timing, compare, measure

#: How the range of an activation is chosen from the calibration images.
CALIBRATIONS = ("minmax", "entropy", "percentile")
#: Images in a batch of the calibration.
BATCH = 16


@dataclass(frozen=True)
class Quantized:
    """An int8 network beside the same network in float32."""

    path: Path
    images: int
    """Training images that it was calibrated on."""
    before: Metrics
    after: Metrics
    bytes_before: int
    bytes_after: int
    seconds: dict[str, Timing]
    """Of one image: `float32` and `int8`, interleaved, on one thread."""
    speedup: Speedup


def export_int8(
    network: Network,
    path: str | Path,
    data: Data,
    *,
    images: int = 256,
    calibration: str = "minmax",
    seconds: float = 3.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Quantized:
    """Write an int8 ONNX file: 8-bit weights per channel, 8-bit activations, calibrated on training images.

    The float32 network is exported and checked first. The file gets its name after it has run on all test
    images; accuracy, size and speed of both come back.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ExportError(f"int8 networks are written as .onnx, not as {path.name}.")
    if calibration not in CALIBRATIONS:
        raise ExportError(f"calibration is one of {', '.join(CALIBRATIONS)}, not {calibration!r}.")
    if images < 1:
        raise ExportError(f"int8 needs at least one calibration image, not {images}.")
    images = min(images, data.train.size)
    with folder_beside(path) as folder:
        full, work = folder / "float32.onnx", folder / path.name
        progress(f"exporting {network.name}")
        _export_float(network, full)
        progress(f"calibrating on {images} images")
        _quantize(full, work, data, images, calibration)
        before, after = (replace(network, model=OnnxModel(file, threads=1)) for file in (full, work))
        progress(f"evaluating float32 and int8 on {data.test.size} images")
        scores = evaluate_network(before, data, device="cpu"), evaluate_network(after, data, device="cpu")
        progress("timing float32 and int8")
        image = torch.randn(1, *network.shape)
        calls = {"float32": partial(before.model, image), "int8": partial(after.model, image)}
        times = measure(calls, seconds=seconds)
        sizes = full.stat().st_size, work.stat().st_size
        full.unlink()
        publish(folder, path)
    return Quantized(path, images, *scores, *sizes, times, compare(times["float32"], times["int8"]))


def _export_float(network: Network, path: Path) -> Exported | None:
    if isinstance(network.model, OnnxModel):
        path.write_bytes(network.model.path.read_bytes())
        return None
    return export(network.model, path, torch.zeros(1, *network.shape))


def _quantize(full: Path, path: Path, data: Data, images: int, calibration: str) -> None:
    quantization, onnx = require("onnxruntime.quantization"), require("onnx")
    methods = quantization.CalibrationMethod
    method = {"minmax": methods.MinMax, "entropy": methods.Entropy, "percentile": methods.Percentile}
    try:
        with untouched():
            quantization.quantize_static(
                str(full),
                str(path),
                _reader(full, data, images),
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=method[calibration],
            )
            made, source = onnx.load(str(path)), onnx.load(str(full), load_external_data=False)
            values = {item.key: item.value for item in source.metadata_props}
            onnx.helper.set_model_props(made, {**values, "precision": '"int8"'})
            onnx.save(made, str(path))
    except Exception as error:
        raise ExportError(
            f"ONNX Runtime cannot quantize it: {type(error).__name__}: {first_line(error)}"
        ) from error


def _reader(full: Path, data: Data, images: int) -> Any:
    """Calibration images of all classes, without augmentation, as ONNX Runtime takes them."""
    order = balanced_order(data.train, seed=0)[:images]
    name = OnnxModel(full, threads=1).input_names[0]

    def feeds() -> Iterator[dict[str, Any]]:
        for batch in data.train.batches(order, BATCH, EVAL, torch.device("cpu")):
            yield {name: batch.inputs.contiguous().numpy()}

    class Reader(require("onnxruntime.quantization").CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = feeds()

        def get_next(self) -> dict[str, Any] | None:
            return next(self.feeds, None)

    return Reader()

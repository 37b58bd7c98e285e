"""Accuracy of a network that was saved, fed as it was trained."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..data.datasets import Data, load_data
from ..errors import ConfigError, DataError
from ..train.engine import Engine, make_engine
from ..train.history import Metrics
from ..train.loop import evaluate
from ..train.objective import get_logits
from ..utils.process_state import preserve_process_state
from .networks import Network
from .onnx_model import OnnxModel


def load_data_for(
    network: Network,
    name: str,
    *,
    root: str | Path | None = None,
    skip_corrupt: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Data:
    """The data, with images as the network was trained on them. `mean` and `std` are for networks without."""
    if len(network.shape) != 3:
        raise DataError(f"{network.name} takes inputs of shape {network.shape}, not images.")
    channels, height, width = network.shape
    resize = network.input.get("resize")
    data = load_data(
        name,
        image_size=height if height == width else None,
        channels=channels,
        root=root,
        skip_corrupt=skip_corrupt,
        **({} if resize is None else {"crop": (min(height, width), int(resize))}),
    )
    if data.shape != network.shape:
        raise DataError(f"{network.name} takes images of shape {network.shape}, {name} has {data.shape}.")
    check_classes(network, data)
    own = (None if mean else network.input.get("mean"), None if std else network.input.get("std"))
    return data.normalized(*own, "of the network").normalized(mean, std)


def check_classes(network: Network, data: Data) -> None:
    """Refuse data with other classes than the network knows."""
    with torch.inference_mode():
        # Two images: an ONNX file with a fixed batch is refused when it is evaluated.
        batch = network.model.input_shape[0] if isinstance(network.model, OnnxModel) else 1
        images = torch.zeros(batch if isinstance(batch, int) else 1, *network.shape)
        logits = get_logits(network.model(images))
    if logits.ndim != 2 or logits.shape[1] != len(data.classes):
        raise DataError(
            f"{network.name} returns {tuple(logits.shape[1:])} logits for an image, but {data.name} has "
            f"{len(data.classes)} classes. Give data with the classes that it was trained on."
        )
    classes = tuple(network.input.get("classes", data.classes))
    if classes != data.classes and sorted(classes) == sorted(data.classes):
        raise DataError(f"{network.name} has the classes in another order: {', '.join(classes[:5])}, ...")


def evaluate_network(
    network: Network, data: Data, *, device: str = "auto", workers: int | None = None
) -> Metrics:
    """Loss, top-1 and top-5 over the test images. ONNX files run on the CPU."""
    with preserve_process_state():
        if isinstance(network.model, OnnxModel):
            if device not in ("auto", "cpu"):
                raise ConfigError(f"ONNX files run on the CPU here, not on {device!r}.")
            engine = Engine(torch.device("cpu"), workers=workers or 0)
            fixed = network.model.input_shape[0]
            if isinstance(fixed, int) and data.test.size % fixed:
                raise DataError(
                    f"{network.name} takes batches of {fixed} only, which {data.test.size} test images do "
                    "not fill. Export it without a fixed batch."
                )
            return evaluate(network.model, data.test, engine, fixed if isinstance(fixed, int) else None)
        engine = make_engine(device, workers=workers)
        return evaluate(engine.prepare(network.model), data.test.to(engine.device), engine)

"""What a run is known by when it goes on: its images, the code of its model, and what it runs on."""

from __future__ import annotations

import platform
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..data.datasets import Data
from ..data.image_folder import ImageFolder, fingerprint_of
from ..data.in_memory import InMemoryImages
from ..graph import ChannelGraph
from ..train.engine import Engine
from ..utils.fingerprint import fingerprint
from ..version import __version__

__all__ = ["code_of", "environment_of", "fingerprint_of_images"]


def fingerprint_of_images(data: Data) -> str:
    """Tells whether the images are still the same ones."""
    parts: list[Tensor | str] = []
    for split in (data.train, data.test):
        parts.append(split.labels)
        if isinstance(split, InMemoryImages):
            parts.append(split.pixels)
        elif isinstance(split, ImageFolder):
            parts.append(fingerprint_of(split.paths))
    return fingerprint(parts)


def code_of(network: nn.Module, graph: ChannelGraph) -> dict[str, str]:
    """Tells whether the model's code still builds the same layers, with the same weights, and calls operators with the same numbers."""
    found = {
        "layers": [
            (name, type(module).__qualname__, _settings_of(module), _numbers_of(module))
            for name, module in network.named_modules()
        ],
        "tensors": [(name, tuple(tensor.shape)) for name, tensor in network.state_dict().items()],
        "constants": graph.constants,
    }
    return {name: fingerprint([repr(value)]) for name, value in found.items()}


def _settings_of(layer: nn.Module) -> str:
    """What a layer says of itself, but for what may differ from one start to the next: addresses, and whether it saves memory."""
    return re.sub(r" at 0x[0-9a-f]+|,? ?inplace=(True|False)", "", layer.extra_repr())


def _numbers_of(layer: nn.Module) -> str:
    """Those that its code puts into buffers: means of images, kernels that blur. Statistics are what training finds."""
    return "" if isinstance(layer, _NormBase) else fingerprint(layer.buffers(recurse=False))


def environment_of(engine: Engine) -> dict[str, Any]:
    import torchvision

    return {
        "peel": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "platform": platform.platform(),
        "device": engine.description,
        "threads": torch.get_num_threads(),
    }

"""The training images of Tiny-ImageNet-32: 50 of each class are held out. The test images are not read."""

from __future__ import annotations

import io
import multiprocessing
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from peel.data.in_memory import InMemoryImages
from peel.utils.rng import derive_seed

#: Held-out images of each class.
HELD_OUT = 50


class Images(NamedTuple):
    train: InMemoryImages
    held_out: InMemoryImages


def prepare(archive: Path, images: Path) -> None:
    """Decode the training images once and draw those that are held out."""
    files = read_training_files(archive)
    classes = sorted(files)
    jpegs = [files[label][name] for label in classes for name in sorted(files[label])]
    labels = torch.tensor([i for i, label in enumerate(classes) for _ in files[label]])
    with multiprocessing.get_context("fork").Pool() as pool:
        pixels = np.stack(pool.map(decode, jpegs, chunksize=256))
    held_out = draw_held_out(labels)
    seen = pixels[~held_out.numpy()].reshape(-1, 3) / np.float32(255)
    mean = [round(float(x), 4) for x in seen.mean(0, np.float64)]
    std = [round(float(x), 4) for x in seen.std(0)]
    images.parent.mkdir(parents=True, exist_ok=True)
    stored = {
        "pixels": torch.from_numpy(pixels),
        "labels": labels,
        "held": held_out,
        "mean": mean,
        "std": std,
    }
    torch.save(stored, images)


def draw_held_out(labels: Tensor) -> Tensor:
    """Which images are held out. Images are ordered by class and file name."""
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    rng = torch.Generator().manual_seed(derive_seed("held out"))
    for i in range(int(labels.max()) + 1):
        places = (labels == i).nonzero().flatten()
        held_out[places[torch.randperm(len(places), generator=rng)[:HELD_OUT]]] = True
    return held_out


def read_training_files(archive: Path) -> dict[str, dict[str, bytes]]:
    """Class -> file name -> bytes, of the members .../train/CLASS/NAME."""
    files: dict[str, dict[str, bytes]] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and parts[-3] == "train":
                file = tar.extractfile(member)
                assert file is not None
                files.setdefault(parts[-2], {})[parts[-1]] = file.read()
    return files


def decode(jpeg: bytes) -> np.ndarray[Any, Any]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))


def load(path: Path, device: torch.device, count: int | None = None) -> Images:
    """Both parts on the device; with `count`, only the first images of each part."""
    stored = torch.load(path)
    pixels, labels, held_out = stored["pixels"], stored["labels"], stored["held"]
    mean, std = tuple(stored["mean"]), tuple(stored["std"])
    parts = [
        InMemoryImages(pixels[part][:count], labels[part][:count], mean, std).to(device)
        for part in (~held_out, held_out)
    ]
    return Images(*parts)

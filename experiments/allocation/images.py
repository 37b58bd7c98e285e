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
    return draw_of_each_class(
        torch.ones_like(labels, dtype=torch.bool), labels, HELD_OUT, derive_seed("held out")
    )


def draw_of_each_class(is_free: Tensor, labels: Tensor, count: int, seed: int) -> Tensor:
    """Which images are drawn: so many of each class, of those that are free."""
    is_drawn = torch.zeros_like(is_free)
    rng = torch.Generator().manual_seed(seed)
    for label in labels.unique():
        places = (is_free & (labels == label)).nonzero().flatten()
        is_drawn[places[torch.randperm(len(places), generator=rng)[:count]]] = True
    return is_drawn


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

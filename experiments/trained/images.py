"""CIFAR-10 from an archive of JPEG files, decoded once: train/CLASS/NAME and test/CLASS/NAME."""

from __future__ import annotations

import multiprocessing
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peel.data.datasets import Data, balanced_order

from ..allocation.images import decode

PARTS = ("train", "test")


def prepare(archive: Path, images: Path) -> None:
    """Decode the archive into one file of tensors."""
    files = read_files(archive)
    classes = sorted(files["train"])
    stored: dict[str, Any] = {"classes": classes}
    with multiprocessing.get_context("fork").Pool() as pool:
        for part in PARTS:
            by_class = [sorted(files[part][label].items()) for label in classes]
            jpegs = [jpeg for some in by_class for _, jpeg in some]
            pixels = torch.from_numpy(np.stack(pool.map(decode, jpegs, chunksize=256)))
            labels = torch.tensor([i for i, some in enumerate(by_class) for _ in some])
            stored[part] = pixels, labels
    images.parent.mkdir(parents=True, exist_ok=True)
    torch.save(stored, images)


def read_files(archive: Path) -> dict[str, dict[str, dict[str, bytes]]]:
    """Part -> class -> file name -> bytes."""
    files: dict[str, dict[str, dict[str, bytes]]] = {part: {} for part in PARTS}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and len(parts) >= 3 and parts[-3] in PARTS:
                file = tar.extractfile(member)
                assert file is not None
                files[parts[-3]].setdefault(parts[-2], {})[parts[-1]] = file.read()
    return files


def load_images(path: Path, device: torch.device, count: int | None = None) -> Data:
    """Both parts on the device. With `count`, so many images of each part, of all classes."""
    stored = torch.load(path)
    train, test = (tuple(map(Tensor.contiguous, stored[part])) for part in PARTS)
    data = Data.from_tensors("cifar10", tuple(stored["classes"]), train, test)
    return reduce_images(data, count).to(device)


def reduce_images(data: Data, count: int | None) -> Data:
    """So many images of each part, of all classes; all of them where it is None."""
    if count is None:
        return data
    train, test = (part.subset(balanced_order(part, 0)[:count]) for part in (data.train, data.test))
    return replace(data, train=train, test=test)

"""Folders of images: `train/CLASS/IMAGE` and `val/CLASS/IMAGE` (or `test/`), ImageNet as it comes.

Every file is looked at before training starts, so that a broken one is named up front. Small images of one size become resident; others
are decoded by worker processes as training goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .resident import cropped
from .transforms import centre_view, imagenet_view
from .view import View

__all__ = ["Folder", "find_images", "load_images", "scan"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}

#: Sets of up to this many files are decoded in full before training; of larger ones, the beginning and the end of each file.
FULL_SCAN = 20_000

#: Files below this are decoded so fast that threads would only get in each other's way.
SMALL_FILE = 16_384


@dataclass(frozen=True)
class Folder:
    """One split that is read from disk as training goes."""

    paths: tuple[Path, ...]
    labels: Tensor
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Folder:
        return self

    def subset(self, index: Tensor) -> Folder:
        chosen = index.tolist()
        return replace(self, paths=tuple(self.paths[i] for i in chosen), labels=self.labels[index])

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        from torch.utils.data import DataLoader

        chosen = order.tolist()
        loader: Any = DataLoader(
            _Views(self, view),  # type: ignore[arg-type]
            batch_sampler=[chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)],
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=device.type == "cuda",
            # A generator of its own, or the loader would draw from the one that dropout uses.
            generator=torch.Generator(),
        )
        mean = torch.tensor(self.mean, device=device)[:, None, None] * 255
        scale = 1 / (torch.tensor(self.std, device=device)[:, None, None] * 255)
        for images, labels in loader:
            moved = images.to(device, non_blocking=True)
            yield ((moved - mean) * scale).contiguous(memory_format=torch.channels_last), labels.to(device, non_blocking=True)


@dataclass(frozen=True)
class _Views:
    """What the worker processes run."""

    split: Folder
    view: View

    def __len__(self) -> int:
        return self.split.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = decode(self.split.paths[index], self.split.shape[0])
        size = self.split.shape[1:]
        if self.view.augment == "imagenet":
            image = imagenet_view(image, size, self.view.seed, index)
        elif self.view.augment == "none":
            image = centre_view(image, size)
        else:
            image = cropped(centre_view(image, size).permute(1, 2, 0)[None], torch.tensor([index]), self.view)[0].permute(2, 0, 1)
        return image, int(self.split.labels[index])


def _collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])


def decode(path: Path, channels: int) -> Tensor:
    """A file as a uint8 tensor, channels x height x width, whatever its mode (grey, palette, CMYK, 16 bit, transparent)."""
    fast = _fast_jpeg() if path.suffix.lower() in (".jpg", ".jpeg") else None
    if fast is not None:
        data = torch.frombuffer(bytearray(path.read_bytes()) or bytearray(1), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            tensor: Tensor = fast(data, 1 if channels == 1 else 3, False)
            return tensor
    from PIL import Image

    with Image.open(path) as opened:
        image: Image.Image = opened
        if opened.mode.startswith(("I", "F")):
            # 16-bit grey, which PIL's own conversion would clip at 255.
            values = np.asarray(opened, dtype=np.float64)
            image = Image.fromarray((values / max(values.max(), 1) * 255).astype(np.uint8))
        elif "transparency" in opened.info:
            image = opened.convert("RGBA")
        converted = np.array(image.convert("L" if channels == 1 else "RGB"))
    tensor = torch.from_numpy(converted)
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1)


@cache
def _fast_jpeg() -> Any:
    """torchvision's decoder of JPEG: faster than PIL, and other threads run meanwhile; what it does not take, PIL may.

    The operator itself, not torchvision.io, which warns at every call that it will go away; where it is gone, None.
    """
    try:
        import torchvision.io  # noqa: F401

        return torch.ops.image.decode_jpeg
    except (ImportError, AttributeError, RuntimeError):
        return None


def find_images(root: Path) -> tuple[list[Path], list[int], list[str]]:
    """The files of one split, the class of each, and the class names in order."""
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise DataError(f"{root} has no folders: it needs one folder of images per class.")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (root / name).rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if not found:
            raise DataError(f"{root / name} holds no images. Remove the folder, or put images of that class into it.")
        paths += found
        labels += [label] * len(found)
    return paths, labels, classes


def scan(paths: Sequence[Path], *, skip: bool) -> list[int]:
    """Positions of the files that can be read. Broken ones are all named at once, or left out with `skip`."""
    check = _decodes if len(paths) <= FULL_SCAN else _looks_whole
    with ThreadPoolExecutor() as pool:
        faults = list(pool.map(check, paths))
    broken = [(path, fault) for path, fault in zip(paths, faults, strict=True) if fault]
    if broken and not skip:
        shown = "\n".join(f"  {path}: {fault}" for path, fault in broken[:20])
        more = f"\n  and {len(broken) - 20} more" if len(broken) > 20 else ""
        raise DataError(
            f"{len(broken)} of {len(paths)} images cannot be read:\n{shown}{more}\nReplace them, or leave them out with --skip-bad."
        )
    return [i for i, fault in enumerate(faults) if not fault]


def _decodes(path: Path) -> str | None:
    try:
        decode(path, 3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _looks_whole(path: Path) -> str | None:
    """Open the header, and look for the end mark of the formats that have one: enough to find what is empty, cut or no image."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            form = image.format
        with path.open("rb") as file:
            file.seek(-min(64, path.stat().st_size), 2)
            tail = file.read()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if (form == "JPEG" and b"\xff\xd9" not in tail) or (form == "PNG" and b"IEND" not in tail):
        return "the end of the file is missing"
    return None


def image_size(path: Path) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as image:
        return image.height, image.width


def load_images(paths: Sequence[Path], shape: tuple[int, int, int], *, skip: bool) -> tuple[Tensor, list[int]]:
    """Every image that can be read, brought to one size: uint8 images x height x width x channels, and their positions in `paths`."""
    channels, height, width = shape

    def load(path: Path) -> Tensor | str:
        try:
            image = decode(path, channels)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if image.shape[1:] != (height, width):
            image = centre_view(image, (height, width))
        return image.permute(1, 2, 0)

    if paths[0].stat().st_size < SMALL_FILE:
        images = [load(path) for path in paths]
    else:
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(load, paths))
    good = [i for i, image in enumerate(images) if isinstance(image, Tensor)]
    if len(good) < len(images) and not skip:
        scan(paths, skip=False)
    kept = [image for image in images if isinstance(image, Tensor)]
    return torch.stack(kept) if kept else torch.zeros(0, height, width, channels, dtype=torch.uint8), good

"""Folders of images: `train/CLASS/IMAGE` and `val/CLASS/IMAGE` (or `test/`), the layout of ImageNet.

Every file is checked before training starts. Large images are decoded by worker processes during training.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..utils.fingerprint import fingerprint
from .augmentation import View, augment_image, border_color, center_crop, draw_color_jitter
from .batch import Batch
from .kernels import has_triton
from .loader import WorkerPool, copy_ahead

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}

#: Images that a worker decodes at a time: several workers share a batch.
PIECE = 16
#: Threads decode files below this size three times more slowly: decoding them rarely releases the GIL.
TINY_FILE = 16_384

T = TypeVar("T")


@dataclass(frozen=True)
class ImageFolder:
    """A split of images that are read from disk during training."""

    paths: list[str]
    labels: Tensor
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None
    """The short side before a center crop. Default: 256 for a crop of 224, and in proportion."""
    _pools: dict[int, WorkerPool] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> ImageFolder:
        return self

    def subset(self, index: Tensor) -> ImageFolder:
        return replace(self, paths=[self.paths[i] for i in index.tolist()], labels=self.labels[index])

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        """Batches of augmented and normalized images in the given order."""
        is_gpu = device.type == "cuda"
        is_fused = is_gpu and view.augment == "imagenet" and self.shape[0] == 3 and has_triton()
        labels = self.labels.to(device)
        mean = torch.tensor(self.mean, device=device) * 255
        scale = 1 / (torch.tensor(self.std, device=device) * 255)

        def prepare(images: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            if is_fused:
                from .color_kernel import fused_color_jitter

                images = fused_color_jitter(images, draw_color_jitter(index, view.seed), mean, scale)
            else:
                images = ((images - mean) * scale).contiguous()
            return images.permute(0, 3, 1, 2), labels[index]

        indices = torch.split(order, batch_size) if len(order) else ()
        decoded = self._decode(indices, view, workers, jitter=not is_fused, pin=is_gpu)
        on_device = torch.split(order.to(device), batch_size)
        for images, batch_labels in copy_ahead(zip(decoded, on_device, strict=False), device, prepare):
            yield Batch(images, batch_labels)

    def _decode(
        self, indices: Sequence[Tensor], view: View, workers: int, *, jitter: bool, pin: bool
    ) -> Iterator[Tensor]:
        """uint8 batches (images x height x width x channels), decoded in pieces by the workers."""
        channels, *size = self.shape
        border = border_color(view, torch.tensor(self.mean) * 255)
        load = partial(_load, view=view, shape=self.shape, border=border, jitter=jitter, resize=self.resize)
        requests = (
            partial(load, [self.paths[i] for i in piece], piece)
            for index in indices
            for piece in map(Tensor.tolist, torch.split(index, PIECE))
        )
        # Two iterations at the same time do not share a pool.
        pool = self._pools.pop(workers, None) or WorkerPool(workers, (PIECE, *size, channels))
        results = pool.run(requests)
        for index in indices:
            batch = torch.empty(len(index), *size, channels, dtype=torch.uint8, pin_memory=pin)
            # Copied by numpy: torch would use as many threads as there are busy workers, and wait for them.
            for start in range(0, len(index), PIECE):
                batch.numpy()[start : start + PIECE] = next(results).numpy()
            yield batch
        self._pools[workers] = pool


def _load(
    paths: list[str],
    index: list[int],
    view: View,
    shape: tuple[int, ...],
    border: Tensor,
    jitter: bool,
    resize: int | None,
) -> list[Tensor]:
    """Some images of a batch, decoded and augmented by a worker."""
    channels, *size = shape
    augmented = []
    for path, place in zip(paths, index, strict=True):
        try:
            image = decode(Path(path), channels)
        except Exception as error:
            text = f"{path} was readable before training, but is not any more"
            raise DataError(f"{text}: {type(error).__name__}: {error}") from error
        augmented.append(augment_image(image, place, view, size, border, jitter=jitter, resize=resize))
    return augmented


def decode(path: Path, channels: int) -> Tensor:
    """A file as uint8, channels x height x width: RGB with 3 channels, else the gray image repeated."""
    image = _decode_jpeg(path, channels) if path.suffix.lower() in (".jpg", ".jpeg") else None
    if image is None:
        image = _decode_any(path, channels)
    return image if channels == 3 else image.expand(channels, -1, -1)


def _decode_jpeg(path: Path, channels: int) -> Tensor | None:
    """torchvision's decoder is faster than PIL and releases the GIL. None if it refuses the file."""
    import torchvision.io  # noqa: F401

    data = torch.frombuffer(bytearray(path.read_bytes()) or bytearray(1), dtype=torch.uint8)
    with contextlib.suppress(RuntimeError, AttributeError):
        # Not torchvision.io.decode_jpeg, which warns at every call that it will be removed.
        image: Tensor = torch.ops.image.decode_jpeg(data, 3 if channels == 3 else 1, False)
        return image
    return None


def _decode_any(path: Path, channels: int) -> Tensor:
    from PIL import Image

    with Image.open(path) as opened:
        image: Image.Image = opened
        if opened.mode.startswith(("I", "F")):
            # PIL would clip 16-bit images at 255. White of float images is a guess from their maximum.
            values = np.asarray(opened, dtype=np.float64)
            guesses = (1, 255) if opened.mode == "F" else ()
            white = next((value for value in guesses if values.max() <= value), 65535)
            image = Image.fromarray((values / white * 255).clip(0, 255).astype(np.uint8))
        elif "transparency" in opened.info:
            image = opened.convert("RGBA")
        pixels = torch.from_numpy(np.array(image.convert("RGB" if channels == 3 else "L")))
    return pixels.permute(2, 0, 1) if channels == 3 else pixels[None]


def is_image(path: Path) -> bool:
    # Broken links count: the check reports them with the other unreadable files.
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def find_images(root: Path) -> tuple[list[Path], list[int], list[str]]:
    """The files of one split, the label of each, and the class names. Hidden folders are skipped."""
    classes = sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not classes:
        raise DataError(f"{root} has no folders: it needs one folder of images per class.")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = filter(is_image, (root / name).rglob("*"))
        found = sorted(p for p in files if "/." not in p.parent.relative_to(root).as_posix())
        if not found:
            raise DataError(
                f"{root / name} holds no images. Remove the folder, or put images of that class in it."
            )
        paths += found
        labels += [label] * len(found)
    return paths, labels, classes


def read_all(paths: Sequence[Path], read: Callable[[Path], T], *, skip: bool) -> tuple[list[int], list[T]]:
    """Apply `read` to every file. Returns the positions of the readable files and the results.

    Files that cannot be read are left out with `skip`; else one error names them all.
    """

    def attempt(path: Path) -> T | Exception:
        try:
            return read(path)
        except Exception as error:
            return error

    is_tiny = paths[0].is_file() and paths[0].stat().st_size < TINY_FILE
    with ThreadPoolExecutor() as pool:
        results = list((map if is_tiny else pool.map)(attempt, paths))
    broken = [(p, error) for p, error in zip(paths, results, strict=True) if isinstance(error, Exception)]
    if broken and not skip:
        shown = [f"\n  {path}: {type(error).__name__}: {error}" for path, error in broken[:20]]
        more = f"\n  and {len(broken) - 20} more" if len(broken) > 20 else ""
        raise DataError(
            f"{len(broken)} of {len(paths)} images cannot be read:{''.join(shown)}{more}\n"
            "Replace them, or leave them out with --skip-corrupt."
        )
    good = {i: result for i, result in enumerate(results) if not isinstance(result, Exception)}
    return list(good), list(good.values())


def load_image(path: Path, shape: tuple[int, int, int], resize: int | None = None) -> Tensor:
    """An image of this shape (channels, height, width): uint8, height x width x channels."""
    image = decode(path, shape[0])
    return (image if image.shape == shape else center_crop(image, shape[1:], resize)).permute(1, 2, 0)


def check_image(path: Path) -> None:
    """Read the header, and the end marker of JPEG and PNG: finds truncated files and files of other types."""
    from PIL import Image

    with Image.open(path) as image:
        marker = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}.get(image.format or "", b"")
    with path.open("rb") as file:
        file.seek(-min(64, path.stat().st_size), os.SEEK_END)
        if marker not in file.read():
            raise ValueError("the end of the file is missing")


def fingerprint_of(paths: Sequence[str]) -> str:
    """A hash of the names and sizes of all files: reading their contents would take hours."""
    try:
        return fingerprint(os.fsencode(f"{os.path.basename(p)}:{os.stat(p).st_size};") for p in paths)
    except OSError as error:
        text = f"{error.filename} was readable before, but is not any more"
        raise DataError(f"{text}: {error.strerror}.") from error

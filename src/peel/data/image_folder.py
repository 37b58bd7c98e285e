"""Folders of images: `train/CLASS/IMAGE` and `val/CLASS/IMAGE` (or `test/`), ImageNet as it comes.

Every file is looked at before training starts, so that a broken one is named up front. Small images of one size become resident; others
are decoded by worker processes as training goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .batch import Batch
from .crops import crop_windows, draw_windows
from .kernels import fused_color_jitter
from .loader import Loader, ahead
from .transforms import center_crop, color_jitter_and_flip, draw_color_jitter, random_resized_crop
from .view import View

__all__ = ["ImageFolder", "Paths", "find_images", "fingerprint_of", "load_images", "scan"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}

#: Sets of up to this many files are decoded in full before training; of larger ones, the beginning and the end of each file.
FULL_SCAN = 20_000

#: Images of a batch that one process decodes at a time.
PIECE = 16

#: Of so many files of a split, spread evenly over it, the contents are looked at to tell whether they are still the same.
LOOKED_INTO = 1_000

#: Files below this are decoded so fast that threads would only get in each other's way.
SMALL_FILE = 16_384


#: A file that cannot be read is tried so often, in case it is the way to it that is disturbed, with pauses that double.
READ_TRIES, READ_PAUSE = 3, 0.5


class Paths(Sequence[Path]):
    """Many paths in little memory: a million of them as objects would be copied into every process that touches them."""

    def __init__(self, paths: Iterable[Path] | np.ndarray) -> None:
        self._bytes = (
            paths
            if isinstance(paths, np.ndarray)
            else np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        )

    def __len__(self) -> int:
        return len(self._bytes)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> Paths: ...
    def __getitem__(self, index: int | slice) -> Path | Paths:
        return (
            Paths(self._bytes[index])
            if isinstance(index, slice)
            else Path(os.fsdecode(bytes(self._bytes[index])))
        )

    def chosen(self, index: Tensor) -> Paths:
        return Paths(self._bytes[index.numpy()])


@dataclass(frozen=True)
class ImageFolder:
    """One split that is read from disk as training goes."""

    paths: Paths
    labels: Tensor
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    _loaders: dict[tuple[int, bool], Loader[Key]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def size(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> ImageFolder:
        return self

    def subset(self, index: Tensor) -> ImageFolder:
        return replace(self, paths=self.paths.chosen(index), labels=self.labels[index])

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        on_gpu = device.type == "cuda"
        if (workers, on_gpu) not in self._loaders:
            decoder = _Decoder(self.paths, self.shape, finishes=not on_gpu)
            self._loaders[workers, on_gpu] = Loader(decoder, workers, pin=on_gpu, file_of=decoder.file_of)
        indices = torch.split(order, batch_size) if len(order) else ()
        batches = [_pieces([Key(place, view) for place in index.tolist()]) for index in indices]
        decoded = self._loaders[workers, on_gpu].batches([piece for pieces in batches for piece in pieces])
        labels = self.labels.to(device)
        mean = torch.tensor(self.mean, device=device) * 255
        scale = 1 / (torch.tensor(self.std, device=device) * 255)
        is_jittered = on_gpu and view.augment == "imagenet"
        fused = fused_color_jitter() if is_jittered and self.shape[0] == 3 else None

        def prepare(images: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            if fused is not None:
                images = fused(images, draw_color_jitter(index, view.seed), mean, scale)
            else:
                if is_jittered:
                    images = color_jitter_and_flip(images.permute(0, 3, 1, 2), index, view.seed).permute(
                        0, 2, 3, 1
                    )
                images = ((images - mean) * scale).contiguous()
            return images.permute(0, 3, 1, 2), labels[index]

        in_pieces = (list(islice(decoded, len(pieces))) for pieces in batches)
        there = torch.split(order.to(device), batch_size)
        for images, its_labels in ahead(zip(in_pieces, there, strict=False), device, prepare):
            yield Batch(images, its_labels)


def _pieces(keys: list[Key]) -> list[list[Key]]:
    """A batch in pieces for several processes: a whole one would be long in coming from one of them, while the others wait to be next."""
    return [keys[start : start + PIECE] for start in range(0, len(keys), PIECE)]


class Key(NamedTuple):
    """What a decoding process is asked for."""

    place: int
    view: View

    def __str__(self) -> str:
        return f"image {self.place}"


@dataclass(frozen=True)
class _Decoder:
    """What the decoding processes run."""

    paths: Paths
    shape: tuple[int, int, int]
    finishes: bool
    """Whether colours and mirroring are changed here too; else on the device, batch by batch."""

    def file_of(self, key: Key) -> Path:
        return self.paths[key.place]

    def __call__(self, key: Key) -> Tensor | str:
        """An image as it goes to the device: uint8, height x width x channels."""
        path, (index, view), (channels, *size) = self.file_of(key), key, self.shape
        for number in range(READ_TRIES):
            try:
                image = decode(path, channels)
                break
            except Exception as error:
                if number + 1 == READ_TRIES:
                    return f"{path} could be read before training, but not any more: {type(error).__name__}: {error}"
                time.sleep(READ_PAUSE * 2**number)
        place = torch.tensor([index])
        if view.augment == "imagenet":
            image = random_resized_crop(image, (size[0], size[1]), view.seed, index)
            if self.finishes:
                image = color_jitter_and_flip(image[None], place, view.seed)[0].to(torch.uint8)
            return image.permute(1, 2, 0)
        image = center_crop(image, (size[0], size[1])).permute(1, 2, 0)
        return (
            image
            if view.augment == "none"
            else crop_windows(draw_windows(place, view, size[0]), image[None])[0]
        )


def decode(path: Path, channels: int) -> Tensor:
    """A file as a uint8 tensor, channels x height x width, whatever its mode (grey, palette, CMYK, 16 bit, transparent).

    Three channels are colours; any other number is that many times grey.
    """
    image = _decoded(path, is_grey=channels != 3)
    return image if channels == 3 else image.expand(channels, -1, -1)


def _decoded(path: Path, *, is_grey: bool) -> Tensor:
    fast = _fast_jpeg() if path.suffix.lower() in (".jpg", ".jpeg") else None
    if fast is not None:
        data = torch.frombuffer(bytearray(path.read_bytes()) or bytearray(1), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            tensor: Tensor = fast(data, 1 if is_grey else 3, False)
            return tensor
    from PIL import Image

    with Image.open(path) as opened:
        image: Image.Image = opened
        if opened.mode.startswith(("I", "F")):
            # 16-bit grey, which PIL's own conversion would clip at 255. All such images are scaled alike, dark ones too; numbers with a
            # point do not say what white is, so there the largest one has to tell.
            values = np.asarray(opened, dtype=np.float64)
            full = (
                65535
                if opened.mode != "F"
                else next((full for full in (1, 255) if values.max() <= full), 65535)
            )
            image = Image.fromarray((values / full * 255).clip(0, 255).astype(np.uint8))
        elif "transparency" in opened.info:
            image = opened.convert("RGBA")
        converted = np.array(image.convert("L" if is_grey else "RGB"))
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
    classes = sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not classes:
        raise DataError(f"{root} has no folders: it needs one folder of images per class.")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _images_in(root / name)
        if not found:
            raise DataError(
                f"{root / name} holds no images. Remove the folder, or put images of that class into it."
            )
        paths += found
        labels += [label] * len(found)
    return paths, labels, classes


def _images_in(folder: Path) -> list[Path]:
    """Also links that lead nowhere, which are named with all that cannot be read; not what hides, such as copies that an editor keeps."""
    found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.is_dir()]
    return sorted(
        path
        for path in found
        if not any(part.startswith(".") for part in path.relative_to(folder).parts[:-1])
    )


def scan(paths: Sequence[Path], *, skip: bool) -> list[int]:
    """Positions of the files that can be read. Broken ones are all named at once, or left out with `skip`."""
    check = _decodes if len(paths) <= FULL_SCAN else _looks_whole
    with ThreadPoolExecutor() as pool:
        faults = list(pool.map(check, paths))
    if not skip:
        _refuse_broken(paths, faults)
    return [i for i, fault in enumerate(faults) if not fault]


def _refuse_broken(paths: Sequence[Path], faults: Sequence[str | None]) -> None:
    broken = [(path, fault) for path, fault in zip(paths, faults, strict=True) if fault]
    if not broken:
        return
    shown = "\n".join(f"  {path}: {fault}" for path, fault in broken[:20])
    more = f"\n  and {len(broken) - 20} more" if len(broken) > 20 else ""
    raise DataError(
        f"{len(broken)} of {len(paths)} images cannot be read:\n{shown}{more}\nReplace them, or leave them out with --skip-bad."
    )


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


def fingerprint_of(paths: Paths) -> bytes:
    """Tells whether the files are still the same ones: by their names and sizes, and by what is in some of them.

    A file that is replaced may have as many bytes as before (bitmaps do); but to read a million of them would take hours.
    """
    digest = hashlib.sha256()
    looked_into = paths[:: max(1, -(-len(paths) // LOOKED_INTO))]
    try:
        for path in paths:
            digest.update(os.fsencode(f"{path.name}:{path.stat().st_size};"))
        with ThreadPoolExecutor() as pool:
            for content in pool.map(_digest_of, looked_into):
                digest.update(content)
    except OSError as error:
        raise DataError(
            f"{error.filename} could be read just now, but not any more: {error.strerror}."
        ) from error
    return digest.digest()


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def image_size(path: Path) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as image:
        return image.height, image.width


def load_images(
    paths: Sequence[Path], shape: tuple[int, int, int], *, skip: bool
) -> tuple[Tensor, list[int]]:
    """Every image that can be read, brought to one size: uint8 images x height x width x channels, and their positions in `paths`."""
    channels, height, width = shape

    def load(path: Path) -> Tensor | str:
        try:
            image = decode(path, channels)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if image.shape[1:] != (height, width):
            image = center_crop(image, (height, width))
        return image.permute(1, 2, 0)

    if paths[0].stat().st_size < SMALL_FILE:
        images = [load(path) for path in paths]
    else:
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(load, paths))
    if not skip:
        _refuse_broken(paths, [image if isinstance(image, str) else None for image in images])
    good = [i for i, image in enumerate(images) if isinstance(image, Tensor)]
    kept = [image for image in images if isinstance(image, Tensor)]
    return torch.stack(kept) if kept else torch.zeros(0, height, width, channels, dtype=torch.uint8), good

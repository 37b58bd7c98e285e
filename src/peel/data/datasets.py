"""Data sets by name: `digits` (embedded), `cifar10`, `cifar100`, `fashion-mnist` (torchvision), or a folder of images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError, did_you_mean
from ..utils.rng import derive_seed
from .batch import Batch
from .image_folder import ImageFolder, Paths, find_images, image_size, load_images, scan
from .in_memory import InMemoryImages
from .view import View

__all__ = ["DATA", "Data", "Split", "held_out_size", "hold_out", "load_data"]

DATA: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels, embedded (UCI, by way of scikit-learn)",
    "cifar10": "50,000 and 10,000 images of 32x32 pixels, 10 classes (torchvision downloads it)",
    "cifar100": "the same with 100 classes",
    "fashion-mnist": "60,000 and 10,000 grey images of 28x28 pixels, 10 classes (torchvision downloads it)",
}

#: A folder becomes resident when its images are at most this large and take at most this many bytes.
IN_MEMORY_SIDE, IN_MEMORY_BYTES = 96, 4 * 2**30

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Split(Protocol):
    """Labelled images that can be visited in any order, seen in any view."""

    @property
    def size(self) -> int: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def std(self) -> tuple[float, ...]: ...
    def to(self, device: torch.device) -> Split: ...
    def subset(self, index: Tensor) -> Split: ...
    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Data:
    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    augment: str
    """The augmentation that suits these images."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.train.shape

    def input_spec(self) -> dict[str, Any]:
        """How to feed a network that was trained on these images."""
        return {
            "classes": list(self.classes),
            "shape": list(self.shape),
            "mean": list(self.train.mean),
            "std": list(self.train.std),
        }

    def to(self, device: torch.device) -> Data:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def load_data(
    name: str,
    *,
    image_size: int | None = None,
    channels: int = 3,
    root: str | Path | None = None,
    skip_corrupt: bool = False,
) -> Data:
    """The data set called `name`, or the folder at that path.

    Images are brought to `channels` (grey ones repeated) and to `image_size`, by default their own size (224 for folders of large
    ones). torchvision keeps what it downloads in `root`.
    """
    if image_size is not None and (
        isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1
    ):
        raise ConfigError(f"image_size must be a whole number of at least 1, not {image_size!r}.")
    if name == "digits":
        return _digits(channels, image_size)
    if name in ("cifar10", "cifar100", "fashion-mnist"):
        return _torchvision(name, channels, image_size, root)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _folder(folder, channels, image_size, skip_corrupt)
    if folder.exists():
        raise DataError(
            f"{name} is a file; data is a folder with train/ and val/ (or test/) in it, or one of {', '.join(DATA)}."
        )
    raise DataError(
        f"there is no data set and no folder called {name!r}.{did_you_mean(name, DATA)} Known are {', '.join(DATA)}."
    )


def hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """The split without a random share of its samples, and that share: for whatever selects, so that it never looks at test images."""
    count = held_out_size(split.size, share)
    if count >= split.size:
        raise DataError(f"cannot hold {count} of {split.size} images out of the training data.")
    order = torch.randperm(split.size, generator=torch.Generator().manual_seed(derive_seed("hold out", seed)))
    return split.subset(order[count:].sort().values), split.subset(order[:count].sort().values)


def held_out_size(size: int, share: float) -> int:
    return max(1, round(size * share))


def _digits(channels: int, image_size: int | None) -> Data:
    with (
        resources.files("peel.data").joinpath("embedded", "digits.npz").open("rb") as file,
        np.load(file) as stored,
    ):
        pixels = torch.from_numpy(np.minimum(stored["images"].astype(np.int64) * 16, 255).astype(np.uint8))[
            ..., None
        ]
        labels = torch.from_numpy(stored["labels"].astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    names = tuple(str(digit) for digit in range(10))
    return _in_memory_data(
        "digits",
        names,
        pixels[train],
        labels[train],
        pixels[test],
        labels[test],
        channels,
        image_size,
        "crop",
    )


def _torchvision(name: str, channels: int, image_size: int | None, root: str | Path | None) -> Data:
    from torchvision import datasets

    kind = {
        "cifar10": datasets.CIFAR10,
        "cifar100": datasets.CIFAR100,
        "fashion-mnist": datasets.FashionMNIST,
    }[name]
    try:
        place = Path(root).expanduser() if root is not None else Path.home() / ".cache" / "peel" / "data"
    except RuntimeError as error:
        raise DataError(
            f"there is no home folder to keep {name} in ({error}). Name a folder with --data-root."
        ) from error
    try:
        place.mkdir(parents=True, exist_ok=True)
        train, test = kind(place, train=True, download=True), kind(place, train=False, download=True)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{name} is not in {place} and could not be downloaded ({error}). Put torchvision's copy there, name another folder with "
            "--data-root, or give a folder of images."
        ) from error

    def tensors(dataset: Any) -> tuple[Tensor, Tensor]:
        pixels = torch.as_tensor(np.asarray(dataset.data), dtype=torch.uint8)
        return pixels if pixels.ndim == 4 else pixels[..., None], torch.as_tensor(
            dataset.targets, dtype=torch.int64
        )

    return _in_memory_data(
        name, tuple(train.classes), *tensors(train), *tensors(test), channels, image_size, "crop-flip"
    )


def _folder(folder: Path, channels: int, wanted: int | None, skip_corrupt: bool) -> Data:
    evaluation = next(
        (name for name in ("val", "test", "validation", "valid") if (folder / name).is_dir()), None
    )
    if not (folder / "train").is_dir() or evaluation is None:
        inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{folder} needs the folders train/ and val/ (or test/), each with one folder of images per class; it holds {inside}."
        )
    paths, labels, classes = find_images(folder / "train")
    test_paths, test_labels, test_classes = find_images(folder / evaluation)
    if test_classes != classes:
        odd = sorted(set(classes) ^ set(test_classes))
        raise DataError(
            f"{folder}: train/ and {evaluation}/ have different classes: {', '.join(odd[:5])} not in both."
        )
    shape = (channels, *_common_size(paths, wanted))
    # Both splits together, so that whatever is broken is named at once.
    every, every_label, count = [*paths, *test_paths], [*labels, *test_labels], len(paths)
    is_resident = (
        max(shape[1:]) <= IN_MEMORY_SIDE and len(every) * shape[0] * shape[1] * shape[2] <= IN_MEMORY_BYTES
    )
    pixels, good = (
        load_images(every, shape, skip=skip_corrupt)
        if is_resident
        else (None, scan(every, skip=skip_corrupt))
    )
    sides = [i for i in good if i < count], [i for i in good if i >= count]
    for side, name in zip(sides, ("train", evaluation), strict=True):
        for gone in sorted({*range(len(classes))} - {every_label[i] for i in side}):
            raise DataError(
                f"none of the images in {folder / name / classes[gone]} can be read. Replace them, or remove the class."
            )
    kept, test_kept = (torch.tensor([every_label[i] for i in side]) for side in sides)
    if pixels is not None:
        seen, test_seen = pixels[: len(kept)], pixels[len(kept) :]
        return _in_memory_data(
            str(folder), tuple(classes), seen, kept, test_seen, test_kept, channels, None, "crop-flip"
        )
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.45,) * channels, (0.225,) * channels)
    train, test = (
        ImageFolder(Paths(every[i] for i in side), found, shape, mean, std)
        for side, found in zip(sides, (kept, test_kept), strict=True)
    )
    return Data(str(folder), tuple(classes), train, test, "imagenet")


def _common_size(paths: list[Path], wanted: int | None) -> tuple[int, int]:
    """The size asked for; else the one that the images have in common where they are small; else 224."""
    if wanted is not None:
        return wanted, wanted
    sizes = set()
    for path in paths[:: max(1, len(paths) // 64)]:
        try:
            sizes.add(image_size(path))
        except Exception:
            continue  # named by the scan that follows
    common = sizes.pop() if len(sizes) == 1 else (224, 224)
    return common if max(common) <= IN_MEMORY_SIDE else (224, 224)


def _in_memory_data(
    name: str,
    classes: tuple[str, ...],
    pixels: Tensor,
    labels: Tensor,
    test_pixels: Tensor,
    test_labels: Tensor,
    channels: int,
    image_size: int | None,
    augment: str,
) -> Data:
    pixels, test_pixels = (_fitted(images, channels, image_size) for images in (pixels, test_pixels))
    mean, std = _statistics(pixels)
    return Data(
        name,
        classes,
        InMemoryImages(pixels, labels, mean, std),
        InMemoryImages(test_pixels, test_labels, mean, std),
        augment,
    )


def _statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, between 0 and 1; rounded, so that they can be written down and used elsewhere."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(pixels.shape[-1]):
        counts = torch.bincount(pixels[..., channel].flatten(), minlength=256).double()
        average = float((counts * levels).sum() / counts.sum())
        variance = float((counts * (levels - average) ** 2).sum() / counts.sum())
        mean.append(round(average, 4))
        std.append(round(max(variance**0.5, 1e-3), 4))
    return tuple(mean), tuple(std)


def _fitted(images: Tensor, channels: int, image_size: int | None) -> Tensor:
    if images.shape[-1] != channels:
        if images.shape[-1] != 1:
            images = images.float().mean(-1, keepdim=True).round().to(torch.uint8)
        images = images.expand(*images.shape[:-1], channels)
    if image_size is not None and images.shape[1:3] != (image_size, image_size):
        planar = images.permute(0, 3, 1, 2).float()
        resized = torch.nn.functional.interpolate(
            planar, (image_size, image_size), mode="bilinear", align_corners=False, antialias=True
        )
        images = resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    return images.contiguous()

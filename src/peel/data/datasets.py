"""Datasets by name: `digits` (embedded), `cifar10`, `cifar100`, `fashion-mnist`; or a folder of images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError, PeelError, did_you_mean
from ..utils.rng import class_order, epoch_order
from ..utils.text import short
from .augmentation import EVAL, View
from .batch import Batch
from .image_folder import ImageFolder, check_image, find_images, is_image, load_image, read_all
from .in_memory import InMemoryImages
from .torch_data import DatasetSplit, LoaderSplit, as_split

#: `digits` is embedded: 1,797 images of 8x8 pixels (UCI). torchvision downloads the others.
DATA = ("digits", "cifar10", "cifar100", "fashion-mnist")

#: The name of torch datasets of the user's own.
OWN_DATA = "given data"

#: The images of a folder are kept in memory up to this height and width, and this many bytes in total.
IN_MEMORY_SIDE, IN_MEMORY_BYTES = 96, 4 * 2**30

#: Fraction of each class that is held out for testing where a folder has no val/ or test/.
HELD_OUT = 0.1

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

#: Whose mean and standard deviation are taken where nobody names others.
OF_TRAINING, OF_IMAGENET = "of the training images", "of ImageNet"

#: Means and standard deviations beyond it make images that are not finite, or all the same.
LARGEST = 1e6

#: Images (uint8, images x height x width x channels) and their labels.
Labeled = tuple[Tensor, Tensor]


class Split(Protocol):
    """The training or the test samples of a `Data`: any object with these members.

    `labels` are int64 class numbers, or None where they are not known. Of images, `shape` is (channels,
    height, width), and `mean` and `std` normalize them. `batches` yields the samples with the indices
    `order`, augmented. What is drawn for a sample must depend only on `view` and its index.
    """

    @property
    def size(self) -> int: ...
    @property
    def labels(self) -> Tensor | None: ...
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
    """Training and test images, and the names of their classes.

    `load_data` returns one, `Data.from_tensors` makes one of your own images.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    augment: str
    """The default augmentation: none, crop, crop-flip or imagenet."""
    notes: tuple[str, ...] = ()
    """What a user should know about the data; a run shows it."""
    mean_source: str = "of the data"
    """Whose the mean is, and the standard deviation: of the training images, of ImageNet, given, ..."""
    std_source: str = "of the data"

    def notes_for_trained(self) -> list[str]:
        """The notes, for a network that was trained elsewhere: maybe on images that are held out here."""
        text = "A network that peel did not train on this folder may have been trained on these images."
        return [*(f"{note} {text}" for note in self.notes), *self.normalization_notes(is_trained=True)]

    def normalization_notes(self, *, is_trained: bool) -> list[str]:
        """One line: mean and standard deviation, and whose they are. `is_trained`: the network has been."""
        if self.is_own:
            return []
        mean, std = (" ".join(f"{x:g}" for x in given) for given in (self.train.mean, self.train.std))
        sources = {self.mean_source, self.std_source}
        first = f" ({self.mean_source})" if len(sources) == 2 else ""
        is_guess = is_trained and not sources.isdisjoint((OF_TRAINING, OF_IMAGENET))
        hint = "; give --mean and --std if it was trained with others" if is_guess else ""
        return [f"Images are normalized by mean {mean}{first} and std {std} ({self.std_source}){hint}."]

    @staticmethod
    def from_tensors(
        name: str, classes: tuple[str, ...], train: Labeled, test: Labeled, augment: str = "crop-flip"
    ) -> Data:
        """Data in memory, normalized by the mean and the standard deviation of the training images.

        Images are uint8, images x height x width x channels; labels are class numbers from 0.
        """
        for pixels, labels in (train, test):
            if pixels.dtype != torch.uint8 or pixels.ndim != 4 or len(pixels) != len(labels):
                given = f"{pixels.dtype} of shape {tuple(pixels.shape)} with {len(labels)} labels"
                wanted = "uint8, images x height x width x channels, with a label for each image"
                raise DataError(f"the images of {name} are {given}; they must be {wanted}.")
        mean, std = _mean_and_std(train[0])
        split, test_split = (InMemoryImages(p, labels.long(), mean, std) for p, labels in (train, test))
        return Data(name, classes, split, test_split, augment, (), OF_TRAINING, OF_TRAINING)

    @staticmethod
    def from_torch(
        train: Any, val: Any, *, batch_size: int | None = None, workers: int | None = None
    ) -> Data:
        """Torch `Dataset`s or `DataLoader`s of the user's own; see docs/own_data.md for what they may hold.

        Batch size and workers are those of the loaders, unless given.
        """
        splits = [
            as_split(given, f"{name} data", batch_size, workers)
            for name, given in (("training", train), ("validation", val))
        ]
        return Data(OWN_DATA, (), splits[0], splits[1], "none")

    @property
    def is_own(self) -> bool:
        """Whether they are torch datasets of the user's own, of which classes and shapes are not known."""
        return isinstance(self.train, DatasetSplit | LoaderSplit)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.train.shape

    def example(self, samples: int = 1) -> Any:
        """What a model is called with: black images, or the first samples of the user's own data."""
        if not self.is_own:
            return torch.zeros(samples, *self.shape)
        return first_batch(self.train, samples).inputs

    def input_spec(self) -> dict[str, Any]:
        """How to feed a network that was trained on these images: classes, shape, mean and std.

        Also the short side before the center crop, where it is not in proportion to 256 for 224.
        """
        if self.is_own:
            return {}
        mean, std = self.train.mean, self.train.std
        spec = {"classes": self.classes, "shape": self.shape, "mean": mean, "std": std}
        resize = getattr(self.train, "resize", None)
        rest = {} if resize is None else {"resize": resize}
        return {name: list(values) for name, values in spec.items()} | rest

    def normalized(
        self, mean: Sequence[float] | None, std: Sequence[float] | None, source: str = "given"
    ) -> Data:
        """The same images with another mean and standard deviation (None: unchanged), for pixels from 0 to 1.

        One number holds for all channels. `source` says whose they are.
        """
        if self.is_own:
            if mean or std:
                raise ConfigError("mean and std are for images: the given data normalize themselves.")
            return self
        train, test, count = self.train, self.test, self.shape[0]
        values = []
        for name, given in (("mean", mean or train.mean), ("std", std or train.std)):
            least = -LARGEST if name == "mean" else 1 / LARGEST
            is_number = all(least <= number <= LARGEST for number in given)
            if len(given) not in (1, count) or not is_number:
                kind = "positive numbers" if name == "std" else "numbers"
                raise ConfigError(
                    f"{name} must be 1 or {count} {kind}, one per channel, not {short(list(given))}."
                )
            values.append(tuple(given) * (count // len(given)))
        told = replace(
            self,
            mean_source=source if mean else self.mean_source,
            std_source=source if std else self.std_source,
        )
        if values == [train.mean, train.std]:
            return told
        if not isinstance(train, InMemoryImages | ImageFolder) or not isinstance(test, type(train)):
            raise ConfigError(f"mean and std of {self.name} are those of its own splits: change them there.")
        parts = (replace(part, mean=values[0], std=values[1]) for part in (train, test))
        return replace(told, train=next(parts), test=next(parts))

    def to(self, device: torch.device) -> Data:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def load_data(
    name: str,
    *,
    image_size: int | None = None,
    channels: int = 3,
    root: str | Path | None = None,
    skip_corrupt: bool = False,
    crop: tuple[int, int] = (224, 256),
) -> Data:
    """The dataset called `name`, or the folder of images at that path.

    Images are converted to `channels` (gray ones repeated) and `image_size`: by default their own size, or
    224 for a folder of images that are large or differ in size. torchvision downloads to `root`.
    `skip_corrupt` leaves out the files of a folder that cannot be read. `crop` holds for folders of large
    images: the side of the images instead of 224, and the short side that the center is cropped from.
    """
    if image_size is not None and (type(image_size) is not int or image_size < 1):
        raise ConfigError(f"image_size must be a whole number of at least 1, not {image_size!r}.")
    if name == "digits":
        return _digits(channels, image_size)
    folder = Path(name).expanduser()
    if name not in DATA and not folder.is_dir():
        raise DataError(
            f"{name!r} is neither a dataset nor a folder.{did_you_mean(name, DATA)} "
            f"Give one of {', '.join(DATA)}, or a folder with train/ and val/ (or test/)."
        )
    if find_spec("torchvision") is None:
        raise PeelError(f"the data {name} needs torchvision: pip install peel-pruning[vision]")
    if name in DATA:
        return _torchvision(name, channels, image_size, root)
    return _folder(folder, channels, image_size, skip_corrupt, crop)


def first_batch(split: Split, index: int | Tensor) -> Batch:
    """So many first samples, or those at some places, as a batch on the CPU, not augmented."""
    index = index if isinstance(index, Tensor) else torch.arange(min(index, split.size))
    samples = len(index)
    batch = next(iter(split.batches(index, samples, EVAL, torch.device("cpu"))), None)
    if batch is None:
        raise DataError("the data yield no batch.")
    # A loader makes batches of its own size.
    return batch if batch.size <= samples else batch.split(-(-batch.size // samples))[0]


def hold_out(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """The split without a random fraction of each class, and the rest: for decisions without test images.

    Where classes are not known, a random fraction of all samples.
    """
    if isinstance(split, LoaderSplit):
        raise DataError(
            f"no samples can be held out of the {split.name}: the loader chooses them itself. Give the "
            "dataset instead, or choose a criterion or method that needs no held-out samples."
        )
    count = held_out_size(split.size, fraction)
    order = balanced_order(split, seed, in_proportion=True)
    return split.subset(order[count:].sort().values), split.subset(order[:count].sort().values)


def balanced_order(split: Split, seed: int, *, in_proportion: bool = False) -> Tensor:
    """A random order whose every prefix holds all classes, where they are known."""
    if split.labels is None:
        return epoch_order(split.size, seed, -1)
    return class_order(split.labels, seed, in_proportion=in_proportion)


def held_out_size(size: int, fraction: float) -> int:
    return max(1, round(size * fraction))


def _digits(channels: int, image_size: int | None) -> Data:
    stored = np.load(str(resources.files("peel.data") / "embedded" / "digits.npz"))
    pixels = torch.from_numpy(np.minimum(stored["images"].astype(np.int64) * 16, 255).astype(np.uint8))
    pixels = _convert(pixels, channels, image_size)
    labels = torch.from_numpy(stored["labels"].astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = ((pixels[index], labels[index]) for index in (order[:1437], order[1437:]))
    return Data.from_tensors("digits", tuple("0123456789"), train, test, "crop")


def _torchvision(name: str, channels: int, image_size: int | None, root: str | Path | None) -> Data:
    from torchvision import datasets

    classes = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion-mnist": "FashionMNIST"}
    dataset = getattr(datasets, classes[name])
    folder = Path("~/.cache/peel/data" if root is None else root)
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        splits = [dataset(folder, train=is_train, download=True) for is_train in (True, False)]
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{name} is not in {folder} and could not be downloaded ({error}). Put torchvision's copy there, "
            "name another folder with --data-root, or give a folder of images."
        ) from error
    pixels = (_convert(torch.as_tensor(split.data), channels, image_size) for split in splits)
    labels = (torch.as_tensor(split.targets) for split in splits)
    train, test = zip(pixels, labels, strict=True)
    return Data.from_tensors(name, tuple(splits[0].classes), train, test)


def _folder(
    folder: Path, channels: int, image_size: int | None, skip_corrupt: bool, crop: tuple[int, int]
) -> Data:
    train, test = _split_folders(folder)
    paths, labels, classes = find_images(train)
    names = {"train": train, "test": test or train}
    test_paths, test_labels, test_classes = find_images(test) if test is not None else ([], [], classes)
    if test_classes != classes:
        odd = ", ".join(sorted(set(classes) ^ set(test_classes))[:5])
        raise DataError(
            f"{folder}: {train.name}/ and {names['test'].name}/ have different classes: {odd} not in both."
        )
    height, width = _common_size(paths, image_size, crop[0])
    # In proportion, where the images are of another size.
    resize = None if crop == (224, 256) else round(min(height, width) * crop[1] / crop[0])
    shape = channels, height, width
    # Both splits are read together, so that one error names all corrupt files.
    count, paths, labels = len(paths), [*paths, *test_paths], [*labels, *test_labels]
    is_small = max(height, width) <= IN_MEMORY_SIDE
    if is_small and len(paths) * channels * height * width <= IN_MEMORY_BYTES:
        readable, images = read_all(paths, partial(load_image, shape=shape, resize=resize), skip=skip_corrupt)
    else:
        readable, images = read_all(paths, check_image, skip=skip_corrupt)[0], []
    count = sum(i < count for i in readable)
    found = torch.tensor([labels[i] for i in readable])
    index = {"train": torch.arange(count), "test": torch.arange(count, len(readable))}
    if test is None:
        index["train"], index["test"] = _hold_out_of_each(found, classes, train)
    for name, part in index.items():
        for missing in sorted({*range(len(classes))} - {*found[part].tolist()}):
            place = names[name] / classes[missing]
            raise DataError(f"none of the images in {place} can be read. Replace them, or remove the class.")
    notes = () if test is not None else (_describe_hold_out(train, index["test"], found),)
    if images:
        in_memory = ((torch.stack([images[i] for i in part]), found[part]) for part in index.values())
        data = Data.from_tensors(str(folder), tuple(classes), next(in_memory), next(in_memory))
        return replace(data, notes=notes)
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.45,) * channels, (0.225,) * channels)
    whole = ImageFolder([str(paths[i]) for i in readable], found, shape, mean, std, resize)
    splits = (whole.subset(part) for part in index.values())
    parts = (next(splits), next(splits))
    return Data(str(folder), tuple(classes), *parts, "imagenet", notes, OF_IMAGENET, OF_IMAGENET)


def _split_folders(folder: Path) -> tuple[Path, Path | None]:
    """The folders of the training and of the test images; None where a part has to be held out."""
    found = [folder / name for name in ("val", "test", "validation", "valid") if (folder / name).is_dir()]
    if (folder / "train").is_dir():
        return folder / "train", found[0] if found else None
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    classes = [entry for entry in entries if entry.is_dir() and any(map(is_image, entry.iterdir()))]
    if found or len(classes) < 2:
        inside = ", ".join(entry.name for entry in entries[:5]) or "nothing"
        needed = "the folders train/ and val/ (or test/), each with one folder of images per class"
        raise DataError(f"{folder} needs {needed}, or such folders itself; it holds {inside}.")
    return folder, None


def _hold_out_of_each(labels: Tensor, classes: Sequence[str], folder: Path) -> tuple[Tensor, Tensor]:
    """Places of the training and of the test images, the same for every seed of a run."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label, name in enumerate(classes):
        places = (labels == label).nonzero()[:, 0]
        if len(places) < 2:
            raise DataError(
                f"{folder / name} holds fewer than two images, and there is no val/ or test/: one is needed "
                "for training and one for testing. Add images, or remove the class."
            )
        held[places[epoch_order(len(places), label, 0)[: held_out_size(len(places), HELD_OUT)]]] = True
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def _describe_hold_out(folder: Path, test: Tensor, labels: Tensor) -> str:
    counts = labels[test].bincount()
    few, many = int(counts.min()), int(counts.max())
    return (
        f"There is no val/ or test/ beside {folder}: {HELD_OUT:.0%} of each class ({len(test)} of "
        f"{len(labels)} images, {few if few == many else f'{few} to {many}'} per class) are held out for "
        "testing, the same ones in every run."
    )


def _common_size(paths: list[Path], image_size: int | None, default: int) -> tuple[int, int]:
    """The size asked for; else the common size of the images if they are small; else the default."""
    if image_size is not None:
        return image_size, image_size
    from PIL import Image

    sizes = set()
    for path in paths[:: max(1, len(paths) // 64)]:
        # A corrupt file is reported when all files are read.
        with contextlib.suppress(Exception), Image.open(path) as image:
            sizes.add((image.height, image.width))
    common = sizes.pop() if len(sizes) == 1 else (default, default)
    return common if max(common) <= IN_MEMORY_SIDE else (default, default)


def _mean_and_std(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, on a scale from 0 to 1, rounded to four digits."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(part.flatten(), minlength=256) for part in pixels.cpu().unbind(-1)])
    mean = (counts * levels).sum(1, keepdim=True) / counts.sum(1, keepdim=True)
    variance = (counts * (levels - mean) ** 2).sum(1) / counts.sum(1)
    std = variance.sqrt().clamp(min=1e-3)
    return tuple(round(x, 4) for x in mean[:, 0].tolist()), tuple(round(x, 4) for x in std.tolist())


def _convert(images: Tensor, channels: int, image_size: int | None) -> Tensor:
    """Convert images to this number of channels and this size. Gray ones may lack the axis of channels."""
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[-1] != channels:
        if images.shape[-1] != 1:
            images = images.float().mean(-1, keepdim=True).round().to(torch.uint8)
        images = images.expand(*images.shape[:-1], channels)
    if image_size is not None and images.shape[1:3] != (image_size, image_size):
        images = images.permute(0, 3, 1, 2).float()
        images = nn.functional.interpolate(images, (image_size, image_size), mode="bilinear", antialias=True)
        images = images.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    return images.contiguous()

"""Datasets by name, data of one's own, and the held-out part."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional

import peel
from helpers.images import images_of, write_folder
from helpers.small import CPU, Small, few_digits
from peel.data.augmentation import EVAL
from peel.data.datasets import hold_out, load_data
from peel.data.in_memory import InMemoryImages
from peel.errors import ConfigError, DataError
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")


def test_digits_are_complete_and_balanced_in_both_splits() -> None:
    data = load_data("digits")
    assert (data.train.size, data.test.size) == (1437, 360)
    assert data.classes == tuple("0123456789")
    assert data.shape == data.test.shape == (3, 8, 8)
    for split in (data.train, data.test):
        counts = torch.bincount(split.labels, minlength=10)
        assert counts.min() > 0.7 * split.size / 10
        assert counts.max() < 1.3 * split.size / 10


def test_digits_are_the_same_every_time_and_the_splits_are_disjoint() -> None:
    first, second = load_data("digits"), load_data("digits")
    assert isinstance(first.train, InMemoryImages)
    assert isinstance(first.test, InMemoryImages)
    for split in ("train", "test"):
        assert torch.equal(getattr(first, split).pixels, getattr(second, split).pixels)
        assert torch.equal(getattr(first, split).labels, getattr(second, split).labels)
    train = {image.numpy().tobytes() for image in first.train.pixels}
    test = {image.numpy().tobytes() for image in first.test.pixels}
    assert len(train) == 1437
    assert not train & test


def test_digits_equal_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    raw = datasets.load_digits()
    ours = load_data("digits", channels=1)
    stored = {
        (image.numpy().tobytes(), int(label))
        for s in (ours.train, ours.test)
        for image, label in zip(s.pixels, s.labels)
    }  # type: ignore[attr-defined]
    theirs = {
        (np.minimum(image * 16, 255).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(raw.images, raw.target)
    }
    assert stored == theirs


def test_gray_images_are_repeated_over_the_channels() -> None:
    gray, color = load_data("digits", channels=1).train, load_data("digits", channels=3).train
    assert gray.shape == (1, 8, 8)
    assert isinstance(gray, InMemoryImages)
    assert isinstance(color, InMemoryImages)
    assert torch.equal(color.pixels, gray.pixels.repeat(1, 1, 1, 3))


def test_normalized_training_images_have_zero_mean_and_unit_deviation() -> None:
    train = load_data("digits").train
    images = images_of(train, torch.arange(train.size), 500, EVAL)
    assert images.mean((0, 2, 3)).abs().max() < 1e-3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 1e-3


def test_image_size_resizes_the_images() -> None:
    small, large = load_data("digits").test, load_data("digits", image_size=16).test
    assert large.shape == (3, 16, 16)
    assert isinstance(small, InMemoryImages)
    assert isinstance(large, InMemoryImages)
    back = torch.nn.functional.avg_pool2d(large.pixels.permute(0, 3, 1, 2).float(), 2)
    original = small.pixels.permute(0, 3, 1, 2).float()
    # Bilinear resizing blurs a little.
    correlation = torch.corrcoef(torch.stack([back.flatten(), original.flatten()]))[0, 1]
    assert correlation > 0.95


@pytest.mark.parametrize("size", [0, -3, True, 8.5])
def test_a_wrong_image_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="image_size must be a whole number"):
        load_data("digits", image_size=size)


def write_fashion_mnist(root: Path, counts: dict[str, int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    written = {}
    for split, count in counts.items():
        generator = np.random.default_rng(count)
        images, labels = (
            generator.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            generator.integers(0, 10, count, dtype=np.uint8),
        )
        for name, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            content = (
                bytes([0, 0, 8, values.ndim])
                + struct.pack(f">{values.ndim}I", *values.shape)
                + values.tobytes()
            )
            (raw / f"{split}-{name}").write_bytes(content)
            (raw / f"{split}-{name}.gz").write_bytes(gzip.compress(content))
        written[split] = images, labels
    return written


def test_fashion_mnist_is_read_from_the_files_that_torchvision_keeps(tmp_path: Path) -> None:
    written = write_fashion_mnist(tmp_path, {"train": 30, "t10k": 12})
    data = load_data("fashion-mnist", root=tmp_path)
    assert (data.train.size, data.test.size, data.shape, len(data.classes)) == (30, 12, (3, 28, 28), 10)
    assert "Sneaker" in data.classes
    for split, name in ((data.train, "train"), (data.test, "t10k")):
        assert isinstance(split, InMemoryImages)
        assert np.array_equal(split.pixels[..., 1].numpy(), written[name][0])
        assert np.array_equal(split.labels.numpy(), written[name][1])


def test_a_failed_download_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"cifar10 is not in .*file/data.*--data-root"):
        load_data("cifar10", root=tmp_path / "file" / "data")


@pytest.mark.parametrize(("crop", "side", "edge"), [((224, 256), 224, 256), ((160, 200), 160, 200)])
def test_large_images_are_cropped_as_asked(
    crop: tuple[int, int], side: int, edge: int, tmp_path: Path
) -> None:
    data = load_data(str(write_folder(tmp_path, size=(300, 340), count=1)), crop=crop)
    assert data.shape == (3, side, side)
    image = images_of(data.test, torch.arange(1), 1, EVAL)[0]
    pixels = torch.from_numpy(np.array(Image.open(tmp_path / "val" / "cat" / "0.png"))).permute(2, 0, 1)
    resized = functional.center_crop(functional.resize(pixels, [edge], antialias=True), [side, side])
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.test.mean, data.test.std))
    assert torch.allclose(image * std + mean, resized / 255, atol=1e-5)
    assert data.input_spec().get("resize") == (None if crop == (224, 256) else edge)


def test_data_from_tensors_is_normalized_by_the_training_images_and_can_be_trained_on() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (80, 8, 8, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (80,), generator=generator)
    data = peel.Data.from_tensors(
        "noise", tuple("abcdefghij"), train=(images, labels), test=(images // 2, labels.to(torch.int32))
    )
    assert torch.allclose(torch.tensor(data.train.mean), images.float().mean((0, 1, 2)) / 255, atol=1e-4)
    assert data.test.mean == data.train.mean
    assert data.input_spec() == {
        "classes": list("abcdefghij"),
        "shape": [3, 8, 8],
        "mean": list(data.train.mean),
        "std": list(data.train.std),
    }
    recipe = Recipe(epochs=1, batch_size=16, augment=data.augment)
    assert len(fit(Small(), CrossEntropy(), data.train, recipe, engine=CPU, seed=0, test=data.test)) == 1


@pytest.mark.parametrize("images", [torch.zeros(4, 8, 8, 3), torch.zeros(4, 8, 8, dtype=torch.uint8)])
def test_data_from_other_tensors_is_refused(images: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"the images of noise are .* they must be uint8"):
        peel.Data.from_tensors("noise", ("a",), (images, torch.zeros(4)), (images, torch.zeros(4)))


WITHOUT_TORCHVISION = """
import sys
sys.modules["torchvision"] = None
import torch, peel
data = peel.load_data("digits")
view = peel.data.augmentation.View("crop-flip")
assert len(list(data.train.batches(torch.arange(8), 4, view, torch.device("cpu")))) == 2
for name in ("cifar10", sys.argv[1]):
    try:
        peel.load_data(name)
    except peel.PeelError as error:
        print(error)
"""


def test_only_folders_and_downloads_need_torchvision(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHVISION, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stderr
    for name, line in zip(("cifar10", str(tmp_path)), lines):
        assert line == f"the data {name} needs torchvision: pip install peel-pruning[vision]"


def test_a_share_of_each_class_is_held_out() -> None:
    labels = torch.arange(100).repeat_interleave(20)
    split = InMemoryImages(torch.zeros(2000, 1, 1, 1, dtype=torch.uint8), labels, (0.5,), (0.5,))
    for seed in range(5):
        rest, held = hold_out(split, 0.1, seed)
        assert (rest.size, held.size) == (1800, 200)
        assert held.labels.bincount(minlength=100).min() >= 1


def test_held_out_images_are_not_trained_on() -> None:
    data = few_digits()
    rest, held = hold_out(data.train, 0.1, seed=3)
    assert (rest.size, held.size) == (180, 20)

    def content(split: Any) -> Counter[bytes]:
        return Counter(image.numpy().tobytes() for image in split.pixels)

    assert not content(rest) & content(held)
    assert content(rest) + content(held) == content(data.train)
    assert (
        content(hold_out(data.train, 0.1, seed=3)[1])
        == content(held)
        != content(hold_out(data.train, 0.1, seed=4)[1])
    )
    labels = {
        image.numpy().tobytes(): int(label) for image, label in zip(data.train.pixels, data.train.labels)
    }  # type: ignore[attr-defined]
    assert [labels[image.numpy().tobytes()] for image in held.pixels] == held.labels.tolist()

"""Images and labels: which ones, how they are seen, and that the view depends on nothing but (seed, epoch, index)."""

from __future__ import annotations

import gzip
import itertools
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from helpers.small import CPU, Small, few_digits
from peel.data import image_folder as folder_module
from peel.data.crops import crop_windows, draw_windows
from peel.data.datasets import Data, Split, hold_out, load_data
from peel.data.image_folder import ImageFolder, Paths, decode, fingerprint_of
from peel.data.in_memory import InMemoryImages
from peel.data.view import EVAL, View
from peel.errors import ConfigError, DataError
from peel.train.loop import evaluate
from peel.utils.rng import epoch_order, uniform

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = torch.device("cpu")


def images_of(split: Split, order: Tensor, batch_size: int, view: View, workers: int = 0) -> Tensor:
    return torch.cat([images for images, *_ in split.batches(order, batch_size, view, DEVICE, workers)])


def noise(height: int, width: int, seed: int, channels: int = 3) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def write_folder(
    root: Path,
    *,
    size: tuple[int, int] = (12, 10),
    classes: tuple[str, ...] = ("cat", "dog"),
    count: int = 4,
    test: str = "val",
) -> Path:
    """`count` PNG files of noise per class and split."""
    seeds = itertools.count()
    for split, name in itertools.product(("train", test), classes):
        (root / split / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(noise(*size, next(seeds))).save(root / split / name / f"{i}.png")
    return root


# Digits


def test_digits_are_all_there_and_balanced_in_both_splits() -> None:
    data = load_data("digits")
    assert (data.train.size, data.test.size) == (1437, 360)
    assert data.classes == tuple("0123456789")
    assert data.shape == data.test.shape == (3, 8, 8)
    for split in (data.train, data.test):
        counts = torch.bincount(split.labels, minlength=10)
        assert counts.min() > 0.7 * split.size / 10
        assert counts.max() < 1.3 * split.size / 10


def test_digits_are_the_same_every_time_and_no_image_is_in_both_splits() -> None:
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


def test_digits_are_the_ones_of_scikit_learn() -> None:
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


def test_grey_images_are_repeated_over_the_channels_that_the_network_reads() -> None:
    grey, colour = load_data("digits", channels=1).train, load_data("digits", channels=3).train
    assert grey.shape == (1, 8, 8)
    assert isinstance(grey, InMemoryImages)
    assert isinstance(colour, InMemoryImages)
    assert torch.equal(colour.pixels, grey.pixels.repeat(1, 1, 1, 3))


def test_normalised_training_images_have_zero_mean_and_unit_deviation() -> None:
    train = load_data("digits").train
    images = images_of(train, torch.arange(train.size), 500, EVAL)
    assert images.mean((0, 2, 3)).abs().max() < 1e-3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 1e-3


def test_image_size_resizes_and_keeps_the_picture() -> None:
    small, large = load_data("digits").test, load_data("digits", image_size=16).test
    assert large.shape == (3, 16, 16)
    assert isinstance(small, InMemoryImages)
    assert isinstance(large, InMemoryImages)
    back = torch.nn.functional.avg_pool2d(large.pixels.permute(0, 3, 1, 2).float(), 2)
    original = small.pixels.permute(0, 3, 1, 2).float()
    # Bilinear resizing blurs a little, but the picture stays in its place.
    correlation = torch.corrcoef(torch.stack([back.flatten(), original.flatten()]))[0, 1]
    assert correlation > 0.95


@pytest.mark.parametrize("size", [0, -3, True, 8.5])
def test_a_wrong_image_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="image_size must be a whole number"):
        load_data("digits", image_size=size)


# Sets of torchvision, from files as it keeps them


def write_fashion_mnist(root: Path, counts: dict[str, int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    written = {}
    for split, count in counts.items():
        chance = np.random.default_rng(count)
        images, labels = (
            chance.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            chance.integers(0, 10, count, dtype=np.uint8),
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


def test_a_set_that_cannot_be_downloaded_says_where_it_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"cifar10 is not in .*file/data.*--data-root"):
        load_data("cifar10", root=tmp_path / "file" / "data")


# Folders


def test_a_folder_of_small_images_of_one_size_becomes_resident_pixel_by_pixel(tmp_path: Path) -> None:
    data = load_data(str(write_folder(tmp_path)))
    assert data.classes == ("cat", "dog")
    assert data.shape == (3, 12, 10)
    assert isinstance(data.train, InMemoryImages)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(
        data.train.pixels[5].numpy(), np.array(Image.open(tmp_path / "train" / "dog" / "1.png"))
    )


@pytest.mark.parametrize("name", ["val", "test", "validation", "valid"])
def test_the_evaluation_split_may_have_any_of_its_usual_names(name: str, tmp_path: Path) -> None:
    assert load_data(str(write_folder(tmp_path, test=name))).test.size == 8


def test_a_folder_of_large_images_is_streamed_at_224_or_at_the_size_asked_for(tmp_path: Path) -> None:
    write_folder(tmp_path, size=(130, 150), count=1)
    data = load_data(str(tmp_path))
    assert isinstance(data.train, ImageFolder)
    assert data.shape == (3, 224, 224)
    assert data.augment == "imagenet"
    smaller = load_data(str(tmp_path), image_size=100)
    assert isinstance(smaller.train, ImageFolder)
    assert images_of(smaller.train, torch.arange(2), 2, EVAL).shape == (2, 3, 100, 100)
    small = load_data(str(tmp_path), image_size=32)
    assert isinstance(small.train, InMemoryImages)
    assert small.shape == (3, 32, 32)


def test_images_of_different_sizes_are_streamed(tmp_path: Path) -> None:
    write_folder(tmp_path)
    Image.fromarray(noise(20, 20, 5)).save(tmp_path / "train" / "cat" / "0.png")
    assert load_data(str(tmp_path)).shape == (3, 224, 224)


def test_a_streamed_image_is_normalised_as_imagenet_and_seen_through_its_centre(tmp_path: Path) -> None:
    write_folder(tmp_path, size=(130, 150), count=1)
    split = load_data(str(tmp_path), image_size=100).test
    seen = images_of(split, torch.arange(2), 2, EVAL)
    reference = v2.Compose(
        [
            v2.PILToTensor(), v2.Resize(114, antialias=True), v2.CenterCrop(100), v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )  # fmt: skip
    for i, name in enumerate(("cat", "dog")):
        expected = reference(Image.open(tmp_path / "val" / name / "0.png"))
        assert torch.allclose(seen[i], expected, atol=1e-4)


def _palette(path: Path) -> None:
    Image.fromarray(noise(12, 10, 1)).convert("P").save(path)


def _transparent_palette(path: Path) -> None:
    Image.fromarray(noise(12, 10, 1)).convert("P").save(path, transparency=bytes(range(256)))


def _sixteen_bit(path: Path) -> None:
    Image.fromarray((noise(12, 10, 1, 1).astype(np.uint16) << 8) + 255).save(path)


MODES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "grey": ("png", lambda path: Image.fromarray(noise(12, 10, 1, 1)).save(path)),
    "grey jpeg": ("jpg", lambda path: Image.fromarray(noise(12, 10, 1, 1)).save(path, quality=95)),
    "cmyk jpeg": (
        "jpg",
        lambda path: Image.fromarray(noise(12, 10, 1)).convert("CMYK").save(path, quality=95),
    ),
    "rgba": (
        "png",
        lambda path: Image.fromarray(np.dstack([noise(12, 10, 1), noise(12, 10, 2, 1)])).save(path),
    ),
    "grey with alpha": ("png", lambda path: Image.fromarray(noise(12, 10, 1)).convert("LA").save(path)),
    "palette": ("png", _palette),
    "transparent palette": ("png", _transparent_palette),
    "gif": ("gif", lambda path: Image.fromarray(noise(12, 10, 1)).convert("P").save(path)),
    "16 bit": ("png", _sixteen_bit),
    "one bit": ("png", lambda path: Image.fromarray(noise(12, 10, 1, 1) > 127).save(path)),
    "bmp in capitals": ("BMP", lambda path: Image.fromarray(noise(12, 10, 1)).save(path)),
    "png called jpg": ("jpg", lambda path: Image.fromarray(noise(12, 10, 1)).save(path, format="png")),
}


@pytest.mark.parametrize("mode", MODES)
def test_images_of_every_mode_become_three_channels_of_the_right_picture(mode: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    suffix, write = MODES[mode]
    path = tmp_path / "train" / "cat" / f"0a.{suffix}"
    write(path)
    split = load_data(str(tmp_path)).train
    assert isinstance(split, InMemoryImages)
    assert split.size == 9
    with Image.open(path) as image:
        expected = noise(12, 10, 1, 1) if mode == "16 bit" else np.array(image.convert("RGBA").convert("RGB"))
    expected = expected if expected.ndim == 3 else expected[..., None].repeat(3, 2)
    assert np.abs(split.pixels[1].numpy().astype(int) - expected).mean() < 2
    assert decode(path, 1).shape == (1, 12, 10)


def test_sixteen_bits_are_scaled_alike_in_dark_images_and_bright_ones(tmp_path: Path) -> None:
    for value, expected in ((200, 0), (256, 0), (0x8000, 0x7F), (0xFFFF, 0xFF)):
        Image.fromarray(np.full((4, 4), value, np.uint16)).save(tmp_path / "grey.png")
        assert decode(tmp_path / "grey.png", 1).unique().tolist() == [expected]


# The crop


@pytest.mark.parametrize("augment", ["crop", "crop-flip"])
def test_resident_crops_are_those_of_torchvision_and_as_frequent(augment: str) -> None:
    size, draws = 8, 9_000
    image = torch.arange(1, size * size + 1, dtype=torch.uint8).reshape(size, size, 1)
    padded = torch.nn.functional.pad(image.permute(2, 0, 1), [1, 1, 1, 1])
    windows = [padded[:, top : top + size, left : left + size] for top in range(3) for left in range(3)]
    possible = windows + ([window.flip(2) for window in windows] if augment == "crop-flip" else [])
    keys = {window.numpy().tobytes(): i for i, window in enumerate(possible)}
    ours: Counter[int] = Counter()
    for epoch in range(3):
        index = torch.arange(draws // 3)
        seen = crop_windows(
            draw_windows(index, View.of_epoch(augment, 0, epoch), size),
            image.expand(len(index), size, size, 1),
        ).permute(0, 3, 1, 2)
        ours.update(keys[window.contiguous().numpy().tobytes()] for window in seen)
    transforms = v2.Compose(
        [v2.RandomCrop(size, padding=1), *([v2.RandomHorizontalFlip()] if augment == "crop-flip" else [])]
    )
    torch.manual_seed(0)
    theirs = {keys[transforms(image.permute(2, 0, 1)).numpy().tobytes()] for _ in range(300)}
    assert set(ours) == theirs == set(range(len(possible)))
    expected = draws / len(possible)
    chi_square = sum((ours[i] - expected) ** 2 / expected for i in range(len(possible)))
    # The 99.99 % quantiles of chi-square with 8 and 17 degrees of freedom.
    assert chi_square < (31.8 if augment == "crop" else 46.0)


def test_random_numbers_of_neighbouring_images_and_draws_are_not_related() -> None:
    drawn = uniform(torch.arange(20_000), 123, 3)
    assert ((drawn >= 0) & (drawn < 1)).all()
    for first, second in [
        (drawn[:, 0], drawn[:, 1]),
        (drawn[:, 1], drawn[:, 2]),
        (drawn[:-1, 0], drawn[1:, 0]),
        (drawn[:-1, 2], drawn[1:, 0]),
    ]:
        assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.03
    assert (drawn.mean(0) - 0.5).abs().max() < 0.01
    assert (
        torch.corrcoef(torch.stack([drawn[:, 0], uniform(torch.arange(20_000), 124, 3)[:, 0]]))[0, 1].abs()
        < 0.03
    )


# What a view depends on


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    split = load_data(
        str(write_folder(tmp_path_factory.mktemp("streamed"), size=(130, 150), count=5)), image_size=100
    ).train
    assert isinstance(split, ImageFolder)
    return split


def test_of_many_files_those_looked_into_lie_all_over_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / os.fsdecode(b"\xff%d.bmp" % number) for number in range(25)]
    for path in paths:
        path.write_text("before")
    monkeypatch.setattr(folder_module, "LOOKED_INTO", 10)
    whole, noticed = fingerprint_of(Paths(paths)), []
    for number, path in enumerate(paths):
        path.write_text("behind")
        if fingerprint_of(Paths(paths)) != whole:
            noticed.append(number)
        path.write_text("before")
    assert noticed == list(range(0, 25, 3))
    paths[1].write_text("longer than before")
    assert fingerprint_of(Paths(paths)) != whole, "sizes are looked at everywhere"


def seen_by_index(
    split: Split, order: Tensor, batch_size: int, view: View, workers: int = 0
) -> dict[int, Tensor]:
    return dict(zip(order.tolist(), images_of(split, order, batch_size, view, workers)))


@pytest.mark.parametrize("augment", ["crop-flip", "imagenet"])
@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_a_view_depends_on_seed_epoch_and_index_alone(augment: str, kind: str, streamed: ImageFolder) -> None:
    split: Split = few_digits().train.subset(torch.arange(10)) if kind == "resident" else streamed
    view = View.of_epoch(augment, 3, 5)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = seen_by_index(split, torch.arange(10), 10, view)
    again = seen_by_index(split, epoch_order(10, 0, 0), 3, view)
    assert torch.equal(torch.get_rng_state(), state), (
        "drawing images must leave the random numbers of the network alone"
    )
    later = seen_by_index(split, torch.tensor([7, 2]), 1, view)
    for other in (
        again,
        later,
        *([seen_by_index(split, torch.arange(10).flip(0), 4, view, workers=2)] if kind == "streamed" else []),
    ):
        assert all(torch.equal(first[i], image) for i, image in other.items())
    for changed in (View.of_epoch(augment, 3, 6), View.of_epoch(augment, 4, 5)):
        different = seen_by_index(split, torch.arange(10), 10, changed)
        assert sum(not torch.equal(first[i], different[i]) for i in first) >= 7


def test_two_images_of_an_epoch_get_views_of_their_own() -> None:
    digits = few_digits().train
    assert isinstance(digits, InMemoryImages)
    same = InMemoryImages(digits.pixels[:1].repeat(12, 1, 1, 1), digits.labels[:12], digits.mean, digits.std)
    for augment in ("crop", "imagenet"):
        seen = images_of(same, torch.arange(12), 12, View.of_epoch(augment, 0, 0))
        assert len({image.contiguous().numpy().tobytes() for image in seen}) > 4


def test_the_order_of_an_epoch_visits_every_image_once_and_changes_with_seed_and_epoch() -> None:
    orders = [epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(order.sort().values.tolist() == list(range(50)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert torch.equal(epoch_order(50, 1, 1), orders[3])


# Evaluation and the held-out part


@pytest.mark.parametrize("batch_size", [1, 7, 90, 1000])
def test_evaluation_counts_each_image_once(batch_size: int) -> None:
    test = few_digits().test
    torch.manual_seed(0)
    model = Small().eval()
    with torch.no_grad():
        scores = model(images_of(test, torch.arange(test.size), 1000, EVAL))
    result = evaluate(model, test, CPU, batch_size)
    assert result.top1 == (scores.argmax(1) == test.labels).sum().item() / 90
    assert result.loss == pytest.approx(
        torch.nn.functional.cross_entropy(scores, test.labels).item(), rel=1e-5
    )


def test_what_is_held_out_is_not_trained_on() -> None:
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
    assert [labels[image.numpy().tobytes()] for image in held.pixels] == held.labels.tolist()  # type: ignore[attr-defined]


def test_holding_everything_out_is_refused() -> None:
    with pytest.raises(DataError, match="cannot hold 200 of 200"):
        hold_out(few_digits().train, 1.0, seed=0)


def test_data_of_ones_own_goes_through_a_run_as_it_is() -> None:
    data = few_digits()
    moved = data.to(DEVICE)
    assert isinstance(moved, Data)
    assert moved.train.size == 200

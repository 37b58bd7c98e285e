"""Folders of images: finding, decoding and checking the files, and the images that training gets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from helpers.images import images_of, noise, write_folder
from helpers.small import few_digits
from peel.data.augmentation import EVAL, View
from peel.data.datasets import Split, load_data
from peel.data.image_folder import ImageFolder, decode, fingerprint_of
from peel.data.in_memory import InMemoryImages
from peel.errors import DataError
from peel.utils.rng import epoch_order

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    split = load_data(
        str(write_folder(tmp_path_factory.mktemp("streamed"), size=(130, 150), count=5)), image_size=100
    ).train
    assert isinstance(split, ImageFolder)
    return split


def test_a_folder_of_small_images_of_one_size_is_kept_in_memory(tmp_path: Path) -> None:
    data = load_data(str(write_folder(tmp_path)))
    assert data.classes == ("cat", "dog")
    assert data.shape == (3, 12, 10)
    assert isinstance(data.train, InMemoryImages)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(
        data.train.pixels[5].numpy(), np.array(Image.open(tmp_path / "train" / "dog" / "1.png"))
    )


@pytest.mark.parametrize("name", ["val", "test", "validation", "valid"])
def test_the_test_split_may_have_any_of_its_usual_names(name: str, tmp_path: Path) -> None:
    assert load_data(str(write_folder(tmp_path, test=name))).test.size == 8


def test_a_folder_of_large_images_is_streamed_at_224_or_at_image_size(tmp_path: Path) -> None:
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
    notes = [one.normalization_notes(is_trained=False)[0] for one in (data, small)]
    assert [note.partition("(")[2] for note in notes] == ["of ImageNet).", "of the training images)."]


def test_images_of_different_sizes_are_streamed(tmp_path: Path) -> None:
    write_folder(tmp_path)
    Image.fromarray(noise(20, 20, 5)).save(tmp_path / "train" / "cat" / "0.png")
    assert load_data(str(tmp_path)).shape == (3, 224, 224)


def test_a_streamed_image_is_center_cropped_and_normalized_as_for_imagenet(tmp_path: Path) -> None:
    write_folder(tmp_path, size=(130, 150), count=1)
    split = load_data(str(tmp_path), image_size=100).test
    seen = images_of(split, torch.arange(2), 2, EVAL)
    reference = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(114, antialias=True),
            v2.CenterCrop(100),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
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
    "gray": ("png", lambda path: Image.fromarray(noise(12, 10, 1, 1)).save(path)),
    "gray jpeg": ("jpg", lambda path: Image.fromarray(noise(12, 10, 1, 1)).save(path, quality=95)),
    "cmyk jpeg": (
        "jpg",
        lambda path: Image.fromarray(noise(12, 10, 1)).convert("CMYK").save(path, quality=95),
    ),
    "rgba": (
        "png",
        lambda path: Image.fromarray(np.dstack([noise(12, 10, 1), noise(12, 10, 2, 1)])).save(path),
    ),
    "gray with alpha": ("png", lambda path: Image.fromarray(noise(12, 10, 1)).convert("LA").save(path)),
    "palette": ("png", _palette),
    "transparent palette": ("png", _transparent_palette),
    "gif": ("gif", lambda path: Image.fromarray(noise(12, 10, 1)).convert("P").save(path)),
    "16 bit": ("png", _sixteen_bit),
    "one bit": ("png", lambda path: Image.fromarray(noise(12, 10, 1, 1) > 127).save(path)),
    "bmp in capitals": ("BMP", lambda path: Image.fromarray(noise(12, 10, 1)).save(path)),
    "png called jpg": ("jpg", lambda path: Image.fromarray(noise(12, 10, 1)).save(path, format="png")),
}


@pytest.mark.parametrize("mode", MODES)
def test_images_of_every_mode_become_rgb(mode: str, tmp_path: Path) -> None:
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


def test_sixteen_bit_images_have_one_scale(tmp_path: Path) -> None:
    for value, expected in ((200, 0), (256, 0), (0x8000, 0x7F), (0xFFFF, 0xFF)):
        Image.fromarray(np.full((4, 4), value, np.uint16)).save(tmp_path / "gray.png")
        assert decode(tmp_path / "gray.png", 1).unique().tolist() == [expected]


def test_float_images_are_scaled_by_the_smallest_white_that_fits(tmp_path: Path) -> None:
    for maximum, white in ((1.0, 1), (200.0, 255), (3000.0, 65535)):
        Image.fromarray(np.full((4, 4), maximum, np.float32)).save(tmp_path / "gray.tiff")
        assert decode(tmp_path / "gray.tiff", 1).unique().tolist() == [int(maximum / white * 255)]


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_other_numbers_of_channels_repeat_the_gray_image(channels: int, streamed: ImageFolder) -> None:
    other = ImageFolder(
        streamed.paths, streamed.labels, (channels, 32, 32), (0.5,) * channels, (0.2,) * channels
    )
    images = images_of(other, torch.arange(10), 10, EVAL)
    assert images.shape == (10, channels, 32, 32)
    assert (images == images[:, :1]).all()


def test_the_fingerprint_covers_all_names_and_sizes(tmp_path: Path) -> None:
    paths = [tmp_path / os.fsdecode(b"\xff%d.bmp" % number) for number in range(25)]
    for path in paths:
        path.write_text("before")
    whole = fingerprint_of([str(path) for path in paths])
    paths[1].write_text("longer than before")
    assert fingerprint_of([str(path) for path in paths]) != whole
    paths[1].write_text("before")
    assert fingerprint_of([str(path) for path in paths]) == whole
    renamed = paths[1].rename(tmp_path / "other.bmp")
    assert fingerprint_of([str(path) for path in [paths[0], renamed, *paths[2:]]]) != whole


def seen_by_index(
    split: Split, order: Tensor, batch_size: int, view: View, workers: int = 0
) -> dict[int, Tensor]:
    return dict(zip(order.tolist(), images_of(split, order, batch_size, view, workers)))


@pytest.mark.parametrize("augment", ["crop-flip", "imagenet"])
@pytest.mark.parametrize("kind", ["in memory", "streamed"])
def test_augmentation_depends_only_on_seed_epoch_and_index(
    augment: str, kind: str, streamed: ImageFolder
) -> None:
    split: Split = few_digits().train.subset(torch.arange(10)) if kind == "in memory" else streamed
    view = View.of_epoch(augment, 3, 5)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = seen_by_index(split, torch.arange(10), 10, view)
    again = seen_by_index(split, epoch_order(10, 0, 0), 3, view)
    assert torch.equal(torch.get_rng_state(), state), "the global generator belongs to the network"
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_disappears_is_named(workers: int, tmp_path: Path) -> None:
    split = load_data(str(write_folder(tmp_path, size=(130, 150))), image_size=100).train
    (tmp_path / "train" / "cat" / "2.png").unlink()
    with pytest.raises(
        DataError, match=r"cat/2\.png was readable before training, but is not any more: FileNotFoundError"
    ):
        images_of(split, torch.arange(8), 8, EVAL, workers)


def test_unusual_file_names_are_read(tmp_path: Path) -> None:
    write_folder(tmp_path, size=(130, 150), count=1)
    for name in ("a b", "ä", os.fsdecode(b"\xff\xfe")):
        shutil.copy(tmp_path / "train" / "cat" / "0.png", tmp_path / "train" / "cat" / f"{name}.png")
    split = load_data(str(tmp_path), image_size=100).train
    images = images_of(split, torch.arange(4), 4, EVAL, workers=1)
    assert all(torch.equal(image, images[0]) for image in images)


# Folders without val/


@pytest.mark.parametrize("layout", ["train", "."])
@pytest.mark.parametrize("size", [(12, 10), (120, 100)])
def test_a_tenth_of_each_class_is_held_out(tmp_path: Path, layout: str, size: tuple[int, int]) -> None:
    write_folder(tmp_path / "whole", size=size, count=20)
    folder = tmp_path / "data"
    shutil.copytree(tmp_path / "whole" / "train", folder / layout)
    for unequal in range(14):
        (folder / layout / "dog" / f"{unequal}.png").unlink()
    data, again = load_data(str(folder)), load_data(str(folder))
    assert (data.train.size, data.test.size) == (23, 3)
    assert data.test.labels is not None
    assert data.test.labels.bincount().tolist() == [2, 1]
    (note,) = data.notes
    assert "10% of each class (3 of 26 images, 1 to 2 per class) are held out" in note
    parts = [
        images_of(part, torch.arange(part.size), 8, EVAL) for part in (data.train, data.test, again.test)
    ]
    assert torch.equal(parts[1], parts[2])
    assert len(torch.cat(parts[:2]).flatten(1).unique(dim=0)) == 26
    assert load_data(str(tmp_path / "whole")).notes == ()


def test_a_folder_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, count=2)
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "train" / "dog" / "0.png").unlink()
    with pytest.raises(DataError, match=r"dog holds fewer than two images, and there is no val/"):
        load_data(str(tmp_path))
    (tmp_path / "train").rename(tmp_path / "val")
    with pytest.raises(DataError, match=r"needs the folders train/ and val/ .* it holds val"):
        load_data(str(tmp_path))

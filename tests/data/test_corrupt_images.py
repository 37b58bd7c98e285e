"""Corrupt image files: named all at once, or left out on request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from peel.data.datasets import load_data
from peel.errors import DataError

#: Small images are kept in memory, large ones are read during training.
SIZE = {"small": (12, 10), "large": (120, 110)}


def write_image(path: Path, size: tuple[int, int], seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)


def write_set(root: Path, size: tuple[int, int] = SIZE["small"], count: int = 6) -> None:
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            for i in range(count):
                write_image(root / split / name / f"{i}.png", size, 10 * label + i)


def corrupt(root: Path) -> list[str]:
    """Add five kinds of corrupt files to both splits; their names."""
    truncated = root / "train" / "cat" / "cut.jpg"
    write_image(truncated, SIZE["large"])
    truncated.write_bytes(truncated.read_bytes()[:2000])
    (root / "train" / "dog" / "empty.png").write_bytes(b"")
    (root / "val" / "cat" / "text.jpg").write_text("this is no image")
    half = root / "val" / "dog" / "half.png"
    half.write_bytes((root / "val" / "dog" / "0.png").read_bytes()[:-200])
    (root / "val" / "dog" / "away.png").symlink_to(root / "nowhere.png")
    names = "train/cat/cut.jpg train/dog/empty.png val/cat/text.jpg val/dog/half.png val/dog/away.png"
    return names.split()


@pytest.mark.parametrize("size", SIZE)
def test_corrupt_images_of_both_splits_are_named_at_once_and_left_out_on_request(
    size: str, tmp_path: Path
) -> None:
    write_set(tmp_path, SIZE[size])
    names = corrupt(tmp_path)
    with pytest.raises(DataError, match=r"5 of 29 images cannot be read") as caught:
        load_data(str(tmp_path))
    assert all(name in str(caught.value) for name in names)
    left = load_data(str(tmp_path), skip_corrupt=True)
    assert (left.train.size, left.test.size) == (12, 12)
    assert left.train.labels.tolist() == [0] * 6 + [1] * 6


def test_folders_and_hidden_files_are_not_images(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train" / "cat" / "folder.png").mkdir()
    write_image(tmp_path / "train" / "cat" / ".ipynb_checkpoints" / "0-checkpoint.png", SIZE["small"])
    assert load_data(str(tmp_path)).train.size == 12


@pytest.mark.parametrize("size", SIZE)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_without_a_readable_image_is_an_error(split: str, size: str, tmp_path: Path) -> None:
    write_set(tmp_path, SIZE[size])
    for path in (tmp_path / split / "cat").iterdir():
        path.write_text("broken")
    with pytest.raises(DataError, match=rf"{split}/cat"):
        load_data(str(tmp_path), skip_corrupt=True)


def test_of_many_corrupt_images_the_first_are_named(tmp_path: Path) -> None:
    write_set(tmp_path, count=20)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_text("broken")
    with pytest.raises(DataError, match=r"40 of 80 images cannot be read(.|\n)*and 20 more"):
        load_data(str(tmp_path))

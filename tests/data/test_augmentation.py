"""Augmentation: the same on CPU and GPU, and distributed as by torchvision."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as reference

from helpers.images import images_of
from helpers.small import few_digits
from peel.data.augmentation import (
    View,
    color_jitter_and_flip,
    count_windows,
    crop_windows,
    draw_color_jitter,
    draw_crop,
    draw_windows,
    padding_of,
    random_resized_crop,
)
from peel.data.in_memory import InMemoryImages

CROPS = """
import torch
from peel.data.augmentation import View, border_color, crop_windows, draw_windows
from peel.data.crop_kernel import fused_crop
generator = torch.Generator().manual_seed(0)
for height, width, channels in ((8, 8, 1), (32, 32, 3), (12, 20, 3)):
    pixels = torch.randint(0, 256, (50, height, width, channels), dtype=torch.uint8, generator=generator)
    index = torch.randperm(50, generator=generator)[:20]
    mean = torch.rand(channels, generator=generator) * 255
    scale = torch.rand(channels, generator=generator) / 50
    for augment in ("none", "crop", "crop-flip"):
        for seed in (0, 1, 2**62 + 12345):
            view = View(augment, seed)
            border = border_color(view, mean)
            cropped = crop_windows(draw_windows(index, view, height), pixels[index], border)
            found = fused_crop(pixels, index, view, mean, scale, border)
            assert torch.equal(found, (cropped - mean) * scale), view
print("equal crops")
"""

COLORS = """
import torch
from peel.data.augmentation import color_jitter_and_flip, draw_color_jitter
from peel.data.color_kernel import fused_color_jitter
generator = torch.Generator().manual_seed(0)
mean, scale = torch.rand(3, generator=generator) * 255, torch.rand(3, generator=generator)
for height, width in ((40, 40), (33, 64)):
    images = torch.randint(0, 256, (30, height, width, 3), dtype=torch.uint8, generator=generator)
    images[0, :5] = 100  # gray has no hue
    index = torch.randperm(1000, generator=generator)[:30]
    changes = draw_color_jitter(index, 7)
    assert len(changes.order.unique(dim=0)) > 15 and 5 < changes.flipped.sum() < 25
    made = fused_color_jitter(images, changes, mean, scale) / scale + mean
    # A value halfway between two levels may be rounded to either.
    gap = (made - color_jitter_and_flip(images.permute(0, 3, 1, 2), index, 7).permute(0, 2, 3, 1)).abs()
    assert gap.max() < 1.01 and (gap > 0.01).float().mean() < 1e-3, (gap.max(), gap.mean())
print("equal colors")
"""


@pytest.mark.slow
def test_the_kernels_agree_with_the_cpu() -> None:
    """In Triton's interpreter; test_gpu.py does it on a GPU."""
    pytest.importorskip("triton")
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", CROPS + COLORS], env=variables, capture_output=True, text=True, check=False
    )
    assert result.stdout.split("\n")[:-1] == ["equal crops", "equal colors"], result.stderr


def test_the_drawn_changes_are_made_in_the_drawn_order() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (200, 3, 20, 30), dtype=torch.uint8, generator=generator)
    images[0, :, :5] = 100  # gray has no hue
    index = torch.arange(200)
    jitter = draw_color_jitter(index, 5)
    assert {tuple(order) for order in jitter.order.tolist()} == set(itertools.permutations(range(4)))
    adjust = [
        reference.adjust_brightness,
        reference.adjust_contrast,
        reference.adjust_saturation,
        reference.adjust_hue,
    ]
    for image, seen, strengths, order, is_flipped in zip(
        images, color_jitter_and_flip(images, index, 5), *(part.tolist() for part in jitter), strict=True
    ):
        expected = image / 255
        for kind in order:
            expected = adjust[kind](expected, strengths[kind])
        expected = expected.flip(2) if is_flipped else expected
        assert torch.allclose(seen, expected * 255, atol=0.51), order


def test_color_jitter_and_flip_depend_only_on_seed_and_index() -> None:
    images = torch.randint(
        0, 256, (80, 3, 10, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    index = torch.arange(80) * 7
    whole = color_jitter_and_flip(images, index, 5)
    order = torch.randperm(80)
    assert torch.equal(color_jitter_and_flip(images[order], index[order], 5), whole[order])
    assert torch.equal(color_jitter_and_flip(images[3:4], index[3:4], 5), whole[3:4])
    assert not torch.equal(color_jitter_and_flip(images, index, 6), whole)
    assert torch.equal(whole, whole.round().clamp(0, 255))


def test_color_jitter_does_not_depend_on_the_number_of_threads() -> None:
    images = torch.randint(
        0, 256, (8, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    before = torch.get_num_threads()
    try:
        seen = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(
                torch.cat([color_jitter_and_flip(images[i : i + 1], torch.tensor([i]), 5) for i in range(8)])
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_half_of_the_images_are_flipped_and_gray_ones_keep_their_values() -> None:
    ramp = torch.arange(10, dtype=torch.uint8).expand(4000, 1, 3, 10)
    seen = color_jitter_and_flip(ramp, torch.arange(4000), 1)
    flipped = seen[:, 0, 0, 0] == 9
    assert (seen[~flipped] == ramp[~flipped]).all()
    assert (seen[flipped].flip(3) == ramp[flipped]).all()
    assert 0.47 < flipped.float().mean() < 0.53


@pytest.mark.parametrize(("height", "width"), [(375, 500), (300, 90), (40, 400)])
def test_random_crops_are_distributed_as_those_of_torchvision(height: int, width: int) -> None:
    torch.manual_seed(0)
    crop, image = v2.RandomResizedCrop(224), torch.zeros(3, height, width)
    drawn = [crop.make_params([image]) for _ in range(4000)]
    theirs = torch.tensor([[params[name] for name in ("top", "left", "height", "width")] for params in drawn])
    mine = torch.tensor([draw_crop(height, width, 1, index) for index in range(4000)])
    assert (mine >= 0).all()
    assert (mine[:, 0] + mine[:, 2]).max() <= height
    assert (mine[:, 1] + mine[:, 3]).max() <= width
    marks = torch.linspace(0.05, 0.95, 10)
    for column, extent in enumerate((height, width, height, width)):
        gap = (
            (mine[:, column].float().quantile(marks) - theirs[:, column].float().quantile(marks)).abs().max()
        )
        assert gap <= 0.04 * extent + 1, (column, gap)
    areas = [(parts[:, 2] * parts[:, 3]).float().mean() / height / width for parts in (mine, theirs)]
    assert abs(areas[0] - areas[1]) < 0.02
    assert torch.equal(mine[7], torch.tensor(draw_crop(height, width, 1, 7)))
    assert not torch.equal(mine, torch.tensor([draw_crop(height, width, 2, index) for index in range(4000)]))


def test_a_random_crop_is_resized_as_by_torchvision() -> None:
    image = torch.randint(0, 256, (3, 90, 120), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for index in range(20):
        wanted = reference.resized_crop(image, *draw_crop(90, 120, 3, index), [64, 48], antialias=True)
        assert (random_resized_crop(image, (64, 48), 3, index).int() - wanted.int()).abs().max() <= 1


@pytest.mark.parametrize("augment", ["none", "crop", "crop-flip"])
def test_every_window_has_its_own_number(augment: str) -> None:
    pad = padding_of(8)
    numbers = {}
    for epoch in range(40):
        windows = draw_windows(torch.arange(100), View.of_epoch(augment, 0, epoch), 8)
        for top, left, flipped, number in zip(
            windows.top.tolist(),
            windows.left.tolist(),
            windows.flipped.tolist(),
            windows.numbers(pad).tolist(),
            strict=True,
        ):
            assert numbers.setdefault(number, (top, left, flipped)) == (top, left, flipped)
    assert len(set(numbers.values())) == len(numbers) == {"none": 1, "crop": 9, "crop-flip": 18}[augment]
    most = count_windows(augment, 8)
    assert most is not None
    assert augment == "none" or max(numbers) < most


@pytest.mark.parametrize(("augment", "border"), [("crop", -0.4 / 0.2), ("crop-flip", 0.0)])
def test_photographs_are_surrounded_by_their_mean_color_and_digits_by_black(
    augment: str, border: float
) -> None:
    white = torch.full((200, 8, 8, 3), 255, dtype=torch.uint8)
    split = InMemoryImages(white, torch.zeros(200, dtype=torch.long), (0.4,) * 3, (0.2,) * 3)
    (batch,) = split.batches(torch.arange(200), 200, View(augment, 5), torch.device("cpu"))
    values = batch.inputs.unique()
    assert values.tolist() == pytest.approx([border, (1 - 0.4) / 0.2], abs=0.01)


@pytest.mark.parametrize("augment", ["crop", "crop-flip"])
def test_crops_are_those_of_torchvision_and_equally_frequent(augment: str) -> None:
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
            torch.zeros(1),
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


def test_two_images_of_an_epoch_are_augmented_differently() -> None:
    digits = few_digits().train
    assert isinstance(digits, InMemoryImages)
    same = InMemoryImages(digits.pixels[:1].repeat(12, 1, 1, 1), digits.labels[:12], digits.mean, digits.std)
    for augment in ("crop", "imagenet"):
        seen = images_of(same, torch.arange(12), 12, View.of_epoch(augment, 0, 0))
        assert len({image.contiguous().numpy().tobytes() for image in seen}) > 4

"""Crops, colours and mirrored images: the same wherever they are made, and as torchvision makes them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torchvision.transforms.v2 import RandomResizedCrop
from torchvision.transforms.v2 import functional as reference

from peel.data.crops import count_windows, draw_windows, padding_of
from peel.data.transforms import color_jitter, color_jitter_and_flip, draw_crop, random_resized_crop
from peel.data.view import View

pytest.importorskip("torchvision")

VIEWS = """
import torch
from peel.train.crops import draw_windows, seen_through
from peel.train.kernels import fused_view
from peel.train.view import View
chance = torch.Generator().manual_seed(0)
for height, width, channels in ((8, 8, 1), (32, 32, 3), (12, 20, 3)):
    pixels = torch.randint(0, 256, (50, height, width, channels), dtype=torch.uint8, generator=chance)
    index = torch.randperm(50, generator=chance)[:20]
    mean, scale = torch.rand(channels, generator=chance) * 255, torch.rand(channels, generator=chance) / 50
    for augment in ("none", "crop", "crop-flip"):
        for seed in (0, 1, 2**62 + 12345):
            view = View(augment, seed)
            wanted = (seen_through(draw_windows(index, view, height), pixels[index]) - mean) * scale
            assert torch.equal(fused_view(pixels, index, view, mean, scale), wanted), (height, augment, seed)
print("the same views")
"""

COLOURS = """
import torch
from peel.train.colour_kernel import fused_colours
from peel.train.transforms import draw_changes, jittered_and_mirrored
chance = torch.Generator().manual_seed(0)
mean, scale = torch.rand(3, generator=chance) * 255, torch.rand(3, generator=chance)
for height, width in ((40, 40), (33, 64)):
    images = torch.randint(0, 256, (30, height, width, 3), dtype=torch.uint8, generator=chance)
    images[0, :5] = 100  # grey has no hue
    index = torch.randperm(1000, generator=chance)[:30]
    changes = draw_changes(index, 7)
    assert len(changes.order.unique(dim=0)) > 15 and 5 < changes.mirrored.sum() < 25
    made = fused_colours(images, changes, mean, scale) / scale + mean
    # Where a level of brightness lies just between two, either is right.
    gap = (made - jittered_and_mirrored(images.permute(0, 3, 1, 2), index, 7).permute(0, 2, 3, 1)).abs()
    assert gap.max() < 1.01 and (gap > 0.01).float().mean() < 1e-3, (gap.max(), gap.mean())
print("the same colours")
"""


def test_the_kernels_make_what_the_cpu_makes() -> None:
    """Run by Triton's interpreter; test_gpu.py has it on a GPU."""
    pytest.importorskip("triton")
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", VIEWS + COLOURS], env=variables, capture_output=True, text=True, check=False
    )
    assert result.stdout.split("\n")[:-1] == ["the same views", "the same colours"], result.stderr


def test_colours_change_as_torchvision_changes_them_in_every_order() -> None:
    chance = torch.Generator().manual_seed(0)
    images = torch.rand(24, 3, 20, 30, generator=chance) * 255
    images[0, :, :5] = 100  # grey has no hue
    orders = torch.tensor(list(itertools.permutations(range(4))))
    strengths = torch.cat(
        [0.8 + 0.4 * torch.rand(24, 3, generator=chance), 0.2 * torch.rand(24, 1, generator=chance) - 0.1], 1
    )
    changed = color_jitter(images, strengths, orders)
    adjust = [
        reference.adjust_brightness,
        reference.adjust_contrast,
        reference.adjust_saturation,
        reference.adjust_hue,
    ]
    for number, order in enumerate(orders.tolist()):
        wanted = images[number] / 255
        for kind in order:
            wanted = adjust[kind](wanted, float(strengths[number, kind]))
        assert torch.allclose(changed[number], wanted * 255, atol=0.01), order


def test_colours_and_mirroring_depend_on_seed_and_index_alone() -> None:
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


def test_colours_do_not_depend_on_the_number_of_threads() -> None:
    images = torch.randint(
        0, 256, (40, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    before = torch.get_num_threads()
    try:
        seen = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            # One at a time, as they are decoded.
            seen.append(
                torch.cat([color_jitter_and_flip(images[i : i + 1], torch.tensor([i]), 5) for i in range(40)])
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_half_of_the_images_are_mirrored_and_grey_ones_keep_their_levels() -> None:
    ramp = torch.arange(10, dtype=torch.uint8).expand(4000, 1, 3, 10)
    seen = color_jitter_and_flip(ramp, torch.arange(4000), 1)
    flipped = seen[:, 0, 0, 0] == 9
    assert (seen[~flipped] == ramp[~flipped]).all()
    assert (seen[flipped].flip(3) == ramp[flipped]).all()
    assert 0.47 < flipped.float().mean() < 0.53


@pytest.mark.parametrize(("height", "width"), [(375, 500), (300, 90), (40, 400)])
def test_random_parts_are_distributed_as_those_of_torchvision(height: int, width: int) -> None:
    torch.manual_seed(0)
    crop, image = RandomResizedCrop(224), torch.zeros(3, height, width)
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


def test_a_random_part_is_what_torchvision_makes_of_that_part() -> None:
    image = torch.randint(0, 256, (3, 90, 120), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for index in range(20):
        wanted = reference.resized_crop(image, *draw_crop(90, 120, 3, index), [64, 48], antialias=True)
        assert (random_resized_crop(image, (64, 48), 3, index).int() - wanted.int()).abs().max() <= 1


@pytest.mark.parametrize("augment", ["none", "crop", "crop-flip"])
def test_every_window_has_a_number_of_its_own(augment: str) -> None:
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

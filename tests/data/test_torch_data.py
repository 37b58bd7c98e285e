"""Torch datasets and loaders of the user's own: what becomes of their samples, and clear errors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from helpers.own_data import PAIR, Restless, Stream, numbered, stream
from peel.data.augmentation import EVAL, View
from peel.data.batch import Batch, call_model
from peel.data.datasets import hold_out
from peel.data.torch_data import DatasetSplit, LoaderSplit, as_split
from peel.errors import ConfigError, DataError

CPU = torch.device("cpu")


def all_batches(split: Any, batch_size: int = 5, view: View = EVAL, workers: int = 0) -> list[Batch]:
    return list(split.batches(torch.arange(split.size), batch_size, view, CPU, workers))


def test_samples_come_in_the_given_order_as_the_dataset_has_them() -> None:
    split = as_split(PAIR[0], "training data", 10)
    order = torch.tensor([7, 3, 90, 11, 0])
    first, second = split.batches(order, 3, View("crop-flip", 1), CPU)
    images, targets = PAIR[0].tensors
    assert torch.equal(torch.cat([first.inputs, second.inputs]), images[order])
    assert torch.equal(torch.cat([first.targets, second.targets]), targets[order])
    part = split.subset(torch.tensor([5, 6])).subset(torch.tensor([1]))
    assert part.size == 1
    assert torch.equal(all_batches(part)[0].inputs[0], images[6])


def test_random_transforms_depend_on_the_epoch_and_the_sample_only() -> None:
    split = as_split(DataLoader(Restless(), 4, num_workers=2), "training data")
    view = View.of_epoch("none", 0, 1)
    whole = torch.cat([batch.inputs for batch in all_batches(split, 4, view)])
    alone = next(split.batches(torch.tensor([9]), 1, view, CPU)).inputs
    assert torch.equal(whole[9], alone[0])
    in_workers = torch.cat([batch.inputs for batch in all_batches(split, 4, view, workers=1)])
    assert torch.equal(whole, in_workers)
    again = torch.cat([batch.inputs for batch in all_batches(split, 4, View.of_epoch("none", 0, 2))])
    assert not (whole[:, 1:] == again[:, 1:]).any()
    assert len(whole[:, 1:].unique()) == whole[:, 1:].numel()


def test_reading_samples_leaves_the_random_numbers_of_the_process_alone() -> None:
    drawn = []
    for reads in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if reads:
            all_batches(as_split(Restless(), "training data", 4))
        drawn.append((float(torch.rand(())), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_a_plain_loader_is_taken_apart_and_one_with_a_sampler_is_not() -> None:
    plain = as_split(DataLoader(PAIR[0], 8, shuffle=True, num_workers=1), "training data")
    assert isinstance(plain, DatasetSplit)
    assert (plain.batch_size, plain.workers, plain.size) == (8, 1, 96)
    changed = as_split(DataLoader(PAIR[0], 8, num_workers=1), "training data", 16, 0)
    assert isinstance(changed, DatasetSplit)
    assert (changed.batch_size, changed.workers) == (16, 0)
    sampler = WeightedRandomSampler(torch.ones(96), 40)
    weighted = as_split(DataLoader(PAIR[0], 8, sampler=sampler), "training data")
    assert isinstance(weighted, LoaderSplit)
    assert (weighted.batch_size, weighted.size, len(all_batches(weighted))) == (8, 40, 5)
    batches = DataLoader(PAIR[0], batch_sampler=BatchSampler(RandomSampler(PAIR[0]), 12, drop_last=True))
    own = as_split(batches, "training data")
    assert (own.batch_size, own.size, len(all_batches(own))) == (12, 96, 8)
    with pytest.raises(ConfigError, match="makes batches of 12: 16 cannot be chosen"):
        as_split(batches, "training data", 16)


def test_inputs_of_any_kind_reach_the_model() -> None:
    class Recorder(torch.nn.Module):
        def forward(self, *args: Any, **options: Any) -> Any:
            return args, options

    image = torch.zeros(3)
    samples = [((image, image + 1), 0), ((image, image + 1), 1)]
    (batch,) = all_batches(as_split(samples, "training data", 2))
    (first, second), _ = call_model(Recorder(), batch.inputs)
    assert first.shape == second.shape == (2, 3)
    assert batch.targets.tolist() == [0, 1]
    (batch,) = all_batches(as_split([{"image": image, "label": 1}], "training data", 2))
    assert batch.targets is batch.inputs or batch.targets.keys() == batch.inputs.keys()
    args, options = call_model(Recorder(), batch.inputs)
    assert args == ()
    assert options["image"].shape == (1, 3)
    listed = DataLoader([(image, 0)] * 3, 3, collate_fn=lambda items: ([x for x, _ in items], None))
    (batch,) = all_batches(as_split(listed, "training data"))
    (images,), _ = call_model(Recorder(), batch.inputs)
    assert len(images) == batch.size == 3


def test_batches_of_any_kind_are_split_into_micro_batches() -> None:
    images = torch.arange(7.0)[:, None]
    targets = [{"boxes": torch.full((i,), i)} for i in range(7)]
    parts = Batch((list(images), {"scale": images}), targets).split(3)
    assert [part.size for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([torch.stack(part.inputs[0]) for part in parts]), images)
    assert torch.equal(torch.cat([part.inputs[1]["scale"] for part in parts]), images)
    assert [len(target["boxes"]) for part in parts for target in part.targets] == list(range(7))


def test_samples_are_held_out_at_random() -> None:
    train, held = hold_out(as_split(PAIR[0], "training data", 8), 0.25, 0)
    assert (train.size, held.size) == (72, 24)
    seen = torch.cat([batch.inputs for split in (train, held) for batch in all_batches(split)])
    assert len(seen.flatten(1).unique(dim=0)) == 96
    with pytest.raises(DataError, match="the loader chooses them itself"):
        hold_out(as_split(stream(PAIR[0]), "training data"), 0.25, 0)


class _Broken(Restless):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class _Endless(Stream):
    def __len__(self) -> int:
        raise TypeError("it has no end")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (_Broken(), r"sample 7 of the training data cannot be read: OSError: the disk is gone"),
        (DataLoader(_Broken(), 4, num_workers=1), r"sample 7 of the training data cannot be read: OSError"),
        (stream(PAIR[0], count=40), r"loader of the training data ended after 3 of 6 batches"),
        (stream(PAIR[0], count=0), r"ended after 0 of 6 batches"),
        (numbered(0), r"the training data are empty"),
        (stream(numbered(0)), r"the training data are empty"),
        (DataLoader(_Endless(PAIR[0]), 4), r"has no length .* Give its dataset a `__len__`"),
        (
            Stream(PAIR[0]),
            r"neither a torch Dataset with a length nor a DataLoader .* Wrap it in a DataLoader",
        ),
        (torch.zeros(3), r"neither a torch Dataset .* but a Tensor"),
        ([(1, 2, 3)], r"a batch of the training data is a list of 3; it must be a pair \(inputs, target\)"),
        ([(torch.tensor(1), 2)] * 0, r"are empty"),
        (DataLoader([(1, 2)], 1, collate_fn=lambda items: ([], [])), r"holds no samples"),
    ],
)
def test_bad_data_are_named(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        all_batches(as_split(given, "training data"), 16, workers=1)

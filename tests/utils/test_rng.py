"""Random numbers by seed, epoch and index."""

from __future__ import annotations

import pytest
import torch

from peel.utils.rng import class_order, epoch_order, hashed_uniform


def test_random_numbers_of_neighboring_indices_and_draws_are_not_correlated() -> None:
    drawn = hashed_uniform(torch.arange(20_000), 123, 3)
    other_seed = hashed_uniform(torch.arange(20_000), 124, 3)
    assert ((drawn >= 0) & (drawn < 1)).all()
    for first, second in [
        (drawn[:, 0], drawn[:, 1]),
        (drawn[:, 1], drawn[:, 2]),
        (drawn[:-1, 0], drawn[1:, 0]),
        (drawn[:-1, 2], drawn[1:, 0]),
        (drawn[:, 0], other_seed[:, 0]),
    ]:
        assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.03
    assert (drawn.mean(0) - 0.5).abs().max() < 0.01


def test_an_epoch_visits_every_image_once_and_its_order_depends_on_seed_and_epoch() -> None:
    orders = [epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(order.sort().values.tolist() == list(range(50)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert torch.equal(epoch_order(50, 1, 1), orders[3])


def test_every_prefix_of_a_class_order_holds_all_classes() -> None:
    labels = torch.arange(1000).repeat_interleave(13)  # sorted by class, as the images of a folder
    labels = torch.cat([labels, torch.full((987,), 7)])  # and one class is much larger
    equal, in_proportion = class_order(labels, 3), class_order(labels, 3, in_proportion=True)
    for order in (equal, in_proportion):
        assert order.sort().values.tolist() == list(range(len(labels)))
    assert labels[equal[:2000]].bincount().tolist() == [2] * 1000
    assert labels[equal[:2500]].bincount().unique().tolist() == [2, 3]
    counts = labels[in_proportion[: len(labels) // 10]].bincount(minlength=1000)
    assert counts[7] == pytest.approx(100, abs=2)
    assert {1, 2} >= set(counts[torch.arange(1000) != 7].tolist())
    assert not torch.equal(class_order(labels, 4), equal)
    assert torch.equal(class_order(labels, 3), equal)

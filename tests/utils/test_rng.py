"""Random numbers by seed, epoch and index."""

from __future__ import annotations

import torch

from peel.utils.rng import epoch_order, hashed_uniform


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

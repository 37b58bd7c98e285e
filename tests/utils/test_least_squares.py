"""The active-set solution is the best of all sets of columns."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from peel.utils.least_squares import nonnegative_least_squares


@pytest.mark.parametrize("seed", range(20))
def test_no_other_set_of_columns_does_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns, target = rng.normal(size=(12, 6)), rng.normal(size=12)
    penalty = np.array([0, 0, 0, 0.5, 0.5, 0.5])

    def loss(x: np.ndarray) -> float:
        return float(((columns @ x - target) ** 2).sum() + (penalty * x**2).sum())

    found = nonnegative_least_squares(columns, target, penalty)
    assert (found >= 0).all()
    best = loss(np.zeros(6))
    for count in range(1, 7):
        for chosen in map(list, combinations(range(6), count)):
            part = columns[:, chosen]
            x = np.zeros(6)
            x[chosen] = np.linalg.solve(part.T @ part + np.diag(penalty[chosen]), part.T @ target)
            if (x >= 0).all():
                best = min(best, loss(x))
    assert loss(found) == pytest.approx(best, rel=1e-6)


def test_equal_columns_share_what_they_explain() -> None:
    column = np.arange(1.0, 6.0)
    found = nonnegative_least_squares(np.stack([column, column], axis=1), 3 * column, np.zeros(2))
    assert found.sum() == pytest.approx(3)

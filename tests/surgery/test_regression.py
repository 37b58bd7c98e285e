"""The ridge regression of a layer: what it gives up so that weights stay of a size that can be trained."""

from __future__ import annotations

import torch

from peel.surgery.regression import Equations, Regression


def test_a_small_gain_does_not_blow_up_the_weights() -> None:
    """Two features that are nearly the same: their difference explains 1 % of the output, at 100 times the
    weights."""
    generator = torch.Generator().manual_seed(0)
    common, extra = torch.randn(2, 4000, generator=generator, dtype=torch.float64)
    x = torch.stack([common, common + 1e-3 * extra], 1)
    y = common + 0.1 * extra
    old = torch.tensor([[[0.5, 0.5]]])

    regression = Regression(old, rows=len(x))
    regression.add(x[None], y[None, :, None], torch.arange(len(x)))
    solution = regression.solve(intercept=True)

    assert solution is not None
    assert solution.fit.weight.norm() < 4 * old.norm()
    assert solution.after < 0.012


def test_a_large_gain_may_change_the_weights() -> None:
    """One of two features has to take over the part of a channel that was cut: its weight triples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([3.0, 1.0], dtype=torch.float64)

    regression = Regression(torch.tensor([[[1.0, 1.0]]]), rows=len(x))
    regression.add(x[None], y[None, :, None], torch.arange(len(x)))
    solution = regression.solve(intercept=True)

    assert solution is not None
    torch.testing.assert_close(
        solution.fit.weight[0, 0], torch.tensor([3.0, 1.0], dtype=torch.float64), atol=1e-4, rtol=0
    )


def test_a_matrix_without_a_cholesky_factor_gets_a_larger_penalty_or_no_solution() -> None:
    """Rounding can make it indefinite. A factor of such a matrix is finite, and wrong."""
    matrix = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]], dtype=torch.float64)  # eigenvalues 3 and -1
    right = torch.ones(1, 2, 1, dtype=torch.float64)
    zeros = torch.zeros(1, 1, 2, dtype=torch.float64)
    equations = Equations(
        matrix, right, torch.ones(1).double(), lambda x: x.mT, zeros, zeros[0], zeros[0, :, :1]
    )

    assert not equations.fit(1e-6).is_finite()
    assert equations.solve(1e-6) is None
    solution = equations.solve(0.1)
    assert solution is not None
    expected = torch.linalg.solve(matrix + 10 * torch.eye(2), right).mT
    torch.testing.assert_close(solution.weight, expected)

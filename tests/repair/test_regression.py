"""The ridge regression of a layer: what it gives up so that weights stay of a size that can be trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peel.repair import regression as regression_module
from peel.repair.regression import Equations, Regression, Solution


def solve(old: Tensor, x: Tensor, y: Tensor) -> Solution:
    """One output of one group, with an intercept; a quarter of the rows is held out."""
    regression = Regression(old, rows=len(x))
    regression.add(x[None], y[None, :, None], 3 * len(x) // 4)
    return regression.solve(intercept=True)


def test_a_small_gain_does_not_blow_up_the_weights() -> None:
    """Two features that are nearly the same: their difference explains 1 % of the output, at 100 times the
    weights."""
    generator = torch.Generator().manual_seed(0)
    common, extra = torch.randn(2, 4000, generator=generator, dtype=torch.float64)
    x = torch.stack([common, common + 1e-3 * extra], 1)
    y = common + 0.1 * extra
    old = torch.tensor([[[0.5, 0.5]]])

    solution = solve(old, x, y)

    assert solution.weight.norm() < 4 * old.norm()
    assert solution.after < 0.012


def test_a_large_gain_may_change_the_weights() -> None:
    """One of two features has to take over the part of a channel that was cut: its weight triples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([3.0, 1.0], dtype=torch.float64)

    solution = solve(torch.tensor([[[1.0, 1.0]]]), x, y)

    torch.testing.assert_close(
        solution.weight[0, 0], torch.tensor([3.0, 1.0], dtype=torch.float64), atol=1e-4, rtol=0
    )


def test_a_matrix_without_a_cholesky_factor_has_no_solution() -> None:
    """Rounding can make it indefinite. A factor of such a matrix is finite, and wrong."""
    matrix = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]], dtype=torch.float64)  # eigenvalues 3 and -1
    right = torch.ones(1, 2, 1, dtype=torch.float64)
    zeros = torch.zeros(1, 1, 2, dtype=torch.float64)
    equations = Equations(matrix, right, torch.ones(1).double(), zeros, zeros[0], zeros[0, :, :1])
    weak, strong = equations.fits(torch.tensor([1e-6, 10.0])).weight
    assert weak.isnan().all()
    torch.testing.assert_close(strong, torch.linalg.solve(matrix + 10 * torch.eye(2), right).mT)


@pytest.mark.parametrize("rows", [400, 8], ids=["moments", "rows"])
def test_equations_that_rounding_has_spoiled_do_no_harm(rows: int) -> None:
    """The inputs vary by less than their squares are rounded by."""
    generator = torch.Generator().manual_seed(0)
    x = 1e9 + 1e-3 * torch.randn(rows, 12, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, generator=generator, dtype=torch.float64)
    old = torch.full((1, 1, 12), 0.1)

    solution = solve(old, x, y)

    assert solution.weight.isfinite().all()
    assert solution.after <= solution.before


@pytest.mark.parametrize("rows", [400, 8], ids=["moments", "rows"])
def test_rows_that_are_not_finite_are_told(rows: int) -> None:
    x, y = torch.randn(rows, 12), torch.randn(rows)
    x[3, 4] = torch.inf
    assert not solve(torch.ones(1, 1, 12), x, y).before.isfinite()


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rows", [400, 8], ids=["moments", "rows"])
def test_errors_are_those_of_the_rows(rows: int, groups: int, intercept: bool) -> None:
    """Sums of products say the same of a fit as the rows themselves."""
    generator = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(groups, rows, 12, generator=generator, dtype=torch.float64)
    y = 1 + torch.randn(groups, rows, 5, generator=generator, dtype=torch.float64)
    old = torch.randn(groups, 5, 12, generator=generator, dtype=torch.float64)
    regression = Regression(old, rows)
    regression.add(x, y, 3 * rows // 4)

    solution = regression.solve(intercept=intercept)

    def error(weight: Tensor, constant: Tensor) -> float:
        left = y - x @ weight.mT - constant
        return float(left.square().mean(1).sum() / y.var(1, correction=0).sum())

    best = (y - x @ old.mT).mean(1, keepdim=True) if intercept else torch.zeros(())
    assert float(solution.before) == pytest.approx(error(old, best))
    assert float(solution.after) == pytest.approx(error(solution.weight, solution.intercept[:, None]))
    assert solution.after < 0.9 * solution.before
    assert intercept == bool(solution.intercept.any())
    ratio = (x @ solution.weight.mT).var(1, correction=0) / y.var(1, correction=0)
    torch.testing.assert_close(solution.variance_ratio, ratio.clamp(0.01, 100))


def test_penalties_that_are_fitted_one_by_one_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 12, generator=generator), torch.randn(40, generator=generator)
    together = solve(torch.zeros(1, 1, 12), x, y)
    monkeypatch.setattr(regression_module, "BATCH_BYTES", {})
    torch.testing.assert_close(solve(torch.zeros(1, 1, 12), x, y).weight, together.weight)

"""Ridge regression of the outputs of a layer on its inputs, in float64, one regression per group of channels.

The penalty draws the weights to those that the layer has. The strength is the one that predicts held-out
images best; the old weights, which no data can beat if there are too few, are one of the candidates.

Where inputs hardly vary, such as the averages that squeeze-excite reads, the best weights are a hundred times
larger than the old ones. They predict a little better and cannot be trained: so growth counts as an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Candidates for the penalty, as fractions of the mean square of a feature. Infinity keeps the weights.
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, float("inf"))

#: The penalty where there are too few rows to hold some out.
SAFE_RIDGE = 1e-2

#: A change of the weights, squared and over their own square, that is free, and what more of it costs, as a
#: fraction of the variance of the outputs.
FREE_GROWTH, GROWTH_COST = 10.0, 1e-3

#: One image in this many is held out to choose the penalty.
HOLD_OUT = 4

#: Keeps a division by a variance, and the matrix of a feature that is always zero, finite.
TINY = 1e-30

#: An output that is hardly explained keeps this much of its variance, so that no noise is scaled up.
MIN_RATIO = 0.01

#: Rows that are converted to float64 at a time, in bytes.
CHUNK_BYTES = 2**26


@dataclass(frozen=True)
class Fit:
    """Weights (groups x outputs x features) and intercepts (groups x outputs)."""

    weight: Tensor
    intercept: Tensor

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.weight).all() and torch.isfinite(self.intercept).all())


class Moments:
    """Sums of products of inputs and outputs: the normal equations."""

    def __init__(self, groups: int, features: int, outputs: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(groups, *shape, dtype=torch.float64, device=device)

        self.count = 0
        self.x, self.y, self.yy = zeros(features), zeros(outputs), zeros(outputs)
        self.xx, self.xy = zeros(features, features), zeros(features, outputs)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows of inputs (groups x rows x features) and of outputs (groups x rows x outputs)."""
        size = max(1, CHUNK_BYTES // (8 * max(1, x.shape[0] * x.shape[2])))
        for start in range(0, x.shape[1], size):
            some_x, some_y = (rows[:, start : start + size].double() for rows in (x, y))
            self.count += some_x.shape[1]
            self.x += some_x.sum(1)
            self.y += some_y.sum(1)
            self.yy += some_y.square().sum(1)
            self.xx += some_x.mT @ some_x
            self.xy += some_x.mT @ some_y

    def merge(self, other: Moments) -> None:
        self.count += other.count
        for name in ("x", "y", "yy", "xx", "xy"):
            getattr(self, name).add_(getattr(other, name))

    def solve(self, ridge: float, old: Tensor, *, intercept: bool) -> Fit | None:
        """None if the equations cannot be solved."""
        x, y = (self.x / self.count, self.y / self.count) if intercept else (0 * self.x, 0 * self.y)
        weight = old
        if ridge != float("inf"):
            xx = self.xx / self.count - x[:, :, None] * x[:, None]
            xy = self.xy / self.count - x[:, :, None] * y[:, None]
            change = _solve(xx, ridge * _scale(xx), xy - xx @ old.mT)
            if change is None:
                return None
            weight = old + change.mT
        return Fit(weight, y - (weight @ x[:, :, None]).squeeze(2))

    def error(self, fit: Fit) -> Tensor:
        """Mean square error of each output: groups x outputs."""
        w, b = fit.weight, fit.intercept
        wx = (w @ self.x[:, :, None]).squeeze(2)
        squares = ((w @ self.xx) * w).sum(2) - 2 * (w * self.xy.mT).sum(2) + self.yy
        return ((squares + 2 * b * (wx - self.y)) / self.count + b.square()).clamp_min(0.0)

    def variances(self, fit: Fit) -> tuple[Tensor, Tensor]:
        """Variance of each fitted output, and of the output it is fitted to."""
        x, y = self.x / self.count, self.y / self.count
        xx = self.xx / self.count - x[:, :, None] * x[:, None]
        return ((fit.weight @ xx) * fit.weight).sum(2), self.yy / self.count - y.square()


class Rows:
    """The rows themselves, for layers with more features than rows; solved in the dual form."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []

    @property
    def count(self) -> int:
        return sum(x.shape[1] for x, _ in self.parts)

    def add(self, x: Tensor, y: Tensor) -> None:
        self.parts.append((x.clone(), y.clone()))

    def merge(self, other: Rows) -> None:
        self.parts += other.parts

    def _all(self) -> tuple[Tensor, Tensor]:
        if len(self.parts) > 1:
            self.parts = [
                (torch.cat([x for x, _ in self.parts], 1), torch.cat([y for _, y in self.parts], 1))
            ]
        x, y = self.parts[0]
        return x.double(), y.double()

    def solve(self, ridge: float, old: Tensor, *, intercept: bool) -> Fit | None:
        x, y = self._all()
        mean_x = x.mean(1, keepdim=True) if intercept else 0 * x[:, :1]
        mean_y = y.mean(1, keepdim=True) if intercept else 0 * y[:, :1]
        weight = old
        if ridge != float("inf"):
            centered = x - mean_x
            products = centered @ centered.mT / self.count
            scale = centered.square().mean((1, 2))
            dual = _solve(products, ridge * scale, (y - mean_y - centered @ old.mT) / self.count)
            if dual is None:
                return None
            weight = old + dual.mT @ centered
        return Fit(weight, (mean_y - mean_x @ weight.mT).squeeze(1))

    def error(self, fit: Fit) -> Tensor:
        x, y = self._all()
        return (y - x @ fit.weight.mT - fit.intercept[:, None]).square().mean(1)

    def variances(self, fit: Fit) -> tuple[Tensor, Tensor]:
        x, y = self._all()
        return (x @ fit.weight.mT).var(1, correction=0), y.var(1, correction=0)


def _scale(xx: Tensor) -> Tensor:
    return xx.diagonal(dim1=1, dim2=2).mean(1)


def _solve(matrix: Tensor, penalty: Tensor, right: Tensor) -> Tensor | None:
    """Solve with a penalty on the diagonal, raised until the matrix has a Cholesky factor."""
    diagonal = torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    for raised in (1.0, 1e2, 1e4):
        penalized = matrix + (raised * penalty).clamp_min(TINY)[:, None, None] * diagonal
        factor, failed = torch.linalg.cholesky_ex(penalized)
        if not failed.any():
            solution = torch.cholesky_solve(right, factor)
            return solution if torch.isfinite(solution).all() else None
    return None


@dataclass(frozen=True)
class Solution:
    """A fit, and how good it is."""

    fit: Fit
    before: float
    """Mean square error of the old weights, with the best intercept, over the variance of the outputs."""
    after: float
    variance_ratio: Tensor
    """Variance of each fitted output over that of what it is fitted to, groups x outputs."""


@dataclass
class Regression:
    """The rows of a layer, some of them held out."""

    old: Tensor
    """The weights that the layer has, groups x outputs x features."""
    rows: int
    """About how many rows will be added."""
    fitted: Moments | Rows = field(init=False)
    held_out: Moments | Rows = field(init=False)

    def __post_init__(self) -> None:
        self.old = self.old.double()
        groups, outputs, features = self.old.shape

        def make() -> Moments | Rows:
            return Rows() if self.rows < features else Moments(groups, features, outputs, self.old.device)

        self.fitted, self.held_out = make(), make()

    def add(self, x: Tensor, y: Tensor, images: Tensor) -> None:
        """Rows of inputs and outputs (groups x rows x ...), and the image of each row."""
        is_held_out = images % HOLD_OUT == HOLD_OUT - 1
        for part, is_in in ((self.fitted, ~is_held_out), (self.held_out, is_held_out)):
            if is_in.all():
                part.add(x, y)
            elif is_in.any():
                part.add(x[:, is_in], y[:, is_in])

    def solve(self, *, intercept: bool) -> Solution | None:
        """The best fit; None if the rows are not finite."""
        chosen = SAFE_RIDGE
        if self.fitted.count and self.held_out.count:
            chosen = min(RIDGES, key=lambda ridge: self._judge(ridge, intercept))
        rows = self.fitted if self.fitted.count else self.held_out
        if rows is self.fitted and self.held_out.count:
            rows.merge(self.held_out)  # type: ignore[arg-type]
        unchanged = rows.solve(float("inf"), self.old, intercept=intercept)
        if unchanged is None or not unchanged.is_finite():
            return None
        before, spread = _total(rows.error(unchanged)), _total(rows.variances(unchanged)[1])
        fit = rows.solve(chosen, self.old, intercept=intercept)
        if fit is None or not fit.is_finite() or not _total(rows.error(fit)) < before:
            fit = unchanged
        fitted, target = rows.variances(fit)
        ratio = torch.where(target > TINY, fitted / target, 1.0).clamp(MIN_RATIO, 1 / MIN_RATIO)
        return Solution(fit, before / spread, _total(rows.error(fit)) / spread, ratio)

    def _judge(self, ridge: float, intercept: bool) -> float:
        """Error on the held-out rows over the variance of the outputs, and what the growth costs."""
        fit = self.fitted.solve(ridge, self.old, intercept=intercept)
        if fit is None or not fit.is_finite():
            return float("inf")
        error = self.held_out.error(fit) / self.held_out.variances(fit)[1].clamp_min(TINY)
        growth = _total((fit.weight - self.old).square()) / _total(self.old.square())
        judged = float(error.mean()) + GROWTH_COST * max(0.0, growth - FREE_GROWTH)
        return judged if judged == judged else float("inf")


def _total(values: Tensor) -> float:
    return float(values.sum()) + TINY

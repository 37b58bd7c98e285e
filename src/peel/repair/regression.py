"""Ridge regression of the outputs of a layer on its inputs, in float64, one regression per group of channels.

The penalty draws the weights to those that the layer has. The strength is the one that predicts held-out
images best; the old weights, which no data can beat if there are too few, are one of the candidates.

Where inputs hardly vary, such as the averages that squeeze-excite reads, the best weights are a hundred times
larger than the old ones. They predict a little better and cannot be trained: so growth counts as an error.

Nothing here waits for a GPU: all choices are made on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

#: Candidates for the penalty, as fractions of the mean square of a feature. Infinity keeps the weights.
FINITE_RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
RIDGES = (*FINITE_RIDGES, math.inf)

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

#: Penalties are fitted together as long as matrices and weights have no more bytes than this, by device. On
#: an H200, factors and solves of seven are 3 times as fast together with 360 features, 2 times with 1,152,
#: 1.4 times with 2,304. On a CPU, large ones are slower together.
BATCH_BYTES = {"cuda": 2**29, "cpu": 2**22}


@dataclass(frozen=True)
class Fit:
    """Several fits: weights (fits x groups x outputs x features) and intercepts (fits x groups x outputs)."""

    weight: Tensor
    intercept: Tensor

    def __add__(self, other: Fit) -> Fit:
        """These fits, and others behind them."""
        return Fit(torch.cat([self.weight, other.weight]), torch.cat([self.intercept, other.intercept]))


@dataclass(frozen=True)
class Equations:
    """The normal equations of the change of the weights, centered."""

    matrix: Tensor
    right: Tensor
    scale: Tensor
    """The mean square of a feature, for each group. Penalties are fractions of it."""
    old: Tensor
    x: Tensor
    y: Tensor
    """Means of inputs (groups x features) and outputs (groups x outputs); zero without an intercept."""

    def fits(self, ridges: Tensor) -> Fit:
        """One fit for each penalty. NaN where the matrix with this penalty has no Cholesky factor."""
        penalties = (ridges[:, None] * self.scale).clamp_min(TINY)
        penalized = self.matrix.repeat(len(ridges), 1, 1, 1)
        penalized.diagonal(dim1=-2, dim2=-1).add_(penalties[..., None])
        factor, failed = torch.linalg.cholesky_ex(penalized)
        weight = self.old + torch.cholesky_solve(self.right, factor).mT
        return self._with_intercept(weight.masked_fill(failed[..., None, None] != 0, torch.nan))

    def unchanged(self) -> Fit:
        """The old weights, with the best intercept."""
        return self._with_intercept(self.old[None])

    def _with_intercept(self, weight: Tensor) -> Fit:
        return Fit(weight, self.y - (weight @ self.x[:, :, None]).squeeze(-1))


class Moments:
    """Sums of products of inputs and outputs: the normal equations."""

    def __init__(
        self, groups: int, features: int, outputs: int, device: torch.device, share: float = 1.0
    ) -> None:
        """`share`: these features over those of the layer, where they are coordinates in a subspace."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(groups, *shape, dtype=torch.float64, device=device)

        self.count, self.share = 0, share
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
            self.xx.baddbmm_(some_x.mT, some_x)
            self.xy.baddbmm_(some_x.mT, some_y)

    def merge(self, other: Moments) -> None:
        self.count += other.count
        for name in ("x", "y", "yy", "xx", "xy"):
            getattr(self, name).add_(getattr(other, name))

    def equations(self, old: Tensor, *, intercept: bool) -> Equations:
        x, y = (self.x / self.count, self.y / self.count) if intercept else (0 * self.x, 0 * self.y)
        xx, xy = self._centered(self.xx, x, x), self._centered(self.xy, x, y)
        right = torch.baddbmm(xy, xx, old.mT, alpha=-1)
        scale = xx.diagonal(dim1=1, dim2=2).mean(1) * self.share
        return Equations(xx, right, scale, old, x, y)

    def _centered(self, sums: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The mean of products, less the product of means."""
        return torch.baddbmm(sums, x[:, :, None], y[:, None], beta=1 / self.count, alpha=-1)

    def error(self, fits: Fit) -> Tensor:
        """Mean square error of each output: fits x groups x outputs."""
        w, b = fits.weight, fits.intercept
        by_group = w.transpose(0, 1).flatten(1, 2)
        wxx, wx = (
            torch.bmm(by_group, sums).view(w.shape[1], len(w), w.shape[2], -1).transpose(0, 1)
            for sums in (self.xx, self.x[:, :, None])
        )
        # |y - X w - b|^2 = w'X'X w - 2 w'X'y + y'y + b (2 w'x - 2 y + n b), with sums x and y over the rows.
        squares = (torch.sub(wxx, self.xy.mT, alpha=2) * w).sum(-1) + self.yy
        shifts = b * (2 * (wx.squeeze(-1) - self.y) + self.count * b)
        return ((squares + shifts) / self.count).clamp_min(0.0)

    def variance(self, weight: Tensor) -> Tensor:
        """Variance of each fitted output, groups x outputs."""
        x = self.x / self.count
        return (torch.bmm(weight, self._centered(self.xx, x, x)) * weight).sum(2)

    def target_variance(self) -> Tensor:
        """Variance of each output that is fitted to."""
        return self.yy / self.count - (self.y / self.count).square()


@dataclass(frozen=True)
class Solution:
    """Weights and intercepts of a layer, and how good they are. Not finite if the rows are not."""

    weight: Tensor
    intercept: Tensor
    before: Tensor
    """Mean square error of the old weights, with the best intercept, over the variance of the outputs."""
    after: Tensor
    variance_ratio: Tensor
    """Variance of each fitted output over that of what it is fitted to, groups x outputs."""


@dataclass
class Regression:
    """The rows of a layer, some of them held out."""

    old: Tensor
    """The weights that the layer has, groups x outputs x features."""
    rows: int
    """About how many rows will be added."""
    parts: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    """The rows themselves (inputs, outputs, number of fitted ones), where a layer has more features."""

    def __post_init__(self) -> None:
        self.old = self.old.double()
        self._start(self.old.shape[2])

    def _start(self, features: int) -> None:
        groups, outputs, _ = self.old.shape
        shape = groups, features, outputs, self.old.device, features / self.old.shape[2]
        self.fitted, self.held_out = Moments(*shape), Moments(*shape)

    def add(self, x: Tensor, y: Tensor, fitted: int) -> None:
        """Rows of inputs and outputs (groups x rows x ...), of which the first `fitted` are not held out."""
        if self.rows < self.old.shape[2]:
            self.parts.append((x.clone(), y.clone(), fitted))
        else:
            self._add(x, y, fitted)

    def _add(self, x: Tensor, y: Tensor, fitted: int) -> None:
        for part, some in ((self.fitted, slice(0, fitted)), (self.held_out, slice(fitted, None))):
            if x[:, some].shape[1]:
                part.add(x[:, some], y[:, some])

    def _project(self, *, intercept: bool) -> tuple[Tensor, Tensor, Tensor]:
        """An orthonormal basis of what the rows span, where these are fewer than the features, and origins.

        No row tells weights apart that differ across the span, and the penalty keeps the old ones there. So
        the change of the weights is sought in coordinates of the basis: with X = Z Q', all of |X w|, |w| and
        the trace of X'X are those of Z and Q'w. With an intercept, rows are counted from their means: inputs
        that hardly vary would be lost in the squares of their means.
        """
        x, y = (torch.cat(rows, 1).double() for rows in list(zip(*self.parts, strict=True))[:2])
        start_x, start_y = (rows.mean(1, keepdim=True) if intercept else 0 * rows[:, :1] for rows in (x, y))
        basis: Tensor = torch.linalg.qr((x - start_x).mT).Q
        self._start(basis.shape[2])
        for x, y, fitted in self.parts:
            self._add((x.double() - start_x) @ basis, y.double() - start_y, fitted)
        return basis, start_x, start_y

    def solve(self, *, intercept: bool) -> Solution:
        """The best fit; the old weights where no fit is better, or the equations cannot be solved."""
        if not self.parts:
            return self._solve(self.old, intercept)
        basis, x, y = self._project(intercept=intercept)
        old = self.old @ basis
        found = self._solve(old, intercept)
        weight = self.old + (found.weight - old) @ basis.mT
        intercepts = found.intercept + (y - x @ weight.mT).squeeze(1)
        return replace(found, weight=weight, intercept=intercepts)

    def _solve(self, old: Tensor, intercept: bool) -> Solution:
        is_divided = self.fitted.count and self.held_out.count
        ridge = self._choose(old, intercept) if is_divided else _tensor((SAFE_RIDGE,), old.device)
        rows = self.fitted if self.fitted.count else self.held_out
        if is_divided:
            rows.merge(self.held_out)
        equations = rows.equations(old, intercept=intercept)
        # The chosen penalty once more, with all rows, against the old weights.
        both = equations.unchanged() + equations.fits(ridge.clamp_max(FINITE_RIDGES[-1]))
        target, errors = rows.target_variance(), rows.error(both).sum((1, 2)) + TINY
        # NaN is never smaller: equations that could not be solved keep the old weights.
        is_better = (errors[1] < errors[0]) & ridge[0].isfinite()
        weight, intercepts = (torch.where(is_better, fit[1], fit[0]) for fit in (both.weight, both.intercept))
        ratio = torch.where(target > TINY, rows.variance(weight) / target, 1.0)
        before, after = errors[0], torch.where(is_better, errors[1], errors[0])
        spread = target.sum() + TINY
        return Solution(
            weight, intercepts, before / spread, after / spread, ratio.clamp(MIN_RATIO, 1 / MIN_RATIO)
        )

    def _choose(self, old: Tensor, intercept: bool) -> Tensor:
        """The penalty that is best for the held-out rows, a tensor of one number."""
        equations = self.fitted.equations(old, intercept=intercept)
        variance = self.held_out.target_variance().clamp_min(TINY)
        limit = BATCH_BYTES.get(old.device.type, 0)
        size = max(1, limit // max(1, equations.matrix.nbytes + old.nbytes))
        *parts, last = torch.split(_tensor(FINITE_RIDGES, old.device), size)
        fits = [*(equations.fits(part) for part in parts), equations.fits(last) + equations.unchanged()]
        errors = torch.cat([self._judge(some, old, variance) for some in fits]).nan_to_num(
            torch.inf, torch.inf
        )
        return _tensor(RIDGES, old.device)[errors.argmin(keepdim=True)]

    def _judge(self, fits: Fit, old: Tensor, variance: Tensor) -> Tensor:
        """For each fit, its error on the held-out rows over the variance of the outputs, and what the growth
        costs.
        """
        change = (fits.weight - old).square().sum((-3, -2, -1))
        growth = change / (self.old.square().sum() + TINY)
        error = (self.held_out.error(fits) / variance).mean((-2, -1))
        return error + GROWTH_COST * (growth - FREE_GROWTH).clamp_min(0.0)


@cache
def _tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: a GPU is waited for."""
    return torch.tensor(values, dtype=torch.float64, device=device)

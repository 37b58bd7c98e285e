"""Ridge regression of the outputs of a layer on its inputs, in float64, one regression per group of channels.

The penalty draws the weights to those that the layer has. The strength is the one that predicts held-out
images best; the old weights, which no data can beat if there are too few, are one of the candidates.

Where inputs hardly vary, such as the averages that squeeze-excite reads, the best weights are a hundred times
larger than the old ones. They predict a little better and cannot be trained: so growth counts as an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

#: Candidates for the penalty, as fractions of the mean square of a feature. Infinity keeps the weights.
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, math.inf)

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


#: Up to this many features, all penalties are fitted in one call: a GPU waits for calls, not for numbers.
MOST_BATCHED = 256


@dataclass(frozen=True)
class Fit:
    """Weights (groups x outputs x features) and intercepts (groups x outputs); several along a first axis."""

    weight: Tensor
    intercept: Tensor

    def __getitem__(self, place: int) -> Fit:
        return Fit(self.weight[place], self.intercept[place])

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.weight.sum() + self.intercept.sum()))


@dataclass(frozen=True)
class Equations:
    """The normal equations of the change of the weights, centered, or their dual form."""

    matrix: Tensor
    right: Tensor
    scale: Tensor
    """The mean square of a feature, for each group. Penalties are fractions of it."""
    change: Callable[[Tensor], Tensor]
    """Solution -> change of the weights."""
    old: Tensor
    x: Tensor
    y: Tensor
    """Means of inputs and outputs; zero where there is no intercept."""

    def fit(self, ridge: float) -> Fit:
        """NaN where the matrix with this penalty has no Cholesky factor. A GPU is not waited for."""
        return self.fits([ridge])[0]

    def fits(self, ridges: Sequence[float]) -> Fit:
        """One fit for each penalty, along a first axis. Infinity keeps the old weights, and comes last."""
        finite, weights = tuple(ridge for ridge in ridges if ridge < math.inf), list[Tensor]()
        if finite:
            penalties = (_tensor(finite, self.scale.device)[:, None] * self.scale).clamp_min(TINY)
            penalized = self.matrix.repeat(len(finite), 1, 1, 1)
            penalized.diagonal(dim1=-2, dim2=-1).add_(penalties[..., None])
            factor, failed = torch.linalg.cholesky_ex(penalized)
            changed = self.old + self.change(torch.cholesky_solve(self.right, factor))
            weights.append(torch.where(failed[..., None, None] == 0, changed, torch.nan))
        if len(finite) < len(ridges):
            weights.append(self.old[None])
        weight = torch.cat(weights)
        return Fit(weight, self.y - (weight @ self.x[:, :, None]).squeeze(-1))

    def solve(self, ridge: float) -> Fit | None:
        """With the penalty raised until the matrix has a Cholesky factor; None if nothing helps."""
        fits = (self.fit(raised * ridge) for raised in (1.0, 1e2, 1e4))
        return next((fit for fit in fits if fit.is_finite()), None)


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

    def equations(self, old: Tensor, *, intercept: bool) -> Equations:
        x, y = (self.x / self.count, self.y / self.count) if intercept else (0 * self.x, 0 * self.y)
        xx = self.xx / self.count - x[:, :, None] * x[:, None]
        xy = self.xy / self.count - x[:, :, None] * y[:, None]
        scale = xx.diagonal(dim1=1, dim2=2).mean(1)
        return Equations(xx, xy - xx @ old.mT, scale, lambda solution: solution.mT, old, x, y)

    def error(self, fit: Fit) -> Tensor:
        """Mean square error of each output: groups x outputs, for each fit."""
        w, b = fit.weight, fit.intercept
        wx = (w @ self.x[:, :, None]).squeeze(-1)
        squares = ((w @ self.xx) * w).sum(-1) - 2 * (w * self.xy.mT).sum(-1) + self.yy
        return ((squares + 2 * b * (wx - self.y)) / self.count + b.square()).clamp_min(0.0)

    def variance(self, fit: Fit) -> Tensor:
        """Variance of each fitted output."""
        x = self.x / self.count
        xx = self.xx / self.count - x[:, :, None] * x[:, None]
        return ((fit.weight @ xx) * fit.weight).sum(2)

    def target_variance(self) -> Tensor:
        """Variance of each output that is fitted to."""
        return self.yy / self.count - (self.y / self.count).square()


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

    def equations(self, old: Tensor, *, intercept: bool) -> Equations:
        x, y = self._all()
        mean_x = x.mean(1, keepdim=True) if intercept else 0 * x[:, :1]
        mean_y = y.mean(1, keepdim=True) if intercept else 0 * y[:, :1]
        centered = x - mean_x
        return Equations(
            centered @ centered.mT / self.count,
            (y - mean_y - centered @ old.mT) / self.count,
            centered.square().mean((1, 2)),
            lambda dual: dual.mT @ centered,
            old,
            mean_x.squeeze(1),
            mean_y.squeeze(1),
        )

    def error(self, fit: Fit) -> Tensor:
        x, y = self._all()
        return (y - x @ fit.weight.mT - fit.intercept[..., None, :]).square().mean(-2)

    def variance(self, fit: Fit) -> Tensor:
        return (self._all()[0] @ fit.weight.mT).var(1, correction=0)

    def target_variance(self) -> Tensor:
        return self._all()[1].var(1, correction=0)


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
        chosen = self._choose(intercept) if self.fitted.count and self.held_out.count else SAFE_RIDGE
        rows = self.fitted if self.fitted.count else self.held_out
        if rows is self.fitted and self.held_out.count:
            rows.merge(self.held_out)  # type: ignore[arg-type]
        equations = rows.equations(self.old, intercept=intercept)
        unchanged = equations.fit(math.inf)
        if not unchanged.is_finite():
            return None
        target = rows.target_variance()
        before, spread = _total(rows.error(unchanged)), _total(target)
        fit = equations.solve(chosen)
        after = before if fit is None else _total(rows.error(fit))
        if fit is None or not after < before:
            fit, after = unchanged, before
        ratio = torch.where(target > TINY, rows.variance(fit) / target, 1.0).clamp(MIN_RATIO, 1 / MIN_RATIO)
        return Solution(fit, before / spread, after / spread, ratio)

    def _choose(self, intercept: bool) -> float:
        """The penalty that is best for the held-out rows. All are tried before a GPU is waited for."""
        equations = self.fitted.equations(self.old, intercept=intercept)
        variance = self.held_out.target_variance().clamp_min(TINY)
        size = len(RIDGES) if equations.matrix.shape[-1] <= MOST_BATCHED else 1
        parts = [RIDGES[start : start + size] for start in range(0, len(RIDGES), size)]
        judged = torch.cat([self._judge(equations.fits(part), variance) for part in parts])
        return RIDGES[int(torch.where(judged.isfinite(), judged, torch.inf).argmin())]

    def _judge(self, fits: Fit, variance: Tensor) -> Tensor:
        """For each fit, its error on the held-out rows over the variance of the outputs, and what the growth
        costs.
        """
        change = (fits.weight - self.old).square().sum((-3, -2, -1))
        growth = change / (self.old.square().sum() + TINY)
        error = (self.held_out.error(fits) / variance).mean((-2, -1))
        return error + GROWTH_COST * (growth - FREE_GROWTH).clamp_min(0.0)


@cache
def _tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: a GPU is waited for."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def _total(values: Tensor) -> float:
    return float(values.sum()) + TINY

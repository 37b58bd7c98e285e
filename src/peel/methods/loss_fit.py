"""A smooth fit of the losses of many allocations, and the allocation with the lowest fitted loss.

An allocation is a row of numbers: for each group, the logarithm of its widths over the uniform ones. The fit
is loss = constant + sum over groups of weight * (width / uniform width) ** -power, with weights >= 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..utils.least_squares import nonnegative_least_squares

Array = npt.NDArray[np.float64]

Load = Callable[[Array], Array]
"""Allocations -> the largest fraction of any limit that each uses. At most 1 where it is allowed."""

#: Exponents to choose from.
POWERS = (0.25, 0.5, 1.0, 2.0)

#: The search for the best point: rounds, allocations in each, and the part that the next round is drawn from.
ROUNDS, DRAWN, ELITE = 60, 400, 0.1

#: Deviation of the first round, and the least one of later rounds.
FIRST_SPREAD, LEAST_SPREAD = 0.3, 1e-3

#: The shift that spends the budget lies within this, and is found by so many bisections.
REACH, BISECTIONS = 3.0, 20


class Fit(NamedTuple):
    power: float
    constant: float
    weights: Array
    """One per group."""

    def predict(self, logs: Array) -> Array:
        """The loss of each allocation."""
        losses: Array = self.constant + np.exp(-self.power * logs) @ self.weights
        return losses

    def gain(self, point: Array) -> float:
        """How far its loss is below that of the uniform network."""
        return float(self.weights.sum() - np.exp(-self.power * point) @ self.weights)


class LeftOut(NamedTuple):
    """What is known of a fit from the fits that leave one allocation out."""

    fits: list[Fit]
    explained: float
    """The part of the variance of the left-out losses that they predict. Negative where they are worse than
    the mean."""

    def gain_error(self, point: Array) -> float:
        """The standard error of the gain at a point (jackknife)."""
        gains = np.array([fit.gain(point) for fit in self.fits])
        return float(np.sqrt((len(gains) - 1) * gains.var()))


@dataclass(frozen=True)
class FitSummary:
    """The fit as it stands in a plan."""

    power: float
    constant: float
    weights: dict[str, float]
    """Group -> its weight."""
    explained: float
    """The part of the variance of networks that the fit explains when each is left out once."""
    loss: float
    """Fitted loss of the best point."""
    uniform_loss: float
    """Fitted loss of the uniform network."""
    gain_error: float
    """Standard error of the difference of the two."""
    networks: int
    """Networks that were compared."""
    dropped: int
    """Networks whose loss was not finite."""
    image_passes: int
    """Images that ran through the networks, for their repair and their losses."""
    measured: float | None = None
    """The loss of the plan after its repair."""
    uniform_measured: float | None = None
    """The same of the uniform network."""

    @property
    def gain(self) -> float:
        return self.uniform_loss - self.loss


def fit_losses(logs: Array, losses: Array) -> tuple[Fit, LeftOut]:
    """The fit with the power that best predicts the allocations that are left out, one at a time."""
    variance = float(losses.var())
    best: tuple[float, list[Fit]] | None = None
    for power in POWERS:
        fits, errors = [], []
        for row in range(len(losses)):
            is_used = np.arange(len(losses)) != row
            fits.append(fit_with_power(logs[is_used], losses[is_used], power))
            errors.append(float(fits[-1].predict(logs[row : row + 1])[0] - losses[row]))
        error = float(np.square(errors).mean())
        if best is None or error < best[0]:
            best = error, fits
    assert best is not None
    error, fits = best
    explained = 1 - error / variance if variance > 0 else 0.0
    return fit_with_power(logs, losses, fits[0].power), LeftOut(fits, explained)


def fit_with_power(logs: Array, losses: Array, power: float) -> Fit:
    terms = np.exp(-power * logs)
    mean, level = terms.mean(0), float(losses.mean())
    weights = nonnegative_least_squares(terms - mean, losses - level, np.zeros(terms.shape[1]))
    return Fit(power, level - float(mean @ weights), weights)


def best_point(fit: Fit, load: Load, low: Array, high: Array) -> Array:
    """The allowed point with the lowest fitted loss, by the cross-entropy method."""
    rng = np.random.default_rng(0)
    mean, spread = np.zeros(len(low)), np.full(len(low), FIRST_SPREAD)
    best = mean
    for _ in range(ROUNDS):
        logs = spend(mean + spread * rng.standard_normal((DRAWN, len(mean))), load, low, high)
        losses = np.where(load(logs) <= 1, fit.predict(logs), np.inf)
        elite = logs[np.argsort(losses, kind="stable")[: int(DRAWN * ELITE)]]
        best, mean, spread = elite[0], elite.mean(0), elite.std(0) + LEAST_SPREAD
    return best


def spend(logs: Array, load: Load, low: Array, high: Array) -> Array:
    """Each allocation, shifted by the one number that uses up the budget, within the bounds of the groups."""
    below, above = np.full(len(logs), -REACH), np.full(len(logs), REACH)
    for _ in range(BISECTIONS):
        middle = (below + above) / 2
        fits = load(np.clip(logs + middle[:, None], low, high)) <= 1
        below, above = np.where(fits, middle, below), np.where(fits, above, middle)
    shifted: Array = np.clip(logs + below[:, None], low, high)
    return shifted

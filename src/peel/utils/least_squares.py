"""Least squares with coefficients that are not negative."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Added to the diagonal, relative to its mean: columns may be multiples of each other.
JITTER = 1e-10


def nonnegative_least_squares(columns: Array, target: Array, penalty: Array) -> Array:
    """The `x >= 0` that minimizes `|columns @ x - target|^2 + sum(penalty * x^2)`.

    An active-set method (Lawson and Hanson) on the normal equations. It ends after finitely many exchanges.
    """
    gram = columns.T @ columns + np.diag(penalty)
    gram += np.eye(len(gram)) * JITTER * max(1e-300, np.trace(gram) / len(gram))
    right = columns.T @ target
    tolerance = 1e-10 * max(1e-300, float(np.abs(right).max(initial=0.0)))
    solution, is_used = np.zeros(len(gram)), np.zeros(len(gram), dtype=bool)
    for _ in range(3 * len(gram)):
        gradient = np.where(is_used, -np.inf, right - gram @ solution)
        # No column outside could lower the error: the conditions of Karush, Kuhn and Tucker hold.
        if gradient.max(initial=-np.inf) <= tolerance:
            break
        is_used[gradient.argmax()] = True
        solution, is_used = _restrict(gram, right, solution, is_used)
    return solution


def _restrict(
    gram: Array, right: Array, solution: Array, is_used: npt.NDArray[np.bool_]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Solve for the columns in use. Columns whose coefficient would be negative are left out."""
    while True:
        wanted = np.zeros_like(solution)
        wanted[is_used] = np.linalg.solve(gram[np.ix_(is_used, is_used)], right[is_used])
        is_negative = is_used & (wanted <= 0)
        if not is_negative.any():
            return wanted, is_used
        # Go toward the wanted solution until the first coefficient is zero.
        reach = solution[is_negative] / (solution[is_negative] - wanted[is_negative])
        solution = solution + reach.min() * (wanted - solution)
        first = np.flatnonzero(is_negative)[reach.argmin()]
        is_used = is_used & (solution > 0)
        is_used[first] = False
        solution = np.where(is_used, solution, 0.0)

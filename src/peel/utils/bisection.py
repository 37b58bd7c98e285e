"""Bisection of an increasing function."""

from collections.abc import Callable


def solve_increasing(cost: Callable[[float], float], wanted: float, low: float) -> tuple[float, bool]:
    """The factor from `low` on at which an increasing cost reaches `wanted`, and whether the cost saturates.

    A cost that saturates below `wanted` gives the smallest factor at which it no longer grows.
    """
    if cost(low) >= wanted:
        return low, False
    high = max(2.0, 2 * low)
    while cost(high) < wanted and high < 2**40:
        high *= 2
    most = cost(high)
    saturates = most < wanted
    for _ in range(100):
        middle = (low + high) / 2
        # A cost that ends below `wanted`: the first factor that gives all there is.
        is_below = cost(middle) < most if saturates else cost(middle) <= wanted
        low, high = (middle, high) if is_below else (low, middle)
    return low, saturates

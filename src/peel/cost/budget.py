"""Budgets as users write them: `"1.1G"`, `"50%"`, `0.5`, `1_100_000_000`."""

import math
import re
from numbers import Integral, Real

from ..errors import BudgetError

Budget = str | int | float

#: Multiply-adds of one sample, number of parameters, bytes of activations at their peak (an estimate).
RESOURCES = ("macs", "params", "memory")

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTES = {f"{prefix}b": size for prefix, size in _COUNTS.items() if prefix != "b"}
_BYTES |= {f"{prefix}ib": 2 ** (10 * power) for power, prefix in enumerate("kmgt", start=1)}
_NUMBER = re.compile(
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*(%|[a-z]*)",
    re.IGNORECASE,
)
_HELP = 'Write "1.1G", "87M", "50%", a fraction between 0 and 1, or a whole number such as 1_100_000_000.'


def parse_budget(budget: Budget, original: int, resource: str = "macs") -> int:
    """The budget as a whole number. `original` is the cost of the original network.

    A number with a percent sign, or one between 0 and 1, is a fraction of the original. A number with a
    suffix (k, M, G or B, T, in either case) and a whole number from 2 on are counts. Bytes of memory may also
    be written as `8MB` or `8MiB`. Text and numbers mean the same. What could be either is refused: 1, or 1.5.

    >>> parse_budget("50%", 4_089_184_256)
    2044592128
    >>> parse_budget("1.1G", 4_089_184_256)
    1100000000
    """
    number, suffix = _split(budget)
    suffixes = _COUNTS | _BYTES if resource == "memory" else _COUNTS
    if suffix not in (*suffixes, "%"):
        raise BudgetError(f"cannot read {budget!r} as a budget of {resource}. {_HELP}")
    value = number * original / 100 if suffix == "%" else number * suffixes[suffix]
    if not suffix and 0 < number < 1:
        value = number * original
    elif not suffix and (number == 1 or number % 1):
        raise BudgetError(
            f"{budget!r} is neither a fraction between 0 and 1 nor a whole number from 2 on. "
            'Write a percentage ("100%", "150%") or a count ("1.5M").'
        )
    if not 1 - 1e-6 <= value < math.inf:
        raise BudgetError(f"the budget must be finite and at least 1, not {budget!r}.")
    # Round down: the budget is never exceeded. The small addition takes back what floating point lost.
    return math.floor(value + 1e-6) if value < 1e15 else int(value)


def _split(budget: Budget) -> tuple[float, str]:
    """The number and the suffix of a budget."""
    if isinstance(budget, Real) and not isinstance(budget, bool):  # numpy's numbers, too
        return int(budget) if isinstance(budget, Integral) else float(budget), ""
    match = _NUMBER.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if match is None:
        raise BudgetError(f"cannot read {budget!r} as a budget. {_HELP}")
    return float(match[1].replace("_", "").replace(",", "")), match[2].lower()


def format_count(count: float) -> str:
    """A count with a suffix: 1.81G, 300.8M, 56.5k."""
    for suffix, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            digits = 2 if count < 10 * size else 1
            return f"{count / size:.{digits}f}{suffix}"
    return str(int(count))


def format_bytes(count: float) -> str:
    """Bytes with a decimal suffix: 4.82MB."""
    return f"{format_count(count)}B"


def format_cost(count: float, resource: str) -> str:
    """A cost with its unit: 1.81G MACs, 11.7M params, 4.82MB of memory."""
    if resource == "memory":
        return f"{format_bytes(count)} of memory"
    return f"{format_count(count)} {'MACs' if resource == 'macs' else resource}"

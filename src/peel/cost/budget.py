"""Budgets as users write them: `"1.1G"`, `"50%"`, `0.5`, `1_100_000_000`."""

import math
import re

from ..errors import BudgetError

Budget = str | int | float

#: Multiply-adds of one sample, number of parameters, bytes of activations at their peak (an estimate).
RESOURCES = ("macs", "params", "memory")

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*(%|[kmgbt]?)",
    re.IGNORECASE,
)
_HELP = 'Write "1.1G", "87M", "50%", a fraction such as 0.5, or a whole number such as 1_100_000_000.'


def parse_budget(budget: Budget, original: int) -> int:
    """The budget as a whole number. `original` is the cost of the original network.

    >>> parse_budget("50%", 4_089_184_256)
    2044592128
    >>> parse_budget("1.1G", 4_089_184_256)
    1100000000
    """
    match = _NUMBER.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if match is not None:
        number = float(match[1].replace("_", "").replace(",", ""))
        if match[2] == "%":
            value = number / 100 * original
        elif match[2] or number > 1:
            value = number * _SUFFIXES[match[2].lower()]
        else:
            value = number * original
    elif isinstance(budget, bool) or not isinstance(budget, int | float):
        raise BudgetError(f"cannot read {budget!r} as a budget. {_HELP}")
    elif isinstance(budget, int):
        value = budget
    elif 0 < budget <= 1 or budget.is_integer():
        value = budget * original if budget <= 1 else budget
    else:
        raise BudgetError(f"{budget!r} is neither a fraction from 0 to 1 nor a whole number. {_HELP}")
    if not 1 - 1e-6 <= value < math.inf:
        raise BudgetError(f"the budget must be finite and at least 1, not {budget!r}.")
    # Round down: the budget is never exceeded. The small addition takes back what floating point lost.
    return math.floor(value + 1e-6) if value < 1e15 else int(value)


def format_count(count: float) -> str:
    """A count with a suffix: 1.81G, 300.8M, 56.5k."""
    for suffix, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            digits = 2 if count < 10 * size else 1
            return f"{count / size:.{digits}f}{suffix}"
    return str(int(count))

"""Budgets as users write them: `"1.1G"`, `"50%"`, `0.5`, `"8ms"`, `"macs<=1.1G, params<=8M"`."""

import math
import re
from numbers import Integral, Real

from ..errors import BudgetError, check_choice
from ..utils.text import short

Budget = str | int | float

#: Multiply-adds of one sample, number of parameters, bytes of activations at their peak (an estimate),
#: nanoseconds of a batch on a measured machine (a latency model).
RESOURCES = ("macs", "params", "memory", "latency")

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTES = {f"{prefix}b": size for prefix, size in _COUNTS.items() if prefix != "b"}
_BYTES |= {f"{prefix}ib": 2 ** (10 * power) for power, prefix in enumerate("kmgt", start=1)}
_TIMES = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_NUMBER = re.compile(
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*(%|[a-z]*)",
    re.IGNORECASE,
)
_SUFFIXES = {"memory": _COUNTS | _BYTES, "latency": {"": 1, **_TIMES}}
_LIMIT = re.compile(r"\s*([a-z]+)\s*(?:<=|≤)\s*([^<≤]+?)\s*", re.IGNORECASE)
_HELP = 'Write "1.1G", "87M", "50%", a fraction between 0 and 1, or a whole number such as 1_100_000_000.'
_TIME_HELP = 'Write a time ("8ms", "500us"), a percentage ("60%"), or a fraction between 0 and 1.'


def parse_budget(budget: Budget, original: int, resource: str = "macs") -> int:
    """The budget as a whole number. `original` is the cost of the original network.

    A number with a percent sign, or one between 0 and 1, is a fraction of the original. A number with a
    suffix (k, M, G or B, T, in either case) and a whole number from 2 on are counts. Bytes of memory may also
    be written as `8MB` or `8MiB`. Text and numbers mean the same. What could be either is refused: 1, or 1.5.
    A latency has a unit (ns, us, ms, s); as a whole number it is in nanoseconds.

    >>> parse_budget("50%", 4_089_184_256)
    2044592128
    >>> parse_budget("1.1G", 4_089_184_256)
    1100000000
    """
    # A latency as text needs its unit: nobody means 8 nanoseconds by "8". Fractions below 1 have none.
    number, suffix = _split(budget)
    suffixes = _SUFFIXES.get(resource, _COUNTS)
    has_no_unit = resource == "latency" and isinstance(budget, str) and not suffix and number >= 1
    if suffix not in (*suffixes, "%") or has_no_unit:
        text = _TIME_HELP if resource == "latency" else _HELP
        raise BudgetError(f"cannot read {budget!r} as a budget of {resource}. {text}")
    value = number * original / 100 if suffix == "%" else number * suffixes[suffix]
    if not suffix and 0 < number < 1:
        value = number * original
    elif not suffix and (number == 1 or number % 1):
        raise BudgetError(
            f"{budget!r} is neither a fraction between 0 and 1 nor a whole number from 2 on. "
            'Write a percentage ("100%", "150%") or a count ("1.5M").'
        )
    if not 1 - 1e-6 <= value < 2**63:
        raise BudgetError(f"the budget must be finite and at least 1, and below 2**63, not {short(budget)}.")
    # Round down: the budget is never exceeded. The small addition takes back what floating point lost.
    return math.floor(value + 1e-6) if value < 1e15 else int(value)


def parse_limits(text: str) -> dict[str, str]:
    """Resource -> budget, from several limits in one text. Empty where the text is a single budget.

    >>> parse_limits("macs<=1.1G, latency<=8ms")
    {'macs': '1.1G', 'latency': '8ms'}
    """
    if not isinstance(text, str) or not re.search("[<>=≤]", text):
        return {}
    limits: dict[str, str] = {}
    for part in re.split(r",(?=\s*[a-z]+\s*[<>=≤])", text, flags=re.IGNORECASE):
        match = _LIMIT.fullmatch(part)
        if match is None:
            raise BudgetError(f'cannot read the limit {part.strip()!r}. Write "macs<=1.1G, params<=8M".')
        name = match[1].lower()
        check_choice("the resource of a limit", name, RESOURCES, BudgetError)
        if name in limits:
            raise BudgetError(f"{text!r} limits {name} twice.")
        limits[name] = match[2]
    return limits


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
    """A cost with its unit: 1.81G MACs, 11.7M params, 4.82MB of memory, 8.21 ms."""
    if resource == "latency":
        return format_latency(count)
    if resource == "memory":
        return f"{format_bytes(count)} of memory"
    return f"{format_count(count)} {'MACs' if resource == 'macs' else resource}"


def format_exact(count: float, resource: str) -> str:
    """A cost with its unit and all its digits: 1.81G MACs (1,814,073,344). A latency has no exact digits."""
    text = format_cost(count, resource)
    return text if resource == "latency" else f"{text} ({int(count):,})"


def format_latency(nanoseconds: float) -> str:
    """A time with three digits: 8.21 ms."""
    return f"{nanoseconds / 1e6:.3g} ms" if nanoseconds >= 1e5 else f"{nanoseconds / 1e3:.3g} us"

"""Attributes of modules that hold widths: `out_channels`, `num_features`, and those of the user's own blocks.

The rules report the attributes of torch's layers (`Call.has_attributes`). For other attributes this module
makes guesses, which the attribute search tests.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..cost.polynomial import Form

#: A number that is not itself a length in a call is taken for a width only if its name says so.
_WIDTH_NAME = re.compile(r"chan|chs|feature|plane|width|dim|hidden|filters|inp|oup|in_c|out_c|_c$")


Guesses = Mapping[tuple[str, int | tuple[int, ...]], list[Any]]
"""(module, number or numbers) -> the `Form` that this may be, or a tuple of forms."""


def guessed_attributes(name: str, module: nn.Module, called: Guesses, seen: Guesses) -> dict[str, list[Any]]:
    """Attribute -> what it may hold in terms of widths, best guess first.

    `called` has the lengths that operators of the module were called with, `seen` those of the axes that they
    worked on.
    """
    guesses: dict[str, list[Any]] = {}
    for attribute, value in vars(module).items():
        numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            continue
        found = list(called.get((name, value if isinstance(value, int) else numbers), ()))
        if isinstance(value, int) and _WIDTH_NAME.search(attribute):
            # Code that says `torch.split(x, self.channels // 2, 1)` holds twice the length it calls with.
            for factor in (factor for factor in range(2, 9) if value % factor == 0):
                found += [_multiple(form, factor) for form in called.get((name, value // factor), ())]
            found += seen.get((name, value), ())
        if found:
            guesses[attribute] = list(dict.fromkeys(found))
    return guesses


def _multiple(form: Form, factor: int) -> Form:
    return Form(form.constant * factor, tuple((tie, times * factor) for tie, times in form.units))


def evaluate(attributes: Mapping[str, Mapping[str, Any]], units: list[int]) -> dict[str, dict[str, Any]]:
    """Module -> attribute -> number (or list of numbers) at the given units."""

    def number(form: Any) -> Any:
        return form.value(units) if isinstance(form, Form) else [item.value(units) for item in form]

    return {
        module: {name: number(form) for name, form in found.items()} for module, found in attributes.items()
    }


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Write numbers, keeping the type of sequence that the attribute had."""
    for name, value in attributes.items():
        old = getattr(module, name)
        setattr(module, name, type(old)(value) if isinstance(old, list | tuple) else value)

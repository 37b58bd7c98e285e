"""Attributes of modules that hold widths: `out_channels`, `num_features`, and those of the user's own blocks.

The rules report the attributes of torch's layers (`Call.has_attributes`). For other attributes this module
makes guesses, which the attribute search tests.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..cost.polynomial import Form

#: A list of integers longer than this is data, not a list of widths.
_MAX_LIST = 16

#: A number that is not itself a length in a call is taken for a width only if its name says so.
_WIDTH_NAME = re.compile(r"chan|chs|feature|plane|width|dim|hidden|filters|inp|oup|in_c|out_c|_c$")


@dataclass
class Lengths:
    """The lengths that operators of one module were called with -> what they are in terms of widths."""

    single: dict[int, list[Form]] = field(default_factory=dict)
    lists: dict[tuple[int, ...], list[tuple[Form, ...]]] = field(default_factory=dict)
    seen: dict[int, list[Form]] = field(default_factory=dict)
    """Lengths of axes that operators of the module worked on, last operator first."""


def guessed_attributes(module: nn.Module, lengths: Lengths) -> dict[str, list[Any]]:
    """Attribute -> what it may hold in terms of widths, best guess first."""
    guesses: dict[str, list[Any]] = {}
    for name, value in vars(module).items():
        found: list[Any] = []
        if _is_integer(value):
            found += lengths.single.get(value, ())
            if _WIDTH_NAME.search(name):
                found += _multiples(value, lengths.single)
                found += lengths.seen.get(value, ())
        elif isinstance(value, list | tuple) and 0 < len(value) <= _MAX_LIST and all(map(_is_integer, value)):
            found += lengths.lists.get(tuple(value), ())
        if found:
            guesses[name] = list(dict.fromkeys(found))
    return guesses


def _multiples(value: int, lengths: Mapping[int, list[Form]]) -> list[Form]:
    """Code that says `torch.split(x, self.channels // 2, 1)` holds twice the length it calls with."""
    return [
        Form(form.constant * factor, tuple((tie, times * factor) for tie, times in form.units))
        for factor in range(2, 9)
        if value > 1 and value % factor == 0
        for form in lengths.get(value // factor, ())
    ]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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

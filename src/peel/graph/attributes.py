"""Attributes of modules that mirror widths: `out_channels`, `num_features`, `normalized_shape`, and those of users' own blocks.

What layers mirror, the rules of their operators tell (`Interpreter.mirror`). Beside that, an integer attribute that equals a length with
which its module's forward called an operator (`torch.split(x, self.width, 1)`) is taken to be that length; the probe (`probe.py`) then runs
the module's code at other widths and finds out whether that was right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..cost.polynomial import Form

#: A list of integers longer than this is data, not a description of widths.
_MAX_LIST = 16

#: What is not a length in a call itself is taken for a width only under a name that says so: `self.scale = 64` is none.
_WIDTH_NAME = re.compile(r"chan|chs|feature|plane|width|dim|hidden|filters|inp|oup|in_c|out_c|_c$")


def times(form: Form, factor: int) -> Form:
    return Form(form.constant * factor, tuple((tie, n * factor) for tie, n in form.units))


def layer_attributes(module: nn.Module, mirrors: Mapping[str, tuple[int, Form]]) -> dict[str, Form]:
    """What a layer says about its widths: attributes that its kind of layer has, where they hold the length they should mirror."""
    return {
        name: form
        for name, (length, form) in mirrors.items()
        if form.units and getattr(module, name, None) == length
    }


def guessed_attributes(module: nn.Module, lengths: Lengths) -> dict[str, list[Any]]:
    """Attribute -> what it may mirror, best guess first: lengths that operators of the module were called with."""
    guesses: dict[str, list[Any]] = {}
    for name, value in vars(module).items():
        if _is_integer(value):
            forms = dict.fromkeys(lengths.single.get(value, ()))
            if _WIDTH_NAME.search(name):
                forms.update(dict.fromkeys(_multiples(value, lengths.single)))
                forms.update(dict.fromkeys(lengths.seen.get(value, ())))
            if forms:
                guesses[name] = list(forms)
        elif (
            isinstance(value, list | tuple)
            and 0 < len(value) <= _MAX_LIST
            and all(_is_integer(item) for item in value)
        ):
            listed = lengths.lists.get(tuple(value))
            if listed:
                guesses[name] = list(listed)
    return guesses


@dataclass
class Lengths:
    """What operators of one module were called with -> what that is in terms of widths."""

    single: dict[int, list[Form]] = field(default_factory=dict)
    lists: dict[tuple[int, ...], list[tuple[Form, ...]]] = field(default_factory=dict)
    seen: dict[int, list[Form]] = field(default_factory=dict)
    """Lengths of axes that operators of the module worked on, latest first. Taking the first 16 of 16 channels leaves no other trace."""


def _multiples(value: int, lengths: Mapping[int, list[Form]]) -> list[Form]:
    """Code that says `torch.split(x, self.channels // 2, 1)` mirrors twice the length it calls with."""
    factors = [factor for factor in range(2, 9) if value > 1 and value % factor == 0]
    return [times(form, factor) for factor in factors for form in lengths.get(value // factor, ())]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Write plain numbers, keeping the kind of sequence the attribute had."""
    for name, value in attributes.items():
        old = getattr(module, name)
        setattr(module, name, type(old)(value) if isinstance(old, list | tuple) else value)


def evaluate(attributes: Mapping[str, Mapping[str, Any]], units: list[int]) -> dict[str, dict[str, Any]]:
    """Module -> attribute -> number (or list of numbers) at the given units."""

    def number(form: Any) -> Any:
        return form.value(units) if isinstance(form, Form) else [item.value(units) for item in form]

    return {
        module: {name: number(form) for name, form in found.items()} for module, found in attributes.items()
    }

"""Attributes of modules that mirror widths: `out_channels`, `num_features`, `normalized_shape`, and those of users' own blocks.

What torch's own layers mirror is known. For every other module, an integer attribute that equals a length with which the module's
forward called an operator (`torch.split(x, self.width, 1)`) is taken to be that length; the probe (`probe.py`) then runs the
module's code at other widths and finds out whether that was right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..cost import Form

FormOf = Callable[[str, int], Form]
"""(tensor name, axis) -> its length"""

#: A list of integers longer than this is data, not a description of widths.
_MAX_LIST = 16

#: What is not a length in a call itself is taken for a width only under a name that says so: `self.scale = 64` is none.
_WIDTH_NAME = re.compile(r"chan|chs|feature|plane|width|dim|hidden|filters|inp|oup|in_c|out_c|_c$")


def times(form: Form, factor: int) -> Form:
    return Form(form.constant * factor, tuple((tie, n * factor) for tie, n in form.units))


def divided(form: Form, divisor: int) -> Form:
    return Form(form.constant // divisor, tuple((tie, n // divisor) for tie, n in form.units))


def layer_attributes(name: str, module: nn.Module, form_of: FormOf) -> dict[str, Any]:
    """What a layer of torch itself, or a subclass of one, says about its widths."""
    prefix = f"{name}." if name else ""

    def size(tensor: str, axis: int) -> Form | None:
        parameter = getattr(module, tensor, None)
        return form_of(f"{prefix}{tensor}", axis) if parameter is not None and parameter.ndim > axis else None

    found: dict[str, Form | tuple[Form | None, ...] | None] = {}
    if isinstance(module, _ConvNd):
        first, second = size("weight", 0), size("weight", 1)
        if first is not None and second is not None:
            outputs, inputs = (second, first) if isinstance(module, _ConvTransposeNd) else (first, second)
            depthwise = module.groups > 1 and module.groups == module.in_channels
            if depthwise:
                per_channel = module.out_channels // module.groups
                channels = first if isinstance(module, _ConvTransposeNd) else divided(first, per_channel)
                found = {"in_channels": channels, "out_channels": times(channels, per_channel), "groups": channels}
            elif isinstance(module, _ConvTransposeNd):
                found = {"in_channels": inputs, "out_channels": times(outputs, module.groups)}
            else:
                found = {"in_channels": times(inputs, module.groups), "out_channels": outputs}
    elif isinstance(module, nn.Linear):
        found = {"in_features": size("weight", 1), "out_features": size("weight", 0)}
    elif isinstance(module, _NormBase):
        found = {"num_features": size("weight", 0) or size("running_mean", 0)}
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        found = {"normalized_shape": tuple(size("weight", axis) for axis in range(len(module.normalized_shape)))}
    elif isinstance(module, nn.GroupNorm):
        found = {"num_channels": size("weight", 0)}
    elif isinstance(module, nn.PReLU):
        found = {"num_parameters": size("weight", 0)}
    elif isinstance(module, nn.Embedding):
        found = {"embedding_dim": size("weight", 1)}
    return {key: form for key, form in found.items() if _changes(form)}


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
        elif isinstance(value, list | tuple) and 0 < len(value) <= _MAX_LIST and all(_is_integer(item) for item in value):
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


def _changes(form: Any) -> bool:
    if form is None:
        return False
    return bool(form.units) if isinstance(form, Form) else any(item is not None and item.units for item in form)


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Write plain numbers, keeping the kind of sequence the attribute had."""
    for name, value in attributes.items():
        old = getattr(module, name)
        setattr(module, name, type(old)(value) if isinstance(old, list | tuple) else value)


def evaluate(attributes: Mapping[str, Mapping[str, Any]], units: list[int]) -> dict[str, dict[str, Any]]:
    """Module -> attribute -> number (or list of numbers) at the given units."""

    def number(form: Any) -> Any:
        return form.value(units) if isinstance(form, Form) else [item.value(units) for item in form]

    return {module: {name: number(form) for name, form in found.items()} for module, found in attributes.items()}

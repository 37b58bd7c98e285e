"""Flags of a method: `--peel.rounds 3` is the setting `rounds` of the method `peel`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import PeelError

#: Prefixes of flags that are not methods.
TABLES = ("train", "backbone", "groups", "methods")

#: Flags of version 0.1 that are settings of the method peel now.
OLD_FLAGS = (
    "backbone-ratio",
    "backbone-init",
    "criterion",
    "reduce",
    "l1-coefficient",
    "l1-strength",
    "gamma-init",
    "ignore",
    "evaluations",
    "policy",
    "solver",
    "rounds",
    "max-width",
)

_settings: dict[str, dict[str, Any]] = {}


def split_method_flags(arguments: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The arguments without the flags of methods, and these by method. A repeated flag is a list."""
    others: list[str] = []
    found: dict[str, dict[str, list[Any]]] = {}
    rest = iter(arguments)
    for argument in rest:
        old = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        if argument.startswith("--") and old in OLD_FLAGS:
            raise PeelError(f"--{old} is a setting of the method peel: --method peel --peel.{old}.")
        flag = re.fullmatch(r"--([A-Za-z_][\w-]*)\.([A-Za-z_][\w-]*)(=.*)?", argument, re.DOTALL)
        if flag is None or flag[1] in TABLES:
            others.append(argument)
            continue
        value = flag[3][1:] if flag[3] is not None else next(rest, None)
        if value is None or (flag[3] is None and value.startswith("--")):
            raise PeelError(f"--{flag[1]}.{flag[2]} needs a value.")
        method, name = (text.replace("-", "_") for text in (flag[1], flag[2]))
        found.setdefault(method, {}).setdefault(name, []).append(_value(value))
    return others, {
        method: {name: values[0] if len(values) == 1 else values for name, values in of_method.items()}
        for method, of_method in found.items()
    }


def _value(text: str) -> Any:
    """A number or a truth value where the text is one, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None if text.lower() == "none" else text


@contextlib.contextmanager
def method_settings(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """The settings of methods that the running command takes."""
    _settings.clear()
    _settings.update({method: dict(values) for method, values in settings.items()})
    try:
        yield
    finally:
        _settings.clear()


def given_settings() -> dict[str, dict[str, Any]]:
    return {method: dict(values) for method, values in _settings.items()}

"""The methods by name with their settings, and methods of the user's own."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ..errors import ConfigError, did_you_mean
from ..utils.fingerprint import fingerprint
from ..utils.references import load_object
from ..utils.text import short
from ..utils.validation import describe_error
from .method import Method, Uniform
from .peel import Peel
from .ranking import Magnitude, Taylor
from .sensitivity import LeastSensitive

#: Name -> class. The first line of its docstring is its description, its fields are its settings.
METHODS: dict[str, type[Method]] = {
    "sensitivity": LeastSensitive,
    "peel": Peel,
    "uniform": Uniform,
    "magnitude": Magnitude,
    "taylor": Taylor,
}


@dataclass(frozen=True)
class MethodSpec:
    """A method as plain values: what a run stores of it, and what tells two of them apart."""

    name: str
    settings: dict[str, Any]
    file: str | None = None
    """A hash of the user's file."""


def prefix_of(reference: str) -> str:
    """The name before a setting: `peel` in --peel.rounds, `random_search` of my_method.py:RandomSearch."""
    name = reference.rpartition(":")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() if ":" in reference else name


def find_method(reference: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """The method of this name, or the user's own class as `path/file.py:Name`, with these settings."""
    if isinstance(reference, Method):
        return reference
    found: Any = METHODS.get(reference)
    if found is None:
        if ":" not in reference:
            raise ConfigError(
                f"no method is called {reference!r}.{did_you_mean(reference, METHODS)} Known are "
                f"{', '.join(METHODS)}; for your own, write path/to/file.py:Name or package.module:Name."
            )
        found = load_object(reference, ConfigError)
    if isinstance(found, Method) and not settings:
        return found
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"the method {reference!r} is not a subclass of peel.Method.")
    return _with_settings(found, reference, settings or {})


def _with_settings(kind: type[Method], reference: str, settings: Mapping[str, Any]) -> Method:
    prefix = prefix_of(reference)
    fields = _fields(kind)
    for name in settings:
        if name not in fields:
            known = f" It has {', '.join(fields)}." if fields else " It has none."
            raise ConfigError(
                f"the method {prefix} has no setting {name}.{did_you_mean(name, fields) or known} "
                f"`peel methods {reference}` shows them."
            )
    hints = get_type_hints(kind, include_extras=True)
    values = {name: _convert(f"{prefix}.{name}", value, hints[name]) for name, value in settings.items()}
    try:
        return kind(**values)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the method {reference!r} cannot be created: {type(error).__name__}: {error}"
        ) from error


def _fields(kind: type[Method]) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _convert(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as error:
        if not isinstance(value, list | tuple | dict):  # one value stands for a list of one
            with contextlib.suppress(msgspec.ValidationError, TypeError):
                return msgspec.convert([value], kind)
        raise ConfigError(f"{name}: {describe_error(error)}, not {short(value)}.") from error


def spec_of(method: Method, reference: str) -> MethodSpec:
    """The method as plain values. Objects in its settings are named by their class."""
    values = {name: _plain(getattr(method, name)) for name in _fields(type(method))}
    # Through JSON: a stored plan has lists where a setting is a tuple.
    settings = msgspec.json.decode(msgspec.json.encode(values, enc_hook=reference_of))
    texts = [value for value in settings.values() if isinstance(value, str) and ".py:" in value]
    paths = {Path(text.rpartition(":")[0]) for text in texts}
    paths |= {path for item in (method, *values.values()) if (path := _file_of(item)) is not None}
    contents = [path.read_bytes() for path in sorted(paths) if path.is_file()]
    return MethodSpec(reference, settings, fingerprint(contents) if contents else None)


def _file_of(item: Any) -> Path | None:
    """The user's file that the class of an object stands in."""
    kind = type(item)
    if kind.__module__.partition(".")[0] in ("peel", "builtins"):
        return None
    try:
        return Path(inspect.getfile(kind))
    except (TypeError, OSError):
        return None


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def reference_of(item: object) -> str:
    kind = item if isinstance(item, type) else type(item)
    return f"{kind.__module__}:{kind.__qualname__}"


def owners_of(setting: str) -> list[str]:
    """The methods that have a setting of this name."""
    return [name for name, kind in METHODS.items() if setting in _fields(kind)]


@dataclass(frozen=True)
class Setting:
    """A setting of a method, as its help shows it."""

    name: str
    default: Any
    help: str


def settings_of(kind: type[Method]) -> list[Setting]:
    """The settings of a method, with the texts that stand below its fields."""
    texts = _texts_below_fields(kind)
    if not dataclasses.is_dataclass(kind):
        return []
    fields = dataclasses.fields(kind)
    return [Setting(item.name, item.default, texts.get(item.name, "")) for item in fields]


def _texts_below_fields(kind: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    except (OSError, TypeError):  # a class without a file
        return {}
    texts = {}
    for field, text in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts

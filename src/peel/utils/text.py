"""Values as text."""

import reprlib
from collections.abc import Mapping
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlong = 30
_SHORT.maxlevel = 2


def format_duration(seconds: float) -> str:
    """0.4 s, 18 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_number_of(count: int, noun: str) -> str:
    """1 thread, 2 threads."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(value: Any) -> str:
    """A value of a file, in one line that a message can show: its `repr`, with the middle left out."""
    return " ".join(_SHORT.repr(value).split())


def brief(error: BaseException, length: int = 300) -> str:
    """The text of an error of a library, in one line: it may quote the file that it comes from."""
    text = " ".join(str(error).split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text[:300] or type(error).__name__


def name_of_key(key: Any) -> str:
    """A name that a file gives, as a message shows it: one that fills lines is cut."""
    return key if isinstance(key, str) and key.isprintable() and len(key) < 100 else short(key)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots: {"train": {"lr": 0.1}} becomes {"train.lr": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat

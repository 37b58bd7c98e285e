"""Every error that a caller can cause, and the checks that many places share.

A message names the thing, the value and how to fix it.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any


class PeelError(Exception):
    """The root of every error that a caller can cause."""


class TraceError(PeelError):
    """The model cannot be captured, or the example input does not fit it."""


class WidthsError(PeelError):
    """The widths do not describe a network that can be built."""


class BudgetError(PeelError):
    """The budget cannot be read or cannot be reached."""


class ModelError(PeelError):
    """The model name is unknown, or the model cannot be built or pruned."""


class StoreError(PeelError):
    """The saved file is missing, unsafe, corrupt or does not fit."""


class ConfigError(PeelError):
    """The setting is unknown or its value is wrong."""


class ExportError(PeelError):
    """The network cannot be exported, or the exported file does not do what the network does."""


class DataError(PeelError):
    """The images or labels are missing, unreadable or do not fit the model."""


class RunError(PeelError):
    """The run folder cannot be used."""


class CorruptFileError(StoreError, RunError):
    """A saved model or a file in a run folder is corrupt, or belongs to another run."""


class DivergedError(PeelError):
    """The loss or the weights are not finite."""


class OutOfMemoryError(PeelError):
    """The smallest micro-batch does not fit into memory."""


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """A hint with the known names closest to a wrong one; empty where none is close."""
    names = sorted(set(known))
    near = get_close_matches(str(name), names) or _longer_names(str(name), names)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _longer_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three that begin with a name of three letters or more, such as onnxruntime with onnx."""
    return [other for other in known if len(name) > 2 and other.startswith(name.lower())][:3]


def check_choice(
    setting: str, value: Any, known: Collection[str], error: type[PeelError] = ConfigError
) -> None:
    if value not in known:
        hint = did_you_mean(value, known)
        raise error(f"{setting} is one of {', '.join(known)}, not {str(value)[:100]!r}.{hint}")

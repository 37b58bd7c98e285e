"""Every error that a caller can cause, in one tree.

    PeelError
    ├── TraceError    the model cannot be captured, or the example input does not fit it
    ├── WidthsError   unknown ties, impossible widths, a fixed tie changed
    ├── BudgetError   a budget that cannot be read or cannot be reached
    ├── ModelError    a model name or reference that leads nowhere
    ├── StoreError    a saved file that is missing, damaged, unsafe or does not fit
    ├── ConfigError   a setting that does not exist or cannot have that value
    ├── DataError     images or labels that are missing, unreadable or do not fit the model
    ├── RunError      a run folder that cannot be used
    │   └── DamagedError  what a run has kept in its folder is damaged
    ├── DivergedError training that produced numbers that are not finite
    └── MemoryShortError not even the smallest part of a batch fits into memory

A message names the thing, the value and the way out.
"""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptFileError",
    "DataError",
    "DivergedError",
    "ModelError",
    "OutOfMemoryError",
    "PeelError",
    "RunError",
    "StoreError",
    "TraceError",
    "WidthsError",
    "did_you_mean",
]


class PeelError(Exception):
    """The root of every error that a caller can cause."""


class TraceError(PeelError):
    """The model cannot be captured, or the example input does not fit it."""


class WidthsError(PeelError):
    """The widths do not describe a network that can be built."""


class BudgetError(PeelError):
    """The budget cannot be read or cannot be reached."""


class ModelError(PeelError):
    """The model name or reference leads nowhere."""


class StoreError(PeelError):
    """The saved file is missing, damaged, unsafe or does not fit."""


class ConfigError(PeelError):
    """The setting does not exist or cannot have that value."""


class DataError(PeelError):
    """The images or labels are missing, unreadable or do not fit the model."""


class RunError(PeelError):
    """The run folder cannot be used."""


class CorruptFileError(RunError):
    """What a run has kept in its folder is damaged, or belongs to another run."""


class DivergedError(PeelError):
    """Training produced numbers that are not finite."""


class OutOfMemoryError(PeelError):
    """Not even the smallest part of a batch fits into memory."""


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """A hint with the names nearest to an unknown one; empty where nothing is near."""
    near = get_close_matches(name, sorted(set(known)), n=limit, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""

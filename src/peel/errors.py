"""Every error that a caller can cause, in one tree.

    PeelError
    ├── TraceError    the model cannot be captured, or the example input does not fit it
    ├── WidthsError   unknown ties, impossible widths, a fixed tie changed
    ├── BudgetError   a budget that cannot be read or cannot be reached
    ├── ModelError    an unknown model name, or a model that cannot be built or pruned
    ├── StoreError    a saved model that is missing, damaged, unsafe or does not fit
    ├── ConfigError   an unknown setting or a wrong value
    ├── DataError     images or labels that are missing, unreadable or do not fit the model
    ├── RunError      a run folder that cannot be used
    │   └── CorruptFileError  a damaged file in a run folder
    ├── DivergedError the loss or the weights are not finite
    └── OutOfMemoryError  the smallest micro-batch does not fit into memory

A message names the thing, the value and how to fix it.
"""

from collections.abc import Iterable
from difflib import get_close_matches


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
    """The saved model is missing, damaged, unsafe or does not fit."""


class ConfigError(PeelError):
    """The setting is unknown or its value is wrong."""


class DataError(PeelError):
    """The images or labels are missing, unreadable or do not fit the model."""


class RunError(PeelError):
    """The run folder cannot be used."""


class CorruptFileError(RunError):
    """A file in a run folder is damaged or belongs to another run."""


class DivergedError(PeelError):
    """The loss or the weights are not finite."""


class OutOfMemoryError(PeelError):
    """The smallest micro-batch does not fit into memory."""


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """A hint with the known names closest to a wrong one; empty where none is close."""
    near = get_close_matches(name, sorted(set(known)), n=limit, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""

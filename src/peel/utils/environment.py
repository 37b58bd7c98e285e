"""What the environment says of this process: its cores, its place among others, numbers in variables."""

from __future__ import annotations

import os

from ..errors import ConfigError

__all__ = ["PEER_LOST", "count_cores", "env_number", "is_main_process", "is_peer_lost"]

#: The exit code of a process that waited in vain for the others, or was left alone by its starter; that of `peel run --gpus` is then 1.
PEER_LOST = 75


def count_cores() -> int:
    """Those that it may use: a scheduler or `taskset` may have given it some of the machine's only."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_main_process() -> bool:
    """Whether this process is alone, or the one of several that talks to people."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def env_number(variable: str, default: float) -> float:
    """The number in a variable of the environment, above zero."""
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"the variable {variable} is {text!r}: it must be a number above zero. Set another one, or unset it."
        )
    return value


def is_peer_lost(error: BaseException) -> bool:
    """Whether another process did not answer: gloo's errors have no type of their own."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)

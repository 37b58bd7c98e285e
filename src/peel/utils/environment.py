"""CPU cores, the rank of this process, and numbers in environment variables."""

import os

from ..errors import ConfigError

#: Exit code of a process that lost the other processes of a distributed run, or its parent process.
PEER_LOST = 75


def count_cores() -> int:
    """The cores that this process may use: a scheduler or `taskset` may have limited them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_main_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def env_number(variable: str, default: float) -> float:
    """The positive number in an environment variable."""
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"the variable {variable} is {text!r}: it must be a number above zero, or unset.")
    return value


def timeout_seconds() -> float:
    """After this time without an answer, another process counts as hanging; PEEL_TIMEOUT changes it."""
    return env_number("PEEL_TIMEOUT", 300.0)


def is_peer_lost(error: BaseException) -> bool:
    """Whether another process of a distributed run is lost. Errors of gloo have no type of their own."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)

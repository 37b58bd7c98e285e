"""How many cores there are for this process."""

from __future__ import annotations

import os

__all__ = ["count_cores"]


def count_cores() -> int:
    """Those that it may use: a scheduler or `taskset` may have given it some of the machine's only."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Interrupts: SIGTERM, SIGUSR1 and Ctrl-C stop training after the current step, with a checkpoint.

A second Ctrl-C stops at once. Outside of training, the first signal stops at once as well.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]

#: Signals received since `handle_signals` began, oldest first.
_received: list[int] = []

#: One entry for each running block of `defer_signals`.
_deferring: list[None] = []

#: The launcher, in a process that was started by one.
_LAUNCHER = os.getppid() if "LOCAL_RANK" in os.environ else None


class Interrupted(BaseException):
    """A signal stopped the run; its state is saved. Like KeyboardInterrupt, it is not an Exception."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


def interrupt_requested() -> int | None:
    """The signal that asked to stop, if any. A worker process whose launcher is gone stops as by SIGTERM."""
    if _received:
        return _received[0]
    return signal.SIGTERM if _LAUNCHER not in (None, os.getppid()) else None


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Turn signals into interrupts within this block. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _on_signal) for number in _SIGNALS}
    _received.clear()
    try:
        yield
    finally:
        _received.clear()
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Only record signals within this block, whose code asks `interrupt_requested` at every step."""
    _deferring.append(None)
    try:
        yield
    finally:
        _deferring.pop()


def _on_signal(number: int, _: FrameType | None) -> None:
    is_second_ctrl_c = number == signal.SIGINT and number in _received
    # Recorded first: Python drops an exception raised inside a destructor. The next training still stops.
    _received.append(number)
    if is_second_ctrl_c:
        raise KeyboardInterrupt
    if not _deferring:
        raise Interrupted(number)

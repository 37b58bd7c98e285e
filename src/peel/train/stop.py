"""Being asked to stop: at SIGTERM, SIGUSR1 and Ctrl-C the running step ends and its state is kept. A second Ctrl-C stops at once.

One of several processes stops as well when the one that started them is gone: nobody could tell it to any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ..surroundings import LOST

__all__ = ["Stopped", "ended_when_left_alone", "listened_to", "listening", "stop_requested"]

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]

_received: list[int] = []

#: Who started this process, one of several. It may be gone already when this is read, so that it had better say so itself.
_STARTED_BY = int(os.environ.get("PEEL_STARTED_BY", os.getppid())) if "LOCAL_RANK" in os.environ else None

#: Seconds between two looks whether it is still there.
LOOK_SECONDS = 0.5

#: How many trainings are running that will look at what was received.
_listeners: list[None] = []


class Stopped(BaseException):
    """Training was asked to stop and has kept its state. Not an Exception: nothing on the way should take it for a failure."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


def stop_requested() -> int | None:
    """The signal that asked to stop, if any has."""
    if _received:
        return _received[0]
    return signal.SIGTERM if _is_left_alone() else None


def _is_left_alone() -> bool:
    return _STARTED_BY not in (None, os.getppid())


@contextlib.contextmanager
def ended_when_left_alone() -> Iterator[None]:
    """For the time in which the processes look for each other: one whose starter is gone would look for minutes, and keeps nothing yet."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            if _is_left_alone():
                os._exit(LOST)

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Turn signals into requests for as long as this lasts. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _received.clear()
    for number in _SIGNALS:
        signal.signal(number, _note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()


@contextlib.contextmanager
def listened_to() -> Iterator[None]:
    """While this lasts, someone asks `stop_requested` at every step; otherwise a signal stops at once, as nothing would be lost."""
    _listeners.append(None)
    try:
        yield
    finally:
        _listeners.pop()


def _note(number: int, _: FrameType | None) -> None:
    if not _listeners:
        raise Stopped(number)
    if number == signal.SIGINT and signal.SIGINT in _received:
        raise KeyboardInterrupt
    _received.append(number)

"""Being asked to stop: at SIGTERM, SIGUSR1 and Ctrl-C the running step ends and its state is kept. A second Ctrl-C stops at once.

One of several processes stops as well when the one that started them is gone: nobody could tell it to any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from ..utils.environment import PEER_LOST, is_main_process

__all__ = ["Interrupted", "defer_signals", "handle_signals", "interrupt_requested", "watch_parent"]

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]

_received: list[int] = []

#: Who started this process, one of several. It may be gone already when this is read, so that it had better say so itself.
_STARTED_BY = int(os.environ.get("PEEL_STARTED_BY", os.getppid())) if "LOCAL_RANK" in os.environ else None

#: Seconds between two looks whether it is still there.
LOOK_SECONDS = 0.5

#: Seconds in which Python hears of a signal, unless it waits for something outside of it.
SECONDS_TO_HEAR = 2.0

#: How many trainings are running that will look at what was received.
_listeners: list[None] = []


class Interrupted(BaseException):
    """Training was asked to stop and has kept its state. Not an Exception: nothing on the way should take it for a failure."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


def interrupt_requested() -> int | None:
    """The signal that asked to stop, if any has."""
    if _received:
        return _received[0]
    return signal.SIGTERM if _is_left_alone() else None


def _is_left_alone() -> bool:
    return _STARTED_BY not in (None, os.getppid())


@contextlib.contextmanager
def watch_parent() -> Iterator[None]:
    """For the time in which the processes look for each other, minutes perhaps: Python hears nothing meanwhile, and there is nothing to
    keep yet. A process that is told to stop ends, and so does one whose starter is gone.
    """
    is_over = threading.Event()
    with _signals_told() as told:

        def look() -> None:
            while not is_over.is_set():
                number = told(LOOK_SECONDS)
                if number is not None and not is_over.wait(SECONDS_TO_HEAR):
                    _end_here(number)
                if _is_left_alone() and not is_over.is_set():
                    os._exit(PEER_LOST)

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()


@contextlib.contextmanager
def _signals_told() -> Iterator[Callable[[float], int | None]]:
    """A function that waits so many seconds for a signal to stop, and has it even where Python itself is not heard."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda seconds: time.sleep(seconds)
        return
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)

        def told(seconds: float) -> int | None:
            reading.settimeout(seconds)
            with contextlib.suppress(TimeoutError):
                return next((number for number in reading.recv(64) if number in _SIGNALS), None)
            return None

        try:
            yield told
        finally:
            signal.set_wakeup_fd(before)


def _end_here(number: int) -> None:
    if is_main_process():
        sys.stderr.write(
            f"stopped by {signal.Signals(number).name} before the processes had met; the same command begins again.\n"
        )
        sys.stderr.flush()
    os._exit(128 + number)


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Turn signals into requests for as long as this lasts. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    complain = sys.unraisablehook

    def tell_again(dropped: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised while an object is taken away, as there are many while a network is captured."""
        if not isinstance(dropped.exc_value, Interrupted):
            complain(dropped)
            return
        number = dropped.exc_value.signal_number
        threading.Timer(
            0.05, lambda: None if _listeners or not _received else os.kill(os.getpid(), number)
        ).start()

    _received.clear()
    sys.unraisablehook = tell_again
    for number in _SIGNALS:
        signal.signal(number, _note)
    try:
        yield
    finally:
        _received.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = complain


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """While this lasts, someone asks `stop_requested` at every step; otherwise a signal stops at once, as nothing would be lost."""
    _listeners.append(None)
    try:
        yield
    finally:
        _listeners.pop()


def _note(number: int, _: FrameType | None) -> None:
    is_second = number == signal.SIGINT and signal.SIGINT in _received
    # First of all: should what is raised here be dropped, the next training still hears of it.
    _received.append(number)
    if not _listeners:
        raise Interrupted(number)
    if is_second:
        raise KeyboardInterrupt

"""`--gpus N`: the same command in several processes on this machine, told about each other by the same variables as torchrun's.

torchrun itself ends its processes thirty seconds after it was told to stop, when a long step has not kept its state yet, does not pass on
every signal, and adds a page to what they say. Here what is said and how it ends is the command's own, as with one process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

from ..utils.environment import PEER_LOST, count_cores

__all__ = ["launch"]

#: Seconds that the others have when one has ended: to write what they know, when it failed; to keep the state, when all were told to stop.
SECONDS_AFTER_A_FAILURE, SECONDS_AFTER_A_STOP = 5.0, 600.0

_PASSED_ON = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def launch(count: int, arguments: list[str]) -> int:
    """The exit code of the process that failed first; 0 where all of them succeed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # They meet here, at a port that is certainly free.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        # As many threads for each as there are cores for it.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, count_cores() // count))),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_WORLD_SIZE": "1",
        "PEEL_STARTED_BY": str(os.getpid()),
    }
    told: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []
    is_told: set[int] = set()

    def pass_on(number: int, _: FrameType | None) -> None:
        told.append(number)
        for process in processes:
            is_told.add(process.pid)
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        for rank in range(count):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "peel", *arguments]
            # In a session of its own: a terminal would tell it of Ctrl-C too, and twice means at once.
            process = subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, start_new_session=True)
            processes.append(process)
            with _held_back():
                if told and process.pid not in is_told:
                    process.send_signal(told[0])
        return _ended(processes, told)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Signals wait meanwhile. Not while a process is started: it would inherit that."""
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


def _ended(processes: list[subprocess.Popen[bytes]], told: list[int]) -> int:
    """Wait for all; when one fails the others have a moment, as they cannot go on without it."""
    failed: int | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if failed is None and (failed := _first_failed(processes)) is not None:
            deadline = min(
                deadline, time.monotonic() + (SECONDS_AFTER_A_STOP if told else SECONDS_AFTER_A_FAILURE)
            )
        if told.count(signal.SIGINT) > 1:
            deadline = min(
                deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE
            )  # at once, whether they hear it or not
        time.sleep(0.05)
    failed = _first_failed(processes) if failed is None else failed
    if failed is None:
        return 128 + told[0] if any(process.returncode is None for process in processes) else 0
    code: int = processes[failed].returncode
    if told and code in (-told[0], 128 + told[0]):
        return 128 + told[0]
    if code >= 0 and code != PEER_LOST:
        return code
    sys.stderr.write(f"error: {_what_happened(processes, failed, code)}. The same command goes on.\n")
    return 1


def _what_happened(processes: list[subprocess.Popen[bytes]], failed: int, code: int) -> str:
    """What the processes cannot say themselves."""
    count = len(processes)
    if code != PEER_LOST:
        return (
            f"process {failed} of {count} was ended by {signal.Signals(-code).name}; the others were stopped"
        )
    silent = [str(rank) for rank, process in enumerate(processes) if process.poll() is None]
    return (
        f"process {' and '.join(silent)} of {count} does not answer and was ended"
        if silent
        else "the processes have lost each other"
    )


def _first_failed(processes: list[subprocess.Popen[bytes]]) -> int | None:
    return next((rank for rank, process in enumerate(processes) if process.poll()), None)

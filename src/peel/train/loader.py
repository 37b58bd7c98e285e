"""Processes that decode images ahead of training, and the way of what they make to the device.

They hold no state: what they make depends on the key they are given, so one that dies is replaced and asked again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import DataError

__all__ = ["Loader", "ahead"]

log = logging.getLogger("peel")

Key = TypeVar("Key")

#: How often processes that died or fell silent are replaced, before it is an error.
TRIES = 3

#: Seconds without a batch after which a process counts as hanging; and after which it is looked at whether it is still there.
PATIENCE, LOOK_SECONDS = 300.0, 5.0

#: Pieces of a batch that each process makes before they are asked for.
PIECES_AHEAD = 8

#: Steps that a GPU has before it, at most, besides the one it is at.
STEPS_AHEAD = 2


class Loader(Generic[Key]):
    """Processes that stay from one epoch to the next. `make` turns a key into a tensor, or into the reason why it cannot."""

    def __init__(self, make: Callable[[Key], Tensor | str], workers: int, *, pin: bool) -> None:
        self.make, self.workers, self.pin = make, workers, pin
        self._wanted: list[Sequence[Key]] = []
        self._running: Any = None

    def batches(self, wanted: list[Sequence[Key]]) -> Iterator[Tensor]:
        """For each sequence of keys, what they make, stacked."""
        given = tries = 0
        was_cautious = False
        patience = float(os.environ.get("PEEL_PATIENCE", PATIENCE))
        running = self._start(wanted, patience, cautious=False) if wanted else iter(())
        asked = time.monotonic()
        while given < len(wanted):
            try:
                batch = next(running)
            except RuntimeError as error:
                said = str(error).splitlines()[0]
                is_slow = "timed out" in said
                if is_slow and time.monotonic() - asked < patience:
                    continue
                if not is_slow and "exited unexpectedly" not in said and "is killed" not in said:
                    raise
                tries += 1
                text = f"a process that decodes images ended or hangs ({said}), at the batch of {wanted[given][0]}"
                if tries == TRIES:
                    raise DataError(
                        f"{text}, {TRIES} times. Fewer --workers need less memory; 0 decodes without other processes."
                    ) from error
                log.warning("%s; it is replaced and asked again.", text)
                self._running, was_cautious = None, True
                running = self._start(wanted[given:], patience, cautious=True)
                asked = time.monotonic()
                continue
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch
            given, tries, asked = given + 1, 0, time.monotonic()
        if was_cautious:
            self._running = None

    def _start(self, wanted: list[Sequence[Key]], patience: float, *, cautious: bool) -> Any:
        """An iterator over what the processes make; a cautious one asks for little at a time, so that it is known where they fail."""
        if self._running is None:
            several: dict[str, Any] = {}
            if self.workers:
                # Whether a process is gone is looked at whenever this time has passed without a batch.
                pause = min(LOOK_SECONDS, patience)
                several = {
                    "persistent_workers": True,
                    "timeout": pause,
                    "prefetch_factor": 1 if cautious else PIECES_AHEAD,
                    "worker_init_fn": _deaf,
                }
            self._running = DataLoader(
                _Made(self.make),  # type: ignore[arg-type]
                batch_sampler=self._wanted,  # type: ignore[arg-type]
                num_workers=self.workers,
                collate_fn=_stacked,
                pin_memory=self.pin,
                # A generator of its own, or the loader would draw from the one that dropout uses.
                generator=torch.Generator(),
                **several,
            )
        self._wanted[:] = wanted
        with _children_unheard():
            return iter(self._running)


@contextlib.contextmanager
def _children_unheard() -> Iterator[None]:
    """Torch makes the death of a process an exception wherever the main thread happens to be, in the middle of a step; not here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


def _deaf(worker: int) -> None:
    """Who signals a whole group of processes means the one that trains; these end with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class _Made(Generic[Key]):
    def __init__(self, make: Callable[[Key], Tensor | str]) -> None:
        self.make = make

    def __getitem__(self, key: Key) -> Tensor | str:
        return self.make(key)


def _stacked(made: list[Tensor | str]) -> Tensor | str:
    whole = []
    for item in made:
        if isinstance(item, str):
            return item
        whole.append(item)
    return torch.stack(whole)


def ahead(
    batches: Iterator[list[Tensor]], device: torch.device, prepare: Callable[[Tensor], tuple[Tensor, ...]]
) -> Iterator[tuple[Tensor, ...]]:
    """What `prepare` makes, on the device, of each batch, which comes in pieces.

    A GPU is given the next batch while it is still at the step before, and both on ways of their own.
    """
    if device.type != "cuda":
        for pieces in batches:
            yield prepare(torch.cat(pieces).to(device))
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    training = torch.cuda.current_stream(device)
    # What `prepare` brings along was made on the stream of training.
    stream.wait_stream(training)
    used: deque[torch.cuda.Event] = deque()
    for pieces in batches:
        with torch.cuda.stream(stream):
            prepared = prepare(torch.cat([piece.to(device, non_blocking=True) for piece in pieces]))
        training.wait_stream(stream)
        for tensor in prepared:
            tensor.record_stream(training)
        yield prepared
        # Images that are decoded faster than they are learnt would fill the memory with batches that wait for their step.
        used.append(training.record_event())
        if len(used) > STEPS_AHEAD:
            used.popleft().synchronize()

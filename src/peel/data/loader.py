"""Processes that decode images ahead of training, and the way of what they make to the device.

They hold no state: what they make depends on the key they are given, so one that dies is replaced and asked again.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import DataError
from ..utils.environment import env_number

__all__ = ["Loader", "ahead"]

log = logging.getLogger("peel")

Key = TypeVar("Key")

#: How often processes that died or fell silent are replaced, before it is an error.
TRIES = 3

#: Seconds without a batch after which a process counts as hanging; and after which it is looked at whether it is still there.
TIMEOUT, LOOK_SECONDS = 300.0, 5.0

#: Pieces of a batch that each process makes before they are asked for.
PIECES_AHEAD = 8

#: Files that an error names, before it only counts them.
NAMED = 3

#: Steps that a GPU has before it, at most, besides the one it is at.
STEPS_AHEAD = 2


class Loader(Generic[Key]):
    """Processes that stay from one epoch to the next. `make` turns a key into a tensor, or into the reason why it cannot.

    `file_of` tells the file behind a key, for whoever has to find out what is wrong with it.
    """

    def __init__(
        self,
        make: Callable[[Key], Tensor | str],
        workers: int,
        *,
        pin: bool,
        file_of: Callable[[Key], object] | None = None,
    ) -> None:
        self.make, self.workers, self.pin, self.file_of = make, workers, pin, file_of
        self._wanted: list[Sequence[Key]] = []
        self._loader: Any = None
        self._processes: list[Any] = []
        self._owner = os.getpid()

    def batches(self, wanted: list[Sequence[Key]]) -> Iterator[Tensor]:
        """For each sequence of keys, what they make, stacked."""
        given = tries = 0
        is_cautious = False
        timeout = env_number("PEEL_PATIENCE", TIMEOUT)
        running: Any = None
        asked = time.monotonic()
        try:
            while given < len(wanted):
                try:
                    if running is None:
                        running = self._start(wanted[given:], timeout, cautious=is_cautious)
                    batch = next(running)
                except (RuntimeError, OSError, EOFError) as error:
                    said = " ".join([type(error).__name__, *str(error).splitlines()[:1]])
                    is_slow = "timed out" in said
                    if is_slow and running is not None and time.monotonic() - asked < timeout:
                        continue
                    # What is on its way from a process that dies, such as a descriptor of shared memory, may fail in ways of its own.
                    is_gone = (
                        "exited unexpectedly" in said
                        or "is killed" in said
                        or not isinstance(error, RuntimeError)
                    )
                    if not is_slow and not is_gone:
                        raise
                    tries += 1
                    text = f"a process that decodes images ended or hangs ({said}), at the batch of {wanted[given][0]}"
                    if tries == TRIES:
                        raise DataError(
                            f"{text}{self._files(wanted[given])}, {TRIES} times. "
                            "Fewer --workers need less memory; 0 decodes without other processes."
                        ) from error
                    log.warning("%s; it is replaced and asked again.", text)
                    self._end()
                    running, is_cautious, asked = None, True, time.monotonic()
                    continue
                if isinstance(batch, str):
                    raise DataError(batch)
                given, tries = given + 1, 0
                yield batch
                asked = time.monotonic()
        finally:
            # Processes that are at something nobody waits for would have to be waited for.
            if given < len(wanted) or is_cautious:
                self._end()

    def _files(self, keys: Sequence[Key]) -> str:
        """The files behind these keys, where there are any, in words."""
        if self.file_of is None:
            return ""
        more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
        return f" ({', '.join(str(self.file_of(key)) for key in keys[:NAMED])}{more})"

    def _start(self, wanted: list[Sequence[Key]], timeout: float, *, cautious: bool) -> Any:
        """An iterator over what the processes make; a cautious one asks for little at a time, so that it is known where they fail."""
        self._wanted[:] = wanted
        if self._loader is None:
            several: dict[str, Any] = {}
            if self.workers:
                # Whether a process is gone is looked at whenever this time has passed without a batch.
                pause = min(LOOK_SECONDS, timeout)
                several = {
                    "persistent_workers": True,
                    "timeout": pause,
                    "prefetch_factor": 1 if cautious else PIECES_AHEAD,
                    "worker_init_fn": _deaf,
                }
            self._loader = DataLoader(
                _Made(self.make),  # type: ignore[arg-type]
                batch_sampler=self._wanted,  # type: ignore[arg-type]
                num_workers=self.workers,
                collate_fn=_stacked,
                pin_memory=self.pin,
                # A generator of its own, or the loader would draw from the one that dropout uses.
                generator=torch.Generator(),
                **several,
            )
        running = iter(self._loader)
        _leave_to_us(running)
        if not self._processes:
            self._processes, self._owner = list(getattr(running, "_workers", ())), os.getpid()
            _alive.add(self)
            # Python would ask them politely when the program ends, and wait for ever. What is registered last comes first.
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        return running

    def _end(self) -> None:
        """They hold nothing that is worth a farewell, and one that hangs would not hear it."""
        if self._owner != os.getpid():
            return  # a copy, in a process that was forked from the one that started them
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(LOOK_SECONDS)
        self._processes, self._loader = [], None

    def __del__(self) -> None:
        self._end()


#: Whoever has processes.
_alive: weakref.WeakSet[Loader[Any]] = weakref.WeakSet()


def _end_all() -> None:
    for loader in list(_alive):
        loader._end()


def _leave_to_us(running: Any) -> None:
    """Torch makes the death of a process of a loader an exception wherever the main thread happens to be, in the middle of a step. Of ours
    it is not to know: whether they live is looked at where a batch is waited for.
    """
    forget = getattr(
        torch._C, "_remove_worker_pids", None
    )  # a private name: without it, such an exception ends the run, which can go on
    if forget is not None and getattr(running, "_worker_pids_set", False):
        forget(id(running))
        running._worker_pids_set = False


def _deaf(worker: int) -> None:
    """Who signals a whole group of processes means the one that trains; these end with it."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


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
    batches: Iterator[tuple[list[Tensor], Tensor]],
    device: torch.device,
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> Iterator[tuple[Tensor, ...]]:
    """What `prepare` makes, on the device, of each batch, which comes in pieces, and of its index, which is there already.

    A GPU is given the next batch while it is still at the step before, and both on ways of their own.
    """
    if device.type != "cuda":
        for pieces, index in batches:
            yield prepare(torch.cat(pieces).to(device), index)
        return
    stream = _side_stream(device)
    training = torch.cuda.current_stream(device)
    # What `prepare` brings along was made on the stream of training.
    stream.wait_stream(training)
    used: deque[torch.cuda.Event] = deque()
    for pieces, index in batches:
        with torch.cuda.stream(stream):
            prepared = prepare(torch.cat([piece.to(device, non_blocking=True) for piece in pieces]), index)
        training.wait_stream(stream)
        for tensor in prepared:
            tensor.record_stream(training)
        yield prepared
        # Images that are decoded faster than they are learnt would fill the memory with batches that wait for their step.
        used.append(training.record_event())
        if len(used) > STEPS_AHEAD:
            used.popleft().synchronize()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: memory that was used on a stream is only used again on the same."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

"""Processes that decode images ahead of training, and the way of what they make to the device.

They hold no state: what they make depends on the key they are given, so one that dies is replaced and asked again.
"""

from __future__ import annotations

import logging
import os
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

#: Seconds without a batch after which a process counts as hanging.
PATIENCE = 300.0


class Loader(Generic[Key]):
    """Processes that stay from one epoch to the next. `make` turns a key into tensors, or into the reason why it cannot."""

    def __init__(self, make: Callable[[Key], tuple[Tensor, ...] | str], workers: int, *, pin: bool) -> None:
        self.make, self.workers, self.pin = make, workers, pin
        self._wanted: list[Sequence[Key]] = []
        self._running: Any = None

    def batches(self, wanted: list[Sequence[Key]]) -> Iterator[tuple[Tensor, ...]]:
        """For each sequence of keys, what they make, stacked."""
        given = tries = 0
        while given < len(wanted):
            try:
                for batch in self._start(wanted[given:], cautious=tries > 0):
                    if isinstance(batch, str):
                        raise DataError(batch)
                    yield batch
                    given, tries = given + 1, 0
            except RuntimeError as error:
                if "DataLoader" not in str(error):
                    raise
                self._running, tries = None, tries + 1
                said = f"a process that decodes images ended or hangs ({str(error).splitlines()[0]}), at the batch of {wanted[given][0]}"
                if tries == TRIES:
                    raise DataError(
                        f"{said}, {TRIES} times. Fewer --workers need less memory; 0 decodes without other processes."
                    ) from error
                log.warning("%s; it is replaced and asked again.", said)

    def _start(self, wanted: list[Sequence[Key]], *, cautious: bool) -> Any:
        """An iterator over what the processes make; a cautious one asks for little at a time, so that it is known where they fail."""
        if self._running is None:
            patience = float(os.environ.get("PEEL_PATIENCE", PATIENCE))
            several = {"persistent_workers": True, "timeout": patience, "prefetch_factor": 1 if cautious else 2} if self.workers else {}
            self._running = DataLoader(
                _Made(self.make),  # type: ignore[arg-type]
                batch_sampler=self._wanted,  # type: ignore[arg-type]
                num_workers=self.workers,
                collate_fn=_stacked,
                pin_memory=self.pin,
                # A generator of its own, or the loader would draw from the one that dropout uses.
                generator=torch.Generator(),
                **several,  # type: ignore[arg-type]
            )
        self._wanted[:] = wanted
        return iter(self._running)


class _Made(Generic[Key]):
    def __init__(self, make: Callable[[Key], tuple[Tensor, ...] | str]) -> None:
        self.make = make

    def __getitem__(self, key: Key) -> tuple[Tensor, ...] | str:
        return self.make(key)


def _stacked(made: list[tuple[Tensor, ...] | str]) -> tuple[Tensor, ...] | str:
    whole = []
    for item in made:
        if isinstance(item, str):
            return item
        whole.append(item)
    return tuple(torch.stack(column) for column in zip(*whole, strict=True))


def ahead(
    batches: Iterator[tuple[Tensor, ...]], device: torch.device, prepare: Callable[..., tuple[Tensor, ...]]
) -> Iterator[tuple[Tensor, ...]]:
    """What `prepare` makes of each batch on the device. On a GPU the next batch travels and is prepared while this one is used."""
    if device.type != "cuda":
        for batch in batches:
            yield prepare(*(tensor.to(device) for tensor in batch))
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[tuple[Tensor, ...], torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            prepared = prepare(*(tensor.to(device, non_blocking=True) for tensor in batch))
            ready = stream.record_event()
        if waiting is not None:
            yield _handed_over(*waiting)
        waiting = prepared, ready
    if waiting is not None:
        yield _handed_over(*waiting)


def _handed_over(prepared: tuple[Tensor, ...], ready: torch.cuda.Event) -> tuple[Tensor, ...]:
    current = torch.cuda.current_stream()
    current.wait_event(ready)
    for tensor in prepared:
        tensor.record_stream(current)
    return prepared

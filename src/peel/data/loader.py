"""Worker processes that read images ahead of training, and copies to the GPU that overlap with training."""

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import cycle, islice, product
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DataError
from ..utils.environment import timeout_seconds

#: Requests per worker that are under way.
PREFETCH = 8
#: How many steps the GPU may be behind: more would fill its memory with batches.
STEPS_AHEAD = 2

#: A function that returns uint8 tensors of one shape, with its arguments: first the files that it reads.
Request = partial[list[Tensor]]


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection
    buffer: Tensor
    """Shared memory for the results: slots x results per request x shape of a result."""


class WorkerPool:
    """Worker processes that stay from one epoch to the next.

    Unlike with a `DataLoader`, the death of a worker is an error where its result is awaited, not in the
    middle of a training step. Workers ignore the signals that stop a run, so that it can finish its step.
    """

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        """`count` may be 0. `shape`: the largest number of results of a request, and their shape."""
        self.count, self.shape = count, shape
        self._workers: list[_Worker] = []

    def run(self, requests: Iterable[Request]) -> Iterator[Tensor]:
        """The results of the requests in order, stacked. Each is valid until the next one is taken."""
        if not self.count:
            yield from (torch.stack(request()) for request in requests)
            return
        if not self._workers:
            self._start()
        timeout = timeout_seconds()
        requests, slots = iter(requests), cycle(product(range(PREFETCH), self._workers))
        pending: deque[tuple[Request, int, _Worker]] = deque()
        try:
            while True:
                for request in islice(requests, self.count * PREFETCH - len(pending)):
                    slot, worker = next(slots)
                    pending.append((request, slot, worker))
                    worker.connection.send((request, slot))
                if not pending:
                    return
                request, slot, worker = pending[0]
                if not worker.connection.poll(timeout):
                    raise TimeoutError
                answer = worker.connection.recv()
                if isinstance(answer, Exception):
                    raise answer
                pending.popleft()
                yield worker.buffer[slot, :answer]
        except (EOFError, ConnectionError, TimeoutError) as error:
            fault = f"did not answer for {timeout:.0f} s" if isinstance(error, TimeoutError) else "died"
            first, *others = pending[0][0].args[0]
            raise DataError(
                f"a worker process {fault} while reading {first} and {len(others)} other files. The run can "
                "be resumed with the same command. If memory was short, use fewer --workers (or 0)."
            ) from error
        finally:
            if pending:
                self._kill()

    def _start(self) -> None:
        for _ in range(self.count):
            buffer: Tensor = torch.empty(PREFETCH, *self.shape, dtype=torch.uint8)
            buffer.share_memory_()  # type: ignore[no-untyped-call]
            connection, other_end = multiprocessing.Pipe()
            process = multiprocessing.Process(target=_work, args=(other_end, buffer), daemon=True)
            process.start()
            other_end.close()
            self._workers.append(_Worker(process, connection, buffer))
        # At exit, multiprocessing runs this before it waits for its daemons: these ignore SIGTERM.
        self._kill = Finalize(self, _kill, args=(self._workers,), exitpriority=0)


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.join()
    workers.clear()


def _work(connection: Connection, buffer: Tensor) -> None:
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)}:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with contextlib.suppress(EOFError, ConnectionError):  # the main process ended
        while connection in wait([connection, parent.sentinel]):
            request, slot = connection.recv()
            try:
                results = request()
                torch.stack(results, out=buffer[slot, : len(results)])
                answer: int | Exception = len(results)
            except Exception as error:
                answer = error
            connection.send(answer)


def copy_ahead(
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> Iterator[tuple[Tensor, ...]]:
    """Copy the images of each pair (images, index) to the device, and yield `prepare(images, index)`.

    On a GPU both run on a side stream, while training works on the batches before.
    """
    if device.type != "cuda":
        for images, index in batches:
            yield prepare(images, index)
        return
    stream, training = _side_stream(device), torch.cuda.current_stream(device)
    # The tensors that `prepare` uses were made on the training stream.
    stream.wait_stream(training)
    used: deque[torch.cuda.Event] = deque()
    for images, index in batches:
        with torch.cuda.stream(stream):
            prepared = prepare(images.to(device, non_blocking=True), index)
        training.wait_stream(stream)
        for tensor in prepared:
            tensor.record_stream(training)
        yield prepared
        used.append(training.record_event())
        if len(used) > STEPS_AHEAD:
            used.popleft().synchronize()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all epochs: the allocator reuses memory only on the stream it was allocated for."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

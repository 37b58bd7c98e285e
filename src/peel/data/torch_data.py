"""Data of the user's own: torch `Dataset`s and `DataLoader`s.

A batch is a pair (inputs, target), or a dict that is both. Samples stay as the data have them: there is no
augmentation and no normalization.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from ..errors import ConfigError, DataError, PeelError
from ..utils.rng import derive_seed, get_rng_state, set_rng_state
from .augmentation import EVAL, View
from .batch import Batch, count_samples, map_tensors

CPU = torch.device("cpu")

#: Of a dataset without a loader, where none is given.
BATCH_SIZE = 32


@dataclass(frozen=True)
class _Samples:
    """What both kinds of splits have in common: no class numbers and no normalization are known."""

    name: str
    """For messages: training data or validation data."""
    batch_size: int

    labels = None
    shape = (0, 0, 0)
    mean = std = ()

    def to(self, device: torch.device) -> Any:
        return self


@dataclass(frozen=True)
class DatasetSplit(_Samples):
    """A map-style dataset, or the one of a `DataLoader` that reads it in order or shuffled."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0
    worker_init: Callable[[int], None] | None = None
    index: Tensor | None = None
    """The samples of the dataset that are part of the split; None: all."""

    @property
    def size(self) -> int:
        return len(self.dataset) if self.index is None else len(self.index)  # type: ignore[arg-type]

    def subset(self, index: Tensor) -> DatasetSplit:
        return replace(self, index=index if self.index is None else self.index[index])

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        """Batches in the given order. `view` seeds the random transforms of each sample."""
        order = order if self.index is None else self.index[order]
        workers = self.workers if workers else 0
        loader = DataLoader(
            _Seeded(self.dataset, view.seed, self.name),
            batch_size,
            sampler=order.tolist(),
            collate_fn=self.collate,
            num_workers=workers,
            worker_init_fn=partial(_start_worker, self.worker_init),
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(view.seed),
        )
        batches = iter(loader) if len(order) else iter(())
        # At exit, multiprocessing waits for its workers, and these ignore SIGTERM: without this it waits for
        # ever where a sample has raised, or a step has.
        stop = Finalize(None, _stop, args=(batches,), exitpriority=0)
        try:
            while (collated := _next(batches, self.name)) is not None:
                yield as_batch(collated, device, self.name, is_default=self.collate is default_collate)
        except BaseException:
            stop()
            raise
        stop.cancel()


class _Seeded(Dataset[Any]):
    """Seeds the random numbers of each sample, so that neither workers nor a resume change them."""

    def __init__(self, dataset: Dataset[Any], seed: int, name: str) -> None:
        self.dataset, self.seed, self.name = dataset, seed, name

    def __getitem__(self, index: int) -> Any:
        state = get_rng_state(CPU) if get_worker_info() is None else None
        seed = derive_seed("sample", self.seed, index)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            return self.dataset[index]
        except Exception as error:
            text = f"sample {index} of the {self.name} cannot be read"
            raise DataError(f"{text}: {type(error).__name__}: {error}") from error
        finally:
            if state is not None:
                set_rng_state(state, CPU)


def _stop(batches: Any) -> None:
    """End the workers of a loader. torch must not count one as failed, so it is told first."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()
        for worker in batches._workers:
            worker.kill()


def _start_worker(user_init: Callable[[int], None] | None, number: int) -> None:
    """A signal stops the run after its step; until then it needs its workers."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if user_init is not None:
        user_init(number)


@dataclass(frozen=True)
class LoaderSplit(_Samples):
    """A `DataLoader` that chooses its samples itself: an iterable dataset, or a sampler of its own.

    Its batches come as they come: they cannot be reordered, and a resumed epoch sees others.
    """

    loader: DataLoader[Any]
    count: int
    """Batches of an epoch."""

    @property
    def size(self) -> int:
        return self.count * self.batch_size

    def subset(self, index: Tensor) -> LoaderSplit:
        """The first batches, as many as hold this number of samples."""
        return replace(self, count=min(self.count, -(-len(index) // self.batch_size)))

    def batches(
        self, order: Tensor, batch_size: int, view: View, device: torch.device, workers: int = 0
    ) -> Iterator[Batch]:
        """As many batches as hold this number of samples. Order, batch size and workers are the loader's."""
        wanted = -(-len(order) // self.batch_size)
        batches = iter(self.loader) if wanted else iter(())
        is_default = self.loader.collate_fn is default_collate
        for number in range(wanted):
            collated = _next(batches, self.name)
            if collated is None:
                raise DataError(
                    f"the loader of the {self.name} ended after {number} of {wanted} batches. Its length "
                    "must be the number of batches that it yields each time."
                )
            yield as_batch(collated, device, self.name, is_default=is_default)


def _next(batches: Iterator[Any], name: str) -> Any:
    """The next batch, or None at the end."""
    try:
        return next(batches, None)
    except PeelError:
        raise
    except Exception as error:
        raise DataError(f"the {name} failed: {type(error).__name__}: {error}") from error


def as_batch(collated: Any, device: torch.device, name: str, *, is_default: bool = False) -> Batch:
    """What a loader yields as a batch on the device.

    The default collation of torch makes lists of tuples; here they are positional arguments again.
    """
    inputs: Any = collated
    targets: Any = collated
    if isinstance(collated, list | tuple) and len(collated) == 2:
        inputs, targets = collated
    elif not isinstance(collated, Tensor | Mapping):
        count = f" of {len(collated)}" if isinstance(collated, list | tuple) else ""
        raise DataError(
            f"a batch of the {name} is a {type(collated).__name__}{count}; it must be a pair (inputs, "
            "target) or a dict. Several inputs are a tuple: ((first, second), target)."
        )
    if is_default and isinstance(inputs, list):
        inputs = tuple(inputs)
    if count_samples(inputs) == 0:
        raise DataError(f"a batch of the {name} holds no samples.")

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return Batch(map_tensors(inputs, move), map_tensors(targets, move))


def as_split(
    given: Any, name: str, batch_size: int | None = None, workers: int | None = None
) -> DatasetSplit | LoaderSplit:
    """The split of a `Dataset` or a `DataLoader`, whose own batch size and workers count unless given."""
    if not isinstance(given, DataLoader):
        if isinstance(given, IterableDataset) or not _is_map_style(given):
            way_out = "Wrap it in a DataLoader." if isinstance(given, IterableDataset) else ""
            kinds = "a torch Dataset with a length nor a DataLoader"
            raise DataError(f"the {name} are neither {kinds} but a {type(given).__name__}. {way_out}".strip())
        split = DatasetSplit(name, batch_size or BATCH_SIZE, given, workers=workers or 0)
    elif isinstance(given.sampler, RandomSampler | SequentialSampler) and given.batch_size is not None:
        split = DatasetSplit(
            name,
            batch_size or given.batch_size,
            given.dataset,
            given.collate_fn,
            given.num_workers if workers is None else workers,
            given.worker_init_fn,
        )
    else:
        return _as_loader_split(given, name, batch_size)
    if split.size == 0:
        raise DataError(f"the {name} are empty: the length of the dataset is 0.")
    return split


def _is_map_style(given: Any) -> bool:
    """Datasets of other libraries, such as Hugging Face, need not derive from torch's class."""
    is_container = isinstance(given, str | bytes | Tensor | Mapping | tuple)
    return not is_container and hasattr(given, "__getitem__") and hasattr(given, "__len__")


def _as_loader_split(loader: DataLoader[Any], name: str, batch_size: int | None) -> LoaderSplit:
    try:
        count = len(loader)
    except TypeError as error:
        raise DataError(
            f"the loader of the {name} has no length ({error}). Give its dataset a `__len__`, the number of "
            "samples of an epoch."
        ) from error
    if count == 0:
        raise DataError(f"the {name} are empty: the length of the loader is 0.")
    own = loader.batch_size
    if own is None:
        # It has a batch sampler of its own: the first batch says how large they are.
        own = next(LoaderSplit(name, 1, loader, 1).batches(torch.arange(1), 1, EVAL, CPU)).size
    if batch_size not in (None, own):
        raise ConfigError(f"the loader of the {name} makes batches of {own}: {batch_size} cannot be chosen.")
    return LoaderSplit(name, own, loader, count)

"""Random numbers that depend only on (seed, epoch, index): a resume or other workers do not change them."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A seed that depends on all parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the global generators, as types that `torch.load(weights_only=True)` reads."""
    kind, numbers, *rest = np.random.get_state(legacy=True)
    return {
        "random": torch.get_rng_state(),
        "device random": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "random of python": random.getstate(),
        "random of numpy": (kind, numbers.tolist(), *rest),  # type: ignore[union-attr]
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["random"])
    if state["device random"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device random"], device)
    random.setstate(state["random of python"])
    np.random.set_state(state["random of numpy"])


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """The order of the images in an epoch."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed("order", seed, epoch)))


def class_order(labels: Tensor, seed: int, *, in_proportion: bool = False) -> Tensor:
    """A random order of images whose every prefix holds all classes.

    The classes have equal numbers of images in it, as long as they last; `in_proportion`, numbers that are
    proportional to their sizes.
    """
    labels, rng = labels.cpu(), torch.Generator().manual_seed(derive_seed("classes", seed))
    order = torch.randperm(len(labels), generator=rng)
    order = order[labels[order].argsort(stable=True)]
    counts = labels.bincount()
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = rank + torch.rand(len(labels), generator=rng, dtype=torch.float64)
    return order[(place / counts.repeat_interleave(counts) if in_proportion else place).argsort()]


def hashed_uniform(index: Tensor, seed: int, draws: int) -> Tensor:
    """For each index, `draws` random numbers in [0, 1) by splitmix64, on the device of `index`."""
    # The constants as signed integers: int64 arithmetic of torch wraps around, as splitmix64 needs.
    step, first, second = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    start = torch.arange(1, draws + 1, device=index.device) * step
    state = (index.to(torch.int64)[:, None] * draws * step + start) ^ seed
    state = (state ^ _shift(state, 30)) * first
    state = (state ^ _shift(state, 27)) * second
    state = state ^ _shift(state, 31)
    return _shift(state, 40).to(torch.float32) * 2.0**-24


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; the `>>` of torch is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)

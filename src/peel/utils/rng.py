"""Random numbers that depend only on (seed, epoch, index): the same for every device and number of workers, and after a resume."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["derive_seed", "epoch_order", "get_rng_state", "seed_everything", "set_rng_state", "uniform"]


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


# The constants of the splitmix64 generator; int64 arithmetic in torch wraps around, as that generator needs.
_STEP, _FIRST, _SECOND = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def derive_seed(*parts: int | str) -> int:
    """A seed made of several numbers or names."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """What a model draws, from torch, numpy or Python, begins with this seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Where a model has come in what it draws."""
    kind, numbers, *rest = np.random.get_state(legacy=True)
    return {
        "random": torch.get_rng_state(),
        "device random": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "random of python": random.getstate(),
        "random of numpy": (kind, numbers.tolist(), *rest),  # type: ignore[union-attr]
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on drawing from there."""
    torch.set_rng_state(state["random"])
    if state["device random"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device random"], device)
    random.setstate(state["random of python"])
    np.random.set_state(state["random of numpy"])


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the samples."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed("order", seed, epoch)))


def uniform(index: Tensor, seed: int, draws: int) -> Tensor:
    """For each sample index, `draws` numbers in [0, 1), on the device of the index."""
    start = torch.arange(1, draws + 1, device=index.device) * _STEP
    state = (index.to(torch.int64)[:, None] * draws * _STEP + start) ^ seed
    state = (state ^ _shift(state, 30)) * _FIRST
    state = (state ^ _shift(state, 27)) * _SECOND
    state = state ^ _shift(state, 31)
    return _shift(state, 40).to(torch.float32) * 2.0**-24


def _shift(value: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros; torch's own repeats the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)

"""The outputs of a network, and how far they are from those of another."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves  # has no public name

from .regression import TINY


def output_tensors(output: Any) -> list[Tensor]:
    """The outputs that have a value for each image. A model may return its loss beside them."""
    tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
    return [value for value in tensors if value.is_floating_point() and value.ndim > 0]


def output_change(before: list[Tensor], after: list[Tensor]) -> float:
    """Mean square change of the outputs, as a fraction of their variance."""
    pairs = zip(before, after, strict=True)
    return sum(_relative(old.double(), new.double()) for old, new in pairs) / max(1, len(before))


def _relative(old: Tensor, new: Tensor) -> float:
    return float((new - old).square().mean() / old.var(correction=0).clamp_min(TINY))

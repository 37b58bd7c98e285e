"""Peak activation memory of a forward pass without gradients: an estimate.

The estimate sums the tensors that are alive between operators: the input and intermediate results. It leaves
out the workspaces of kernels, the rounding of the allocator and operator fusion, so a measured peak differs.
Ratios between widths are what it is good for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .polynomial import Form


class Activation(NamedTuple):
    """A tensor of the forward pass: its axes, and the first and last operator between which it is alive."""

    forms: tuple[Form, ...]
    element_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class ActivationCost:
    activations: tuple[Activation, ...]

    def total(self, units: Sequence[float]) -> float:
        """Bytes alive at the peak. Units may be fractions, and arrays of many candidates."""
        end = max((activation.last for activation in self.activations), default=0)
        # A sweep over the operators: a tensor adds its size where it is made and takes it back behind its
        # last use. At its last use it is still alive, beside the result of that operator: so `last + 1`.
        change: list[Any] = [0] * (end + 2)
        for forms, element_bytes, first, last in self.activations:
            size = prod((form.value(units) for form in forms), start=element_bytes)
            change[first] += size
            change[last + 1] -= size
        peak: Any = 0.0
        alive: Any = 0.0
        for delta in change:
            alive = alive + delta
            # By elements, where units are arrays of many candidates.
            peak = np.maximum(peak, alive)
        return peak if isinstance(peak, np.ndarray) else float(peak)  # type: ignore[return-value]

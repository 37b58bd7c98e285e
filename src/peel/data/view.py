"""How a pass over the data looks at it: as it is, or augmented by numbers that depend only on (seed, epoch, index)."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.rng import derive_seed

__all__ = ["EVAL", "View"]


@dataclass(frozen=True)
class View:
    augment: str = "none"
    seed: int = 0

    @staticmethod
    def of_epoch(augment: str, seed: int, epoch: int) -> View:
        return View(augment, derive_seed("augment", seed, epoch))


#: The centre crop, for evaluation.
EVAL = View()

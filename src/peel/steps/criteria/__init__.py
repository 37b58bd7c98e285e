"""The criteria of step 2, each with one method: `measure(subject)` gives numbers per channel, layer by layer."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError, did_you_mean
from ..importance import Criterion

__all__ = ["find_criterion"]


def find_criterion(name: str, **settings: Any) -> Criterion:
    """The criterion called `name`, with settings of its own."""
    from .gradient import Gradient
    from .legr import Legr
    from .reconstruction import Reconstruction
    from .scales import NormScale
    from .weights import WeightMagnitude

    kinds: dict[str, Any] = {
        "bn": NormScale,
        "weight": WeightMagnitude,
        "legr": Legr,
        "reconstruction": Reconstruction,
        "gradient": Gradient,
    }
    if name not in kinds:
        raise ConfigError(
            f"no criterion is called {name!r}.{did_you_mean(name, kinds)} Known are {', '.join(kinds)}."
        )
    criterion: Criterion = kinds[name](**settings)
    return criterion

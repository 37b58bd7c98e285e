"""What a run leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..train.history import Epoch

__all__ = ["Result"]


@dataclass(frozen=True)
class Result:
    """What a run leaves."""

    model: nn.Module | None
    """The slim network, trained; None where the steps that were asked for end before it."""
    plan: dict[str, Any] | None
    history: Mapping[str, Sequence[Epoch]]
    rows: Sequence[Mapping[str, Any]]
    """The table: original, uniform, peel."""
    notes: Sequence[str]
    folder: Path | None
    estimate: Mapping[str, float] | None = None
    """Seconds per stage, of a dry run."""

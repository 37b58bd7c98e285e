"""The settings of the method: every choice that the paper makes or leaves open, with what each value means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cost.budget import RESOURCES
from ..errors import ConfigError, did_you_mean

__all__ = ["Method"]


@dataclass(frozen=True)
class Method:
    """PEEL as published, unless changed. docs/paper.md says where each of these stands in the paper."""

    budget: str = "50%"
    """What the slim network may cost: 1.1G, 87M, 50%, 0.5 or a whole number."""
    resource: str = "macs"
    """What the budget counts: macs, params or memory."""
    keep: float = 0.8
    """Step 1: the part of the budget that the backbone costs (lambda)."""
    start: str = "uniform"
    """Step 1: the backbone's widths: uniform, equal (the same number of channels everywhere), or a JSON file with widths of your own."""
    criterion: str = "bn"
    """Step 2: bn, weight, legr, reconstruction or gradient."""
    reduce: str = "mean"
    """Step 2: a group's importance is the mean or the sum over its channels."""
    l1_coefficient: float | None = None
    """Step 2: the coefficient of the L1 term (alpha_s). Default: 1e-4 for the criterion bn, none for others."""
    l1_strength: float | None = None
    """Step 2: instead of the penalty, how far the L1 term pulls a scale over the whole schedule: 12.5 in the paper."""
    gamma_init: float = 1.0
    """Step 2: what the scales of the backbone's norm layers start from."""
    ignore: tuple[str, ...] = ()
    """Step 2: layers whose importance is not counted, as patterns such as `*downsample*`."""
    evaluations: int = 400
    """Step 2: candidates that legr tries."""
    policy: str = "importance"
    """Step 4: importance, winner-take-all, uniform or random."""
    solver: str = "telescoped"
    """Step 4: telescoped or triangular."""
    rounds: int = 1
    """Step 4: in how many parts the pool is given away; the backbone is widened and trained on between them."""
    max_width: float | None = None
    """Step 4: no layer grows beyond this multiple of its original width."""
    divisor: int = 1
    """Widths are multiples of this."""
    freeze: tuple[str, ...] | None = None
    """Ties that keep their width. Default: the last convolution of MobileNetV2, as the literature has it."""
    distill: str = "teacher"
    """Step 5: teacher, in-place or none."""
    kd_weight: float | None = None
    """Step 5: the weight of the teacher's term (alpha_d). Default: 0.1; in place 1."""
    temperature: float = 1.0
    """Step 5: the temperature of the soft labels."""
    hard_weight: float = 0.0
    """Step 5: with in-place distillation, the weight of the labels for the student."""

    def __post_init__(self) -> None:
        for name in ("ignore", "freeze"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        self._check_names()
        self._check_pairs()
        if not 0 < _number("keep (lambda)", self.keep) <= 1:
            raise ConfigError(
                f"keep (lambda) is the part of the budget that the backbone may cost, above 0 and at most 1, not {self.keep!r}."
            )
        if self.l1_coefficient is not None and self.l1_strength is not None:
            raise ConfigError("penalty and pull say the same thing in two ways: give one of them.")
        for name in ("l1_coefficient", "l1_strength", "kd_weight", "hard_weight"):
            value = getattr(self, name)
            if value is not None and _number(name, value) < 0:
                raise ConfigError(f"{name} must not be negative, not {value!r}.")
        for name in ("temperature", "gamma_init", "max_width"):
            value = getattr(self, name)
            if value is not None and not _number(name, value) > 0:
                raise ConfigError(f"{name} must be positive, not {value!r}.")
        for name in ("rounds", "divisor", "evaluations"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")

    def _check_names(self) -> None:
        # Imported here: `peel --help` does not wait for torch.
        from ..steps.backbone import BACKBONE_INITS
        from ..steps.criteria import CRITERIA
        from ..steps.distillation import DISTILLATIONS
        from ..steps.reallocation import POLICIES, SOLVERS

        for name, known in (
            ("resource", RESOURCES),
            ("start", BACKBONE_INITS),
            ("criterion", CRITERIA),
            ("reduce", ("mean", "sum")),
            ("policy", POLICIES),
            ("solver", SOLVERS),
            ("distill", DISTILLATIONS),
        ):
            value = getattr(self, name)
            if name == "start" and isinstance(value, Mapping):
                continue
            if name == "criterion":
                continue  # find_criterion checks it
            if not isinstance(value, str) or value not in known:
                raise ConfigError(
                    f"{name} is one of {', '.join(known)}, not {value!r}.{did_you_mean(str(value), known)}"
                )

    def _check_pairs(self) -> None:
        """A setting that would have no effect is refused, so that nobody takes it for one that had."""
        if self.policy in ("uniform", "random"):
            for name in ("max_width", "l1_strength", "l1_coefficient"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"the policy {self.policy} has no use for {name}: leave it out.")
            if self.rounds > 1:
                raise ConfigError(f"the policy {self.policy} gives the pool away at once: leave out rounds.")
        if self.hard_weight and self.distill != "in-place":
            raise ConfigError(
                f"hard_weight belongs to in-place distillation, not to distill={self.distill!r}."
            )
        if self.kd_weight is not None and self.distill == "none":
            raise ConfigError('kd_weight has no use without a teacher: distill="none".')


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}.")
    return float(value)

"""The settings of the method: every choice that the paper makes or leaves open."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from msgspec import Meta

from ..cost.budget import RESOURCES
from ..errors import ConfigError, check_choice
from ..steps.backbone import BACKBONE_INITS
from ..steps.distillation import DISTILLATIONS
from ..steps.reallocation import POLICIES, SOLVERS

#: Settings that other methods have no use for.
PEEL_ONLY = (
    "backbone_ratio",
    "backbone_init",
    "criterion",
    "reduce",
    "l1_coefficient",
    "l1_strength",
    "gamma_init",
    "ignore",
    "evaluations",
    "policy",
    "solver",
    "rounds",
    "max_width",
)

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """PEEL as published, unless changed. docs/paper.md names the section of the paper for each setting."""

    budget: str | int | float = "50%"
    """What the slim network may cost: 1.1G, 50%, 8MB, 8ms; or several limits: macs<=1.1G, params<=8M."""
    resource: str = "macs"
    """What the budget counts: macs, params, memory (bytes of activations of one image), latency."""
    method: str = "peel"
    """sensitivity, peel, uniform, magnitude, taylor, or your own as path/file.py:Name."""
    backbone_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Step 1: the fraction of the budget that the backbone costs (lambda)."""
    backbone_init: str | dict[str, int] = "uniform"
    """Step 1: the backbone's widths: uniform, equal (the same number of channels), or a JSON file."""
    criterion: str = "bn"
    """Step 2: bn, weight, legr, reconstruction, gradient, taylor, or your own as path/file.py:Name."""
    reduce: str = "mean"
    """Step 2: a group's importance is the mean or the sum over its channels."""
    l1_coefficient: NotNegative | None = None
    """Step 2: the coefficient of the L1 term (alpha_s). Default: 1e-4 for the criterion bn, 0 for others."""
    l1_strength: NotNegative | None = None
    """Step 2: instead of l1_coefficient, the total shrinkage of a scale by the L1 term: 12.5 in the paper."""
    gamma_init: Positive = 1.0
    """Step 2: the initial scale of the backbone's norm layers."""
    ignore: tuple[str, ...] = ()
    """Step 2: layers whose importance is not counted, as patterns such as `*downsample*`."""
    evaluations: Count = 400
    """Step 2: candidates that legr evaluates."""
    policy: str = "importance"
    """Step 4: importance, winner-take-all, equal (the same number of channels) or random."""
    solver: str = "telescoped"
    """Step 4: telescoped or triangular."""
    rounds: Annotated[int, Meta(ge=1, le=100)] = 1
    """Step 4: rounds of reallocation; the backbone is widened and trained again between them."""
    max_width: Positive | None = None
    """Step 4: no layer grows beyond this multiple of its original width."""
    divisor: Count | Literal["auto"] = "auto"
    """Widths are multiples of this. auto: of 8, and of 4, 2 or 1 in narrow layers. 1 is the paper's."""
    grow: bool = False
    """Allow a budget above the original's cost, and plans that exceed the original in other resources."""
    freeze: tuple[str, ...] | None = None
    """Ties that keep their width. Default: the last convolution of MobileNetV2, as in the literature."""
    distill: str = "teacher"
    """Step 5: teacher, in-place or none."""
    kd_weight: NotNegative | None = None
    """Step 5: the weight of the distillation loss (alpha_d). Default: 0.1; 1 in place and in fine-tuning."""
    temperature: Positive | None = None
    """Step 5: the temperature of the soft labels. Default: 1; 4 in fine-tuning."""
    hard_weight: NotNegative | None = None
    """Step 5: the weight of the labels for the slim network. Default: 1; 0 in place and in fine-tuning."""

    def __post_init__(self) -> None:
        for name, known in (
            ("resource", RESOURCES),
            ("reduce", ("mean", "sum")),
            ("policy", POLICIES),
            ("solver", SOLVERS),
            ("distill", DISTILLATIONS),
        ):
            check_choice(name, getattr(self, name), known)
        if isinstance(self.backbone_init, str) and not self.backbone_init.endswith(".json"):
            check_choice("backbone_init", self.backbone_init, BACKBONE_INITS)
        self._check_combinations()

    def method_config(self) -> "MethodConfig":
        """The settings of the method alone, without those of a run."""
        return MethodConfig(**{item.name: getattr(self, item.name) for item in fields(MethodConfig)})

    @property
    def method_name(self) -> str:
        """The name of the row: that of the method, or of the user's own class."""
        return self.method.rpartition(":")[2]

    @property
    def peel_settings(self) -> list[str]:
        """The settings that only PEEL has and that differ from their defaults."""
        return [name for name in PEEL_ONLY if getattr(self, name) != getattr(MethodConfig, name)]

    @property
    def uses_importance(self) -> bool:
        """Whether PEEL trains and measures a backbone; the policies equal and random need none."""
        return self.policy in ("importance", "winner-take-all")

    def _check_combinations(self) -> None:
        """Refuse settings that would have no effect."""
        if self.l1_coefficient is not None and self.l1_strength is not None:
            raise ConfigError("l1_coefficient and l1_strength set the same thing: give one of them.")
        if not self.uses_importance:
            for name in ("max_width", "l1_strength", "l1_coefficient", "rounds"):
                if getattr(self, name) != getattr(MethodConfig, name):
                    raise ConfigError(f"policy={self.policy!r} does not use {name}: leave it out.")
        # A method of the user's own may have a use for the settings of PEEL.
        own = self.peel_settings + (["grow"] if self.grow and self.method == "sensitivity" else [])
        if own and self.method != "peel" and ":" not in self.method:
            raise ConfigError(f'{own[0]} needs method="peel" (--method peel), not method={self.method!r}.')
        for name in ("kd_weight", "temperature", "hard_weight") if self.distill == "none" else ():
            if getattr(self, name) is not None:
                raise ConfigError(f'{name} needs a teacher, but distill="none".')

"""`Config`: all settings of a run. Command-line flags, TOML files and `prune`'s keywords are views of it."""

import dataclasses
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import tomli_w
from cyclopts import Group, Parameter
from msgspec import Meta

from ..cost.budget import RESOURCES
from ..errors import ConfigError, check_choice, did_you_mean
from ..train.recipe import FIELDS, Recipe
from ..utils.text import name_of_key, short
from ..utils.validation import Count, NotNegative, Positive, describe_error

# No torch here: `peel run --help` answers at once. What needs it is imported where it is used.

DISTILLATIONS = ("teacher", "in-place", "none")

COMPILE = ("auto", "on", "off")

#: Says that `--help-all` is asked for. The groups of flags that few people need are shown then.
SHOWS_ALL = "--help-all" in sys.argv

RECIPE, WIDTHS, DISTILLATION, IMAGES, MACHINE_FLAGS = (
    Parameter(group=Group(name, show=SHOWS_ALL))
    for name in ("Recipe", "Widths", "Distillation", "Images", "Machine")
)

#: The original is the teacher; plan is what the method does (steps 1 to 4 of PEEL), final step 5.
STAGES = ("original", "plan", "uniform", "final")

INITS = ("auto", "inherit", "cut", "scratch")

#: Settings that do not change what is computed. They are not part of the name of the default folder.
MACHINE = (
    "stages",
    "device",
    "threads",
    "workers",
    "compile",
    "checkpoint_seconds",
    "accumulate",
    "bench_seconds",
)

#: Several numbers may follow one flag.
Numbers = Annotated[tuple[float, ...], Parameter(consume_multiple=True, negative_iterable=())]

#: The fields of `Recipe`, each of which may be left out.
RecipeOverrides: Any = dataclasses.make_dataclass(
    "RecipeOverrides",
    [(name, kind | None, None) for name, kind in get_type_hints(Recipe, include_extras=True).items()],
    frozen=True,
    kw_only=True,
)
# Python 3.11 would say "types", and the command line treats classes from there as plain values.
RecipeOverrides.__module__ = __name__
# The command line reads the help of its flags from here.
RecipeOverrides.__doc__ = "\n".join(
    ["Parameters", "----------", *(f"{name}\n    {text}" for name, text in FIELDS.items())]
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run: what is pruned to what budget, by which method, on what data, trained how."""

    model: str = "cifar_resnet20"
    """The model: a name, or a reference to a callable."""
    data: str | None = None
    """digits (the default of models by name), cifar10, cifar100, fashion-mnist, or a folder of images."""
    budget: str | int | float = "50%"
    """What the slim network may cost: 1.1G, 50%, 8MB, 8ms; or several limits: macs<=1.1G, params<=8M."""
    resource: str = "macs"
    """What the budget counts: macs, params, memory (bytes of activations of one image), latency."""
    method: str = "sensitivity"
    """sensitivity, peel, uniform, magnitude, taylor, or your own as path/file.py:Name."""
    methods: Annotated[dict[str, dict[str, Any]], Parameter(parse=False)] = field(default_factory=dict)
    """The settings of the method: --peel.rounds 3, or a table [methods.peel]. `peel methods` lists them."""
    divisor: Annotated[Count | Literal["auto"], WIDTHS] = "auto"
    """Widths are multiples of this. auto: of 8, and of 4, 2 or 1 in narrow layers. 1 is the paper's."""
    grow: Annotated[bool, WIDTHS] = False
    """Allow a budget above the original's cost, and plans that exceed the original in other resources."""
    freeze: Annotated[tuple[str, ...] | None, WIDTHS] = None
    """Ties that keep their width. Default: the last convolution of MobileNetV2, as in the literature."""
    distill: Annotated[str, DISTILLATION] = "teacher"
    """What the final training learns from, beside the labels: teacher, in-place or none."""
    kd_weight: Annotated[NotNegative | None, DISTILLATION] = None
    """The weight of the distillation loss (alpha_d). Default: 0.1; 1 in place and in fine-tuning."""
    temperature: Annotated[Positive | None, DISTILLATION] = None
    """The temperature of the soft labels. Default: 1; 4 in fine-tuning."""
    hard_weight: Annotated[NotNegative | None, DISTILLATION] = None
    """The weight of the labels for the slim network. Default: 1; 0 in place and in fine-tuning."""
    latency: str | None = None
    """A latency model: the file that `peel latency` wrote. Latency can then be a budget or a limit."""
    recipe: str = "auto"
    """The training recipe: auto, imagenet-resnet, imagenet-mobilenet, cifar, cifar-fast, digits, ..."""
    train: Annotated[RecipeOverrides, RECIPE] = field(default_factory=RecipeOverrides)
    """Changes to the recipe for every training."""
    backbone: Annotated[RecipeOverrides, RECIPE] = field(default_factory=RecipeOverrides)
    """Changes to the recipe of networks that a method trains, such as PEEL's backbone."""
    weights: str = "train"
    """What the model was trained to: pretrained, a file, or a run folder. train: the run trains it."""
    init: str = "auto"
    """What networks start from: inherit (cut and repaired), cut, scratch. auto: inherit with weights."""
    stages: tuple[str, ...] = STAGES
    """Which of original, plan, uniform, final to run."""
    plan: str | dict[str, int] | None = None
    """Train the widths in this JSON file (a plan.json, or tie name to channels) instead of searching."""
    groups: Annotated[dict[str, tuple[str, ...]] | None, WIDTHS] = None
    """Your own groups: --groups.NAME TIE, or a [groups] table in the config file."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of everything random."""
    image_size: Annotated[Annotated[int, Meta(ge=1)] | None, IMAGES] = None
    """Side of the images in pixels. Default: their own, and 224 for folders of large images."""
    mean: Annotated[Numbers | None, IMAGES] = None
    """Mean of the pixels (0 to 1), per channel or of all. Default: what the weights have, else the data."""
    std: Annotated[Numbers | None, IMAGES] = None
    """Standard deviation of the pixels, likewise."""
    data_root: Annotated[str | None, IMAGES] = None
    """Where torchvision stores the data sets it downloads."""
    skip_corrupt: Annotated[bool, IMAGES] = False
    """Leave out images that cannot be read instead of stopping."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    threads: Annotated[Annotated[int, Meta(ge=1)] | None, MACHINE_FLAGS] = None
    """CPU threads. Default: as many as are worth it for this network, up to OMP_NUM_THREADS."""
    workers: Annotated[Annotated[int, Meta(ge=0)] | None, MACHINE_FLAGS] = None
    """Data-loader workers for image folders. Default: one per core, at most 24 per GPU (4 on a CPU)."""
    deterministic: Annotated[bool, MACHINE_FLAGS] = False
    """Bit-identical runs on a GPU too; slower there."""
    accumulate: Annotated[Annotated[int, Meta(ge=1)], MACHINE_FLAGS] = 1
    """Micro-batches per batch (gradient accumulation), to save memory."""
    compile: Annotated[str, MACHINE_FLAGS] = "auto"
    """torch.compile: auto (on a GPU, when the rest of the training takes over ten minutes), on, off."""
    sync_bn: Annotated[bool, MACHINE_FLAGS] = False
    """With several processes, batch norm over the whole batch instead of each process's part."""
    checkpoint_seconds: Annotated[Annotated[float, Meta(ge=0)], MACHINE_FLAGS] = 600.0
    """Seconds between checkpoints within an epoch; one is also written after each epoch."""
    bench_seconds: Annotated[Annotated[float, Meta(ge=0, le=3600)], MACHINE_FLAGS] = 5.0
    """Seconds of timing the networks at the end, all together, for their speed-ups. 0: they are not timed."""

    def __post_init__(self) -> None:
        from ..methods.registry import prefix_of

        stages = [name.strip() for item in self.stages for name in item.split(",")]
        for name in stages:
            check_choice("each of the stages", name, STAGES)
        object.__setattr__(self, "stages", tuple(name for name in STAGES if name in stages))
        object.__setattr__(self, "methods", {name: own for name, own in self.methods.items() if own})
        for name, known in (
            ("compile", COMPILE),
            ("init", INITS),
            ("resource", RESOURCES),
            ("distill", DISTILLATIONS),
        ):
            check_choice(name, getattr(self, name), known)
        for name in ("kd_weight", "temperature", "hard_weight") if self.distill == "none" else ():
            if getattr(self, name) is not None:
                raise ConfigError(f'{name} needs a teacher, but distill="none".')
        for name in ("groups", "grow"):
            if getattr(self, name) and self.method == "sensitivity":
                raise ConfigError(f'{name} needs method="peel" (--method peel), not method="sensitivity".')
        if self.init in ("inherit", "cut") and self.weights == "train":
            raise ConfigError(
                f'init="{self.init}" needs trained weights: name them with --weights. To train them first: '
                "peel run ... --stages original --output FOLDER, then --weights FOLDER."
            )
        for name, settings in self.methods.items():
            if name != prefix_of(self.method):
                own = next(iter(settings))
                raise ConfigError(
                    f"{name}.{own} is a setting of the method {name}: --method {name} --{name}.{_flag(own)}; "
                    f"the method here is {self.method}."
                )

    @property
    def method_name(self) -> str:
        """The name of the row of the slim network. Widths of the user's own may come from anywhere."""
        return "given" if self.plan is not None else row_name(self.method)

    @property
    def inherits(self) -> bool:
        """Whether networks are cut from the trained original instead of trained from scratch."""
        return self.init in ("inherit", "cut") or (self.init == "auto" and self.weights != "train")

    @property
    def repairs(self) -> bool:
        """Whether networks that are cut from the trained original are repaired."""
        return self.init != "cut"

    def to_dict(self) -> dict[str, Any]:
        """The settings that are not None, as plain values: what `prune` takes as keywords."""
        return _without_none(dataclasses.asdict(self))

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None and (name, value) != ("methods", {})
    }


def row_name(method: str) -> str:
    """The row of the table that a method's network has: its name, or that of the user's class."""
    return method.rpartition(":")[2].rpartition(".")[2]


def _flag(name: str) -> str:
    return name.replace("_", "-")


def make_config(given: Mapping[str, Any]) -> Config:
    """A validated config. A wrong name or value is a ConfigError that names it."""
    from .. import zoo

    values = dict(given)
    _check_names("", values, Config)
    for name in ("train", "backbone"):
        overrides = values.get(name) or {}
        if isinstance(overrides, RecipeOverrides):
            overrides = dataclasses.asdict(overrides)
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"{name} is a table such as {{epochs = 20}}, not {short(overrides)}.")
        values[name] = dict(overrides)
        _check_names(f"{name}.", values[name], RecipeOverrides)
    if values.get("data") is None:
        model = values.get("model", Config.model)
        if zoo.is_own(model):
            raise ConfigError(f"no data is given for {model}: give data= (--data).")
        values["data"] = "digits"
    for name in ("freeze", "stages", "mean", "std"):
        if isinstance(values.get(name), str | int | float):
            values[name] = (values[name],)
    for name in ("data", "weights", "plan", "data_root", "latency"):
        if isinstance(values.get(name), Path):
            values[name] = str(values[name])
    try:
        return msgspec.convert(values, Config)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(_explain(error, values)) from error


def _check_names(prefix: str, given: Mapping[str, Any], kind: type) -> None:
    from ..methods.registry import owners_of

    known = [item.name for item in fields(kind)]
    for name in given:
        if name not in known:
            if not prefix and (owners := owners_of(name)):
                owner = owners[0]
                raise ConfigError(
                    f"{name} is a setting of the method {owner}: --method {owner} --{owner}.{_flag(name)}, "
                    f'in Python method="{owner}", methods={{"{owner}": {{"{name}": ...}}}}.'
                )
            raise ConfigError(f"there is no setting {prefix}{name_of_key(name)}.{did_you_mean(name, known)}")


def _explain(error: Exception, values: Mapping[str, Any]) -> str:
    """msgspec's "Expected `int` >= 1 - at `$.rounds`" -> "rounds: expected int >= 1, not 0."."""
    found = re.fullmatch(r".* - at `\$\.([\w.]+).*`", str(error))
    if found is None:
        return f"{error}."
    value: Any = values
    for name in found[1].split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return f"{found[1]}: {describe_error(error)}, not {short(value)}."

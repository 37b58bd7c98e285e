"""The model, the data, the recipes and the plan of a run: read, made to fit each other, and refused where they cannot."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import zoo
from ..cost.widths import Widths
from ..data.datasets import Data, load_data
from ..data.in_memory import InMemoryImages
from ..errors import ConfigError, DataError, ModelError
from ..graph import ChannelGraph
from ..surgery import record_of
from ..train.objective import get_logits
from ..train.recipe import Recipe, backbone_recipe, named_recipe

__all__ = [
    "check_classes",
    "check_weights",
    "frozen_notes",
    "held_ties",
    "model_and_data",
    "read_json",
    "read_plan",
    "recipes_for",
]


def model_and_data(
    model: nn.Module | str,
    data: Data | str | Path,
    image_size: int | None,
    root: str | Path | None,
    skip_corrupt: bool,
    pretrained: bool,
) -> tuple[Data, nn.Module]:
    def load(channels: int) -> Data:
        if isinstance(data, Data):
            return data
        return load_data(
            str(data), image_size=image_size, channels=channels, root=root, skip_corrupt=skip_corrupt
        )

    loaded = load(zoo.find(model).input_size[0] if isinstance(model, str) else next(_convolved(model), 3))
    network = _create(model, len(loaded.classes), pretrained) if isinstance(model, str) else model
    channels = _channels_of(network, loaded.shape)
    return (load(channels) if channels != loaded.shape[0] else loaded), network


def _channels_of(network: nn.Module, shape: tuple[int, int, int]) -> int:
    """How many channels the network takes of images of this shape: those of its first convolution, which need not be the first to run."""
    taken = [*_convolved(network)] or [shape[0]]
    for channels in dict.fromkeys(taken):
        with contextlib.suppress(Exception):  # whatever its code makes of other images
            _scores_of(network, (channels, *shape[1:]))
            return channels
    return taken[0]


def _convolved(network: nn.Module) -> Iterator[int]:
    return (layer.in_channels for layer in network.modules() if isinstance(layer, nn.Conv2d))


def _create(model: str, classes: int, pretrained: bool) -> nn.Module:
    """The model with as many classes as the data; a callable of the user's may not take that argument."""
    try:
        return zoo.create(model, num_classes=classes, pretrained=pretrained)
    except ModelError as error:
        if isinstance(error.__cause__, TypeError) and "num_classes" in str(error.__cause__):
            return zoo.create(model, pretrained=pretrained)
        raise


def _scores_of(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The class scores of one black image; the network is left as it was."""
    modes = {name: module.training for name, module in network.named_modules()}
    try:
        with torch.inference_mode():
            return get_logits(
                network.eval()(torch.zeros(1, *shape, device=next(network.parameters()).device))
            )
    finally:
        for name, module in network.named_modules():
            module.training = modes[name]


def check_weights(network: nn.Module) -> None:
    kinds = {parameter.dtype for parameter in network.parameters()}
    if not kinds:
        raise ModelError(f"{type(network).__name__} has no parameters: there is nothing to train.")
    own_state = next((name for name in network.state_dict() if name.endswith("_extra_state")), None)
    if own_state is not None:
        raise ModelError(
            f"{own_state} is a state of the model that is no tensor of its own (get_extra_state): peel could not keep it. Make it a buffer."
        )
    other = next(iter(kinds - {torch.float32}), None)
    if other is not None:
        raise ModelError(
            f"the model has weights of type {other}; peel trains in float32, or bfloat16 with float32 weights: call .float()."
        )


def check_classes(network: nn.Module, data: Data) -> None:
    scores = _scores_of(network, data.shape)
    if scores.ndim != 2 or scores.shape[1] != len(data.classes):
        raise DataError(
            f"the model gives scores of shape {tuple(scores.shape[1:])}, the data {data.name} has {len(data.classes)} classes. Build the "
            f"model with {len(data.classes)} outputs, or choose data with as many classes as the model."
        )
    for name, split in (("training", data.train), ("test", data.test)):
        lowest, highest = int(split.labels.min()), int(split.labels.max())
        if lowest < 0 or highest >= len(data.classes):
            raise DataError(
                f"the {name} labels of {data.name} go from {lowest} to {highest}; with {len(data.classes)} classes they must lie between "
                f"0 and {len(data.classes) - 1}. Number the classes without gaps, from 0."
            )


def frozen_notes(network: nn.Module) -> list[str]:
    """A network that is frozen as a whole was only looked at; one with frozen parts was made so."""
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    if not frozen or len(frozen) == len(list(network.parameters())):
        return []
    more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
    return [f"Frozen parameters ({', '.join(frozen[:3])}{more}) are initialised and trained like all others."]


def recipes_for(
    name: str,
    data: Data,
    network: nn.Module,
    train: Mapping[str, Any] | None,
    search: Mapping[str, Any] | None,
) -> tuple[Recipe, Recipe]:
    """The recipe of the final training and that of the backbone."""
    if name == "auto":
        source = str(record_of(network).source.get("zoo", type(network).__name__)).lower()
        is_mobile = any(word in source for word in ("mobile", "efficient", "mnas", "ghost", "shuffle"))
        if data.name == "digits":
            name = "digits"
        elif isinstance(data.train, InMemoryImages):
            name = "cifar"
        else:
            name = "imagenet-mobilenet" if is_mobile else "imagenet-resnet"
    final = named_recipe(name).changed(**dict(train or {}))
    # What is changed for the final training, but for its length, is changed for the backbone too.
    shared = {key: value for key, value in dict(train or {}).items() if key != "epochs"}
    backbone = backbone_recipe(name).changed(**{**shared, **dict(search or {})})
    return _suited(final, data), _suited(backbone, data)


def _suited(recipe: Recipe, data: Data) -> Recipe:
    return recipe.changed(augment=data.augment) if recipe.augment == "auto" else recipe


def held_ties(network: nn.Module, graph: ChannelGraph, freeze: tuple[str, ...] | None) -> tuple[str, ...]:
    if freeze is not None:
        return tuple(freeze)
    source = record_of(network).source.get("zoo", "")
    return tuple(tie for tie in zoo.FROZEN.get(source, ()) if tie in graph.widths)


def read_plan(plan: Mapping[str, Any] | str | Path, graph: ChannelGraph) -> Widths:
    """Widths from a plan.json, from a bare mapping in a JSON file, or from a mapping."""
    if isinstance(plan, str | Path):
        plan = read_json(plan, "the plan")
    if not isinstance(plan, Mapping):
        raise ConfigError(
            "a plan is an object with `widths`, or the widths themselves (tie name -> channels)."
        )
    widths = plan["widths"] if isinstance(plan.get("widths"), Mapping) else plan
    return graph.check(widths)


def read_json(path: str | Path, what: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}.") from error

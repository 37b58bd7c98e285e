"""A model by reference with its weights: what `peel export`, `peel eval` and `peel curve` start from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .. import zoo
from ..data.datasets import Data
from ..deploy.networks import is_model
from ..errors import ConfigError, DataError
from ..surgery.info import attach_info, info_of
from .config import Config
from .loading import check_model, has_new_classifier, load_model_and_data
from .original import input_of
from .weights import load_weights, saved_file

#: The weights of a model as its code builds it.
RANDOM = "random"


def check_weights(reference: str, weights: str | None, **settings: Any) -> None:
    """Refuse a model without weights. What was saved has weights, and these settings, of its own."""
    if is_model(reference):
        zoo.find(reference)  # an unknown name has an error of its own
        if weights is None:
            raise ConfigError(
                f"{reference} is a model without weights. Name them: --weights FILE, --weights pretrained "
                "(those of torchvision or timm), or --weights random (as its code builds it)."
            )
        return
    for name, value in {"weights": weights, **settings}.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for models by name; leave it out: {reference} has its own.")


def load_trained(model: str, weights: str, num_classes: int | None = None) -> nn.Module:
    """A model with weights. Those of torchvision, timm or a file of peel say how the network is fed."""
    if weights == "pretrained":
        known = zoo.pretrained(model)
        if num_classes not in (None, known.classes):
            raise ConfigError(_other_classes(model, known.classes, f"--num-classes is {num_classes}"))
        network, size = zoo.create(model, pretrained=True), (known.size, known.size)
        spec = {"shape": [zoo.find(model).input_size[0], *size], "resize": known.resize}
        spec |= {"mean": list(known.mean), "std": list(known.std)}
        attach_info(network, replace(info_of(network), input=spec))
        return network
    classes = num_classes or len(input_of(weights).get("classes", ()))
    return with_weights(zoo.create_for(model, classes) if classes else zoo.create(model), weights)


def load_trained_and_data(model: str, data: str, settings: Config, weights: str) -> tuple[nn.Module, Data]:
    """A model with weights, and the data, preprocessed as `load_model_and_data` says."""
    network, loaded = load_model_and_data(model, data, settings, weights)
    if has_new_classifier(model, weights, loaded):
        known = zoo.pretrained(model).classes
        raise DataError(_other_classes(model, known, f"{loaded.name} has {len(loaded.classes)}"))
    network = with_weights(network, weights)
    check_model(network, loaded)
    return network, loaded


def with_weights(network: nn.Module, weights: str) -> nn.Module:
    """The network with the weights of a file or run folder; it has those of torchvision and timm already."""
    return network if weights in ("pretrained", RANDOM) else load_weights(saved_file(Path(weights)), network)


def _other_classes(model: str, known: int, given: str) -> str:
    return (
        f"the pretrained weights of {model} know {known} classes, but {given}. Train the classifier first "
        f"(peel run {model} --weights pretrained --stages original --output T), then --weights T."
    )

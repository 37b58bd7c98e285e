"""Models by name: those of torchvision and timm, the CIFAR networks of the literature, the user's own.

`resnet50` is torchvision's. Where both libraries have a name, `timm:resnet50` asks for the other one.
`package.module:callable` and `path/to/file.py:callable` call the user's function or class.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import ModelError, did_you_mean
from ..utils.references import load_object
from ..utils.text import first_line
from .cifar import CIFAR_MODELS

__all__ = [
    "FROZEN",
    "ModelSpec",
    "Pretrained",
    "create",
    "create_for",
    "find",
    "is_own",
    "names",
    "pretrained",
]

CIFAR = "cifar"
TORCHVISION = "torchvision"
TIMM = "timm"

#: Layers that the literature does not scale: MobileNetV2 ends in 1,280 channels at every width up to 1.
FROZEN = {"torchvision:mobilenet_v2": ("features.18.0",), "cifar:cifar_mobilenet_v2": ("features.18.0",)}


@dataclass(frozen=True)
class ModelSpec:
    """Where a model comes from."""

    source: str
    """`cifar`, `torchvision`, `timm`, or `user`."""
    name: str
    input_size: tuple[int, int, int]
    """Channels, height, width that the model was made for."""

    @property
    def reference(self) -> str:
        """The name that finds exactly this model again."""
        return self.name if self.source == "user" else f"{self.source}:{self.name}"


@dataclass(frozen=True)
class Pretrained:
    """What the pretrained weights of a model were made for."""

    classes: int
    size: int
    """Side of the images."""
    resize: int
    """The short side that images are resized to before their center is cropped."""
    mean: tuple[float, ...]
    std: tuple[float, ...]


def _torchvision_names() -> list[str]:
    import torchvision

    return list(torchvision.models.list_models(module=torchvision.models))


def _timm_names() -> list[str]:
    """Empty if timm is not installed: only its models need it."""
    try:
        import timm
    except ImportError:
        return []
    return list(timm.list_models())


def names() -> dict[str, list[str]]:
    """Source -> names of its models."""
    return {CIFAR: list(CIFAR_MODELS), TORCHVISION: _torchvision_names(), TIMM: _timm_names()}


def is_own(reference: str) -> bool:
    """Whether a reference names the user's own code."""
    source, colon, _ = reference.rpartition(":")
    return bool(colon) and source not in (CIFAR, TORCHVISION, TIMM)


def find(reference: str) -> ModelSpec:
    """The source of a model. The error for an unknown name lists similar ones."""
    source, _, name = reference.rpartition(":")
    if is_own(reference):
        return ModelSpec("user", reference, (3, 224, 224))
    if source in ("", CIFAR) and name in CIFAR_MODELS:
        return ModelSpec(CIFAR, name, (3, 32, 32))
    if source in ("", TORCHVISION) and name in _torchvision_names():
        return ModelSpec(TORCHVISION, name, (3, 299, 299) if name == "inception_v3" else (3, 224, 224))
    if source in ("", TIMM) and name.split(".")[0] in _timm_names():
        import timm

        try:
            config = timm.get_pretrained_cfg(name, allow_unregistered=False)
        except Exception as error:
            raise ModelError(f"timm has no {name!r}: {error}") from error
        return ModelSpec(TIMM, name, config.input_size if config is not None else (3, 224, 224))
    by_source = names()
    known = [model for group in by_source.values() for model in group]
    absent = "" if by_source[TIMM] else " timm is not installed; for its models: pip install timm."
    raise ModelError(
        f"no model is called {reference!r}.{did_you_mean(name, known)} Models are named as in torchvision "
        f"and timm; for your own, write package.module:callable or path/to/file.py:callable.{absent}"
    )


def pretrained(reference: str) -> Pretrained:
    """The classes and the preprocessing of the weights that `create(..., pretrained=True)` loads."""
    spec = find(reference)
    if spec.source == TORCHVISION:
        import torchvision

        weights = torchvision.models.get_model_weights(spec.name).DEFAULT
        given = weights.transforms()
        size, resize = given.crop_size[0], given.resize_size[0]
        return Pretrained(len(weights.meta["categories"]), size, resize, tuple(given.mean), tuple(given.std))
    if spec.source == TIMM:
        import timm

        config = timm.get_pretrained_cfg(spec.name)
        if config is not None and config.has_weights:
            size = config.input_size[-1]
            resize = int(size / config.crop_pct)
            return Pretrained(config.num_classes, size, resize, tuple(config.mean), tuple(config.std))
    raise ModelError(f"{reference} has no pretrained weights that peel could load.")


def create(
    reference: str, /, *, num_classes: int | None = None, pretrained: bool = False, **arguments: Any
) -> nn.Module:
    """Build the model of a name or reference. It keeps its source, so that `peel.load` can build it again.

    With another number of classes than that of the pretrained weights, the classifier is new.

    >>> create("cifar_resnet20", num_classes=10)
    """
    spec = find(reference)
    if num_classes is not None:
        arguments["num_classes"] = num_classes
    weights = _pretrained_weights(spec) if pretrained else None
    if pretrained and spec.name in ("inception_v3", "googlenet") and spec.source == TORCHVISION:
        arguments["transform_input"] = True  # their weights expect it
    build = load_object(reference, ModelError) if spec.source == "user" else _builder(spec)
    try:
        model = build if isinstance(build, nn.Module) else build(**arguments)
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no arguments"
        raised = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{reference} cannot be built with {given}: it raised {raised}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{reference} gave a {type(model).__name__}, not a torch.nn.Module.")
    if weights is not None:
        own = model.state_dict()
        fitting = {
            name: value for name, value in weights.items() if name in own and own[name].shape == value.shape
        }
        model.load_state_dict(fitting, strict=False)
    if spec.source != "user":
        model.peel_source = {"zoo": spec.reference, "arguments": arguments}  # type: ignore[assignment]
    return model


def create_for(reference: str, classes: int, *, pretrained: bool = False) -> nn.Module:
    """The model with this number of classes; a user's callable may not take that argument."""
    try:
        return create(reference, num_classes=classes, pretrained=pretrained)
    except ModelError as error:
        if isinstance(error.__cause__, TypeError) and "num_classes" in str(error.__cause__):
            return create(reference, pretrained=pretrained)
        raise


def _pretrained_weights(spec: ModelSpec) -> dict[str, Tensor]:
    pretrained(spec.reference)  # refuses models without any
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it reports every attempt of a download
    try:
        return _builder(spec, pretrained=True)().state_dict()
    except Exception as error:
        raise ModelError(
            f"the pretrained weights of {spec.reference} cannot be loaded: {type(error).__name__}: "
            f"{first_line(error)} Check the network, or give a file with weights: --weights FILE."
        ) from error
    finally:
        log.setLevel(level)


def _builder(spec: ModelSpec, *, pretrained: bool = False) -> Callable[..., nn.Module]:
    if spec.source == CIFAR:
        return CIFAR_MODELS[spec.name]
    if spec.source == TIMM:
        import timm

        return partial(timm.create_model, spec.name, pretrained=pretrained)
    import torchvision

    options = {"init_weights": False} if spec.name in ("inception_v3", "googlenet") and not pretrained else {}
    weights = "DEFAULT" if pretrained else None
    return partial(torchvision.models.get_model, spec.name, weights=weights, **options)

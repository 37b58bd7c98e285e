"""Models by name: those of torchvision and timm, the CIFAR networks of the literature, the user's own.

`resnet50` is torchvision's. Where both libraries have a name, `timm:resnet50` asks for the other one.
`package.module:callable` and `path/to/file.py:callable` call the user's function or class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..errors import ModelError, did_you_mean
from ..utils.references import load_object
from .cifar import CIFAR_MODELS

__all__ = ["FROZEN", "ModelSpec", "create", "find", "names"]

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


def create(
    reference: str, *, num_classes: int | None = None, pretrained: bool = False, **arguments: Any
) -> nn.Module:
    """Build the model of a name or reference. It keeps its source, so that `peel.load` can build it again.

    >>> create("cifar_resnet20", num_classes=10)
    """
    spec = find(reference)
    if num_classes is not None:
        arguments["num_classes"] = num_classes
    if pretrained and spec.source in ("user", CIFAR):
        raise ModelError(f"{reference} has no pretrained weights that peel could load.")
    build = load_object(reference, ModelError) if spec.source == "user" else _builder(spec, pretrained)
    try:
        model = build if isinstance(build, nn.Module) else build(**arguments)
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no arguments"
        raise ModelError(
            f"{reference} cannot be built with {given}: it raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{reference} gave a {type(model).__name__}, not a torch.nn.Module.")
    if spec.source != "user":
        model.peel_source = {"zoo": spec.reference, "arguments": arguments}  # type: ignore[assignment]
    return model


def _builder(spec: ModelSpec, pretrained: bool) -> Callable[..., nn.Module]:
    if spec.source == CIFAR:
        return CIFAR_MODELS[spec.name]
    if spec.source == TIMM:
        import timm

        return partial(timm.create_model, spec.name, pretrained=pretrained)
    import torchvision

    options = {"init_weights": False} if spec.name in ("inception_v3", "googlenet") and not pretrained else {}
    weights = "DEFAULT" if pretrained else None
    return partial(torchvision.models.get_model, spec.name, weights=weights, **options)

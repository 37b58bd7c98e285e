"""Names of models: torchvision's, timm's, the CIFAR-size networks of the literature, and references to the user's own code.

`resnet50` is torchvision's; where both libraries have a name, `timm:resnet50` asks for the other. `package.module:callable` and
`path/to/file.py:callable` call a function (or class) of the user's that returns the model.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ModelError, did_you_mean

__all__ = ["FROZEN", "ModelSpec", "create", "find", "names"]

CIFAR = "cifar"
TORCHVISION = "torchvision"
TIMM = "timm"


#: Layers whose width the literature keeps when it scales a network: MobileNetV2 ends in 1,280 channels at every width up to 1.
FROZEN = {"torchvision:mobilenet_v2": ("features.18.0",), "cifar:cifar_mobilenet_v2": ("features.18.0",)}


@dataclass(frozen=True)
class ModelSpec:
    """Where a model name leads."""

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
    """None where timm is not installed: everything but its models works without."""
    try:
        import timm
    except ImportError:
        return []
    return list(timm.list_models())


def names() -> dict[str, list[str]]:
    """Source -> names of its models."""
    from .cifar import CIFAR_MODELS

    return {CIFAR: list(CIFAR_MODELS), TORCHVISION: _torchvision_names(), TIMM: _timm_names()}


def find(reference: str) -> ModelSpec:
    """Where a model name or reference leads; an unknown name is answered with the names near it."""
    source, colon, name = reference.partition(":")
    if not colon:
        source, name = "", reference
    elif source not in (CIFAR, TORCHVISION, TIMM):
        if not source or not name:
            raise ModelError(
                f"{reference!r} is not a reference; write package.module:callable or path/to/file.py:callable."
            )
        return ModelSpec("user", reference, (3, 224, 224))
    from .cifar import CIFAR_MODELS

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
        channels, height, width = config.input_size if config is not None else (3, 224, 224)
        return ModelSpec(TIMM, name, (channels, height, width))
    by_source = names()
    known = [model for group in by_source.values() for model in group]
    absent = "" if by_source[TIMM] else " timm is not installed; for its models: pip install timm."
    raise ModelError(
        f"no model is called {reference!r}.{did_you_mean(name, known)} Models are named as in torchvision and timm; for "
        f"your own, write package.module:callable or path/to/file.py:callable.{absent}"
    )


def create(
    reference: str, *, num_classes: int | None = None, pretrained: bool = False, **arguments: Any
) -> nn.Module:
    """The model that a name or reference leads to. It remembers where it came from, so that `peel.load` can build it again.

    >>> create("cifar_resnet20", num_classes=10)
    """
    spec = find(reference)
    if spec.source == "user":
        if pretrained:
            raise ModelError(f"{reference}: a model of your own loads its weights in its own code.")
        if num_classes is not None:
            arguments["num_classes"] = num_classes
        return _call(reference, arguments)
    if num_classes is not None:
        arguments["num_classes"] = num_classes
    try:
        model = _build(spec, pretrained, arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ModelError(f"{reference} cannot be built with {given or 'its defaults'}: {error}") from error
    model.peel_source = {"zoo": spec.reference, "arguments": arguments}  # type: ignore[assignment]
    return model


def _build(spec: ModelSpec, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    model: nn.Module
    if spec.source == CIFAR:
        from .cifar import CIFAR_MODELS

        if pretrained:
            raise ModelError(f"{spec.name} has no pretrained weights.")
        model = CIFAR_MODELS[spec.name](**arguments)
    elif spec.source == TORCHVISION:
        import torchvision

        if spec.name in ("inception_v3", "googlenet") and not pretrained:
            arguments.setdefault("init_weights", False)
        model = torchvision.models.get_model(
            spec.name, weights="DEFAULT" if pretrained else None, **arguments
        )
    else:
        import timm

        model = timm.create_model(spec.name, pretrained=pretrained, **arguments)
    return model


def _call(reference: str, arguments: dict[str, Any]) -> nn.Module:
    """Call `package.module:callable` or `path/to/file.py:callable`."""
    place, _, name = reference.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, reference)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            hint = did_you_mean(part, [item for item in dir(target) if not item.startswith("_")])
            raise ModelError(f"{place} has no {name!r}.{hint}")
        target = getattr(target, part)
    try:
        model = (
            target if isinstance(target, nn.Module) else target(**arguments) if callable(target) else target
        )
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ModelError(
            f"{reference}: calling it with ({given}) raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{reference} gave a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, reference: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise ModelError(
                f"{reference}: there is no module {name!r}; it is looked for in this folder and among installed packages."
            ) from error
        raise ModelError(f"{reference} cannot be imported: {error}") from error
    except Exception as error:
        raise ModelError(f"{reference} cannot be imported: {type(error).__name__}: {error}") from error

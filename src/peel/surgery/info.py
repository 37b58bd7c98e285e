"""How a slim model was made. `slim` and `load` attach this to the model, `save` writes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from ..utils.fingerprint import fingerprint

T = TypeVar("T")


@dataclass(frozen=True)
class SlimInfo:
    """How a model was made: plain values that can be written as JSON."""

    source: Mapping[str, Any]
    """How to build the original: `{"zoo": name, "arguments": {...}}`, or `{"class": "module:Class"}`."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Tie -> channels. Empty for a model that was never slimmed."""
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Module -> attributes that differ from the original."""
    costs: Mapping[str, Any] = field(default_factory=dict)
    """MACs, parameters, the input shapes that they were counted for, and the modules if only these were."""
    input: Mapping[str, Any] | None = None
    """Of a trained model: its classes, and the shape and normalization of the images."""
    original_shapes: Mapping[str, Sequence[int | None]] | None = field(default_factory=dict)
    """Tensor -> the sizes of its axes before slimming; None for an axis that is as it was.

    None where it is not known: files of version 1 do not have it.
    """
    kept: Mapping[str, Sequence[Sequence[int] | None]] | None = field(default=None, compare=False, repr=False)
    """Tensor -> for each axis, which places of the network that was slimmed are kept (-1: a new one).

    None for an axis that is as it was. Tensors that are as they were are left out. None for fresh weights.
    """

    original: str = field(default="", compare=False)
    """`weights_fingerprint` of the model that weights were inherited from."""

    def after(self, earlier: "SlimInfo") -> "SlimInfo":
        """That of a network that was slimmed again. `kept` holds places of the network in between."""
        shapes = dict(self.original_shapes or {})
        for name, first in (earlier.original_shapes or {}).items():
            sizes = zip(first, shapes.get(name, first), strict=True)
            shapes[name] = [now if was is None else was for was, now in sizes]
        modules = {
            name: {**earlier.modules.get(name, {}), **self.modules.get(name, {})}
            for name in (*earlier.modules, *self.modules)
        }
        widths = {**earlier.widths, **self.widths}
        return replace(self, source=earlier.source, widths=widths, modules=modules, original_shapes=shapes)

    def without_prefix(self, name: str) -> "SlimInfo":
        """The same for the module `name` of the model alone."""

        def strip(values: Mapping[str, T]) -> dict[str, T]:
            return {f"{key}.".removeprefix(f"{name}.")[:-1]: value for key, value in values.items()}

        return replace(
            self,
            widths=strip(self.widths),
            modules=strip(self.modules),
            original_shapes=strip(self.original_shapes or {}),
            kept=None if self.kept is None else strip(self.kept),
        )


def changed_sizes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, list[int | None]]:
    """The `original_shapes` of a network with new tensors."""
    sizes = {name: zip(tensor.shape, new[name].shape, strict=True) for name, tensor in old.items()}
    shapes = {name: [was if was != now else None for was, now in pairs] for name, pairs in sizes.items()}
    return {name: shape for name, shape in shapes.items() if any(size is not None for size in shape)}


#: Values of each parameter that a fingerprint is made of. Another training changes all of them.
FINGERPRINT_VALUES = 256


def weights_fingerprint(model: nn.Module) -> str:
    """A fingerprint of evenly spaced values of each parameter; the same on every device."""
    flat = (parameter.detach().reshape(-1) for parameter in model.parameters())
    return fingerprint(values[:: -(-len(values) // FINGERPRINT_VALUES) or 1] for values in flat)


def info_of(model: nn.Module) -> SlimInfo:
    """How a model was made. A model that was never slimmed has only a source."""
    info = getattr(model, "peel_info", None)
    if isinstance(info, dict):
        return SlimInfo(**info)
    named = getattr(model, "peel_source", None)  # zoo.create sets it
    return SlimInfo(named or {"class": f"{type(model).__module__}:{type(model).__qualname__}"})


def attach_info(model: nn.Module, info: SlimInfo) -> None:
    """Attach plain values, of no class of peel: a pickled model opens without peel."""
    vars(model)["peel_info"] = dict(vars(info))

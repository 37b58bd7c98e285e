"""`save` and `load`: weights in safetensors, everything else in JSON, a checksum over both. Nothing is ever unpickled.

`slim.json` holds how to build the model (a name of `peel.zoo`, or the class of the user's own), the attributes of modules that differ
from the original, the shape of every tensor, the widths and the checksums; `slim.safetensors` holds the tensors. `docs/format.md`
describes both, with a reader of forty lines that needs neither `peel` nor tracing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn

from ..errors import StoreError
from ..graph.attributes import set_attributes
from ..graph.capture import computed_tensors
from ..utils.files import write_bytes
from ..version import __version__

__all__ = ["load", "save"]

FORMAT = "peel-model"
VERSION = 1


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write `PATH.safetensors` and `PATH.json`; each appears whole or not at all. Returns the path of the JSON file.

    >>> peel.save(small, "slim")
    PosixPath('slim.json')
    """
    weights_path, json_path = _paths(path)
    model = _unwrapped(model)
    record: dict[str, Any] = getattr(model, "peel_record", {})
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in _tensors(model).items()}
    data = dump_tensors(tensors, metadata={"format": "pt"})
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": getattr(model, "peel_source", None)
        or {"class": f"{type(model).__module__}:{type(model).__qualname__}"},
        "widths": record.get("widths", {}),
        "modules": record.get("modules", {}),
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "costs": record.get("costs", {}),
        **({"input": record["input"]} if "input" in record else {}),
        "weights": {"file": weights_path.name, "sha256": hashlib.sha256(data).hexdigest()},
        "made_by": {"peel": __version__, "torch": torch.__version__.split("+")[0]},
    }
    try:
        document["checksum"] = _checksum(document)
    except TypeError as error:
        raise StoreError(
            f"how the model was built cannot be written as JSON: {document['model']}: {error}."
        ) from error
    try:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(weights_path, data)
        write_bytes(json_path, json.dumps(document, indent=1).encode())
    except OSError as error:
        raise StoreError(f"cannot write {error.filename or json_path}: {error.strerror}.") from error
    return json_path


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The model saved at `path`. A model of `peel.zoo` is built by its name; for one of your own, give an instance as `model`.

    The given instance is not changed. No tracing is needed.
    """
    _, json_path = _paths(path)
    document = _read_document(json_path)
    try:
        return _load(document, json_path, model)
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{json_path} is malformed: {type(error).__name__}: {error}.") from error


def _load(document: dict[str, Any], json_path: Path, model: nn.Module | None) -> nn.Module:
    weights_path = json_path.parent / _plain_name(document["weights"]["file"], json_path)
    tensors = _read_weights(weights_path, document["weights"]["sha256"])
    source = document["model"]
    if model is None:
        if "zoo" not in source:
            raise StoreError(
                f"{json_path} holds a model of your own ({source.get('class')}): build one as it was before slimming and pass it "
                "as peel.load(path, model=...)."
            )
        model = _from_zoo(source, json_path)
    built = _fill(model, document, tensors, json_path)
    kept = ("widths", "modules", "costs", *(["input"] if "input" in document else []))
    built.peel_record = {key: document[key] for key in kept}  # type: ignore[assignment]
    return built


def _from_zoo(source: Mapping[str, Any], path: Path) -> nn.Module:
    """Build a model by its name. A file names models and plain settings only: nothing that would import, open or fetch something."""
    from .. import zoo

    spec = zoo.find(source["zoo"])
    if spec.source == "user":
        raise StoreError(
            f"{path}: {source['zoo']!r} is not a model of the zoo; a saved file does not run other code."
        )
    arguments = source.get("arguments", {})
    for name, value in arguments.items():
        if (
            not isinstance(value, bool | int | float | None)
            or "pretrained" in name
            or ("weights" in name and name != "init_weights")
        ):
            raise StoreError(
                f"{path}: the argument {name}={value!r} is not a plain setting; a saved file does not load other files."
            )
    return zoo.create(source["zoo"], **arguments)


def _fill(
    model: nn.Module, document: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> nn.Module:
    """A copy of the model with the saved tensors in place of its own, and attributes to match."""
    expected = _tensors(model)
    for name in expected:
        if name not in tensors:
            raise StoreError(f"{path} does not fit this model: it has no {name}.")
    for name, tensor in tensors.items():
        if name not in expected:
            raise StoreError(f"{path} does not fit this model: the model has no {name}.")
        if list(tensor.shape) != document["shapes"].get(name) or tensor.ndim != expected[name].ndim:
            raise StoreError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, which is not what the file says or the model expects."
            )
    replaced: dict[int, Any] = dict(computed_tensors(model))
    for name, old in expected.items():
        new = tensors[name].to(old.device)
        replaced[id(old)] = (
            nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
        )
    built = copy.deepcopy(model, replaced)
    for name, attributes in document["modules"].items():
        try:
            module = built.get_submodule(name)
        except AttributeError as error:
            raise StoreError(f"{path} does not fit this model: it has no module {name}.") from error
        for attribute, value in attributes.items():
            _check_attribute(module, name, attribute, value, path)
        set_attributes(module, attributes)
    return built


def _check_attribute(module: nn.Module, name: str, attribute: str, value: Any, path: Path) -> None:
    """Only whole numbers, and lists of them, replace whole numbers: a file cannot put anything else into a model."""

    def whole(item: Any) -> bool:
        return isinstance(item, int) and not isinstance(item, bool)

    old = vars(module).get(attribute)
    scalar = whole(old) and whole(value) and value > 0
    listed = (
        isinstance(old, list | tuple)
        and isinstance(value, list)
        and all(map(whole, (*old, *value)))
        and len(old) == len(value)
    )
    is_stride = attribute in ("stride", "padding", "dilation", "kernel_size", "output_padding")
    if not (scalar or listed) or is_stride:
        raise StoreError(
            f"{path}: {name}.{attribute} = {value!r} does not fit this model, whose value is {old!r}."
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what DataParallel, DistributedDataParallel and torch.compile put around it."""
    if not isinstance(model, nn.Module):
        raise StoreError(f"only a torch.nn.Module can be saved, not a {type(model).__name__}.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return _unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    given = Path(path)
    if not given.name:
        raise StoreError(f"{str(path)!r} names no file; give a path such as runs/slim.")
    base = given.with_suffix("") if given.suffix in (".json", ".safetensors") else given
    return base.with_name(base.name + ".safetensors"), base.with_name(base.name + ".json")


def _plain_name(name: Any, path: Path) -> str:
    if not isinstance(name, str) or Path(name).name != name or not name:
        raise StoreError(f"{path}: the weights file {name!r} must be a plain file name beside it.")
    return name


def _checksum(document: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StoreError(f"there is no file {path}. Restore it from a copy, or name another.") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}.") from error


def _read_document(path: Path) -> dict[str, Any]:
    data = _read(path)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged or is not a file of peel: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{path} is not a model saved by peel.")
    if document.get("version") != VERSION:
        raise StoreError(
            f"{path} has format version {document.get('version')!r}; this peel reads version {VERSION}."
        )
    if document.get("checksum") != _checksum(document):
        raise StoreError(
            f"{path} is damaged: its checksum does not agree with its content. Use another copy of the file."
        )
    return document


def _read_weights(path: Path, sha256: str) -> dict[str, Tensor]:
    data = _read(path)
    if _looks_like_pickle(data):
        raise StoreError(
            f"{path} is a pickle (a .pt or .pth file of torch), not safetensors: reading it could run code, so it is refused. "
            "Load it yourself with torch.load(..., weights_only=True) and save the model with peel.save."
        )
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreError(
            f"{path} is damaged or belongs to another JSON file: its checksum does not agree. Use another copy of the file."
        )
    try:
        return load_tensors(data)
    except safetensors.SafetensorError as error:
        raise StoreError(f"{path} is not a safetensors file: {error}.") from error


def _looks_like_pickle(data: bytes) -> bool:
    """The magic of a zip file or a pickle, where safetensors would have the length of its header."""
    return (data[:2] == b"PK" or data[:1] == b"\x80") and int.from_bytes(data[:8], "little") > len(data)

"""`save` and `load`: weights in safetensors, the rest in JSON, with checksums. Nothing is unpickled.

`slim.json` holds how to build the model, attributes that differ from the original, tensor shapes, widths and
checksums; `slim.safetensors` holds the tensors. `docs/format.md` has a reader that does not need `peel`.
"""

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

from ..errors import CorruptFileError, StoreError
from ..graph.capture import computed_tensors
from ..graph.rebuild import set_attributes, tensors_of
from ..utils.files import parse_object, write_bytes
from ..version import __version__
from .info import SlimInfo, attach_info, info_of

FORMAT = "peel-model"
VERSION = 1

#: Attributes of layers that are whole numbers but no widths.
NO_WIDTHS = ("stride", "padding", "dilation", "kernel_size", "output_padding")


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write `PATH.safetensors` and `PATH.json`, each atomically. Returns the path of the JSON file.

    >>> peel.save(small, "slim")
    PosixPath('slim.json')
    """
    weights_path, json_path = _paths(path)
    model = _unwrapped(model)
    info = info_of(model)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors_of(model).items()}
    data = dump_tensors(tensors, metadata={"format": "pt"})
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": info.source,
        "widths": dict(info.widths),
        "modules": info.modules,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "costs": info.costs,
        **({"input": info.input} if info.input is not None else {}),
        "weights": {"file": weights_path.name, "sha256": hashlib.sha256(data).hexdigest()},
        "made_by": {"peel": __version__, "torch": torch.__version__.split("+")[0]},
    }
    try:
        document["checksum"] = _checksum(document)
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(weights_path, data)
        write_bytes(json_path, json.dumps(document, indent=1).encode())
    except TypeError as error:
        raise StoreError(f"{info.source} cannot be written as JSON: {error}.") from error
    except OSError as error:
        raise StoreError(f"cannot write {error.filename or json_path}: {error.strerror}.") from error
    return json_path


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The model saved at `path`. No tracing is needed.

    A model of `peel.zoo` is built by its name. For a model of your own, give an instance as `model`.
    """
    json_path = _paths(path)[1]
    document = _read_document(json_path)
    try:
        tensors = _read_weights(json_path, document["weights"]["file"], document["weights"]["sha256"])
        original = build_original(document["model"], json_path) if model is None else model
        built = _build(original, document, tensors, json_path)
        kept = {key: document[key] for key in ("widths", "modules", "costs")}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{json_path} is malformed: {type(error).__name__}: {error}.") from error
    attach_info(built, SlimInfo(info_of(original).source, **kept, input=document.get("input")))
    return built


def read_info(path: str | os.PathLike[str]) -> SlimInfo:
    """How the model saved at `path` was made and is fed, without its weights."""
    document = _read_document(_paths(path)[1])
    try:
        kept = {key: document[key] for key in ("widths", "modules", "costs")}
        return SlimInfo(document["model"], **kept, input=document.get("input"))
    except KeyError as error:
        raise StoreError(f"{path} is malformed: it has no {error}.") from error


def build_original(source: Mapping[str, Any], path: Path) -> nn.Module:
    """Build the original of a saved model by its name, with random weights.

    The file may not import code, open files or download weights.
    """
    from .. import zoo

    if "zoo" not in source:
        own = f"holds a model of your own ({source.get('class')})"
        raise StoreError(f"{path} {own}: give the model before slimming, as peel.load(path, model=...).")
    name, arguments = source["zoo"], source.get("arguments", {})
    if zoo.find(name).source == "user":
        raise StoreError(f"{path}: {name!r} is not a model of the zoo; a saved file does not run other code.")
    for key, value in arguments.items():
        loads_weights = "pretrained" in key or ("weights" in key and key != "init_weights")
        if loads_weights or not isinstance(value, bool | int | float | None):
            raise StoreError(
                f"{path}: the argument {key}={value!r} is refused: a saved file does not load other files."
            )
    return zoo.create(name, **arguments)


def _build(
    model: nn.Module, document: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> nn.Module:
    """A copy of the model with the saved tensors and attributes."""
    expected = tensors_of(model)
    if different := sorted(set(expected) ^ set(tensors)):
        raise StoreError(f"{path} does not fit this model: only one of them has {different[0]}.")
    replaced: dict[int, Any] = dict(computed_tensors(model))
    for name, old in expected.items():
        new = tensors[name].to(old.device)
        if list(new.shape) != document["shapes"].get(name) or new.ndim != old.ndim:
            raise StoreError(f"{path} does not fit this model: the shape of {name} is {list(new.shape)}.")
        is_parameter = isinstance(old, nn.Parameter)
        replaced[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
    built = copy.deepcopy(model, replaced)
    modules = dict(built.named_modules())
    for name, attributes in document["modules"].items():
        if name not in modules:
            raise StoreError(f"{path} does not fit this model: it has no module {name}.")
        for attribute, value in attributes.items():
            own = vars(modules[name]).get(attribute)
            if attribute in NO_WIDTHS or not _may_replace(own, value):
                raise StoreError(f"{path}: {name}.{attribute} = {value!r} does not fit this model ({own!r}).")
        set_attributes(modules[name], attributes)
    return built


def _may_replace(old: Any, value: Any) -> bool:
    """Whether both are whole numbers, or lists of them: a file cannot put anything else into a model."""
    if isinstance(old, list | tuple) and isinstance(value, list):
        return len(old) == len(value) and all(type(item) is int for item in (*old, *value))
    return type(old) is int and type(value) is int and value > 0


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise StoreError(f"only a torch.nn.Module can be saved, not a {type(model).__name__}.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return _unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)  # torch.compile has no public name for it
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


def _paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    given = Path(path)
    if not given.name:
        raise StoreError(f"{str(path)!r} names no file; give a path such as runs/slim.")
    base = given.with_suffix("") if given.suffix in (".json", ".safetensors") else given
    return base.with_name(base.name + ".safetensors"), base.with_name(base.name + ".json")


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
    try:
        document = parse_object(_read(path))
    except ValueError as error:
        raise CorruptFileError(f"{path} is corrupt or is not a file of peel: {error}.") from error
    if document.get("format") != FORMAT:
        raise StoreError(f"{path} is not a model saved by peel.")
    if document.get("version") != VERSION:
        raise StoreError(f"{path} has format version {document.get('version')!r}, not {VERSION}.")
    if document.get("checksum") != _checksum(document):
        raise CorruptFileError(f"{path} is corrupt: its checksum is wrong. Use another copy of the file.")
    return document


def _read_weights(json_path: Path, name: str, sha256: str) -> dict[str, Tensor]:
    if Path(name).name != name:
        raise StoreError(f"{json_path}: the weights file {name!r} must be a plain file name beside it.")
    path = json_path.parent / name
    data = _read(path)
    # A zip file or a pickle, where safetensors has the length of its header.
    if data.startswith((b"PK", b"\x80")) and int.from_bytes(data[:8], "little") > len(data):
        raise StoreError(
            f"{path} is a pickle (a .pt or .pth file), which could run code, so it is refused. Load it "
            "yourself with torch.load(..., weights_only=True) and save the model with peel.save."
        )
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptFileError(f"{path} is corrupt or belongs to another JSON file: its checksum is wrong.")
    try:
        return load_tensors(data)
    except safetensors.SafetensorError as error:
        raise CorruptFileError(f"{path} is not a safetensors file: {error}.") from error

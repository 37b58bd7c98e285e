"""Networks by reference: a run folder, a saved model, an ONNX file, or a name of the zoo."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from .. import zoo
from ..cost.count import count_macs
from ..errors import ModelError, RunError, StoreError
from ..graph.capture import with_batch
from ..graph.copying import deep_copy
from ..report.record import RunRecord
from ..surgery.info import SlimInfo, info_of
from ..surgery.serialization import Input, build_original, load, read_info, saved_path
from ..utils.text import first_line, short
from ..utils.validation import Whole, describe_error
from .onnx_model import OnnxModel

#: Files that hold weights or programs, but not a network that peel can build.
FOREIGN = (".pt", ".pth", ".pt2", ".ckpt", ".bin", ".pb", ".tflite", ".py")


class Metadata(Input, total=False):
    """What an ONNX file says of its network. Other programs may add keys of their own."""

    macs: Whole | None
    params: Whole | None


@dataclass(frozen=True)
class Network:
    """A network that can run, and how to feed it."""

    name: str
    model: nn.Module
    """A torch module in evaluation mode, or an `OnnxModel`."""
    shape: tuple[int, ...]
    """Of one input, without the batch axis."""
    input: Mapping[str, Any] = field(default_factory=dict)
    """Of a trained network: its classes, mean, std and resize."""
    macs: int | None = None
    params: int | None = None
    key: str = ""
    """Equal for networks that are the same: the original of several runs."""
    baseline: str | None = None
    """The key of its own original."""
    example: Any = None
    """What it is called with, where that is not one tensor of numbers: as `trace` takes it."""

    def arguments(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of a call with `batch` samples."""
        if self.example is None:
            return (torch.randn(batch, *self.shape),), {}
        return with_batch(self.example, batch)


def make_network(name: str, model: nn.Module, shape: tuple[int, ...] | None = None, **fields: Any) -> Network:
    """A torch module as a network. The shape is by default the one that it was trained or traced with."""
    info = info_of(model)
    found = shape or shape_of(info)
    if found is None:
        raise ModelError(f"the input shape of {name} is not known: give an example input (--input).")
    model = deep_copy(model).cpu().eval()
    try:
        macs = count_macs(model, (torch.zeros(1, *found),), {})
    except Exception as error:  # the code of the model may raise any
        raise ModelError(
            f"{name} cannot run on an input of shape {(1, *found)}: {first_line(error)}"
        ) from error
    params = sum(parameter.numel() for parameter in model.parameters())
    return Network(name, model, found, info.input or {}, macs, params, **{"key": name, **fields})


def shape_of(info: SlimInfo) -> tuple[int, ...] | None:
    """Shape of one input of a model, as far as it is recorded."""
    if info.input is not None and "shape" in info.input:
        return tuple(info.input["shape"])
    shapes = info.costs.get("input_shapes")
    if shapes:
        return tuple(shapes[0][1:])
    name = info.source.get("zoo")
    return zoo.find(name).input_size if name is not None else None


def known_shape(reference: str) -> tuple[int, ...]:
    """The input that a model of the zoo was made for. Nothing is known of a model of the user's own."""
    if zoo.is_own(reference):
        raise ModelError(
            f"the input shape of {reference} is not known: give --input channels,height,width, such as "
            "--input 3,224,224; in Python, an example input."
        )
    return zoo.find(reference).input_size


def is_model(reference: str) -> bool:
    """Whether a reference names a model, which has no weights, and no folder or file."""
    path = Path(reference)
    return not (path.is_dir() or _is_saved(path) or path.suffix == ".onnx" or path.suffix in FOREIGN)


def _is_saved(path: Path) -> bool:
    return path.suffix in (".json", ".safetensors") or saved_path(path).is_file()


def load_network(
    reference: str, *, model: str | None = None, shape: tuple[int, ...] | None = None
) -> Network:
    """The slim network of a run, a saved model, or an ONNX file. `model` builds the original of your own.

    `shape` is that of one input, where it is not recorded or another one is wanted.
    """
    return load_networks(reference, model=model, with_original=False, shape=shape)[-1]


def load_networks(
    reference: str,
    *,
    model: str | None = None,
    with_original: bool = True,
    threads: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> list[Network]:
    """The network of a reference; before it, its original, where it is slim."""
    path = Path(reference)
    if path.is_dir():
        return _of_run(path, model, with_original, shape)
    if path.suffix == ".onnx":
        if shape is not None:
            raise ModelError(f"{path} has an input shape of its own: leave --input out.")
        return [_of_onnx(path, threads)]
    if _is_saved(path):
        return _of_saved(path, path, model, with_original, shape)
    if path.suffix in FOREIGN:
        raise StoreError(
            f"{reference} is no network that peel can run: give a run folder, a model saved by peel "
            "(slim.safetensors), a file .onnx, or the name of a model."
        )
    shape = shape or known_shape(reference)
    network = zoo.create(reference)
    return [make_network(reference, network, shape, key=f"{zoo.find(reference).reference} {shape}")]


def _of_onnx(path: Path, threads: int | None) -> Network:
    network = OnnxModel(path, threads=threads)
    given = network.metadata
    try:
        msgspec.convert(given, Metadata)
    except ValueError as error:
        where = str(error).rpartition("$.")[2].strip("`")
        raise StoreError(
            f"{path}: its metadata {where} is malformed: {describe_error(error)}. Export the network again."
        ) from error
    shape = tuple(given.get("shape") or network.input_shape[1:])
    fixed = network.input_shape[1:]
    pairs = zip(fixed, shape, strict=False)
    if len(fixed) != len(shape) or any(isinstance(size, int) and size != said for size, said in pairs):
        raise StoreError(
            f"{path}: its metadata say that inputs have the shape {short(shape)}, its graph says "
            f"{short(tuple(fixed))}. Export the network again."
        )
    if not all(isinstance(size, int) for size in shape):
        raise ModelError(
            f"the input of {path} has the shape {network.input_shape}: only a free batch is known."
        )
    return Network(str(path), network, shape, given, given.get("macs"), given.get("params"), key=str(path))


def _of_run(
    folder: Path, model: str | None, with_original: bool, shape: tuple[int, ...] | None
) -> list[Network]:
    record = RunRecord.read(folder)
    file = folder / "slim.safetensors"
    if not file.is_file():
        reason = f" It ended with: {record.error}" if record.error else ""
        raise RunError(f"{folder} has no slim network yet: finish the run with its own command.{reason}")
    return _of_saved(folder, file, model or record.config.get("model"), with_original, shape)


def _of_saved(
    place: Path, file: Path, reference: str | None, with_original: bool, shape: tuple[int, ...] | None
) -> list[Network]:
    """A saved model, which lies at `place` for the user."""
    info = read_info(file)
    is_own = "zoo" not in info.source
    if is_own:
        original = _build_own(place, info, reference)
    else:
        original = build_original(info, file)
    slim = load(file, model=original)
    shape = shape or shape_of(info)
    key = f"{info.source} {reference if is_own else None} {shape}"
    is_slim = bool(info.modules)
    networks = [
        make_network(
            f"{place} slim" if place.is_dir() else str(place),
            slim,
            shape,
            key=str(place) if is_slim else key,
            baseline=key if is_slim else None,
        )
    ]
    if with_original and is_slim:
        networks.insert(0, make_network(f"{place} original", original, shape, key=key))
    return networks


def _build_own(place: Path, info: SlimInfo, reference: str | None) -> nn.Module:
    """The original of a model that is not of the zoo, with random weights."""
    name = info.source.get("class")
    if reference is None:
        raise StoreError(
            f"{place} holds a model of your own ({name}): say what builds it before slimming, "
            "with --model path/to/file.py:callable or --model package.module:callable."
        )
    classes = (info.input or {}).get("classes")
    try:
        return zoo.create_for(reference, len(classes)) if classes else zoo.create(reference)
    except ModelError as error:
        raise ModelError(
            f"{error} Say what builds the model of {place}, without arguments: --model."
        ) from error

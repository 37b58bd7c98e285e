"""`save` and `load`: one safetensors file, with the description in its metadata. Nothing is unpickled.

The description holds how to build the original, attributes and shapes that differ from it, widths, and which
channels were kept. `docs/format.md` has it key by key, and a reader that does not need `peel`.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec
import safetensors
import torch
from msgspec import Meta
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..errors import CorruptFileError, ModelError, StoreError
from ..graph.copying import deep_copy
from ..graph.rebuild import set_attributes, tensors_of
from ..utils.files import check_name, parse_object, write_bytes
from ..utils.text import brief, name_of_key, short
from ..utils.validation import Channels, Whole
from ..version import __version__
from .info import SlimInfo, attach_info, changed_sizes, info_of

FORMAT = "peel-model"
VERSION = 2

#: The key of the metadata that holds the description.
KEY = "peel"

#: Attributes of layers that are whole numbers but no widths.
NO_WIDTHS = ("stride", "padding", "dilation", "kernel_size", "output_padding")

T = TypeVar("T")

Size = Annotated[int, Meta(ge=0, lt=2**31)]
Place = Annotated[int, Meta(ge=-1, lt=2**31)]
Attribute = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

Source = TypedDict("Source", {"zoo": str, "arguments": dict[str, Any], "class": str}, total=False)


class Costs(TypedDict, total=False):
    macs: Whole
    params: Whole
    input_shapes: list[list[Size]]
    modules: list[str]


class Input(TypedDict, total=False):
    classes: list[str]
    shape: list[Channels]
    mean: list[Annotated[float, Meta(ge=-1e6, le=1e6)]]
    std: list[Annotated[float, Meta(ge=1e-6, le=1e6)]]
    resize: Annotated[int, Meta(ge=1, le=2**16)]


class Kept(TypedDict):
    lists: list[list[Place]]
    """Axes that keep the same share one."""
    axes: dict[str, list[Size | None]]
    """Tensor -> for each axis the index of its list."""


class Description(TypedDict):
    """What the metadata hold, as JSON."""

    model: Source
    widths: dict[str, Size]
    modules: dict[str, dict[str, Attribute | list[Attribute]]]
    original_shapes: NotRequired[dict[str, list[Size | None]]]
    kept: NotRequired[Kept]
    original_weights: NotRequired[str]
    """`weights_fingerprint` of the model that weights were inherited from."""
    costs: Costs
    input: NotRequired[Input]


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write `PATH.safetensors`, atomically. Returns its path.

    >>> peel.save(small, "slim")
    PosixPath('slim.safetensors')
    """
    file = saved_path(path)
    model, info = _unwrapped(model)
    tensors = {name: _plain(name, tensor) for name, tensor in tensors_of(model).items()}
    description: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": info.source,
        "widths": dict(info.widths),
        "modules": info.modules,
        "original_shapes": info.original_shapes,
        **({"kept": _share_lists(info.kept)} if info.kept is not None else {}),
        **({"original_weights": info.original} if info.original else {}),
        "costs": info.costs,
        **({"input": info.input} if info.input is not None else {}),
        "made_by": {"peel": __version__, "torch": torch.__version__.split("+")[0]},
    }
    try:
        check_name(file)
        # One key: safetensors writes several in any order, and equal networks are to give equal files.
        data = dump_tensors(tensors, metadata={KEY: json.dumps(description)})
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, data)
    except TypeError as error:
        raise StoreError(f"{info.source} cannot be written as JSON: {error}.") from error
    except OSError as error:
        raise StoreError(f"cannot write {error.filename or file}: {error.strerror}.") from error
    return file


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The model saved at `path`. No tracing is needed.

    A model of `peel.zoo` is built by its name. For a model of your own, give an instance as `model`: as it
    was before slimming.
    """
    file, info = saved_path(path), read_info(path)
    original = build_original(info, file) if model is None else model
    built = _build(original, info, _read_tensors(file), file)
    shapes = info.original_shapes
    if shapes is None:
        shapes = changed_sizes(tensors_of(original), tensors_of(built))
    attach_info(built, replace(info, source=info_of(original).source, original_shapes=shapes))
    return built


def read_info(path: str | os.PathLike[str]) -> SlimInfo:
    """How the model saved at `path` was made and is fed, without its weights."""
    file = saved_path(path)
    document = _read_document(file)
    if document is None or document.get("format") != FORMAT:
        raise StoreError(f"{file} is not a model saved by peel.")
    if document.get("version") not in (1, VERSION):
        raise StoreError(f"{file} has format version {short(document.get('version'))}, not {VERSION}.")
    try:
        found = msgspec.convert(document, Description)
        kept = _spread_lists(found["kept"]) if "kept" in found else None
    except (ValueError, IndexError) as error:
        raise CorruptFileError(f"{file} is malformed: {brief(error)}.") from error
    return SlimInfo(
        found["model"],
        found["widths"],
        found["modules"],
        found["costs"],
        found.get("input"),
        found.get("original_shapes"),
        kept,
        found.get("original_weights", ""),
    )


def is_saved(file: Path) -> bool:
    """Whether `save` wrote this file. Other safetensors files hold weights only."""
    is_named = file.suffix in (".json", ".safetensors") and saved_path(file).is_file()
    return is_named and _read_document(saved_path(file)) is not None


def saved_path(path: str | os.PathLike[str]) -> Path:
    """The safetensors file that `path` means, with or without its ending."""
    given = Path(path)
    if not given.name:
        raise StoreError(f"{str(path)!r} names no file; give a path such as runs/slim.")
    base = given.with_suffix("") if given.suffix in (".json", ".safetensors") else given
    return base.with_name(base.name + ".safetensors")


def build_original(info: SlimInfo, path: Path) -> nn.Module:
    """Build the original of a saved model by its name, with random weights.

    The file may not import code, open files or download weights. Its numbers are tried without memory first:
    a network of another size than that of its tensors is not built.
    """
    from .. import zoo

    source = info.source
    if "zoo" not in source:
        own = f"holds a model of your own ({source.get('class')})"
        raise StoreError(f"{path} {own}: give the model before slimming, as peel.load(path, model=...).")
    name, arguments = source["zoo"], source.get("arguments", {})
    if zoo.find(name).source == "user":
        raise StoreError(f"{path}: {name!r} is not a model of the zoo; a saved file does not run other code.")
    for key, value in arguments.items():
        loads_weights = "pretrained" in key or ("weights" in key and key != "init_weights")
        is_name = key.isidentifier() and not key.startswith("_")
        if loads_weights or not is_name or not isinstance(value, bool | int | float | None):
            raise StoreError(
                f"{path}: the argument {name_of_key(key)}={short(value)} is refused: a saved file may only "
                "give numbers to the arguments of a model, and load no other files."
            )
    with contextlib.suppress(ModelError), torch.device("meta"):  # the next line raises it without a device
        _check_shapes(tensors_of(zoo.create(name, **arguments)), _read_shapes(path), info, path)
    return zoo.create(name, **arguments)


def _build(model: nn.Module, info: SlimInfo, tensors: Mapping[str, Tensor], path: Path) -> nn.Module:
    """A copy of the model with the saved tensors and attributes."""
    expected = tensors_of(model)
    _check_shapes(expected, {name: list(tensor.shape) for name, tensor in tensors.items()}, info, path)
    refuse_unusable(tensors, expected, str(path))
    replaced: dict[int, Any] = {}
    for name, old in expected.items():
        new = tensors[name].to(old.device)
        is_parameter = isinstance(old, nn.Parameter)
        replaced[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
    built = deep_copy(model, replaced)
    modules = dict(built.named_modules())
    for name, attributes in info.modules.items():
        if name not in modules:
            raise StoreError(f"{path} does not fit this model: it has no module {name_of_key(name)}.")
        for attribute, value in attributes.items():
            own = vars(modules[name]).get(attribute)
            if attribute in NO_WIDTHS or not _may_replace(own, value):
                wrong = f"{name}.{name_of_key(attribute)} = {short(value)}"
                raise StoreError(f"{path}: {wrong} does not fit this model ({short(own)}).")
        set_attributes(modules[name], attributes)
    return built


def _check_shapes(
    expected: Mapping[str, Tensor], saved: Mapping[str, list[int]], info: SlimInfo, path: Path
) -> None:
    """Whether a model has the shapes of the saved one before it was slimmed, or those that it has now."""
    if different := sorted(set(expected) ^ set(saved)):
        raise StoreError(f"{path} does not fit this model: only one of them has {name_of_key(different[0])}.")
    own = {name: list(tensor.shape) for name, tensor in expected.items()}
    if own == saved:
        return
    for name, size in own.items():
        now = saved[name]
        # A file of version 1 does not say what the original was: any sizes go.
        before = size if info.original_shapes is None else info.original_shapes.get(name, [None] * len(now))
        original = [now if was is None else was for was, now in zip(before, now, strict=False)]
        if size != original or len(before) != len(now):
            raise StoreError(
                f"{path} does not fit this model: {name} has shape {size}, and {original} in the model "
                "that was slimmed. Build the same model with the same number of classes (change the head "
                "before peel.load)."
            )


def refuse_unusable(weights: Mapping[str, Any], expected: Mapping[str, Any], source: str) -> None:
    """Refuse tensors of another kind than the model's, and NaN and inf that its own do not have.

    A mask of -inf is in the model before it is trained.
    """
    for name, wanted in expected.items():
        given = weights.get(name)
        if not isinstance(given, Tensor) or not isinstance(wanted, Tensor):
            continue
        loses = (wanted.is_floating_point() and not given.is_floating_point()) or (
            given.is_complex() and not wanted.is_complex()
        )
        if not _is_plain(given) or given.is_quantized or loses:
            raise StoreError(
                f"{source}: {name} is of another kind than in the model: {_kind_of(given)}, not "
                f"{_kind_of(wanted)}. Save plain tensors: of the network before it was quantized or made "
                "sparse."
            )
        # As the model will hold it: a large number may have no place in it.
        is_finite = torch.isfinite(given.to(wanted.dtype))
        if not is_finite.all() and (wanted.is_meta or torch.isfinite(wanted).all()):
            raise StoreError(
                f"{source}: {name} holds {int((~is_finite).sum())} values that are not finite (NaN or inf): "
                "the training diverged, or the file is corrupt. Use an earlier checkpoint."
            )


def _is_plain(tensor: Tensor) -> bool:
    is_wrapper = hasattr(tensor, "__tensor_flatten__") or _is_flat(tensor)
    return not (is_wrapper or tensor.is_meta or tensor.layout != torch.strided)


def _is_flat(tensor: Tensor) -> bool:
    """Whether it is several parameters in one, as FSDP keeps them; it has no public name for that."""
    return hasattr(tensor, "_is_flat_param")


def _kind_of(tensor: Tensor) -> str:
    """What a tensor is, as a message says it."""
    if _is_flat(tensor):
        return "FlatParameter"
    if tensor.layout != torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    if tensor.is_quantized:
        return "quantized tensor"
    if tensor.is_meta:
        return "meta tensor"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} tensor" if _is_plain(tensor) else type(tensor.data).__name__


def _may_replace(old: Any, value: Any) -> bool:
    """Whether both are whole numbers, or lists of them: a file cannot put anything else into a model."""
    if isinstance(old, list | tuple) and isinstance(value, list):
        return len(old) == len(value) and all(type(item) is int for item in (*old, *value))
    return type(old) is int and type(value) is int and value > 0


def _unwrapped(model: nn.Module) -> tuple[nn.Module, SlimInfo]:
    """The model inside wrappers such as DataParallel and torch.compile, and how it was made.

    A model that was traced in its wrapper has the wrapper's prefix in all names; the saved file has not.
    """
    if not isinstance(model, nn.Module):
        raise StoreError(f"only a torch.nn.Module can be saved, not a {type(model).__name__}.")
    outer: list[SlimInfo] = []
    while (name := _wrapped_name(model)) is not None:
        if "peel_info" in vars(model):
            outer.append(info_of(model))
        outer = [info.without_prefix(name) for info in outer]
        model = getattr(model, name)
    if not outer and "peel_info" not in vars(model):
        _refuse_lost_info(model)
    info = info_of(model)
    for later in reversed(outer):
        info = later.after(info)
    return model, info


def _wrapped_name(model: nn.Module) -> str | None:
    """The attribute of a wrapper that holds the model."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel):
        return "module"
    if type(model).__module__ == "timm.utils.model_ema":
        return "module"
    # torch.compile has no public name for it.
    return "_orig_mod" if "_orig_mod" in dict(model.named_children()) else None


def _refuse_lost_info(model: nn.Module) -> None:
    """Refuse what may be made from a slim network, and does not say how that was slimmed."""
    kind = type(model).__name__
    for name, module in model.named_modules():
        if "peel_info" in vars(module):
            raise StoreError(
                f"this {kind} holds a slim network as {name}, and was not slimmed itself: save that one, "
                f"peel.save(model.get_submodule({name!r}), ...)."
            )
    if isinstance(model, torch.fx.GraphModule | torch.jit.ScriptModule):
        origin = "torch.fx" if isinstance(model, torch.fx.GraphModule) else "TorchScript"
        raise StoreError(
            f"{kind} is a module of {origin}, which does not say whether and how it was slimmed: save the "
            "module that it was made from."
        )


def _plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor as a file holds it."""
    if not _is_plain(tensor):
        raise StoreError(
            f"{name} is a {_kind_of(tensor)}, which a file cannot hold: it holds plain tensors. A sharded "
            "network (DTensor): copy the full_tensor() of each into one that is not sharded. A quantized "
            "network: save it before quantizing, and quantize after peel.load."
        )
    return tensor.detach().contiguous().cpu()


def _share_lists(kept: Mapping[str, Sequence[Sequence[int] | None]]) -> Kept:
    numbers: dict[tuple[int, ...], int] = {}
    axes = {
        name: [None if axis is None else numbers.setdefault(tuple(axis), len(numbers)) for axis in of_tensor]
        for name, of_tensor in kept.items()
    }
    return {"lists": [list(axis) for axis in numbers], "axes": axes}


def _spread_lists(kept: Kept) -> dict[str, list[list[int] | None]]:
    lists = kept["lists"]
    return {
        name: [None if number is None else lists[number] for number in of_tensor]
        for name, of_tensor in kept["axes"].items()
    }


def _open(file: Path, read: Callable[[Any], T]) -> T:
    try:
        with file.open("rb") as handle:
            # The library takes names in UTF-8 only; others are reached through the open file.
            is_utf8 = str(file) == str(file).encode(errors="replace").decode()
            name = str(file) if is_utf8 else f"/dev/fd/{handle.fileno()}"
            with safetensors.safe_open(name, "pt") as opened:
                return read(opened)
    except FileNotFoundError:
        raise StoreError(f"there is no file {file}. Restore it from a copy, or name another.") from None
    except OSError as error:
        raise StoreError(f"cannot read {file}: {brief(error)}.") from error
    except safetensors.SafetensorError as error:
        raise CorruptFileError(f"{file} is corrupt, or is no safetensors file: {brief(error)}.") from error


def _read_tensors(file: Path) -> dict[str, Tensor]:
    # Clones do not stay mapped to the file.
    return _open(file, lambda opened: {name: opened.get_tensor(name).clone() for name in iter(opened.keys())})


def _read_shapes(file: Path) -> dict[str, list[int]]:
    return _open(
        file, lambda opened: {name: opened.get_slice(name).get_shape() for name in iter(opened.keys())}
    )


def _read_document(file: Path) -> dict[str, Any] | None:
    """The description of a saved model, as a file of version 2 or a JSON file of version 1 has it.

    None where neither does: the file holds weights only.
    """
    text, old = (_open(file, lambda opened: opened.metadata()) or {}).get(KEY), file.with_suffix(".json")
    try:
        if text is None:
            return parse_object(old.read_bytes()) if old.is_file() else None
        return parse_object(text.encode())
    except (ValueError, OSError) as error:
        place = file if text is not None else old
        raise CorruptFileError(
            f"the description of the model in {place} is corrupt: {brief(error)}."
        ) from error

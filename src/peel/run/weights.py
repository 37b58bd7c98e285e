"""Weights of the user's own: state dicts in files of many kinds, found and fitted to the model."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import StoreError
from ..graph.copying import deep_copy
from ..surgery.serialization import is_saved, load, refuse_unusable, saved_path
from ..utils.files import DEPTH, parse_toml, read_file
from ..utils.text import name_of_key, short

#: Where checkpoints have the state dict.
USUAL_KEYS = ("state_dict", "model_state_dict", "model", "net")


def saved_file(path: Path) -> Path:
    """The teacher in a run folder, a model saved by peel, or a state dict."""
    inside, shown = path / "stages" / "original.safetensors", name_of_key(str(path))
    try:
        candidates = (inside,) if path.is_dir() else (path, saved_path(path))
        for candidate in candidates:
            if candidate.is_file():
                return candidate
    except OSError as error:  # the name is too long
        raise StoreError(f"there are no weights at {shown}: {error.strerror}.") from error
    if (path / "state.json").is_file() and (given := _given_weights(path)) is not None:
        raise StoreError(
            f"{path} holds no original: it is a run that was given a trained one, and does not store it "
            f"again. {given}"
        )
    raise StoreError(
        f"there are no weights at {shown}. Name a file, or a run folder. To train the original once for "
        f"several runs: peel run ... --stages original --output FOLDER"
    )


def _given_weights(run: Path) -> str | None:
    """What to give instead of a run that was given its weights; None where it trains the original."""
    config = run / "config.toml"
    values = read_file(config, parse_toml) if config.is_file() else {}
    weights = values.get("weights", "train")
    if weights == "train":
        return None
    if weights == "given module":
        return "It was given a module in Python: save its state_dict() with torch.save, and name that file."
    return f"Give what it came from: --weights {weights}"


def load_weights(path: Path, original: nn.Module) -> nn.Module:
    """A copy of the original with the weights stored at `path`."""
    if is_saved(path):
        return load(path, model=original)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors that are refused below
            is_safe = path.suffix == ".safetensors"
            stored = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = "without running code from it" if "weights_only" in str(error) else "by torch"
        raise StoreError(
            f"{path} cannot be loaded {reason} ({type(error).__name__}). Save the model's state_dict() with "
            "torch.save, or the model with peel.save."
        ) from error
    return with_weights(original, stored, str(path))


def with_weights(original: nn.Module, stored: Any, source: str) -> nn.Module:
    model = deep_copy(original)
    weights = _find_state_dict(stored, source, model)
    if wrong := _misfits(model.state_dict(), weights):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise StoreError(f"{source} does not fit the model: {'; '.join(wrong[:3])}{more}.")
    refuse_unusable(weights, original.state_dict(), source)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise StoreError(f"{source} does not fit the model. {error}") from error
    return model


def _misfits(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """How a state dict differs from that of the model, one text for each name."""
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items() if isinstance(tensor, Tensor)}
    wrong = [f"{name} is missing" for name in shapes if name not in given]
    wrong += [f"the model has no {name_of_key(name)}" for name in given if name not in wanted]
    for name, shape in shapes.items():
        tensor = given.get(name)
        if name in given and not isinstance(tensor, Tensor):
            wrong.append(f"{name} is {short(tensor)}, not a tensor")
        elif tensor is not None and tuple(tensor.shape) != shape:
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    return wrong


def _find_state_dict(stored: Any, source: str, model: nn.Module) -> dict[str, Tensor]:
    """The weights in a checkpoint, without the prefix that wrappers add.

    They are taken from the usual keys, else from the only place where a state dict that fits the model lies.
    """
    usual = stored
    for _ in range(DEPTH):
        inner = (usual.get(key) for key in USUAL_KEYS) if isinstance(usual, dict) else ()
        usual = next((value for value in inner if isinstance(value, dict)), usual)
    wanted = model.state_dict()
    if is_state_dict := _has_tensors(usual):
        usual = _without_prefix(usual, list(wanted))
    if is_state_dict and usual.keys() & wanted.keys():
        return dict(usual)
    nested = {key: _without_prefix(inner, list(wanted)) for key, inner in _nested_state_dicts(stored)}
    fitting = {key: weights for key, weights in nested.items() if not _misfits(wanted, weights)}
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    way_out = "Save the one to use by itself: torch.save(model.state_dict(), FILE)."
    if fitting:
        raise StoreError(f"{source} holds several state dicts that fit, {', '.join(fitting)}. {way_out}")
    if is_state_dict:
        return dict(usual)
    keys = ", ".join(map(name_of_key, list(stored)[:8])) if isinstance(stored, dict) else ""
    raise StoreError(
        f"{source} holds no state dict (names and tensors) that fits the model."
        + (f" Its keys: {keys}." if keys else "")
        + f" {way_out}"
    )


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(inner, Tensor) for inner in value.values())


def _nested_state_dicts(stored: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where in a checkpoint, and what. Each dict once: a checkpoint may hold itself."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), stored)]
    while waiting:
        place, table = waiting.pop()
        if not isinstance(table, dict) or id(table) in seen or len(place) > DEPTH:
            continue
        seen.add(id(table))
        if place and _has_tensors(table) and all(isinstance(name, str) for name in table):
            yield ".".join(map(name_of_key, place)), table
        waiting += [((*place, key), value) for key, value in reversed(table.items())]


def _without_prefix(stored: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Lightning adds `model.`, DataParallel `module.`, torch.compile `_orig_mod.`."""
    if stored.keys() & set(wanted):
        return stored
    names = [name for name in stored if isinstance(name, str)]
    for prefix in (name.removesuffix(wanted[0]) for name in names if name.endswith(f".{wanted[0]}")):
        cut = {name.removeprefix(prefix): stored[name] for name in names if name.startswith(prefix)}
        if cut.keys() >= set(wanted):
            return cut
    return stored

"""The trained original: from a file, from a run folder, or with the weights that torchvision or timm offer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import StoreError
from .files import is_packed
from .store import load

__all__ = ["load_teacher", "saved_teacher"]


def saved_teacher(path: Path) -> Path | None:
    """Where the teacher named by `path` is kept: a run folder, a model saved by peel, or a checkpoint; None where nothing is yet."""
    if path.is_dir():
        inside = path / "stages" / "original.json"
        return inside if inside.exists() and (path / "stages" / "original.record.json").exists() else None
    for candidate in (path, path.with_name(path.name + ".json")):
        if candidate.is_file():
            return candidate
    return None


def load_teacher(path: Path, original: nn.Module) -> nn.Module:
    """The original with the weights kept at `path`."""
    if path.suffix in (".json", ".safetensors"):
        return load(path, model=original)
    try:
        with path.open("rb") as file:
            packed = is_packed(file)
            stored: Any = None if packed else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StoreError(
            f"{path} cannot be read as weights without running code from it, so it is refused ({type(error).__name__}). Save the model's "
            "state_dict() with torch.save, or the model with peel.save."
        ) from error
    if packed:
        raise StoreError(f"{path} is compressed: unpacked, it could fill the memory, so it is refused. torch.save never compresses.")
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(stored, dict) and isinstance(stored.get(key), dict):
            stored = stored[key]
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise StoreError(f"{path} holds no state_dict: names and tensors are needed, under `state_dict` or `model` or on their own.")
    weights = {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in stored.items()}
    teacher = copy.deepcopy(original)
    wanted = teacher.state_dict()
    odd = [name for name in weights if name in wanted and wanted[name].shape != weights[name].shape]
    if odd:
        raise StoreError(
            f"{path} does not fit the model: {odd[0]} has shape {tuple(weights[odd[0]].shape)} there and {tuple(wanted[odd[0]].shape)} here"
            f"{' (another number of classes?)' if odd[-1].startswith(('fc', 'classifier', 'head')) else ''}."
        )
    missing = sorted(set(wanted) ^ set(weights))
    if missing:
        raise StoreError(f"{path} does not fit the model: {', '.join(missing[:3])} {'are' if len(missing) > 1 else 'is'} not in both.")
    teacher.load_state_dict(weights)
    return teacher

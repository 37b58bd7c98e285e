"""The trained original: from a file, from a run folder, or with the weights that torchvision or timm offer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError, RunError, StoreError
from ..methods.problem import Problem
from ..surgery import record_of
from ..surgery.serialization import load
from ..train.objective import get_logits
from ..utils.files import is_compressed
from ..utils.fingerprint import fingerprint
from .resume import NO_PATHS
from .stage_record import StageRecord, read_object, read_record

__all__ = ["Teacher", "find_teacher", "weights_hash"]


@dataclass(frozen=True)
class Teacher:
    """An original that is trained already."""

    model: nn.Module
    file: str = "stages/original.json"
    record: StageRecord | None = None
    """Of its training, where that is known."""
    folder: Path | None = None
    """Where runs that share it may keep what they learn about it."""


def find_teacher(named: nn.Module | str | Path, problem: Problem) -> Teacher | None:
    """The teacher that was named; None where it is still to be trained."""
    if named == "train":
        return None
    if isinstance(named, nn.Module):
        found = Teacher(copy.deepcopy(named))  # it will be moved and frozen
    elif named == "pretrained":
        found = Teacher(copy.deepcopy(problem.model))
    else:
        kept = saved_teacher(Path(named))
        if kept is None and Path(named).suffix in (".pt", ".pth", ".json", ".safetensors"):
            raise RunError(
                f"there is no teacher at {named}. Name a file that exists, or a folder to train the original in."
            )
        if kept is None:
            return None
        record = kept.with_name("original.record.json")
        known = (
            read_record(record, "--teacher") if kept.name == "original.json" and record.is_file() else None
        )
        found = Teacher(
            load_teacher(kept, problem.model), str(kept), known, Path(named) if Path(named).is_dir() else None
        )
        _refuse_slim(found, problem)
    _check(found.model, problem)
    return found


def weights_hash(model: nn.Module) -> str:
    """Tells one trained network from another."""
    return fingerprint(part for named in model.state_dict().items() for part in named)


def _refuse_slim(teacher: Teacher, problem: Problem) -> None:
    """A network that peel has made smaller would stand in the table with the costs of the original."""
    kept = record_of(teacher.model).widths
    graph = problem.graph
    other = {tie: kept[tie] for tie, width in graph.widths.items() if kept.get(tie, width) != width}
    if other:
        tie = next(iter(other))
        raise DataError(
            f"{teacher.file} is not the original but a network of other widths: {tie} has {other[tie]} channels there and "
            f"{graph.widths[tie]} in the original. Name the folder of a run that has trained the original, or its stages/original.json."
        )


def _check(teacher: nn.Module, problem: Problem) -> None:
    device = problem.engine.device
    try:
        with torch.inference_mode():
            scores = get_logits(teacher.to(device).eval()(torch.zeros(2, *problem.data.shape, device=device)))
    except (RuntimeError, ValueError, TypeError) as error:
        raise DataError(f"the teacher cannot take images of shape {problem.data.shape}: {error}") from error
    if not torch.isfinite(scores).all():
        raise DataError(
            "the teacher answers with numbers that are not finite: its weights are damaged, or it diverged in its own training."
        )
    if scores.shape[1] != len(problem.data.classes):
        raise DataError(
            f"the teacher knows {scores.shape[1]} classes, the data has {len(problem.data.classes)}."
        )


def saved_teacher(path: Path) -> Path | None:
    """Where the teacher named by `path` is kept: a run folder, a model saved by peel, or a checkpoint; None where nothing is yet."""
    if path.is_dir():
        inside = path / "stages" / "original.json"
        if inside.exists() and (path / "stages" / "original.record.json").exists():
            return inside
        _refuse_other_run(path)
        return None
    for candidate in (path, path.with_name(path.name + ".json")):
        if candidate.is_file():
            return candidate
    return None


def _refuse_other_run(folder: Path) -> None:
    """Only a teacher is trained in the folder of a teacher."""
    settings = folder / "settings.json"
    resolved = read_object(settings, "--teacher")["resolved"] if settings.is_file() else {}
    if "method" in resolved:
        named = resolved.get("teacher", "train")
        other = "" if named in NO_PATHS else f", name its teacher ({named})"
        raise RunError(
            f"{folder} is the folder of a run that has not trained its original. Finish that run{other}, or name another folder."
        )


def load_teacher(path: Path, original: nn.Module) -> nn.Module:
    """The original with the weights kept at `path`."""
    if path.suffix in (".json", ".safetensors"):
        return load(path, model=original)
    try:
        with path.open("rb") as file:
            packed = is_compressed(file)
            stored: Any = None if packed else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StoreError(
            f"{path} cannot be read as weights without running code from it, so it is refused ({type(error).__name__}). Save the model's "
            "state_dict() with torch.save, or the model with peel.save."
        ) from error
    if packed:
        raise StoreError(
            f"{path} is compressed: unpacked, it could fill the memory, so it is refused. torch.save never compresses."
        )
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(stored, dict) and isinstance(stored.get(key), dict):
            stored = stored[key]
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise StoreError(
            f"{path} holds no state_dict: names and tensors are needed, under `state_dict` or `model` or on their own."
        )
    weights = {
        name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in stored.items()
    }
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
        raise StoreError(
            f"{path} does not fit the model: {', '.join(missing[:3])} {'are' if len(missing) > 1 else 'is'} not in both."
        )
    teacher.load_state_dict(weights)
    return teacher

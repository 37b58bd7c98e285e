"""The trained original: a module, a file, a run folder, or the weights that torchvision or timm offer."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ..errors import DataError, StoreError
from ..methods.problem import Problem
from ..surgery.info import info_of
from ..surgery.serialization import load
from ..train.objective import get_logits
from ..utils.files import parse_object, read_file
from ..utils.fingerprint import fingerprint
from .result import StageRecord


@dataclass(frozen=True)
class Teacher:
    """A trained original."""

    model: nn.Module
    file: str = "stages/original.json"
    record: StageRecord | None = None
    """How it was trained, where that is known."""


def find_teacher(reference: nn.Module | str, problem: Problem) -> Teacher | None:
    """The trained teacher; None where it is trained by the run itself."""
    if reference == "train":
        return None
    if isinstance(reference, nn.Module):
        teacher = Teacher(copy.deepcopy(reference))
    elif reference == "pretrained":
        teacher = Teacher(copy.deepcopy(problem.model))
    else:
        file = _saved_file(Path(reference))
        record = file.with_name("original.record.json")
        known = None
        if file.name == "original.json" and record.is_file():
            known = read_file(record, lambda data: msgspec.convert(parse_object(data), StageRecord))
        teacher = Teacher(load_weights(file, problem.model), str(file), known)
        _refuse_slim(teacher, problem)
    _check(teacher.model, problem)
    return teacher


def weights_hash(model: nn.Module) -> str:
    return fingerprint(part for named in model.state_dict().items() for part in named)


def _refuse_slim(teacher: Teacher, problem: Problem) -> None:
    """A slim network would appear in the table with the costs of the original."""
    stored = info_of(teacher.model).widths
    for tie, width in problem.graph.widths.items():
        if stored.get(tie, width) != width:
            raise DataError(
                f"{teacher.file} is not the original: {tie} has {stored[tie]} channels there and {width} in "
                "the original. Name the folder of a run that trained the original."
            )


def _check(teacher: nn.Module, problem: Problem) -> None:
    device, shape = problem.engine.device, problem.data.shape
    try:
        with torch.inference_mode():
            logits = get_logits(teacher.to(device).eval()(torch.zeros(2, *shape, device=device)))
    except (RuntimeError, ValueError, TypeError) as error:
        raise DataError(f"the teacher cannot take images of shape {shape}: {error}") from error
    if not torch.isfinite(logits).all():
        raise DataError(
            "the teacher's logits are not finite: its weights are corrupt, or its training diverged."
        )
    if logits.shape[1] != len(problem.data.classes):
        raise DataError(
            f"the teacher has {logits.shape[1]} classes, the data has {len(problem.data.classes)}."
        )


def _saved_file(path: Path) -> Path:
    """The teacher in a run folder, a model saved by peel, or a state dict."""
    inside = path / "stages" / "original.json"
    candidates = (inside,) if path.is_dir() else (path, path.with_name(path.name + ".json"))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise StoreError(
        f"there is no teacher at {path}. Name a file with its weights, or a run folder. To train it once for "
        f"several runs: peel run ... --stages original --output {path}"
    )


def load_weights(path: Path, original: nn.Module) -> nn.Module:
    """A copy of the original with the weights stored at `path`."""
    if path.suffix in (".json", ".safetensors"):
        return load(path, model=original)
    try:
        stored: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StoreError(
            f"{path} cannot be loaded without running code from it ({type(error).__name__}). Save the "
            "model's state_dict() with torch.save, or the model with peel.save."
        ) from error
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(stored, dict) and isinstance(stored.get(key), dict):
            stored = stored[key]
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise StoreError(
            f"{path} holds no state dict (names and tensors, possibly under `state_dict` or `model`)."
        )
    weights = {
        name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in stored.items()
    }
    teacher = copy.deepcopy(original)
    try:
        teacher.load_state_dict(weights)
    except RuntimeError as error:
        raise StoreError(f"{path} does not fit the model. {error}") from error
    return teacher

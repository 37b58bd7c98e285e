"""The trained original: a module, a file, a run folder, or the weights that torchvision or timm offer.

It is evaluated before anything is trained: a teacher that fails on the data would cost a run for nothing.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..data.augmentation import EVAL
from ..data.batch import call_model, map_tensors
from ..data.datasets import IMAGENET_MEAN, IMAGENET_STD, Data
from ..errors import ConfigError, DataError, StoreError
from ..graph.copying import deep_copy
from ..methods.problem import Problem
from ..surgery.info import info_of
from ..surgery.serialization import is_saved, load, read_info, refuse_unusable, saved_path
from ..train.engine import Engine, eval_batch_size
from ..train.objective import get_logits, main_output
from ..utils.files import DEPTH, parse_object, parse_toml, read_file
from ..utils.fingerprint import fingerprint
from ..utils.text import name_of_key, short
from .result import StageRecord

#: Images that the likely reasons for a low accuracy are tried on.
TRIED_IMAGES = 1000

#: How networks are usually fed: name -> mean and standard deviation, for pixels from 0 to 1.
NORMALIZATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "pixels from 0 to 1": ((0.0,), (1.0,)),
    "pixels from -1 to 1": ((0.5,), (0.5,)),
    "pixels from 0 to 255": ((0.0,), (1 / 255,)),
    "the mean and deviation of ImageNet": (IMAGENET_MEAN, IMAGENET_STD),
}


#: Where checkpoints have the state dict.
USUAL_KEYS = ("state_dict", "model_state_dict", "model", "net")

#: A cause is named only if the accuracy without it is at least this many times that of a guess.
FAR_ABOVE_CHANCE = 3

#: A top-1 below this, over the number of outputs, looks like that of a network that was not trained.
NEAR_CHANCE = 1.5


@dataclass(frozen=True)
class Teacher:
    """A trained original."""

    model: nn.Module
    file: str = "stages/original.safetensors"
    record: StageRecord | None = None
    """How it was trained, where that is known."""


def find_teacher(reference: nn.Module | Mapping[str, Tensor] | str, problem: Problem) -> Teacher | None:
    """The trained teacher; None where it is trained by the run itself."""
    if reference == "train":
        return None
    if isinstance(reference, nn.Module):
        teacher = Teacher(deep_copy(reference))
    elif isinstance(reference, Mapping):
        teacher = Teacher(_with_weights(problem.model, dict(reference), "the given state dict"))
    elif reference == "pretrained":
        teacher = Teacher(deep_copy(problem.model))
    else:
        file = saved_file(Path(reference))
        record = file.with_name("original.record.json")
        known = None
        if file.stem == "original" and record.is_file():
            known = read_file(record, lambda data: msgspec.convert(parse_object(data), StageRecord))
        teacher = Teacher(load_weights(file, problem.model), str(file), known)
        _refuse_slim(teacher, problem)
    _check(teacher.model, problem)
    stored = info_of(teacher.model).input or {}
    classes = tuple(stored.get("classes", problem.data.classes))
    if classes != problem.data.classes and sorted(classes) == sorted(problem.data.classes):
        raise DataError(f"the network's classes are in another order: {', '.join(classes[:5])}, ...")
    return teacher


def input_of(reference: nn.Module | Mapping[str, Tensor] | str) -> Mapping[str, Any]:
    """How a teacher is fed (classes, shape, mean, std), as far as a module or a file of peel says it."""
    if isinstance(reference, nn.Module):
        return info_of(reference).input or {}
    if isinstance(reference, Mapping):
        return {}
    path = Path(reference)
    file = path / "stages" / "original.safetensors" if path.is_dir() else path
    return (read_info(file).input or {}) if is_saved(file) else {}


def check_accuracy(teacher: Teacher, top1: float, problem: Problem, is_chosen: bool) -> None:
    """Refuse a teacher that fails on the data. `is_chosen`: mean and std were given, and are not doubted.

    A teacher that a run of peel trained may have lost half of what its record had above chance. Any other
    must be above chance by three standard errors, and no usual normalization may be better by as much.
    """
    data, history = problem.data, teacher.record.history if teacher.record is not None else []
    text = f"the network is right for only {top1:.1%} of the test images of {data.name}"
    recorded = (history[-1].test or {}).get("top1") if history else None
    if recorded is not None:
        least = (recorded + min(recorded, 1 / len(data.classes))) / 2
        if top1 < least - _error(recorded, data.test.size):
            raise DataError(
                f"{text}; its record says {recorded:.1%}. It was trained on other data, or fed otherwise "
                "(--mean, --std)."
            )
    elif reason := why_it_fails(teacher.model, data, problem.engine, is_chosen):
        raise DataError(f"{text}. {reason} Or train it: --weights train.")


def chance_notes(teacher: Teacher, top1: float, problem: Problem) -> list[str]:
    """A note where a classifier is no better than a guess on data of the user's own."""
    example = map_tensors(problem.data.example(2), lambda tensor: tensor.to(problem.engine.device))
    with torch.inference_mode():
        logits = main_output(call_model(teacher.model.eval(), example))
    if logits is None or top1 > NEAR_CHANCE / logits.shape[1]:
        return []
    return [
        f"The given network is right for {top1:.1%} of the validation samples, and has {logits.shape[1]} "
        "outputs: are its weights trained? A network that is not: weights='train'."
    ]


def untrained_notes(top1: float | None, problem: Problem) -> list[str]:
    """A note where an original that the run has trained is no better than a guess."""
    classes = len(problem.data.classes)
    if top1 is None or not classes or top1 > NEAR_CHANCE / classes:
        return []
    return [
        f"The original has learned little: it is right for {top1:.1%} of the test images, which have "
        f"{classes} classes. Try a lower learning rate (--train.lr) or more epochs (--train.epochs)."
    ]


def _error(fraction: float, count: int) -> float:
    """Three standard errors of a fraction of `count` images, and at least one image."""
    return 3 * math.sqrt(max(fraction * (1 - fraction), 1 / count) / count)


def why_it_fails(model: nn.Module, data: Data, engine: Engine, is_chosen: bool) -> str:
    """Why a trained network fails on some test images; empty where it does not."""
    index = torch.arange(0, data.test.size, -(-data.test.size // TRIED_IMAGES))
    assert data.test.labels is not None
    labels, count = data.test.labels.cpu()[index], len(index)

    def score(predicted: Tensor) -> float:
        return float((predicted == labels).float().mean())

    predicted = _predictions(model, data, index, engine)
    best, better = score(predicted), ""
    limit = max(best + _error(best, count), _far_above_chance(labels))
    for name, (mean, std) in {} if is_chosen else NORMALIZATIONS.items():
        with contextlib.suppress(ConfigError):  # other channels, or splits of the user's own
            top1 = score(_predictions(model, data.normalized(mean, std), index, engine))
            if top1 > max(best, limit):
                flags = " ".join(f"{flag} {_numbers(x)}" for flag, x in (("--mean", mean), ("--std", std)))
                best, better = top1, f"With {name} it is right for {top1:.1%} of {count}: give {flags}."
    # A renaming of the classes is found on one half of the images and scored on the other.
    names = _renaming(predicted[::2], labels[::2])
    answers = zip(predicted[1::2].tolist(), labels[1::2].tolist(), strict=True)
    renamed = sum(names.get(found) == label for found, label in answers) / max(1, count // 2)
    if renamed > max(best + 2 * _error(best, count), limit):
        text = f"With its classes renamed it is right for {renamed:.1%}"
        return f"{text}: they are in another order than the data's ({', '.join(data.classes[:3])}, ...)."
    # What guesses of the same frequency would score.
    frequencies = [x.bincount(minlength=len(data.classes)) / count for x in (predicted, labels)]
    chance = float(frequencies[0] @ frequencies[1])
    if better or best > chance + _error(chance, count):
        return better
    return (
        f"Guesses would be right for {chance:.1%}. Likely reasons: its mean and standard deviation are not "
        f"{_numbers(data.train.mean)} and {_numbers(data.train.std)} (--mean, --std); its weights are not "
        f"trained; or its classes are in another order than {', '.join(data.classes[:3])}, ..."
    )


def _far_above_chance(labels: Tensor) -> float:
    """An accuracy that no untrained network has: three times that of a guess, or half of the way to 1."""
    chance = float(labels.bincount().max()) / len(labels)
    return min(FAR_ABOVE_CHANCE * chance, (1 + chance) / 2)


def _renaming(predicted: Tensor, labels: Tensor) -> dict[int, int]:
    """Predicted class -> class, one to one; the most frequent pairs first."""
    names: dict[int, int] = {}
    pairs = Counter(zip(predicted.tolist(), labels.tolist(), strict=True))
    for (found, label), _ in pairs.most_common():
        if found not in names and label not in names.values():
            names[found] = label
    return names


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


@torch.inference_mode()
def _predictions(model: nn.Module, data: Data, index: Tensor, engine: Engine) -> Tensor:
    model.eval()
    batches = data.test.batches(index, eval_batch_size(data.test), EVAL, engine.device, engine.workers)
    return torch.cat([get_logits(model(batch.inputs)).argmax(1).cpu() for batch in batches])


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
    device, data = problem.engine.device, problem.data
    example = map_tensors(data.example(2), lambda tensor: tensor.to(device))
    teacher.to(device).eval()  # not under inference_mode: what moves there cannot be repaired or trained
    try:
        with torch.inference_mode():
            output = call_model(teacher, example)
    except (RuntimeError, ValueError, TypeError) as error:
        what = "the given data" if data.is_own else f"images of shape {data.shape}"
        raise DataError(f"the network cannot take {what}: {error}") from error
    logits = main_output(output) if data.is_own else get_logits(output)
    if logits is not None and not torch.isfinite(logits).all():
        raise DataError(
            "the network's logits are not finite: its weights are corrupt, or its training diverged."
        )
    if logits is not None and not data.is_own and logits.shape[1] != len(problem.data.classes):
        raise DataError(
            f"the network has {logits.shape[1]} classes, the data has {len(problem.data.classes)}."
        )


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
    return _with_weights(original, stored, str(path))


def _with_weights(original: nn.Module, stored: Any, source: str) -> nn.Module:
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

"""The trained original: a module, a file, a run folder, or the weights that torchvision or timm offer.

It is evaluated before anything is trained: a teacher that fails on the data would cost a run for nothing.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ..data.augmentation import EVAL
from ..data.batch import call_model, map_tensors
from ..data.datasets import IMAGENET_MEAN, IMAGENET_STD, Data
from ..errors import ConfigError, DataError
from ..graph.copying import deep_copy
from ..surgery.info import info_of
from ..surgery.serialization import is_saved, read_info
from ..train.engine import Engine, eval_batch_size
from ..train.objective import get_logits, main_output
from ..utils.files import parse_object, read_file
from ..utils.fingerprint import fingerprint
from .loaded import Given, Loaded
from .result import Record
from .weights import load_weights, saved_file, with_weights

#: Images that the likely reasons for a low accuracy are tried on.
TRIED_IMAGES = 1000

#: How networks are usually fed: name -> mean and standard deviation, for pixels from 0 to 1.
NORMALIZATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "pixels from 0 to 1": ((0.0,), (1.0,)),
    "pixels from -1 to 1": ((0.5,), (0.5,)),
    "pixels from 0 to 255": ((0.0,), (1 / 255,)),
    "the mean and deviation of ImageNet": (IMAGENET_MEAN, IMAGENET_STD),
}


#: A cause is named only if the accuracy without it is at least this many times that of a guess.
FAR_ABOVE_CHANCE = 3

#: A top-1 below this, over the number of outputs, looks like that of a network that was not trained.
NEAR_CHANCE = 1.5


def find_original(reference: nn.Module | Mapping[str, Tensor] | str, loaded: Loaded) -> Given | None:
    """The trained original; None where the run itself trains it."""
    if reference == "train":
        return None
    if isinstance(reference, nn.Module):
        original = Given(deep_copy(reference))
    elif isinstance(reference, Mapping):
        original = Given(with_weights(loaded.model, dict(reference), "the given state dict"))
    elif reference == "pretrained":
        original = Given(deep_copy(loaded.model))
    else:
        file = saved_file(Path(reference))
        record = file.with_name("original.record.json")
        known = None
        if file.stem == "original" and record.is_file():
            known = read_file(record, lambda data: msgspec.convert(parse_object(data), Record))
        original = Given(load_weights(file, loaded.model), str(file), known)
        _refuse_slim(original, loaded)
    _check(original.model, loaded)
    stored = info_of(original.model).input or {}
    classes = tuple(stored.get("classes", loaded.data.classes))
    if classes != loaded.data.classes and sorted(classes) == sorted(loaded.data.classes):
        raise DataError(f"the network's classes are in another order: {', '.join(classes[:5])}, ...")
    return original


def input_of(reference: nn.Module | Mapping[str, Tensor] | str) -> Mapping[str, Any]:
    """How a teacher is fed (classes, shape, mean, std), as far as a module or a file of peel says it."""
    if isinstance(reference, nn.Module):
        return info_of(reference).input or {}
    if isinstance(reference, Mapping):
        return {}
    path = Path(reference)
    file = path / "stages" / "original.safetensors" if path.is_dir() else path
    return (read_info(file).input or {}) if is_saved(file) else {}


def check_accuracy(original: Given, top1: float, loaded: Loaded) -> None:
    """Refuse an original that fails on the data.

    A teacher that a run of peel trained may have lost half of what its record had above chance. Any other
    must be above chance by three standard errors, and no usual normalization may be better by as much.
    """
    data, history = loaded.data, original.record.history if original.record is not None else []
    text = f"the network is right for only {top1:.1%} of the test images of {data.name}"
    recorded = (history[-1].test or {}).get("top1") if history else None
    if recorded is not None:
        least = (recorded + min(recorded, 1 / len(data.classes))) / 2
        if top1 < least - _error(recorded, data.test.size):
            raise DataError(
                f"{text}; its record says {recorded:.1%}. It was trained on other data, or fed otherwise "
                "(--mean, --std)."
            )
    elif reason := why_it_fails(original.model, data, loaded.engine, loaded.is_chosen):
        raise DataError(f"{text}. {reason} Or train it: --weights train.")


def chance_notes(original: Given, top1: float, loaded: Loaded) -> list[str]:
    """A note where a classifier is no better than a guess on data of the user's own."""
    example = map_tensors(loaded.data.example(2), lambda tensor: tensor.to(loaded.engine.device))
    with torch.inference_mode():
        logits = main_output(call_model(original.model.eval(), example))
    if logits is None or top1 > NEAR_CHANCE / logits.shape[1]:
        return []
    return [
        f"The given network is right for {top1:.1%} of the validation samples, and has {logits.shape[1]} "
        "outputs: are its weights trained? A network that is not: weights='train'."
    ]


def untrained_notes(top1: float | None, loaded: Loaded) -> list[str]:
    """A note where an original that the run has trained is no better than a guess."""
    classes = len(loaded.data.classes)
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


def given_hash(given: Given | None) -> str:
    """What the original comes from: the hash of given weights, else train."""
    return "train" if given is None else weights_hash(given.model)


def weights_hash(model: nn.Module) -> str:
    return fingerprint(part for named in model.state_dict().items() for part in named)


def _refuse_slim(original: Given, loaded: Loaded) -> None:
    """A slim network would appear in the table with the costs of the original."""
    stored = info_of(original.model).widths
    for tie, width in loaded.graph.widths.items():
        if stored.get(tie, width) != width:
            raise DataError(
                f"{original.file} is not the original: {tie} has {stored[tie]} channels there and {width} in "
                "the original. Name the folder of a run that trained the original."
            )


def _check(original: nn.Module, loaded: Loaded) -> None:
    device, data = loaded.engine.device, loaded.data
    example = map_tensors(data.example(2), lambda tensor: tensor.to(device))
    original.to(device).eval()  # not under inference_mode: what moves there cannot be repaired or trained
    try:
        with torch.inference_mode():
            output = call_model(original, example)
    except (RuntimeError, ValueError, TypeError) as error:
        what = "the given data" if data.is_own else f"images of shape {data.shape}"
        raise DataError(f"the network cannot take {what}: {error}") from error
    logits = main_output(output) if data.is_own else get_logits(output)
    if logits is not None and not torch.isfinite(logits).all():
        raise DataError(
            "the network's logits are not finite: its weights are corrupt, or its training diverged."
        )
    if logits is not None and not data.is_own and logits.shape[1] != len(loaded.data.classes):
        raise DataError(
            f"the network has {logits.shape[1]} classes, the data has {len(loaded.data.classes)}."
        )

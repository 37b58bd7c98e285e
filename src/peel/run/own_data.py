"""Data, loss and loop of the user's own: how they enter a run, and what they leave off."""

import inspect
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..data.datasets import Data
from ..data.torch_data import LoaderSplit
from ..errors import ConfigError, DataError
from ..train.engine import Engine
from ..train.task import Task, TrainFunction
from .config import Config


def check_pair(given: object) -> None:
    """Refuse a single dataset or loader."""
    if isinstance(given, Dataset | DataLoader):
        raise DataError(
            f"data of your own are a pair (train, val), not one {type(given).__name__}: "
            "peel.prune(model, (train, val))."
        )


def resolve_data(given: Any, config: Config) -> Data | str:
    """Data of the user's own as `Data`, any other as they are given: `Data`, a name or a folder."""
    if isinstance(given, tuple):
        if len(given) != 2:
            raise DataError(f"data of your own are a pair (train, val), not a tuple of {len(given)}.")
        return Data.from_torch(*given, batch_size=config.train.batch_size, workers=config.workers)
    assert config.data is not None
    return given if isinstance(given, Data) else config.data


def restrict_engine(engine: Engine, data: Data, task: Task) -> tuple[Engine, list[str]]:
    """The engine without what assumes images in memory or code that is known, and a note about it."""
    is_stream = isinstance(data.train, LoaderSplit)
    if is_stream and engine.world.size > 1:
        raise ConfigError(
            "the loader of the training data chooses its samples itself: several processes would see the "
            "same ones. Give the dataset, or a DataLoader without a sampler of its own."
        )
    if not data.is_own and not task.is_own:
        return engine, []
    # A user's loss may wait for the device, and batches may differ in shape.
    changes: dict[str, Any] = {"cuda_graphs": False}
    changes |= {"compile": "off"} if engine.compile == "auto" else {}
    changes |= {"pad_channels": False, "cache_teacher": False} if data.is_own else {}
    names = {
        "cuda_graphs": "CUDA graphs",
        "compile": "automatic compilation",
        "pad_channels": "padding of slow widths",
        "cache_teacher": "the teacher cache",
    }
    off = [names[name] for name in changes if getattr(engine, name)]
    notes = [f"Left off with data, a loss or an optimizer of your own: {', '.join(off)}."] if off else []
    if is_stream:
        notes.append(
            "The loader of the training data chooses its samples itself: a run that is resumed within an "
            "epoch sees other samples than one that was not interrupted."
        )
    return replace(engine, **changes), notes


def _check_signature(train_fn: TrainFunction) -> None:
    """Refuse a function that cannot be called as it will be, before anything is computed."""
    try:
        inspect.signature(train_fn).bind(nn.Identity(), epochs=1, teacher=None)
    except TypeError as error:
        wanted = "train_fn(model, epochs=..., teacher=...)"
        raise ConfigError(f"train_fn is called as {wanted}: {error}.") from error
    except ValueError:  # not every callable has a signature
        pass


def restrict_settings(config: Config, data: Data, task: Task) -> tuple[Config, list[str]]:
    """The settings without what the outputs do not allow, and notes about what differs."""
    notes = []
    if task.train_fn is not None:
        if config.distill == "in-place":
            raise ConfigError('with train_fn, distill is "teacher" (it gets the original) or "none".')
        _check_signature(task.train_fn)
        notes.append("train_fn trains every network, so recipes count for their epochs only.")
    elif config.distill != "none" and not task.has_output:
        config = replace(config, distill="none", kd_weight=None, temperature=None, hard_weight=None)
        notes.append("Distillation is off: in training the model returns no output that could be compared.")
    elif config.distill != "none" and not task.is_classification:
        notes.append(
            "Outputs are no class logits: distillation compares them by their mean squared error, relative "
            "to the variance of the teacher's."
        )
    return config, notes

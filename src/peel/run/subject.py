"""What a run is about, and what may change between two starts of it."""

import json
import logging
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..cost.latency import LatencyModel
from ..data.datasets import Data, first_batch
from ..data.image_folder import ImageFolder, fingerprint_of
from ..data.in_memory import InMemoryImages
from ..errors import RunError
from ..graph import ChannelGraph
from ..train.engine import Engine
from ..train.objective import describe
from ..train.task import Task
from ..utils.files import parse_object
from ..utils.fingerprint import fingerprint
from ..utils.text import flatten, name_of_key, short
from ..version import __version__
from .config import Config
from .store import RunFolder

log = logging.getLogger("peel")


FORMAT, VERSION = "peel-run", 3


@dataclass
class State:
    """state.json: what the run is about, and its jobs in the words of the settings."""

    command: str
    subject: dict[str, Any]
    settings: dict[str, Any]
    jobs: dict[str, dict[str, Any]]
    """Name -> settings of the job."""
    keys: dict[str, str]
    """Name -> key of the job."""
    format: str = FORMAT
    version: int = VERSION


def subject_of(
    graph: ChannelGraph, network: nn.Module, data: Data, engine: Engine, task: Task, deterministic: bool
) -> dict[str, Any]:
    """What all jobs of a run share: fingerprints of code and images, and what changes their numbers."""
    subject = {
        **({"latency": _latency_key(graph.latency_model)} if graph.latency_model is not None else {}),
        "groups": {name: list(ties) for name, ties in graph.groups.items()},
        "deterministic": deterministic,
        "model": {
            "macs": graph.macs(),
            "params": graph.params(),
            "layers": fingerprint([repr([_layer(name, layer) for name, layer in network.named_modules()])]),
            "tensors": fingerprint([repr([(n, tuple(t.shape)) for n, t in network.state_dict().items()])]),
            "operators": fingerprint([" ".join(graph.operators)]),
            "constants": fingerprint([repr(graph.constants)]),
        },
        "data": {"images": _fingerprint_images(data), **data.input_spec()},
        **({"task": task.names()} if task != Task() else {}),
        "processes": engine.world.size,
        "accumulate": engine.accumulation_steps,
        "device": engine.device.type,  # a GPU pads odd widths
        "sync_bn": engine.sync_bn,
    }
    return dict(json.loads(json.dumps(subject)))


def _latency_key(model: LatencyModel) -> str:
    return fingerprint([repr((model.constant, model.terms))])


def _fingerprint_images(data: Data) -> str:
    parts: list[Tensor | str] = []
    for split in (data.train, data.test):
        if split.labels is not None:
            parts.append(split.labels)
        if isinstance(split, InMemoryImages):
            parts.append(split.pixels)
        elif isinstance(split, ImageFolder):
            parts.append(fingerprint_of(split.paths))
        elif data.is_own:
            # Their contents may take hours to read.
            parts.append(f"{split.size} samples, {describe(first_batch(split, 1).inputs)}")
    return fingerprint(parts)


def _layer(name: str, layer: nn.Module) -> tuple[str, str, str, str]:
    """Name, class, settings and constant buffers of a layer; statistics of norm layers do not count."""
    settings = re.sub(r" at 0x[0-9a-f]+|,? ?inplace=(True|False)", "", layer.extra_repr())
    buffers = "" if isinstance(layer, _NormBase) else fingerprint(layer.buffers(recurse=False))
    return name, type(layer).__qualname__, settings, buffers


def environment_of(engine: Engine) -> dict[str, Any]:
    return {
        "peel": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": engine.description,
        "threads": torch.get_num_threads(),
    }


def check_state(folder: RunFolder, now: State, environment: dict[str, Any]) -> None:
    """Refuse a folder of another subject, and one that has another job under a known name."""
    if not folder.has("state.json"):
        return
    found = folder.read("state.json", parse_object)
    if found.get("format") == FORMAT and found.get("version") != VERSION:
        raise RunError(
            f"{folder.folder} was written by another version of peel (format version "
            f"{short(found.get('version'))}). "
            f"Resume it with that version, or start a new run with another --output."
        )
    before = folder.read_json("state.json", State)
    old = folder.read("environment.json", parse_object) if folder.has("environment.json") else {}
    changed = _changes(folder, before.subject, now.subject, old, environment)
    for name in before.keys.keys() & now.keys.keys():
        if before.keys[name] != now.keys[name]:
            found = _differences(before.jobs[name], now.jobs[name])
            # Another method has other settings, and given weights have no recipe: what differs is enough.
            both = flatten(before.jobs[name]).keys() & flatten(now.jobs[name]).keys()
            changed |= {setting: found[setting] for setting in found if setting in both} or found
    if changed:
        refuse_changes(folder, changed)
    # What an earlier start has done stays known, also where this one leaves it out.
    now.jobs = {**before.jobs, **now.jobs}
    now.keys = {**before.keys, **now.keys}


def write_state(folder: RunFolder, state: State, environment: dict[str, Any], config: Config) -> None:
    # First: a folder without it is not that of a run.
    folder.write_json("state.json", asdict(state))
    if not folder.has("environment.json"):
        folder.write_json("environment.json", environment)
    # TOML is UTF-8; a path need not be.
    folder.write_bytes("config.toml", config.to_toml().encode(errors="replace"))


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    first, second = flatten(json.loads(json.dumps(before))), flatten(json.loads(json.dumps(after)))
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return {name: (first.get(name), second.get(name)) for name in names}


def _changes(
    folder: RunFolder,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    old: Mapping[str, Any],
    new: Mapping[str, Any],
) -> dict[str, tuple[Any, Any]]:
    """Setting -> (before, after), for changes that matter. Others are logged."""
    changed = _differences(before, after)
    # Batch norm sees other micro-batches.
    warned = {"accumulate": changed.pop("accumulate")} if "accumulate" in changed else {}
    for name in ("peel", "torch", *(["threads"] if "CPU" in str(new.get("device")) else [])):
        if name in old and old[name] != new.get(name):
            warned[name] = old[name], new.get(name)
    text = "%s resumes with %s %s instead of %s: the result may not be bit-identical."
    for name, (was, is_now) in warned.items():
        log.warning(text, folder.folder, name, is_now, was)
    if old.get("torch", new.get("torch")) != new.get("torch"):
        # Another torch may capture the same code as other operators.
        for name in ("model.operators", "model.constants"):
            changed.pop(name, None)
    return changed


def refuse_changes(folder: RunFolder, changed: Mapping[str, tuple[Any, Any]]) -> None:
    lines = [f"{name_of_key(name)}: {short(old)} -> {short(new)}" for name, (old, new) in changed.items()]
    shown = "\n  ".join([*lines[:12], *([f"and {len(lines) - 12} more"] if len(lines) > 12 else [])])
    raise RunError(
        f"{folder.folder} was started with other settings:\n  {shown}\nUse the same settings to resume "
        f"it, or another --output to start a new run."
    )

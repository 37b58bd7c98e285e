"""`prune`: the five steps from a model, a budget and data to a trained slim network, resumable at any point."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import zoo
from .allocation import resolve_budget
from .errors import ConfigError, DataError, ModelError, PeelError, RunError, did_you_mean
from .fingerprint import fingerprint
from .graph import ChannelGraph, trace
from .problem import Problem
from .reporter import Reporter, Silent
from .result import Result
from .settings import Method
from .stages import STEPS, Stages
from .steps.grouping import group_layers
from .surroundings import is_lost
from .train.chance import derive
from .train.data import Data, load_data
from .train.engine import Engine, find_engine
from .train.folder import Folder, fingerprint_of
from .train.objective import class_scores
from .train.recipe import Recipe, backbone_recipe, named_recipe
from .train.resident import Resident
from .trainer import Trainer
from .version import __version__
from .widths import Widths
from .workspace import Workspace

__all__ = ["prune"]

log = logging.getLogger("peel")


def prune(
    model: nn.Module | str,
    data: Data | str | Path = "digits",
    *,
    budget: str | int | float = "50%",
    output: str | Path | None = None,
    seed: int = 0,
    recipe: str = "auto",
    train: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
    teacher: nn.Module | str | Path = "train",
    steps: Iterable[str] | None = None,
    plan: Mapping[str, Any] | str | Path | None = None,
    groups: Mapping[str, Iterable[str]] | None = None,
    image_size: int | None = None,
    data_root: str | Path | None = None,
    skip_bad: bool = False,
    device: str = "auto",
    workers: int | None = None,
    deterministic: bool = False,
    parts: int = 1,
    compile: str = "auto",
    sync_bn: bool = False,
    dry_run: bool = False,
    force: bool = False,
    checkpoint_seconds: float = 600.0,
    reporter: Reporter | None = None,
    command: str | None = None,
    **method: Any,
) -> Result:
    """The five steps. With `output`, everything is written to that folder, and the same call goes on where it was stopped.

    `model` is a name of `peel.zoo` or a module; `data` a name, a folder or a `Data`. `recipe` names the training recipe; `train` and
    `search` change fields of it for the final training and for the backbone's. `teacher` is `"train"` (train the original first), a
    trained module, `"pretrained"`, or a path: what is kept there is used, and where nothing is yet, the original is trained and kept there.
    `plan` trains widths that come from elsewhere. `parts` splits each batch where memory is short; `compile` is `"auto"` (on a GPU, where a
    training is long enough to repay it), `"on"` or `"off"`; `sync_bn` lets batch norms see the batch of all processes. The state is kept
    after every epoch (on a GPU not more often than every ten seconds), and every `checkpoint_seconds` within one. `force` goes on with what
    is in `output` although the recipe, the images or the code of the model changed, and the result says so. All other arguments are fields
    of `peel.settings.Method`.

    >>> result = peel.prune("cifar_resnet20", "digits", budget="50%", output="run")
    >>> result.rows[-1]["top1"], result.model
    """
    if output is not None and isinstance(teacher, str | Path) and Path(output).resolve() == Path(teacher).resolve():
        raise ConfigError(f"output and teacher are the same folder, {output}: give each one of its own.")
    if not checkpoint_seconds >= 0:
        raise ConfigError(f"checkpoint_seconds must be a number of 0 or more, not {checkpoint_seconds!r}.")
    chosen = _method(budget, method)
    wanted = _check_steps(steps)
    torch.manual_seed(derive("original", seed))
    loaded, network = _model_and_data(model, data, image_size, data_root, skip_bad, teacher == "pretrained")
    _check_weights(network)
    graph = group_layers(trace(network, torch.zeros(1, *loaded.shape)), groups)
    _check_classes(network, loaded)
    recipes = _recipes(recipe, loaded, network, train, search)
    chosen = replace(chosen, hold=_held(network, graph, chosen.hold))
    given_plan = _read_plan(plan, graph) if plan is not None else None
    engine = find_engine(device, workers=workers, deterministic=deterministic, parts=parts, compile=compile, sync_bn=sync_bn)
    resolved: dict[str, Any] = {
        "model": model if isinstance(model, str) else f"{type(model).__module__}:{type(model).__qualname__}",
        "original": {"macs": graph.macs(), "params": graph.params(), **_code_of(network, graph), "operators": " ".join(graph.operators)},
        "data": loaded.name,
        "image_shape": list(loaded.shape),
        "images": [loaded.train.size, loaded.test.size],
        "fingerprint": _fingerprint(loaded) if output is not None or isinstance(teacher, str | Path) else "",
        "input": loaded.described(),
        "seed": seed,
        "device": engine.device.type,
        "processes": engine.world.size,
        "parts": engine.parts,
        "pads": engine.pads,
        "sync_bn": engine.sync_bn,
        "deterministic": deterministic,
        "method": asdict(chosen),
        "train": asdict(recipes[0]),
        "search": asdict(recipes[1]),
        "teacher": str(teacher) if isinstance(teacher, str | Path) else "given module",
        "steps": list(wanted),
        "plan": dict(given_plan) if given_plan is not None else None,
        "groups": {name: list(ties) for name, ties in graph.groups.items()},
    }
    problem = Problem(
        network,
        graph,
        resolve_budget(graph, budget, chosen.resource),
        chosen.resource,
        chosen.divisor,
        chosen.hold or (),
        loaded.to(engine.device),
        recipes[1],
        engine,
        seed,
    )
    images = ("data", "image_shape", "images", "input", "fingerprint")
    own = ("model", "original", *images, "seed", "device", "processes", "parts", "pads", "sync_bn", "train")
    run = Stages(
        problem,
        chosen,
        recipes[0],
        wanted,
        teacher,
        given_plan,
        Trainer(problem, (reporter if engine.world.is_first else None) or Silent(), checkpoint_seconds),
        teacher_settings={name: resolved[name] for name in own},
        environment=_environment(engine),
        force=force,
    )
    run.notes += _frozen_notes(network)
    run.check()
    engine.world.check_equal("a setting", json.dumps({**resolved, "device": None, "taken": run.taken is not None}, sort_keys=True))
    if dry_run:
        return run.estimate()
    if output is None or not engine.world.is_first:
        # The first process writes; the others learn from it what it finds in the folder.
        return run.go()
    settings = {"format": "peel-run", "version": 1, "command": command or "peel.prune(...)", "resolved": resolved}
    return _go_in(output, run, {**settings, "given": _given(model, data, budget, recipe, train, search, method)})


def _method(budget: str | int | float, given: dict[str, Any]) -> Method:
    """The settings of the method; a backbone's widths in a file are read."""
    known = [item.name for item in Method.__dataclass_fields__.values()]
    for name in given:
        if name not in known:
            raise ConfigError(f"prune has no setting {name!r}.{did_you_mean(name, known)}")
    if isinstance(given.get("start"), str | Path) and str(given["start"]).endswith(".json"):
        given["start"] = _read_json(given["start"], "the widths of the backbone")
    return Method(budget=budget if isinstance(budget, str) else repr(budget), **given)


def _go_in(folder: str | Path, run: Stages, settings: dict[str, Any]) -> Result:
    """The run in its folder, where it leaves what stopped it and its page."""
    with Workspace(folder) as workspace:
        workspace.settle(settings, run.environment, force=run.force)
        run.workspace = run.trainer.workspace = workspace
        workspace.remove("stopped.json")
        try:
            return run.go()
        except Exception as error:
            said = str(error) if isinstance(error, PeelError) else f"{type(error).__name__}: {error}"
            if is_lost(error):
                said = f"another process of this run ended, and has said why, or did not answer ({said.splitlines()[0]})"
            with contextlib.suppress(RunError):  # the disk may be full
                workspace.write_json("stopped.json", {"format": "peel-stopped", "version": 1, "error": said})
            raise
        finally:
            _draw(workspace)


def _draw(workspace: Workspace) -> None:
    """The page of the run, as far as it has come. It never fails a run."""
    from .record import RunRecord
    from .report import render

    try:
        workspace.write_text("report.html", render(RunRecord.read(workspace.folder)))
    except Exception as error:
        log.warning("report.html could not be drawn: %s: %s", type(error).__name__, error)


def _check_steps(steps: Iterable[str] | None) -> list[str]:
    wanted = list(STEPS) if steps is None else [steps] if isinstance(steps, str) else list(steps)
    for name in wanted:
        if name not in STEPS:
            raise ConfigError(f"no step is called {name!r}.{did_you_mean(name, STEPS)} The steps are {', '.join(STEPS)}.")
    return [name for name in STEPS if name in wanted]


def _model_and_data(
    model: nn.Module | str, data: Data | str | Path, image_size: int | None, root: str | Path | None, skip_bad: bool, pretrained: bool
) -> tuple[Data, nn.Module]:
    def load(channels: int) -> Data:
        if isinstance(data, Data):
            return data
        return load_data(str(data), image_size=image_size, channels=channels, root=root, skip_bad=skip_bad)

    loaded = load(zoo.find(model).input_size[0] if isinstance(model, str) else next(_convolved(model), 3))
    network = _create(model, len(loaded.classes), pretrained) if isinstance(model, str) else model
    channels = _channels_of(network, loaded.shape)
    return (load(channels) if channels != loaded.shape[0] else loaded), network


def _channels_of(network: nn.Module, shape: tuple[int, int, int]) -> int:
    """How many channels the network takes of images of this shape: those of its first convolution, which need not be the first to run."""
    taken = [*_convolved(network)] or [shape[0]]
    for channels in dict.fromkeys(taken):
        with contextlib.suppress(Exception):  # whatever its code makes of other images
            _scores_of(network, (channels, *shape[1:]))
            return channels
    return taken[0]


def _convolved(network: nn.Module) -> Iterator[int]:
    return (layer.in_channels for layer in network.modules() if isinstance(layer, nn.Conv2d))


def _create(model: str, classes: int, pretrained: bool) -> nn.Module:
    """The model with as many classes as the data; a callable of the user's may not take that argument."""
    try:
        return zoo.create(model, num_classes=classes, pretrained=pretrained)
    except ModelError as error:
        if isinstance(error.__cause__, TypeError) and "num_classes" in str(error.__cause__):
            return zoo.create(model, pretrained=pretrained)
        raise


def _check_weights(network: nn.Module) -> None:
    kinds = {parameter.dtype for parameter in network.parameters()}
    if not kinds:
        raise ModelError(f"{type(network).__name__} has no parameters: there is nothing to train.")
    own_state = next((name for name in network.state_dict() if name.endswith("_extra_state")), None)
    if own_state is not None:
        raise ModelError(
            f"{own_state} is a state of the model that is no tensor of its own (get_extra_state): peel could not keep it. Make it a buffer."
        )
    other = next(iter(kinds - {torch.float32}), None)
    if other is not None:
        raise ModelError(f"the model has weights of type {other}; peel trains in float32, or bfloat16 with float32 weights: call .float().")


def _scores_of(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The class scores of one black image; the network is left as it was."""
    modes = {name: module.training for name, module in network.named_modules()}
    try:
        with torch.inference_mode():
            return class_scores(network.eval()(torch.zeros(1, *shape, device=next(network.parameters()).device)))
    finally:
        for name, module in network.named_modules():
            module.training = modes[name]


def _frozen_notes(network: nn.Module) -> list[str]:
    """A network that is frozen as a whole was only looked at; one with frozen parts was made so."""
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    if not frozen or len(frozen) == len(list(network.parameters())):
        return []
    more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
    return [f"Frozen parameters ({', '.join(frozen[:3])}{more}) are initialised and trained like all others."]


def _check_classes(network: nn.Module, data: Data) -> None:
    scores = _scores_of(network, data.shape)
    if scores.ndim != 2 or scores.shape[1] != len(data.classes):
        raise DataError(
            f"the model gives scores of shape {tuple(scores.shape[1:])}, the data {data.name} has {len(data.classes)} classes. Build the "
            f"model with {len(data.classes)} outputs, or choose data with as many classes as the model."
        )
    for name, split in (("training", data.train), ("test", data.test)):
        lowest, highest = int(split.labels.min()), int(split.labels.max())
        if lowest < 0 or highest >= len(data.classes):
            raise DataError(
                f"the {name} labels of {data.name} go from {lowest} to {highest}; with {len(data.classes)} classes they must lie between "
                f"0 and {len(data.classes) - 1}. Number the classes without gaps, from 0."
            )


def _recipes(
    name: str, data: Data, network: nn.Module, train: Mapping[str, Any] | None, search: Mapping[str, Any] | None
) -> tuple[Recipe, Recipe]:
    """The recipe of the final training and that of the backbone."""
    if name == "auto":
        source = str(getattr(network, "peel_source", {}).get("zoo", type(network).__name__)).lower()
        is_mobile = any(word in source for word in ("mobile", "efficient", "mnas", "ghost", "shuffle"))
        if data.name == "digits":
            name = "digits"
        elif isinstance(data.train, Resident):
            name = "cifar"
        else:
            name = "imagenet-mobilenet" if is_mobile else "imagenet-resnet"
    final = named_recipe(name).changed(**dict(train or {}))
    # What is changed for the final training, but for its length, is changed for the backbone too.
    shared = {key: value for key, value in dict(train or {}).items() if key != "epochs"}
    backbone = backbone_recipe(name).changed(**{**shared, **dict(search or {})})
    return _suited(final, data), _suited(backbone, data)


def _suited(recipe: Recipe, data: Data) -> Recipe:
    return recipe.changed(augment=data.augment) if recipe.augment == "auto" else recipe


def _held(network: nn.Module, graph: ChannelGraph, hold: tuple[str, ...] | None) -> tuple[str, ...]:
    if hold is not None:
        return tuple(hold)
    source = getattr(network, "peel_source", {}).get("zoo", "")
    return tuple(tie for tie in zoo.HELD.get(source, ()) if tie in graph.widths)


def _read_plan(plan: Mapping[str, Any] | str | Path, graph: ChannelGraph) -> Widths:
    """Widths from a plan.json, from a bare mapping in a JSON file, or from a mapping."""
    if isinstance(plan, str | Path):
        plan = _read_json(plan, "the plan")
    if not isinstance(plan, Mapping):
        raise ConfigError("a plan is an object with `widths`, or the widths themselves (tie name -> channels).")
    widths = plan["widths"] if isinstance(plan.get("widths"), Mapping) else plan
    return graph.check(widths)


def _read_json(path: str | Path, what: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}.") from error


def _fingerprint(data: Data) -> str:
    """Tells whether the images are still the same ones."""
    parts: list[Tensor | bytes] = []
    for split in (data.train, data.test):
        parts.append(split.labels)
        if isinstance(split, Resident):
            parts.append(split.pixels)
        elif isinstance(split, Folder):
            parts.append(fingerprint_of(split.paths))
    return fingerprint(parts)


def _code_of(network: nn.Module, graph: ChannelGraph) -> dict[str, str]:
    """Tells whether the model's code still builds the same layers, with the same weights, and calls operators with the same numbers."""
    found = {
        "layers": [(name, type(module).__qualname__, _settings_of(module)) for name, module in network.named_modules()],
        "tensors": [(name, tuple(tensor.shape)) for name, tensor in network.state_dict().items()],
        "constants": graph.constants,
    }
    return {name: fingerprint([repr(value)]) for name, value in found.items()}


def _settings_of(layer: nn.Module) -> str:
    """What a layer says of itself, but for what may differ from one start to the next: addresses, and whether it saves memory."""
    return re.sub(r" at 0x[0-9a-f]+|,? ?inplace=(True|False)", "", layer.extra_repr())


def _given(
    model: nn.Module | str,
    data: Data | str | Path,
    budget: str | int | float,
    recipe: str,
    train: Mapping[str, Any] | None,
    search: Mapping[str, Any] | None,
    method: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "model": model if isinstance(model, str) else type(model).__name__,
        "data": data.name if isinstance(data, Data) else str(data),
        "budget": budget,
        "recipe": recipe,
        "train": dict(train or {}),
        "search": dict(search or {}),
        **method,
    }


def _environment(engine: Engine) -> dict[str, Any]:
    import torchvision

    return {
        "peel": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "platform": platform.platform(),
        "device": engine.description,
        "threads": torch.get_num_threads(),
    }

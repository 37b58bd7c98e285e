"""`prune`: the five steps from a model, a budget and data to a trained slim network, resumable at any point."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from ..cost.rounding import resolve_budget
from ..data.datasets import Data
from ..errors import ConfigError, PeelError, RunError, did_you_mean
from ..graph import trace
from ..methods.problem import Problem
from ..methods.settings import Method
from ..train.engine import make_engine
from ..utils.environment import is_peer_lost
from ..utils.rng import derive_seed, seed_everything
from .callbacks import Callback, NoCallback
from .fingerprint import code_of, environment_of, fingerprint_of_images
from .folder import RunFolder
from .loading import (
    check_classes,
    check_weights,
    frozen_notes,
    held_ties,
    model_and_data,
    read_json,
    read_plan,
    recipes_for,
)
from .pipeline import STEPS, Pipeline
from .result import Result
from .trainer import Trainer

__all__ = ["prune"]

log = logging.getLogger("peel")

P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Threads take turns: they would draw from the same random numbers, and torch captures one network at a time."""
    turn = threading.RLock()

    @functools.wraps(function)
    def take_turns(*args: P.args, **kwargs: P.kwargs) -> R:
        with turn:
            return function(*args, **kwargs)

    return take_turns


@_one_at_a_time
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
    skip_corrupt: bool = False,
    device: str = "auto",
    workers: int | None = None,
    deterministic: bool = False,
    parts: int = 1,
    compile: str = "auto",
    sync_bn: bool = False,
    dry_run: bool = False,
    force: bool = False,
    checkpoint_seconds: float = 600.0,
    reporter: Callback | None = None,
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
    if (
        output is not None
        and isinstance(teacher, str | Path)
        and Path(output).resolve() == Path(teacher).resolve()
    ):
        raise ConfigError(f"output and teacher are the same folder, {output}: give each one of its own.")
    if not checkpoint_seconds >= 0:
        raise ConfigError(f"checkpoint_seconds must be a number of 0 or more, not {checkpoint_seconds!r}.")
    chosen = _method(budget, method)
    wanted = _check_steps(steps)
    seed_everything(derive_seed("original", seed))
    loaded, network = model_and_data(
        model, data, image_size, data_root, skip_corrupt, teacher == "pretrained"
    )
    check_weights(network)
    graph = trace(network, torch.zeros(1, *loaded.shape), groups=groups)
    check_classes(network, loaded)
    recipes = recipes_for(recipe, loaded, network, train, search)
    chosen = replace(chosen, freeze=held_ties(network, graph, chosen.freeze))
    given_plan = read_plan(plan, graph) if plan is not None else None
    engine = make_engine(
        device,
        workers=workers,
        deterministic=deterministic,
        accumulate=parts,
        compile=compile,
        sync_bn=sync_bn,
    )
    resolved: dict[str, Any] = {
        "model": model if isinstance(model, str) else f"{type(model).__module__}:{type(model).__qualname__}",
        "original": {
            "macs": graph.macs(),
            "params": graph.params(),
            **code_of(network, graph),
            "operators": " ".join(graph.operators),
        },
        "data": loaded.name,
        "image_shape": list(loaded.shape),
        "images": [loaded.train.size, loaded.test.size],
        "fingerprint": fingerprint_of_images(loaded)
        if output is not None or isinstance(teacher, str | Path)
        else "",
        "input": loaded.input_spec(),
        "seed": seed,
        "device": engine.device.type,
        "processes": engine.world.size,
        "parts": engine.accumulation_steps,
        "pad_channels": engine.pad_channels,
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
        chosen.freeze or (),
        loaded.to(engine.device),
        recipes[1],
        engine,
        seed,
    )
    images = ("data", "image_shape", "images", "input", "fingerprint")
    own = (
        "model",
        "original",
        *images,
        "seed",
        "device",
        "processes",
        "parts",
        "pad_channels",
        "sync_bn",
        "train",
    )
    run = Pipeline(
        problem,
        chosen,
        recipes[0],
        wanted,
        teacher,
        given_plan,
        Trainer(
            problem, (reporter if engine.world.is_main_process else None) or NoCallback(), checkpoint_seconds
        ),
        teacher_settings={name: resolved[name] for name in own},
        environment=environment_of(engine),
        force=force,
    )
    run.notes += frozen_notes(network)
    run.check()
    engine.world.check_equal(
        "a setting", json.dumps({**resolved, "device": None, "taken": run.taken is not None}, sort_keys=True)
    )
    if dry_run:
        return run.estimate()
    if output is None or not engine.world.is_main_process:
        # The first process writes; the others learn from it what it finds in the folder.
        return run.run()
    settings = {
        "format": "peel-run",
        "version": 1,
        "command": command or "peel.prune(...)",
        "resolved": resolved,
    }
    return _go_in(
        output, run, {**settings, "given": _given(model, data, budget, recipe, train, search, method)}
    )


def _method(budget: str | int | float, given: dict[str, Any]) -> Method:
    """The settings of the method; a backbone's widths in a file are read."""
    known = [item.name for item in Method.__dataclass_fields__.values()]
    for name in given:
        if name not in known:
            raise ConfigError(f"prune has no setting {name!r}.{did_you_mean(name, known)}")
    if isinstance(given.get("start"), str | Path) and str(given["start"]).endswith(".json"):
        given["start"] = read_json(given["start"], "the widths of the backbone")
    return Method(budget=budget if isinstance(budget, str) else repr(budget), **given)


def _go_in(folder: str | Path, run: Pipeline, settings: dict[str, Any]) -> Result:
    """The run in its folder, where it leaves what stopped it and its page."""
    with RunFolder(folder) as workspace:
        workspace.open_or_resume(settings, run.environment, force=run.force)
        run.workspace = run.trainer.workspace = workspace
        workspace.remove("stopped.json")
        try:
            return run.run()
        except Exception as error:
            said = str(error) if isinstance(error, PeelError) else f"{type(error).__name__}: {error}"
            if is_peer_lost(error):
                said = f"another process of this run ended, and has said why, or did not answer ({said.splitlines()[0]})"
            with contextlib.suppress(RunError):  # the disk may be full
                workspace.write_json("stopped.json", {"format": "peel-stopped", "version": 1, "error": said})
            raise
        finally:
            _draw(workspace)


def _draw(workspace: RunFolder) -> None:
    """The page of the run, as far as it has come. It never fails a run."""
    from ..report import render
    from ..report.record import RunRecord

    try:
        workspace.write_text("report.html", render(RunRecord.read(workspace.folder)))
    except Exception as error:
        log.warning("report.html could not be drawn: %s: %s", type(error).__name__, error)


def _check_steps(steps: Iterable[str] | None) -> list[str]:
    wanted = list(STEPS) if steps is None else [steps] if isinstance(steps, str) else list(steps)
    for name in wanted:
        if name not in STEPS:
            raise ConfigError(
                f"no step is called {name!r}.{did_you_mean(name, STEPS)} The steps are {', '.join(STEPS)}."
            )
    return [name for name in STEPS if name in wanted]


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

"""`prune`: from a model, a budget and data to a trained slim network."""

import contextlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..cost.constraint import Constraint
from ..data.datasets import OWN_DATA, Data
from ..errors import ConfigError, CorruptFileError, PeelError, RunError
from ..graph import ChannelGraph, trace
from ..methods.problem import Problem
from ..methods.registry import find_method
from ..train.callbacks import Callback
from ..train.engine import Engine, make_engine
from ..train.objective import Loss
from ..train.task import OptimizerFactory, Task, TrainFunction
from ..utils.environment import is_main_process
from ..utils.process_state import preserve_process_state, share_cores
from ..utils.rng import derive_seed, seed_everything
from .config import Config, make_config
from .folder import RunFolder
from .latency import attach_latency, latency_notes
from .loading import (
    check_model,
    frozen_ties,
    has_new_classifier,
    leave_out,
    load_model_and_data,
    model_notes,
    name_of_recipe,
    read_widths,
    resolve_distillation,
    resolve_recipes,
)
from .own_data import check_pair, resolve_data, restrict_engine, restrict_settings
from .pipeline import Pipeline
from .result import Result
from .resume import environment_of, read_state, run_identity, write_state
from .trainer import Trainer

log = logging.getLogger("peel")


def prune(
    model: nn.Module | str,
    data: Data | str | Path | tuple[Any, Any] | None = None,
    *,
    loss: Loss | str | None = None,
    metric: Any = None,
    optimizer: OptimizerFactory | None = None,
    train_fn: TrainFunction | None = None,
    graph: ChannelGraph | None = None,
    output: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    dry_run: bool = False,
    command: str = "peel.prune(...)",
    **settings: Any,
) -> Result:
    """Prune and train a model. With `output`, all is written to that folder, and the same call resumes there.

    `model` is a name of `peel.zoo` or a module; `data` a name, a folder, a `peel.Data`, or a pair of torch
    `Dataset`s or `DataLoader`s, (train, val). All other settings are fields of `peel.Config`: `budget`,
    `seed`, `criterion`, `train={"epochs": 20}`, ... `criterion` may be an object with a `measure` method,
    `plan` and `backbone_init` mappings from tie names to channels. `dry_run` returns a preview of
    the plan and the estimated time.

    `weights` says what the model was trained to: a state dict, a trained module, a file, a run folder, or
    "pretrained". A given module counts as trained (`weights="pretrained"`). With weights, slim networks are
    cut from the original, repaired and fine-tuned; `init="scratch"` trains them from scratch.
    `weights="train"` trains the original here first.

    `loss(output, target)`, `metric(output, target)` (higher is better), `optimizer(parameters)` and
    `train_fn(model, epochs=..., teacher=...)` are functions of your own; docs/own_data.md says more. `graph`
    is the model's, where you traced it yourself. `callbacks=[peel.ProgressBar()]` shows the progress.

    The process is left as it was: random states, deterministic and precision flags, threads.

    >>> result = peel.prune("cifar_resnet20", "digits", budget="50%", output="run")
    >>> result.rows[-1].top1, result.model
    """
    check_pair(data)
    _check_callbacks(callbacks)
    config = _config_of(model, data, settings)
    weights, criterion = settings.get("weights"), settings.get("criterion")
    with preserve_process_state(), _open_folder(None if dry_run else output) as folder:
        given_weights = weights if isinstance(weights, nn.Module | Mapping) else config.weights
        task, given_data = Task(loss, metric, optimizer, train_fn), resolve_data(data, config)
        pipeline = _prepare(model, given_data, given_weights, config, callbacks, task, graph)
        own_criterion = None if isinstance(criterion, str) else criterion
        pipeline.method = find_method(pipeline.config.method, own_criterion)
        pipeline.check()
        agreed = {**pipeline.identity, "teacher found": pipeline.loaded_teacher is not None}
        pipeline.world.check_equal("a setting", json.dumps(agreed, sort_keys=True))
        with contextlib.ExitStack() as stack:
            stack.enter_context(share_cores())
            if dry_run:
                return pipeline.estimate()
            for callback in pipeline.trainer.callbacks:
                stack.callback(callback.on_run_end)
            if folder is not None:
                return _run_in_folder(folder, pipeline, config, command)
            pipeline.evaluate_teacher()
            return pipeline.run()


def _open_folder(output: str | Path | None) -> contextlib.AbstractContextManager[RunFolder | None]:
    """The run folder, opened before anything is loaded: one that cannot be used is noticed at once.

    Only the main process writes; the others get from it what they need.
    """
    return RunFolder(output) if output is not None and is_main_process() else contextlib.nullcontext()


def _check_callbacks(callbacks: object) -> None:
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks is a list of peel.Callback objects, not {callbacks!r}.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = " Give an object, not the class." if isinstance(callback, type) else ""
            raise ConfigError(f"callbacks has {callback!r}, which is no peel.Callback object.{hint}")


def _config_of(model: nn.Module | str, data: object, settings: Mapping[str, Any]) -> Config:
    """The config of `prune`'s arguments. Objects of the caller's are named by their class."""
    weights, criterion = settings.get("weights"), settings.get("criterion")
    if weights is None:
        weights = "train" if isinstance(model, str) else "pretrained"
    given = {
        **settings,
        "model": model if isinstance(model, str) else _reference(model),
        "data": data.name if isinstance(data, Data) else OWN_DATA if isinstance(data, tuple) else data,
        "weights": "given module" if isinstance(weights, nn.Module | Mapping) else str(weights),
    }
    if criterion is not None and not isinstance(criterion, str):
        given["criterion"] = _reference(criterion)
    return make_config(given)


def _reference(item: object) -> str:
    kind = type(item)
    return f"{kind.__module__}:{kind.__qualname__}"


def _prepare(
    model: nn.Module | str,
    data: Data | str,
    weights: nn.Module | Mapping[str, Tensor] | str,
    config: Config,
    callbacks: Sequence[Callback],
    task: Task,
    graph: ChannelGraph | None,
) -> Pipeline:
    """Load and trace everything; nothing is written or trained yet."""
    seed_everything(derive_seed("original", config.seed))
    network, loaded = load_model_and_data(model, data, config, weights)
    new_classifier = has_new_classifier(model, weights, loaded)
    task = check_model(network, loaded, task)
    graph = _graph_of(network, loaded, config, graph)
    config, own_notes = restrict_settings(config, loaded, task)
    recipe = name_of_recipe(config, loaded, network)
    config = resolve_distillation(config, recipe, task)
    recipes = resolve_recipes(config, recipe, loaded, task)
    resolved = _resolve_ties(config, network, graph)
    constraint = Constraint.of(
        graph,
        config.budget,
        resource=config.resource,
        divisor=config.divisor,
        freeze=resolved.freeze or (),
        grow=config.grow,
    )
    plan = read_widths(config.plan, graph, "plan") if config.plan is not None else None
    layer_macs = _layer_macs(network, graph, recipes[0].batch_size // config.accumulate)
    engine, notes = restrict_engine(_engine_of(config, layer_macs), loaded, task)
    remaining, held_out, held_out_notes = leave_out(loaded, config, task)
    problem = Problem(
        network,
        graph,
        constraint,
        remaining.to(engine.device),
        recipes[1],
        engine,
        config.seed,
        inherits=config.inherits,
        repairs=config.repairs,
        task=task,
        held_out=held_out if held_out is None else held_out.to(engine.device),
        callbacks=callbacks if engine.world.is_main_process else (),
    )
    fed = loaded.normalization_notes(is_trained=config.weights != "train")
    known = model_notes(model, network, config, new_classifier)
    told = [*loaded.notes, *fed, *notes, *own_notes, *held_out_notes, *known]
    return Pipeline(
        problem,
        resolved,
        recipes[0],
        Trainer(problem, problem.callbacks, config.checkpoint_seconds),
        run_identity(resolved, graph, network, loaded, engine, recipes, plan, task),
        weights,
        new_classifier,
        given_widths=plan,
        notes=[*told, *latency_notes(graph)],
    )


def _graph_of(network: nn.Module, loaded: Data, config: Config, given: ChannelGraph | None) -> ChannelGraph:
    if given is not None and config.groups is not None:
        raise ConfigError("the given graph has its groups already: call graph.regroup(groups) yourself.")
    graph = given or trace(network, loaded.example(), groups=config.groups)
    return attach_latency(graph, config.latency)


def _resolve_ties(config: Config, network: nn.Module, graph: ChannelGraph) -> Config:
    """Names of modules and files become ties and widths."""
    init = config.backbone_init
    if not isinstance(init, str) or init.endswith(".json"):
        init = dict(read_widths(init, graph, "backbone_init"))
    return replace(config, freeze=frozen_ties(network, graph, config.freeze), backbone_init=init)


def _engine_of(config: Config, layer_macs: float) -> Engine:
    return make_engine(
        config.device,
        workers=config.workers,
        deterministic=config.deterministic,
        accumulate=config.accumulate,
        compile=config.compile,
        sync_bn=config.sync_bn,
        threads=config.threads,
        layer_macs=layer_macs,
    )


def _layer_macs(network: nn.Module, graph: ChannelGraph, batch_size: int) -> float:
    """Multiply-adds of a forward pass, per layer."""
    layers = sum(parameter.ndim > 1 for parameter in network.parameters())
    return graph.macs() * batch_size / max(1, layers)


def _run_in_folder(folder: RunFolder, pipeline: Pipeline, config: Config, command: str) -> Result:
    environment = environment_of(pipeline.problem.engine)
    state = read_state(folder, command, pipeline.identity, environment)
    pipeline.evaluate_teacher()
    write_state(folder, state, environment, config)
    pipeline.state = state
    pipeline.folder = pipeline.trainer.folder = folder
    folder.path("error.json").unlink(missing_ok=True)
    try:
        return pipeline.run()
    except (Exception, SystemExit) as error:
        message = str(error) if isinstance(error, PeelError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RunError):  # the disk may be full
            folder.write_json("error.json", {"format": "peel-error", "version": 2, "error": message})
        raise
    finally:
        _write_report(folder)


def _write_report(folder: RunFolder) -> None:
    """The page of the run so far. A failure here never fails the run."""
    from ..report import RunRecord, render

    ended_by = sys.exception()
    try:
        page = render(RunRecord.read(folder.folder))
        folder.write_bytes("report.html", page.encode(errors="backslashreplace"))
    except Exception as error:
        if not isinstance(ended_by, CorruptFileError):  # else the run's own error has named the file
            reason = error if isinstance(error, PeelError) else repr(error)
            log.warning("report.html was not written: %s", reason)

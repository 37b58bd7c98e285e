"""`prune`: from a model, a budget and data to a trained slim network."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from ..data.datasets import OWN_DATA, Data
from ..errors import ConfigError
from ..graph import ChannelGraph
from ..methods.method import Method
from ..methods.registry import METHODS, find_method, prefix_of, reference_of, spec_of
from ..report.progress import ProgressBar
from ..train.callbacks import Callback
from ..train.objective import Loss
from ..train.task import OptimizerFactory, Task, TrainFunction
from ..utils.environment import is_main_process
from ..utils.process_state import preserve_process_state, share_cores
from .config import Config, make_config
from .loading import load_all
from .own_data import check_pair, resolve_data
from .result import Result
from .single import Run
from .store import RunFolder


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
    progress: bool | None = None,
    dry_run: bool = False,
    command: str = "peel.prune(...)",
    **settings: Any,
) -> Result:
    """Prune and train a model. With `output`, all is written to that folder, and the same call resumes there.

    `model` is a name of `peel.zoo` or a module; `data` a name, a folder, a `peel.Data`, or a pair of torch
    `Dataset`s or `DataLoader`s, (train, val). All other settings are fields of `peel.Config`: `budget`,
    `seed`, `train={"epochs": 20}`, ... `method` may be an object, such as `peel.methods.Peel(rounds=3)`,
    `plan` a mapping from tie names to channels. `dry_run`: a preview of the plan, and the estimated time.

    `weights` says what the model was trained to: a state dict, a trained module, a file, a run folder, or
    "pretrained". A given module counts as trained (`weights="pretrained"`). With weights, slim networks are
    cut from the original, repaired and fine-tuned; `init="scratch"` trains them from scratch.
    `weights="train"` trains the original here first.

    `loss(output, target)`, `metric(output, target)` (higher is better), `optimizer(parameters)` and
    `train_fn(model, epochs=..., teacher=...)` are functions of your own; docs/own_data.md says more. `graph`
    is the model's, where you traced it yourself. Terminals and notebooks show progress and notes.

    The process is left as it was: random states, flags of torch, threads.

    >>> result = peel.prune("cifar_resnet20", "digits", budget="50%", output="run")
    >>> result.rows[-1].top1, result.model
    """
    check_pair(data)
    callbacks = _with_progress(callbacks, progress)
    config, weights = _config_of(model, data, settings), settings.get("weights")
    with preserve_process_state(), _open_folder(None if dry_run else output) as folder:
        loaded = load_all(
            model,
            resolve_data(data, config),
            weights if isinstance(weights, nn.Module | Mapping) else config.weights,
            config,
            method=_method_of(config, settings),
            task=Task(loss, metric, optimizer, train_fn),
            graph=graph,
            callbacks=callbacks,
        )
        run = Run(loaded, folder, config, command)
        with contextlib.ExitStack() as stack:
            stack.enter_context(share_cores())
            run.check()
            if dry_run:
                return run.estimate()
            for callback in loaded.callbacks:
                stack.callback(callback.on_run_end)
            return run.run()


def _method_of(config: Config, settings: Mapping[str, Any]) -> Method:
    method, own = settings.get("method"), settings.get("methods") or {}
    if isinstance(method, Method):
        if own:
            raise ConfigError("method is an object with its settings: leave methods= out.")
        return method
    return find_method(config.method, own.get(prefix_of(config.method)))


def _open_folder(output: str | Path | None) -> contextlib.AbstractContextManager[RunFolder | None]:
    """The run folder, opened before anything is loaded: one that cannot be used is noticed at once.

    Only the main process writes; the others get from it what they need.
    """
    return RunFolder(output) if output is not None and is_main_process() else contextlib.nullcontext()


def _with_progress(callbacks: Sequence[Callback], progress: bool | None) -> Sequence[Callback]:
    """The callbacks, with a progress bar where somebody looks."""
    _check_callbacks(callbacks)
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not progress or not is_main_process() or any(isinstance(one, ProgressBar) for one in callbacks):
        return callbacks
    return [*callbacks, ProgressBar()]


def _check_callbacks(callbacks: object) -> None:
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks is a list of peel.Callback objects, not {callbacks!r}.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = " Give an object, not the class." if isinstance(callback, type) else ""
            raise ConfigError(f"callbacks has {callback!r}, which is no peel.Callback object.{hint}")


def _config_of(model: nn.Module | str, data: object, settings: Mapping[str, Any]) -> Config:
    """The config of `prune`'s arguments. Objects of the caller's are named by their class."""
    weights, method = settings.get("weights"), settings.get("method")
    if weights is None:
        weights = "train" if isinstance(model, str) else "pretrained"
    given = {
        **settings,
        "model": model if isinstance(model, str) else reference_of(model),
        "data": data.name if isinstance(data, Data) else OWN_DATA if isinstance(data, tuple) else data,
        "weights": "given module" if isinstance(weights, nn.Module | Mapping) else str(weights),
    }
    if "methods" in given:
        given["methods"] = msgspec.to_builtins(given["methods"], enc_hook=reference_of)
    if isinstance(method, Method):
        known = {kind: name for name, kind in METHODS.items()}
        name = known.get(type(method), reference_of(method))
        given |= {"method": name, "methods": {prefix_of(name): spec_of(method, name).settings}}
    return make_config(given)

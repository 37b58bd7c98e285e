"""`peel run`: prune and train. torch is imported when the command runs: its help answers at once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json as json_library
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import ConfigError
from ..run.config import MACHINE, Config, make_config
from ..utils.environment import is_main_process
from ..utils.files import check_target
from ..utils.terminal import make_console, print_json
from .launch import command_line, launch
from .method_flags import given_settings

if TYPE_CHECKING:
    from ..run.result import Result


def run(
    model: str | None = None,
    /,
    *,
    settings: Annotated[Config | None, Parameter(name="*")] = None,
    config: Path | None = None,
    output: Path | None = None,
    export: Path | None = None,
    gpus: int | None = None,
    dry_run: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> int:
    """Prune and train: from a model, a budget and data to a slim network. The same command resumes.

    Parameters
    ----------
    model
        Name or reference of the model. Default: cifar_resnet20.
    config
        A TOML file with settings, such as the config.toml of a run folder. Flags override it.
    output
        The run folder. Default: a folder in runs/ named after the settings.
    export
        Also export the slim network to this file, as `peel export` does: .onnx, .pt2 or .safetensors.
    gpus
        Train with this many processes on this machine, one per GPU, started by torchrun's launcher.
    dry_run
        Show a preview of the plan and the estimated time; train nothing.
    json
        Print the result as JSON.
    quiet
        Print nothing but the result.
    """
    if gpus is not None:
        return launch(gpus)
    chosen = _chosen(settings, model)
    folder = None if dry_run else output or default_folder(chosen)
    if export is not None:
        _check_export(export, chosen, dry_run)
    result = _prune(chosen, folder, quiet=quiet, dry_run=dry_run)
    if is_main_process():
        _show(result, json=json, with_notes=quiet)
        if export is not None and folder is not None:
            from .export import export_slim

            export_slim(folder, export, make_console(stderr=json))
    return 0


def _prune(config: Config, folder: Path | None, *, quiet: bool, dry_run: bool) -> Result:
    from ..run.prune import prune
    from ..train.distributed import shutdown_distributed
    from ..train.signals import handle_signals

    with contextlib.ExitStack() as stack:
        stack.enter_context(handle_signals())
        stack.callback(shutdown_distributed)
        return prune(
            **vars(config), output=folder, progress=not quiet, dry_run=dry_run, command=command_line()
        )


def _chosen(settings: Config | None, model: str | None) -> Config:
    given = vars(settings or Config())
    # A table [methods.random-search] is that of the prefix random_search.
    own = {name.replace("-", "_"): table for name, table in given_settings().items()}
    given |= {"methods": own} | ({} if model is None else {"model": model})
    from ..methods.registry import find_method, prefix_of

    config = make_config(given)
    # Wrong settings are found before the model is loaded.
    find_method(config.method, config.methods.get(prefix_of(config.method)))
    return config


def _check_export(path: Path, config: Config, dry_run: bool) -> None:
    """Find before training what would keep the slim network from being exported."""
    from ..deploy.export import check_path

    if dry_run or "final" not in config.stages:
        raise ConfigError("--export needs the slim network: leave out --dry-run, and have final in --stages.")
    check_path(path)
    check_target(path, "--export")


def _show(result: Result, *, json: bool, with_notes: bool) -> None:
    from ..report.summary import draw_estimate
    from .summary import draw_result

    if json:
        print_json(_as_json(result))
    elif result.plan is not None and result.estimate is not None:
        draw_estimate(result.plan, result.estimate, make_console(), result.notes)
    else:
        draw_result(result, make_console(), with_notes=with_notes)


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "plan": json_library.loads(result.plan.to_json()) if result.plan is not None else None,
        "rows": [dataclasses.asdict(row) for row in result.rows],
        "notes": list(result.notes),
        "estimate": result.estimate,
        "bench": result.bench,
        "folder": str(result.folder) if result.folder is not None else None,
    }


def default_folder(config: Config) -> Path:
    """A folder named after the settings: the same command finds it again."""
    names = f"{Path(config.model).name}-{Path(str(config.data)).name}-{config.budget}-seed{config.seed}"
    values = {name: value for name, value in config.to_dict().items() if name not in MACHINE}
    digest = hashlib.sha256(json_library.dumps(values, sort_keys=True).encode()).hexdigest()
    return Path("runs") / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', names).strip('-')}-{digest[:6]}"

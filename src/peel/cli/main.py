"""The command line: a thin client of the public API. The only module that knows the CLI library, and the only one that prints.

Nothing heavy is imported before a command runs: `peel --help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import App, CycloptsError, Parameter

from ..errors import CorruptFileError, DataError, DivergedError, OutOfMemoryError, PeelError, StoreError
from ..methods.settings import Method
from ..train.recipe import FIELDS, Recipe
from ..utils.environment import PEER_LOST, is_main_process, is_peer_lost
from ..version import __version__
from .launch import launch
from .terminal import make_console, show_status, silence

__all__ = ["main"]

#: Exit codes, documented in the README.
OK, FAILED, WRONG_INPUT, BAD_FILES, DIVERGED, MEMORY_SHORT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

#: The arguments of this call, for the record of a run.
_arguments: list[str] = []

#: Where processes find the arguments of the command that started them.
GIVEN = "PEEL_ARGUMENTS"

#: A recipe of which any field may be left as it is.
RecipeChanges: Any = dataclasses.make_dataclass(
    "RecipeChanges",
    [
        (name, Annotated[kind | None, Parameter(help=FIELDS[name])], None)
        for name, kind in get_type_hints(Recipe).items()
    ],
    frozen=True,
)
# Python 3.11 would say "types", and cyclopts takes what is in there for a plain value.
RecipeChanges.__module__ = __name__

app = App(
    name="peel",
    help="Make a convolutional network fit a budget.",
    version=__version__,
    suppress_keyboard_interrupt=False,  # main answers it
    help_epilogue="MODEL is a name of torchvision or timm, a network of peel.zoo such as cifar_resnet20, or your own as "
    "package.module:callable or path/to/file.py:callable.",
)


@app.command
def inspect(
    model: str,
    /,
    *,
    input: str | None = None,
    num_classes: int | None = None,
    verify: bool = False,
    seconds: float = 120.0,
    json: bool = False,
) -> int:
    """Which channels are tied, what each group costs, what is fixed and why.

    Parameters
    ----------
    model
        Name or reference of the model.
    input
        Shape of one input: channels,height,width. Default: what the model was made for.
    num_classes
        Classes of the model's head, where it takes that argument.
    verify
        Prove it on this model: zero channels, cut them, compare the outputs; count costs on built networks.
    seconds
        Time after which --verify starts no further check.
    json
        Print JSON instead of tables.
    """
    from .. import zoo
    from ..graph import trace
    from ..surgery import verify as run_verify
    from .inspection import draw, draw_verification, inspection

    console, notes = make_console(), make_console(stderr=True)
    shape = _parse_shape(input)
    with show_status(notes, f"building {model}"):
        spec = zoo.find(model)
        network = zoo.create(model, num_classes=num_classes)
    import torch

    example = torch.zeros(1, *(shape or spec.input_size))
    with show_status(notes, f"tracing {model}"):
        graph = trace(network, example)
    data = inspection(model, graph)
    if not verify:
        _print_json(data) if json else draw(data, console)
        return OK
    with show_status(notes, "verifying") as shown:
        example = torch.randn(1, *(shape or spec.input_size))
        verification = run_verify(
            network,
            example,
            graph=graph,
            seconds=seconds,
            progress=lambda name, done, total: shown.update(f"verifying {done}/{total}: {name}"),
        )
    if json:
        checks = [
            {"name": check.name, "passed": check.passed, "detail": check.detail}
            for check in verification.checks
        ]
        _print_json({**data, "verification": {"passed": verification.passed, "checks": checks}})
    else:
        draw(data, console)
        draw_verification(verification, console)
    return OK if verification.passed else FAILED


@app.command
def run(
    model: str = "cifar_resnet20",
    /,
    *,
    data: str = "digits",
    method: Annotated[Method | None, Parameter(name="*")] = None,
    recipe: str = "auto",
    train: RecipeChanges = RecipeChanges(),  # noqa: B008
    search: RecipeChanges = RecipeChanges(),  # noqa: B008
    teacher: str = "train",
    steps: str | None = None,
    plan: Path | None = None,
    groups: Path | None = None,
    output: Path | None = None,
    seed: int = 0,
    image_size: int | None = None,
    data_root: Path | None = None,
    skip_corrupt: bool = False,
    device: str = "auto",
    workers: int | None = None,
    deterministic: bool = False,
    parts: int = 1,
    compile: str = "auto",
    sync_bn: bool = False,
    gpus: int | None = None,
    dry_run: bool = False,
    force: bool = False,
    checkpoint_seconds: float = 600.0,
    json: bool = False,
    quiet: bool = False,
) -> int:
    """The five steps, from a model, a budget and data to a trained slim network. The same command goes on where it was stopped.

    Parameters
    ----------
    model
        Name or reference of the model.
    data
        digits, cifar10, cifar100, fashion-mnist, or a folder with train/ and val/ (or test/).
    recipe
        How networks are trained: auto, or a named recipe such as imagenet-resnet, imagenet-mobilenet, cifar, digits.
    train
        Changes to the recipe for every training.
    search
        Changes to the recipe of the backbone.
    teacher
        train (the original, first), pretrained, or a path: what is kept there is used; where nothing is yet, the original is trained there.
    steps
        Which of original,backbone,plan,uniform,peel to do; all by default.
    plan
        Train the widths of this plan.json (or of a JSON object: tie name to channels) instead of searching.
    groups
        A JSON file with groups of your own: group name to list of tie names.
    output
        The run folder. Default: a folder in runs/ named after the settings.
    seed
        Seed of everything that is random.
    image_size
        Side of the images in pixels; by default their own, and 224 for folders of large ones.
    data_root
        Where torchvision keeps the data sets it downloads.
    skip_bad
        Leave out images that cannot be read instead of stopping.
    device
        auto, cpu, cuda, cuda:1, ...
    workers
        Processes that decode images from folders; by default one per core, at most 24 for each process that trains (4 on a CPU).
    deterministic
        The same bits in every run, on a GPU too; slower there.
    parts
        In how many parts each batch goes through the network, where memory is short; the batch stays the same.
    compile
        Fused kernels for the network: auto (on a GPU, when what is left takes longer than ten minutes), on, off.
    sync_bn
        With several processes, batch norms take their statistics over the whole batch instead of each process's part.
    gpus
        Train with this many processes on this machine, one per GPU; for many machines, start `torchrun -m peel run ...`.
    dry_run
        Show the plan with neutral importance and the estimated time; train nothing.
    force
        Go on with the run in the folder although its rates, its images or the code of the model changed; the result says so. What would
        not fit what is done already (the budget, epochs, batch, classes) is refused all the same.
    checkpoint_seconds
        How often the state is kept within an epoch; it also is at the end of one, on a GPU not more often than every ten seconds.
    json
        Print the result as JSON.
    quiet
        Print nothing but the result.
    """
    if gpus is not None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise PeelError("torchrun has started the processes already: leave out --gpus.")
        return _start_processes(gpus)
    from ..run.callbacks import NoCallback
    from ..run.prune import prune
    from ..train.distributed import shutdown_distributed
    from ..train.signals import handle_signals
    from .progress import RunProgress
    from .summary import draw_estimate, draw_outcome, read_groups, run_folder

    is_main = is_main_process()
    console, notes = make_console(), make_console(stderr=True)
    chosen = {
        name: value for name, value in vars(method or Method()).items() if value != getattr(Method(), name)
    }
    arguments: dict[str, Any] = {
        "budget": (method or Method()).budget,
        "recipe": recipe,
        "train": _changes(train),
        "search": _changes(search),
        "teacher": teacher,
        "steps": steps.replace(" ", "").split(",") if steps is not None else None,
        "plan": plan,
        "groups": read_groups(groups) if groups is not None else None,
        "seed": seed,
        "image_size": image_size,
        "data_root": data_root,
        "skip_corrupt": skip_corrupt,
        "deterministic": deterministic,
        **{name: value for name, value in chosen.items() if name != "budget"},
    }
    folder = None if dry_run else output or run_folder(model, data, arguments)
    with contextlib.ExitStack() as stack:
        stack.enter_context(handle_signals())
        stack.callback(shutdown_distributed)
        reporter = NoCallback() if quiet or not is_main else stack.enter_context(RunProgress(notes))
        stack.enter_context(_stopped_rather_than_lost())
        result = prune(
            model,
            data,
            output=folder,
            device=device,
            workers=workers,
            parts=parts,
            compile=compile,
            sync_bn=sync_bn,
            dry_run=dry_run,
            force=force,
            checkpoint_seconds=checkpoint_seconds,
            reporter=reporter,
            command=_command(),
            **arguments,
        )
    if not is_main:
        return OK
    if json:
        _print_json(
            {
                "plan": result.plan,
                "rows": result.rows,
                "notes": result.notes,
                "estimate": result.estimate,
                "folder": folder and str(folder),
            }
        )
    elif dry_run:
        draw_estimate(result, console)
    else:
        draw_outcome(result, console, with_notes=quiet)
    return OK


@contextlib.contextmanager
def _stopped_rather_than_lost() -> Iterator[None]:
    """Where several processes are told to stop, one may end before another that still waits for it: that one was told as well."""
    from ..train.signals import Interrupted, interrupt_requested

    try:
        yield
    except RuntimeError as error:
        if is_peer_lost(error):
            time.sleep(1.0)  # the signal may be on its way
            number = interrupt_requested()
            if number is not None:
                raise Interrupted(number) from error
        raise


def _start_processes(count: int) -> int:
    """Run the same command, without --gpus, in several processes."""
    if count < 1:
        raise PeelError(f"--gpus must be at least 1, not {count}.")
    arguments = [*_arguments]
    place = next(
        i for i, argument in enumerate(arguments) if argument == "--gpus" or argument.startswith("--gpus=")
    )
    del arguments[place : place + (2 if arguments[place] == "--gpus" else 1)]
    os.environ[GIVEN] = shlex.join(_arguments)
    return launch(count, arguments)


def _command() -> str:
    """The command as it was given, also in the processes that it started."""
    if GIVEN in os.environ:
        return f"peel {os.environ[GIVEN]}"
    return f"{'torchrun ... -m ' if 'TORCHELASTIC_RUN_ID' in os.environ else ''}peel {shlex.join(_arguments)}"


def _changes(changes: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(changes).items() if value is not None}


def _parse_shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if len(shape) < 1 or any(size < 1 for size in shape):
        raise PeelError(
            f"--input {text!r} is not a shape; write it as channels,height,width, such as 3,224,224."
        )
    return shape


def _print_json(data: dict[str, Any]) -> None:
    import json

    print(json.dumps(data, indent=2))


def _say(error: PeelError) -> None:
    if not is_main_process():
        # What goes wrong in all processes is said by the first, whose end is the end of the others, if they wait for it.
        time.sleep(10)
    print(f"error: {error}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _arguments[:] = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path may hold letters that this terminal lacks: no reason to fail after hours of training.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(list(_arguments), exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return WRONG_INPUT  # already printed
    except (DataError, StoreError, CorruptFileError) as error:
        _say(error)
        return BAD_FILES
    except DivergedError as error:
        _say(error)
        return DIVERGED
    except OutOfMemoryError as error:
        _say(error)
        return MEMORY_SHORT
    except PeelError as error:
        _say(error)
        return WRONG_INPUT
    except KeyboardInterrupt:
        if is_main_process():
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)
        return OK
    except BaseException as error:
        # By their names: their home imports torch.
        if type(error).__name__ == "OutOfMemoryError" or "CPUAllocator" in str(error):
            _say(
                OutOfMemoryError(
                    f"{str(error).splitlines()[0]} Choose a smaller batch, smaller images, or more parts (--parts)."
                )
            )
            return MEMORY_SHORT
        if is_peer_lost(error):
            # Whoever was lost has said why, or whoever started the processes says it.
            time.sleep(10)
            place = f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
            print(
                f"error: {place} waited in vain for the others ({str(error).splitlines()[0]}).",
                file=sys.stderr,
            )
            return PEER_LOST
        if type(error).__name__ != "Interrupted":
            raise
        if is_main_process():
            way_on = (
                "."
                if "--dry-run" in _arguments
                else f"; the state is kept. Go on with the same command:\n  {_command()}"
            )
            print(f"{error}{way_on}", file=sys.stderr)
        return 128 + error.signal_number  # type: ignore[attr-defined, no-any-return]
    return code if isinstance(code, int) else OK

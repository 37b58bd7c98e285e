"""The command line: a thin client of the public API.

Commands are imported when they run: `peel --help` answers at once.
"""

import errno
import io
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter, Token, convert
from cyclopts.config import Dict

from ..errors import CorruptFileError, DataError, DivergedError, OutOfMemoryError, PeelError, StoreError
from ..utils.environment import PEER_LOST, is_main_process, is_peer_lost
from ..utils.files import parse_toml, read_file
from ..utils.text import brief
from ..version import __version__
from .launch import command_line, set_arguments
from .method_flags import method_settings, split_method_flags

#: Exit codes, documented in docs/faults.md.
OK, WRONG_INPUT, BAD_FILES, DIVERGED, OUT_OF_MEMORY, INTERRUPTED = 0, 2, 3, 4, 5, 130

#: The longest line of an error, in characters.
LONGEST = 1000


def _converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """The value of a flag as its type. cyclopts would round `--divisor 7.5` to 8."""
    kinds = get_args(kind) or (kind,)
    if int in kinds and float not in kinds:
        for token in tokens:
            if re.fullmatch(r"[+-]?[0-9_]*\.[0-9_]*", token.value) and float(token.value) % 1:
                raise ValueError(f"{token.value} is not a whole number.")
    return convert(kind, tokens)


app = App(
    name="peel",
    default_parameter=Parameter(converter=_converted),
    help="Make a convolutional network fit a budget.",
    version=__version__,
    error_formatter=lambda error: CycloptsPanel(brief(error, LONGEST)),
    suppress_keyboard_interrupt=False,  # main handles it
    help_epilogue="MODEL is a name of torchvision or timm, a network of peel.zoo such as cifar_resnet20, "
    "or your own as package.module:callable or path/to/file.py:callable. --help-all shows all flags, "
    "`peel methods NAME` those of a method.",
)
app.command(
    "peel.cli.inspect:inspect",
    name="inspect",
    help="Which channels are tied, what each group costs, what is fixed and why.",
)
app.command(
    "peel.cli.run:run",
    name="run",
    help="Prune and train: from a model, a budget and data to a slim network. The same command resumes.",
)
app.command(
    "peel.cli.compare:compare",
    name="compare",
    help="Methods side by side: any budgets, any seeds, the same data, recipe and original. It resumes.",
)
app.command(
    "peel.cli.methods:methods",
    name="methods",
    help="The methods of pruning; with a name, its settings, its paper and what it needs.",
)
app.command(
    "peel.cli.curve:curve",
    name="curve",
    help="Accuracy against budget for a trained network that is cut and repaired. Nothing is trained.",
)
app.command(
    "peel.cli.bench:bench",
    name="bench",
    help="Latency and throughput of runs, saved models, files .onnx and models, side by side.",
)
app.command(
    "peel.cli.latency:latency",
    name="latency",
    help="Time a model at many widths on this machine: a file that makes latency a budget.",
)
app.command(
    "peel.cli.export:export",
    name="export",
    help="A network as .onnx, .pt2 or .safetensors, checked by running it; int8 with --int8.",
)
app.command(
    "peel.cli.eval:evaluate",
    name="eval",
    help="Accuracy of a run, a saved model, a file .onnx, or a model with its weights.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    set_arguments(arguments)
    settings: dict[str, dict[str, Any]] = {}
    if "torch" not in sys.modules:
        # Read when torch is loaded. OpenMP threads that spin while they wait take the cores from others.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path may hold characters that this terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if arguments[:1] in (["run"], ["compare"]):
            arguments, settings = split_method_flags(arguments)
        app.config = _config_files(arguments, settings)
        with method_settings(settings):
            code = app(arguments, exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return WRONG_INPUT  # already printed
    except PeelError as error:
        return _report(error)
    except KeyboardInterrupt:
        if is_main_process():
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as error:
        return _report(PeelError(_place_of_exit(error)))
    except BaseException as error:
        return _report_other(error, arguments)
    return code if isinstance(code, int) else OK


def _config_files(arguments: Sequence[str], settings: dict[str, dict[str, Any]]) -> list[Dict]:
    """The file named by `--config`, from which cyclopts takes settings that no flag gives.

    Its tables [methods.NAME] are added to the settings of methods, below those of flags.
    """
    for place, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--config":
            path = value or next(iter(arguments[place + 1 :]), "")
            if not os.path.isfile(path):
                raise PeelError(f"--config: there is no file {path!r}.")
            try:
                values = read_file(Path(path), parse_toml, "Correct it.")
            except CorruptFileError as error:  # a setting, not a file of a run: another exit code
                raise PeelError(f"--config: {error}") from error
            methods = values.pop("methods", {})
            if not all(isinstance(table, dict) for table in [methods, *dict(methods).values()]):
                raise PeelError(f"--config: methods in {path} must be tables, such as [methods.peel].")
            for method, table in methods.items():
                settings[method] = {**table, **settings.get(method, {})}
            return [Dict(values, use_commands_as_keys=False, source=path)]
    return []


def _report(error: PeelError) -> int:
    if not is_main_process():
        time.sleep(10)  # the main process prints an error of all; torchrun then stops the others
    lines = [line[:LONGEST] for line in str(error).splitlines()]  # they may quote a value of any length
    print("error:", "\n".join(lines), file=sys.stderr)
    if isinstance(error, DivergedError):
        return DIVERGED
    if isinstance(error, OutOfMemoryError):
        return OUT_OF_MEMORY
    return BAD_FILES if isinstance(error, DataError | StoreError) else WRONG_INPUT


def _place_of_exit(error: SystemExit) -> str:
    """Where a user's code has ended the process. An exit of the terminal's library is raised again."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<"
    own = [
        frame for frame in frames if "site-packages" in frame.filename or not frame.filename.startswith(ours)
    ]
    if not own or "rich" in Path(frames[-1].filename).parts:  # the output is a closed pipe
        raise error
    place = f"{own[-1].filename}, line {own[-1].lineno}, ended the process (SystemExit: {error.code})."
    if own[-1].name == "<module>":
        return f'{place} Put what a script does below: if __name__ == "__main__".'
    return f"{place} Return, or raise an error, instead."


def _report_other(error: BaseException, arguments: Sequence[str]) -> int:
    # Compared by name, so that torch is not imported for `peel --help`.
    if type(error).__name__ == "Interrupted":
        number: int = error.signal_number  # type: ignore[attr-defined]
        if is_main_process():
            saved = f"; the state is saved. Resume with the same command:\n  {command_line()}"
            rest = "." if "--dry-run" in arguments else saved
            print(f"stopped by {signal.Signals(number).name}{rest}", file=sys.stderr)
        return 128 + number
    if type(error).__name__ == "OutOfMemoryError" or "CPUAllocator" in str(error):
        message = f"{str(error).splitlines()[0]} Use a smaller batch, smaller images, or --accumulate."
        return _report(OutOfMemoryError(message))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return _report(PeelError(f"{error.filename}: no file can have this name, it is too long."))
    if is_peer_lost(error):
        time.sleep(5)  # the process that failed prints its error, and its end ends this one
        print(f"error: another process did not answer ({str(error).splitlines()[0]}).", file=sys.stderr)
        return PEER_LOST
    raise error

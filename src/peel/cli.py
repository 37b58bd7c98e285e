"""The command line: a thin client of the public API. The only module that knows the CLI library, and the only one that prints.

Nothing heavy is imported before a command runs: `peel --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclopts import App, CycloptsError

from .errors import PeelError
from .version import __version__

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["main"]

#: Exit codes, documented in the README.
OK, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

app = App(
    name="peel",
    help="Make a convolutional network fit a budget.",
    version=__version__,
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
    from . import zoo
    from .graph import trace
    from .graph import verify as run_verify
    from .inspection import draw, draw_verification, inspection

    console, notes = _console(), _console(stderr=True)
    shape = _parse_shape(input)
    with _status(notes, f"building {model}"):
        spec = zoo.find(model)
        network = zoo.create(model, num_classes=num_classes)
    import torch

    example = torch.zeros(1, *(shape or spec.input_size))
    with _status(notes, f"tracing {model}"):
        graph = trace(network, example)
    data = inspection(model, graph)
    if not verify:
        _print_json(data) if json else draw(data, console)
        return OK
    with _status(notes, "verifying") as status:
        example = torch.randn(1, *(shape or spec.input_size))
        verification = run_verify(
            network,
            example,
            graph=graph,
            seconds=seconds,
            progress=lambda name, done, total: status.update(f"verifying {done}/{total}: {name}"),
        )
    if json:
        checks = [{"name": check.name, "passed": check.passed, "detail": check.detail} for check in verification.checks]
        _print_json({**data, "verification": {"passed": verification.passed, "checks": checks}})
    else:
        draw(data, console)
        draw_verification(verification, console)
    return OK if verification.passed else FAILED


def _parse_shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if len(shape) < 1 or any(size < 1 for size in shape):
        raise PeelError(f"--input {text!r} is not a shape; write it as channels,height,width, such as 3,224,224.")
    return shape


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    # A file has no width: do not cut tables as if it were a narrow terminal.
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=160, no_color=True)


def _status(console: Console, text: str) -> Any:
    """A spinner on a terminal; one plain line elsewhere."""
    from contextlib import contextmanager

    if console.is_terminal:
        return console.status(text)

    class Plain:
        def update(self, text: str) -> None:
            console.print(text)

    @contextmanager
    def plain() -> Any:
        console.print(text)
        yield Plain()

    return plain()


def _print_json(data: dict[str, Any]) -> None:
    import json

    print(json.dumps(data, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        code = app(list(sys.argv[1:] if argv is None else argv), exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return WRONG_INPUT  # already printed
    except PeelError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return OK
    return code if isinstance(code, int) else OK

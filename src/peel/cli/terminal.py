"""Where the command line speaks: a terminal, a file, or a pipe that nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["make_console", "show_status", "silence"]


def make_console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    file: Any = _Heard("stderr" if stderr else "stdout")
    console = Console(file=file, highlight=False, soft_wrap=False)
    # A file has no width: do not cut tables as if it were a narrow terminal.
    return console if console.is_terminal else Console(file=file, highlight=False, width=160, no_color=True)


class _Heard:
    """Standard output or standard error as it is now. When nobody reads it any more, that is no reason to stop."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> int:
        return self._try(lambda stream: stream.write(text), len(text))

    def flush(self) -> None:
        self._try(lambda stream: stream.flush() or 0, 0)

    def _try(self, action: Callable[[TextIO], int], otherwise: int) -> int:
        stream = getattr(sys, self.name)
        try:
            return action(stream)
        except BrokenPipeError:
            silence(stream)
            return otherwise

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self.name), name)


def silence(stream: TextIO) -> None:
    """Nobody reads it any more: that is not to be found out at every word, and again when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def show_status(console: Console, text: str) -> Any:
    """A spinner on a terminal; one plain line elsewhere."""
    if console.is_terminal:
        from rich.text import Text

        return console.status(Text(text))

    class Plain:
        def update(self, text: str) -> None:
            console.print(text, markup=False)

    @contextlib.contextmanager
    def plain() -> Any:
        console.print(text, markup=False)
        yield Plain()

    return plain()

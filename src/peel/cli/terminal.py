"""Consoles: a terminal, a file, or a pipe that its reader may close."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    file: Any = _SafeStream("stderr" if stderr else "stdout")
    console = Console(file=file, highlight=False, soft_wrap=False)
    # A file has no width: do not cut tables to that of a narrow terminal.
    return console if console.is_terminal else Console(file=file, highlight=False, width=160, no_color=True)


class _SafeStream:
    """Standard output or error. When a pipe is closed (`| head`), output is dropped."""

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
    """Send further output to the null device; Python flushes once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))


def show_status(console: Console, text: str) -> Any:
    """A spinner on a terminal, one plain line elsewhere."""
    if console.is_terminal:
        from rich.text import Text

        return console.status(Text(text))
    return _plain_status(console, text)


@contextlib.contextmanager
def _plain_status(console: Console, text: str) -> Iterator[Any]:
    class Status:
        def update(self, text: str) -> None:
            console.print(text, markup=False)

    console.print(text, markup=False)
    yield Status()

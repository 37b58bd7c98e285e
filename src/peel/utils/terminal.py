"""Consoles and other output."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    # A file has no width: do not cut tables to that of a narrow terminal.
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, width=160, no_color=True)


def print_json(data: dict[str, Any]) -> None:
    make_console().out(json.dumps(data, indent=2), highlight=False)


def print_notes(notes: Iterable[str], console: Console) -> None:
    for note in notes:
        console.print(f"note: {note}", markup=False)


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

"""Plain tables for a terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Columns of a text that is not written to a terminal.
WIDTH = 120


def make_table(first: str, *others: str) -> Table:
    """A plain table: text in the first column, numbers in the others. The first column is not shortened."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def as_text(draw: Callable[[Console], None]) -> str:
    """What `draw` prints, as wide as the terminal."""
    from rich.console import Console

    buffer, width = io.StringIO(), shutil.get_terminal_size((WIDTH, 0)).columns
    draw(Console(file=buffer, width=width, highlight=False, no_color=True))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

"""Plain tables for a terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """A table as it is stored: it is drawn without the code that made it. Units stand in the column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    chart: Literal["", "bars", "lines"] = ""
    """How the page shows the numbers beside the table: bars for each row, or lines over the first column."""

    @property
    def words(self) -> int:
        """The number of columns at the left that hold words."""
        return next((i for i in range(len(self.columns)) if any(_is_number(row[i]) for row in self.rows)), 1)

    @property
    def cells(self) -> list[list[str]]:
        return [[show(value) for value in row] for row in self.rows]


def _is_number(value: Cell) -> bool:
    return isinstance(value, int | float)


def show(value: Cell) -> str:
    """A cell as text."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


#: Columns of a text that is not written to a terminal.
WIDTH = 120


def make_table(first: str, *others: str) -> RichTable:
    """A plain table: text in the first column, numbers in the others. The first column is not shortened."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def table_of(columns: Mapping[str, Sequence[str]]) -> RichTable:
    """A table of cells: title -> one for each row."""
    from rich.markup import escape

    table = make_table(*columns)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, cells))
    return table


def fits(table: RichTable, console: Console) -> bool:
    """Whether nothing has to be shortened or wrapped."""
    from rich.measure import Measurement

    unlimited = console.options.update(width=10_000)
    return Measurement.get(console, unlimited, table).maximum <= console.width


def draw_what_fits(
    columns: Mapping[str, Sequence[str]], optional: Iterable[str], console: Console
) -> list[str]:
    """Print the table. Where it is too wide, optional columns are left out, in their order, and returned."""
    shown, left_out = dict(columns), []
    for title in (title for title in optional if title in columns):
        if fits(table_of(shown), console):
            break
        del shown[title]
        left_out.append(title)
    console.print(table_of(shown))
    return left_out


def as_text(draw: Callable[[Console], None]) -> str:
    """What `draw` prints, as wide as the terminal."""
    from rich.console import Console

    buffer, width = io.StringIO(), shutil.get_terminal_size((WIDTH, 0)).columns
    draw(Console(file=buffer, width=width, highlight=False, no_color=True))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

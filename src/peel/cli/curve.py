"""`peel curve`: how much of a trained network can be cut without training."""

from __future__ import annotations

import json as json_library
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..cost.budget import format_count
from ..errors import PeelError
from ..run.curve import Curve, CurveConfig
from ..run.curve import curve as run_curve
from ..utils.files import write_bytes
from .terminal import make_console, print_json, show_status

if TYPE_CHECKING:
    from rich.console import Console

#: Column of the table -> field of a point.
COLUMNS = {
    "cut": "cut",
    "recalibrated": "recalibrated",
    "repaired": "repaired",
    "repaired, by sensitivity": "repaired_by_sensitivity",
}


def curve(
    model: str,
    /,
    *,
    settings: Annotated[CurveConfig, Parameter(name="*")],
    output: Path | None = None,
    json: bool = False,
) -> int:
    """Accuracy against budget for a trained network that is cut and repaired. Nothing is trained.

    Parameters
    ----------
    model
        Name or reference of the model.
    output
        Write the table and a picture to OUTPUT.json, OUTPUT.csv and OUTPUT.png.
    json
        Print JSON instead of a table.
    """
    console, notes = make_console(), make_console(stderr=True)
    with show_status(notes, f"loading {model}") as status:
        found = run_curve(
            model, settings, lambda text, done, total: status.update(f"{done + 1} of {total}: {text}")
        )
    if json:
        print_json(found.to_dict())
    else:
        _draw(found, console)
    if output is not None:
        _write(found, output)
    return 0


def _draw(found: Curve, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("budget")
    for name in ("MACs", "params", *COLUMNS):
        table.add_column(name, justify="right")
    table.add_row(
        "original", format_count(found.macs), format_count(found.params), *[f"{found.original:.1%}"] * 4
    )
    for point in found.points:
        values = [getattr(point, field) for field in COLUMNS.values()]
        cells = ["" if value is None else f"{value:.1%}" for value in values]
        table.add_row(f"{point.budget:.0%}", format_count(point.macs), format_count(point.params), *cells)
    console.print(table)
    console.print(
        f"top-1 on {found.test_images:,} test images of {found.data}; {found.images:,} unlabeled training "
        "images calibrate; uniform widths but in the last column; nothing was trained",
        markup=False,
    )


def _write(found: Curve, output: Path) -> None:
    """The table, and then a picture, which needs matplotlib."""
    base = output.with_suffix("") if output.suffix in (".json", ".csv", ".png") else output
    points: dict[str, Any] = {}
    for column, field in COLUMNS.items():
        pairs = [(100 * p.budget, getattr(p, field)) for p in found.points]
        points[column] = [(budget, 100 * value) for budget, value in pairs if value is not None]
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(
            base.with_name(base.name + ".json"), json_library.dumps(found.to_dict(), indent=1).encode()
        )
        write_bytes(base.with_name(base.name + ".csv"), found.to_csv().encode())
        from ..report.charts import budget_chart

        picture = budget_chart(points, 100 * found.original, found.model)
        write_bytes(base.with_name(base.name + ".png"), picture)
    except ImportError as error:
        raise PeelError(
            f'the picture needs matplotlib: pip install "peel-pruning[report]". The table is in {base}.csv.'
        ) from error
    except OSError as error:
        raise PeelError(f"cannot write {error.filename or base}: {error.strerror}.") from error

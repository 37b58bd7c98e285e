"""`peel curve`: how much of a trained network can be cut without training."""

from __future__ import annotations

import json as json_library
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..cost.budget import format_count
from ..errors import PeelError
from ..run.curve import Curve, CurveConfig
from ..run.curve import curve as run_curve
from ..utils.files import check_target, write_bytes
from ..utils.terminal import make_console, print_json, print_notes, show_status

if TYPE_CHECKING:
    from rich.console import Console

#: Column of the table -> field of a point.
COLUMNS = {
    "cut": "cut",
    "recalibrated": "recalibrated",
    "repaired": "repaired",
    "repaired, by sensitivity": "repaired_by_sensitivity",
}


SUFFIXES = (".json", ".csv", ".png")


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
    if output is not None:
        for file in _files(output) if output.name else [output]:
            check_target(file, "--output")
    console, notes = make_console(), make_console(stderr=True)
    with show_status(notes, f"loading {model}") as status:
        found = run_curve(
            model, settings, lambda text, done, total: status.update(f"{done + 1} of {total}: {text}")
        )
    if json:
        print_json(found.to_dict())
    else:
        _draw(found, console)
    print_notes(found.notes, notes)
    if output is not None:
        written = ", ".join(map(str, _write(found, output)))
        notes.print(f"written: {written}", markup=False, soft_wrap=True)
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
        cells = [f"{value:.1%}" for value in values]
        table.add_row(f"{point.budget:.0%}", format_count(point.macs), format_count(point.params), *cells)
    console.print(table)
    console.print(
        f"top-1 on {found.test_images:,} test images of {found.data}; {found.images:,} unlabeled training "
        "images calibrate; nothing was trained",
        markup=False,
    )
    console.print(
        f"{found.test_images:,} test images: standard error up to {100 * found.standard_error:.1f} points",
        markup=False,
    )
    console.print(
        "MACs and params are those of uniform widths. Networks by sensitivity have their own, within the "
        "same budget: see --output or --json.",
        markup=False,
    )


def _write(found: Curve, output: Path) -> list[Path]:
    """The table, and then a picture, which needs matplotlib. The files that were written."""
    json_file, csv_file, picture_file = files = _files(output)
    try:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(json_file, json_library.dumps(found.to_dict(), indent=1).encode())
        write_bytes(csv_file, found.to_csv().encode())
        from ..report.charts import budget_chart

        write_bytes(picture_file, budget_chart(_points(found), 100 * found.original, found.model))
    except ImportError as error:
        raise PeelError(
            f'the picture needs matplotlib: pip install "peel-pruning[report]". The table is in {csv_file}.'
        ) from error
    except OSError as error:
        raise PeelError(f"cannot write {error.filename or json_file}: {error.strerror}.") from error
    return files


def _files(output: Path) -> list[Path]:
    """The table as JSON and CSV, and the picture."""
    base = output.with_suffix("") if output.suffix in SUFFIXES else output
    return [base.parent / f"{base.name}{suffix}" for suffix in SUFFIXES]


def _points(found: Curve) -> dict[str, list[tuple[float, float]]]:
    """Column -> MACs of its own networks and accuracies, both in percent."""
    points = {}
    for column, field in COLUMNS.items():
        macs = "macs_by_sensitivity" if field == "repaired_by_sensitivity" else "macs"
        points[column] = [
            (100 * getattr(point, macs) / found.macs, 100 * getattr(point, field)) for point in found.points
        ]
    return points

"""The end of a run on the terminal: the table, the notes, the files."""

from rich.console import Console

from ..report.summary import draw_rows
from ..run.result import Result
from ..surgery.serialization import read_info

_FILES = ("report.html", "slim.safetensors", "plan.json", "metrics.jsonl", "result.json")


def draw_result(result: Result, console: Console, *, with_notes: bool = False) -> None:
    for note in result.notes if with_notes else ():
        console.print(f"note: {note}", markup=False)
    if result.rows:
        draw_rows([vars(row) for row in result.rows], result.bench or {}, console, result.search_seconds)
    folder = result.folder
    if folder is None:
        return
    files = [name for name in _FILES if (folder / name).exists()]
    console.print(f"\nfiles in {folder}: {', '.join(files)}", markup=False)
    if "slim.safetensors" in files:
        is_own = "zoo" not in read_info(folder / "slim").source
        load = f'peel.load("{folder / "slim"}"{", model=..." if is_own else ""})'
        console.print(f"the slim network: {load}", markup=False)

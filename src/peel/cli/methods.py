"""`peel methods`: the methods by name, and the settings of one."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import ConfigError
from ..methods.registry import METHODS, find_method, prefix_of, settings_of
from ..utils.tables import table_of
from ..utils.terminal import make_console, print_json


def methods(name: str | None = None, /, *, json: bool = False) -> int:
    """The methods of pruning; with a name, its settings, its paper and what it needs.

    Parameters
    ----------
    name
        A method, or your own as path/file.py:Name.
    json
        Print JSON.
    """
    if name is None:
        found = [{"name": method, "description": _first_line(kind)} for method, kind in METHODS.items()]
        if json:
            print_json({"methods": found})
            return 0
        console = make_console()
        console.print(table_of({key: [item[key] for item in found] for key in ("name", "description")}))
        console.print("\npeel methods NAME: its settings. peel run ... --method NAME --NAME.SETTING VALUE")
        return 0
    kind = METHODS[name] if name in METHODS else type(find_method(name))
    settings = settings_of(kind)
    needs = kind().needs if _has_defaults(kind) else None
    wants = [] if needs is None else [text for text in _words(needs) if text]
    if json:
        values = {item.name: {"default": _plain(item.default), "help": item.help} for item in settings}
        print_json({"name": name, "description": inspect.getdoc(kind), "settings": values, "needs": wants})
        return 0
    console = make_console()
    console.print(f"{name}: {inspect.getdoc(kind) or ''}\n", markup=False)
    console.print(f"needs: {', '.join(wants) or 'nothing'}", markup=False)
    if not settings:
        console.print("It has no settings.")
        return 0
    console.print()
    columns = {
        "setting": [f"--{prefix_of(name)}.{item.name.replace('_', '-')}" for item in settings],
        "default": [_shown(item.default) for item in settings],
    }
    width = max(len(flag) for flag in columns["setting"])
    for flag, default, item in zip(*columns.values(), settings, strict=True):
        console.print(f"{flag:{width}}  {default}", markup=False)
        console.print(f"{'':{width}}  {item.help}", markup=False)
    return 0


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _has_defaults(kind: type) -> bool:
    try:
        kind()
    except (TypeError, ConfigError):
        return False
    return True


def _words(needs: Any) -> list[str]:
    training = {"loss": "training of networks", "step": "training with steps of its own"}
    return [
        "the trained original (which a run can train)" if needs.original else "",
        "held-out training images" if needs.held_out else "",
        training.get(needs.training, ""),
    ]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _shown(value: Any) -> str:
    return "none" if value in (None, ()) else str(value)

"""Objects of the user's own code, named as `path/to/file.py:Name` or `package.module:Name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, PeelError, did_you_mean

__all__ = ["load_object"]


def load_object(reference: str, error_type: type[PeelError] = ConfigError) -> Any:
    """The object that a reference names. An error of the user's code is part of the message."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise error_type(
            f"{reference!r} is not a reference; write package.module:Name or path/to/file.py:Name."
        )
    target: Any = _import(place, error_type)
    for part in name.split("."):
        if not hasattr(target, part):
            public = [item for item in dir(target) if not item.startswith("_")]
            raise error_type(f"{place} has no {name!r}.{did_you_mean(part, public)}")
        target = getattr(target, part)
    return target


def _import(place: str, error_type: type[PeelError]) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise error_type(f"there is no file {place}.")
    try:
        return _import_file(Path(place)) if is_file else _import_module(place)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not is_file and f"{place}.".startswith(f"{missing}."):
            raise error_type(
                f"there is no module {place!r}; it is looked for in this folder and among installed packages."
            ) from error
        raise error_type(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)

"""Objects of the user's own code by reference: `package.module:name` or `path/to/file.py:name`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import PeelError, did_you_mean


def load_object(reference: str, error: type[PeelError]) -> Any:
    """The object that a reference names. Problems are raised as `error`."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise error(f"{reference!r} is not a reference; write package.module:name or path/to/file.py:name.")
    if place.endswith(".py") and not Path(place).is_file():
        raise error(f"there is no file {place}.")
    try:
        target: Any = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except ModuleNotFoundError as problem:
        missing = (
            "there is" if place.startswith(problem.name or " ") else f"{place} cannot be imported: there is"
        )
        raise error(f"{missing} no module {problem.name!r}, here or among installed packages.") from problem
    except Exception as problem:
        raise error(f"{place} cannot be imported: {type(problem).__name__}: {problem}") from problem
    for part in name.split("."):
        if not hasattr(target, part):
            hint = did_you_mean(part, [item for item in dir(target) if not item.startswith("_")])
            raise error(f"{place} has no {name!r}.{hint}")
        target = getattr(target, part)
    return target


def module_of_file(path: Path) -> tuple[Path, str]:
    """The folder that a file can be imported from, and its name as a module; in a package, below that."""
    path = path.resolve()
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root, ".".join(path.with_suffix("").relative_to(root).parts)


def _import_file(path: Path) -> ModuleType:
    """Import a file. It may import its neighbors, as a script may; in a package also relatively."""
    root, name = module_of_file(path)
    _put_on_path(root)
    if "." in name:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    _put_on_path(Path.cwd())
    return importlib.import_module(name)


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

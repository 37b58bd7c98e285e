"""The shape of the package: public names, and imports that point downwards."""

from __future__ import annotations

import ast
from pathlib import Path

import peel

SOURCE = Path(peel.__file__).parent

#: Each layer may import itself and those below it.
LAYERS = [
    {"cli", "__main__"},
    {"outcome", "progress", "launch", "terminal"},
    {"run"},
    {"stages"},
    {"estimate", "trainer"},
    {"method", "teacher", "workspace", "inputs", "identity"},
    {"run_files"},
    {"problem"},
    {"reporter", "result"},
    {"steps"},
    {"train"},
    {"inspection", "store", "allocation", "report"},
    {"zoo"},
    {"graph"},
    {"cost", "widths", "budget", "changes", "record", "settings"},
    {"errors", "version", "files", "fingerprint", "surroundings"},
]


def test_every_public_name_is_there_and_listed() -> None:
    assert peel.__all__ == sorted(peel.__all__, key=str)
    assert set(peel.__all__) - {"__version__"} == set(peel._HOME)
    for name in peel.__all__:
        assert getattr(peel, name) is not None
    assert set(peel.__all__) <= set(dir(peel))


def test_imports_point_downwards() -> None:
    level = {module: i for i, layer in enumerate(LAYERS) for module in layer}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*parts[: len(parts) - node.level], *(node.module or "").split(".")]
                targets = [base[0]] if base[0] else [alias.name for alias in node.names]
                for target in targets:
                    assert level[target] >= level[parts[0]], f"{path.name} imports {target} from above"


def test_only_the_command_line_prints() -> None:
    for path in SOURCE.rglob("*.py"):
        calls = [
            n
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"
        ]
        assert not calls or path.name == "cli.py"

"""The shape of the code. The packages are the folders of src/peel, in the order of docs/architecture.md."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import peel

SOURCE = Path(peel.__file__).parent
TESTS = Path(__file__).parent

TOP_LEVEL = {"__init__.py", "__main__.py", "errors.py", "version.py"}

MAX_LINES, MAX_NESTING, MAX_PARAMETERS, MAX_COLUMNS = 60, 4, 12, 110
#: The part of all lines that data, train and run may take.
MAX_MACHINERY = 0.35

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def sources() -> dict[Path, str]:
    """Path below src/peel -> text."""
    return {path.relative_to(SOURCE): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


def packages() -> set[str]:
    return {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}


def documented_packages() -> list[str]:
    """The first word of each line of the first fenced block."""
    text = (TESTS.parent / "docs" / "architecture.md").read_text()
    block = re.search(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    return re.findall(r"^(\w+)", block[1], re.MULTILINE)


def functions() -> Iterator[tuple[str, Function, bool]]:
    """(place, function, whether it is public) for every function of the package."""

    def inside(node: ast.AST, place: str, is_public: bool) -> Iterator[tuple[str, Function, bool]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from inside(child, place, is_public)
                continue
            name = f"{place}.{child.name}"
            is_open = is_public and not child.name.startswith("_")
            if isinstance(child, ast.ClassDef):
                yield from inside(child, name, is_open)
            else:
                yield name, child, is_open
                yield from inside(child, name, False)

    for path, tree in trees().items():
        yield from inside(tree, str(path), True)


# Names and packages


def test_every_public_name_exists_and_is_listed() -> None:
    for name in peel.__all__:
        assert getattr(peel, name) is not None
    assert set(peel.__all__) <= set(dir(peel))


def test_the_documented_packages_are_the_folders() -> None:
    documented = documented_packages()
    assert len(documented) == len(set(documented))
    assert set(documented) == packages()


def test_the_tests_mirror_the_packages() -> None:
    assert {path.parent.name for path in TESTS.rglob("test_*.py")} == packages() | {TESTS.name}


def test_only_a_few_modules_stand_at_top_level() -> None:
    assert {path.name for path in SOURCE.glob("*.py")} == TOP_LEVEL


# Imports


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_packages(path: Path, tree: ast.AST) -> Iterator[str]:
    """The packages that a module imports, also within functions, but not for type checking only."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            parents = path.parts[: len(path.parts) - node.level]
            target = [*parents, *(node.module or "").split(".")]
            yield from [target[0]] if target[0] else [alias.name for alias in node.names]
        yield from imported_packages(path, node)


def test_imports_point_to_earlier_packages() -> None:
    order = documented_packages()
    wrong = []
    for path, tree in trees().items():
        if len(path.parts) > 1:
            own = order.index(path.parts[0])
            later = [package for package in imported_packages(path, tree) if package in order[own + 1 :]]
            wrong += [f"{path} imports {package}" for package in later]
    assert not wrong


def test_errors_and_version_import_no_package() -> None:
    for name in ("errors.py", "version.py"):
        assert not set(imported_packages(Path(name), trees()[Path(name)])) & packages()


def test_only_the_command_line_prints() -> None:
    for path, tree in trees().items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert path.parts[0] == "cli" or not any(ast.unparse(call.func) == "print" for call in calls), path


# Sizes


def nesting(node: ast.AST) -> int:
    """How deep blocks are nested. `elif` is as deep as its `if`; a function within counts for itself."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and [child] == node.orelse and isinstance(child, ast.If)
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def test_no_function_is_too_long() -> None:
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node, _ in functions()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_function_is_nested_too_deeply() -> None:
    depths = {name: nesting(node) for name, node, _ in functions()}
    assert {name: depth for name, depth in depths.items() if depth > MAX_NESTING} == {}


def test_no_public_function_has_too_many_parameters() -> None:
    def parameters(node: Function) -> int:
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return len([name for name in names if name not in ("self", "cls")])

    counts = {name: parameters(node) for name, node, is_public in functions() if is_public}
    assert {name: count for name, count in counts.items() if count > MAX_PARAMETERS} == {}


def test_no_line_is_too_long() -> None:
    for path, text in sources().items():
        for number, line in enumerate(text.splitlines(), 1):
            assert len(line) <= MAX_COLUMNS, f"{path}:{number}"


def test_most_of_the_package_is_not_machinery() -> None:
    stub = SOURCE / "__init__.pyi"
    lines = {path: text.count("\n") for path, text in [*sources().items(), (stub, stub.read_text())]}
    total = sum(lines.values())
    machinery = sum(count for path, count in lines.items() if path.parts[0] in ("data", "train", "run"))
    assert machinery <= MAX_MACHINERY * total

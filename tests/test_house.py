"""Promise: the code keeps the shape that docs/design.md and CONTRIBUTING.md describe; every limit is computed here."""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

from adapterbank.kinds import table as kinds
from adapterbank.methods import ADDITIONS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "adapterbank"
TESTS = ROOT / "tests"
MODULES = sorted(SOURCE.rglob("*.py"))

ROOT_MODULES = 8
LEVELS = 14
FILE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 8
SIGNATURES = {SOURCE / "api" / "opened.py", *(SOURCE / "encoder" / "kernels").glob("*.py")}
"""Beside the commands, whose parameters are their options: the public API, and kernels, which take numbers only."""
KINDS = {*kinds.KINDS, "tagging"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def place(path: Path, node: ast.AST | None = None) -> str:
    line = f":{node.lineno}" if isinstance(node, ast.expr | ast.stmt) else ""
    return f"{path.relative_to(ROOT)}{line}"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def room_of(path: Path) -> str:
    """Return the sub-package that a module is in, or its own name in the package root."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def compared(names: set[str], path: Path) -> Iterator[str]:
    """Yield the places where a module compares with one of these names, matches it or looks it up."""
    for node in ast.walk(tree(path)):
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Subscript):
            sides = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "startswith", "endswith"):
            sides = list(node.args)
        constants = [
            one
            for side in sides
            for one in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])
            if isinstance(one, ast.Constant)
        ]
        yield from (f"{place(path, one)} {one.value}" for one in constants if one.value in names)


# --- rooms


def test_the_package_root_holds_few_modules() -> None:
    found = [path.stem for path in SOURCE.glob("*.py") if path.name != "__init__.py"]
    assert len(found) <= ROOT_MODULES, found


def test_the_import_contract_has_few_levels_and_names_every_module() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in contracts if contract["type"] == "layers" and contract.get("exhaustive")]
    (layers,) = [contract for contract in layered if contract["containers"] == ["adapterbank"]]
    assert len(layers["layers"]) <= LEVELS


def test_no_two_classes_share_a_name() -> None:
    found = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(place(path, node))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


# --- sizes


def test_no_file_is_long() -> None:
    lines = {place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_no_function_is_long() -> None:
    lengths = {
        f"{place(path, node)} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in MODULES
        for node in functions(path)
    }
    assert {name: count for name, count in lengths.items() if count > FUNCTION_LINES} == {}


def test_no_function_has_many_parameters() -> None:
    """`self` and `cls` do not count."""
    counts = {}
    for path in MODULES:
        for node in functions(path) if not path.is_relative_to(SOURCE / "cli") and path not in SIGNATURES else ():
            given = node.args
            named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            counts[f"{place(path, node)} {node.name}"] = len([name for name in named if name not in ("self", "cls")])
    assert {name: count for name, count in counts.items() if count > PARAMETERS} == {}


# --- words


def test_every_module_has_a_docstring() -> None:
    """But for the empty `__init__.py` of sub-packages."""
    assert [place(path) for path in MODULES if path.read_bytes() and not ast.get_docstring(tree(path))] == []


def test_a_docstring_starts_with_what_the_function_does_and_not_with_give() -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        place(path, node)
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, documented) and (ast.get_docstring(node) or "").startswith(("Give ", "Gives "))
    ]
    assert found == []


# --- variety is a row in a table


def test_nothing_outside_kinds_compares_the_name_of_a_kind() -> None:
    outside = [path for path in MODULES if room_of(path) != "kinds"]
    assert [found for path in outside for found in compared(KINDS, path)] == []


def test_nothing_outside_the_additions_and_methods_compares_the_name_of_an_addition() -> None:
    inside = (SOURCE / "slots" / "additions", SOURCE / "methods.py")
    outside = [path for path in MODULES if not any(path.is_relative_to(one) for one in inside)]
    assert [found for path in outside for found in compared({*ADDITIONS}, path)] == []


# --- tests mirror the rooms


def named_after_a_module(test: Path) -> bool:
    """Return whether tests/ROOM/test_MODULE.py or test_MODULE_ASPECT.py has its module in that room of the source."""
    room = test.relative_to(TESTS).parent.parts[:1]
    places = SOURCE.joinpath(*room).rglob("*.py") if room else SOURCE.glob("*.py")
    name = test.stem.removeprefix("test_")
    return any(name == module.stem or name.startswith(f"{module.stem}_") for module in places)


def test_every_test_file_is_named_after_a_module_or_states_its_promise() -> None:
    found = sorted(TESTS.rglob("test_*.py"))
    promising = {path for path in found if (ast.get_docstring(tree(path)) or "").startswith("Promise: ")}
    assert [place(path) for path in found if path not in promising and not named_after_a_module(path)] == []


# --- scripts inside strings


def scripts(path: Path) -> Iterator[ast.Module]:
    """Yield the strings of a file that are Python and import this package: no type checker reads them."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            with suppress(SyntaxError):
                yield ast.parse(dedent(node.value))


def exists(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or (hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None)


def test_scripts_in_the_strings_of_tests_import_names_that_exist() -> None:
    imported = {
        (place(path), node.module, name.name)
        for path in sorted([*TESTS.rglob("*.py"), *(ROOT / "bench").glob("*.py")])
        for script in scripts(path)
        for node in ast.walk(script)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "adapterbank"
        for name in node.names
        if node.module and name.name != "*"
    }
    assert imported
    assert [one for one in sorted(imported) if not exists(*one[1:])] == []

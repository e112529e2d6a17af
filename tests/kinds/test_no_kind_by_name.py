"""Promise: only `kinds/` knows the kinds by name; the sources are parsed, and everything else asks the row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from adapterbank.kinds.table import KINDS

SOURCE = Path(__file__).parents[2] / "src" / "adapterbank"
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent.name != "kinds"]


def names_in(node: ast.AST) -> set[str]:
    """Return the kinds that an expression names: as a constant, or in a tuple, list or set of them."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant) and part.value in KINDS}


def decides(node: ast.AST) -> bool:
    """Return whether a node compares with a kind's name, matches or looks up one, or lists several."""
    match node:
        case ast.Compare():
            return any(names_in(part) for part in (node.left, *node.comparators))
        case ast.MatchValue():
            return bool(names_in(node.value))
        case ast.Subscript():
            return bool(names_in(node.slice))
        case ast.Dict():
            return len({name for key in node.keys if key for name in names_in(key)}) > 1
    return len(names_in(node)) > 1


def uses(source: str) -> list[str]:
    """Return the lines that decide by the name of a kind."""
    found = (node for node in ast.walk(ast.parse(source)) if decides(node))
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in found if isinstance(node, ast.expr | ast.pattern)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_outside_kinds_decides_by_the_name_of_a_kind(path: Path) -> None:
    assert uses(path.read_text(encoding="utf-8")) == []


def test_the_page_does_not_compare_kinds_either() -> None:
    compared = re.compile(rf"""[!=]==?\s*["'`]({"|".join(KINDS)})["'`]""")
    pages = list(SOURCE.rglob("*.js"))
    assert pages
    assert [path.name for path in pages if compared.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "line",
    [
        'x = task.kind == "span"',
        'x = "regression" != kind',
        'x = kind in ("classification", "multilabel")',
        'x = {"regression": 1, "span": 2}[kind]',
        'x = ["regression", "span"].index(kind)',
        'x = KINDS["span"]',
        'match kind:\n    case "span":\n        pass',
    ],
)
def test_every_way_to_decide_by_name_is_found(line: str) -> None:
    assert uses(line)

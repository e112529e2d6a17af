"""Label names: how cells spell them, their order, and their indices. Kinds of task with labels share this file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.values import as_number, is_missing, listed, short

if TYPE_CHECKING:
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_ITEM = re.compile(
    r"""\s*(?:'((?:[^'\\]|\\.)*+)'|"((?:[^"\\]|\\.)*+)"|([^\s,'"\[\]][^,'"\[\]]*))\s*(?:,|$)""", re.DOTALL
)
"""An item of a list as Python and JSON print it."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?")
_DOUBTFUL = (",", ";")
"""What may separate labels, and may as well be part of a label's name."""


def label_name(value: Any) -> str:
    """Return the name of a label, the same for every file format: 1, 1.0 and "1.0" are "1"; True is "true"."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value).strip()
    whole = _WHOLE.fullmatch(text)
    if whole:
        return whole[1]
    return text.lower() if text in ("True", "False") else text


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once: numbers by size, false before true, words in order of appearance."""
    unique = tuple(dict.fromkeys(names))
    sizes = {name: as_number(name) for name in unique}
    if all(size is not None for size in sizes.values()):
        return tuple(sorted(unique, key=lambda name: sizes[name] or 0.0))
    # F1 takes the second of two labels as the positive one, so the order of booleans must not depend on the rows.
    return ("false", "true") if set(unique) == {"false", "true"} else unique


def spelling(label: str) -> str:
    """Return a label without what spellings differ in: case, blanks, dashes and underscores."""
    if as_number(label) is not None:
        return label  # 1 and -1 are not two spellings of one label
    return "".join(mark for mark in label.casefold() if not mark.isspace() and mark not in "-_\u2010\u2013") or label


def is_list_text(value: Any) -> bool:
    """Return whether a cell is a list that was written as text, such as "['a', 'b']"."""
    return isinstance(value, str) and (text := value.strip())[:1] == "[" and text[-1:] == "]"


def items_of(text: str) -> list[str]:
    """Return the items of a list that was written as text, by Python or as JSON; raise if it is not one."""
    try:
        found = json.loads(text)
        if isinstance(found, list) and not any(isinstance(item, (list, dict)) for item in found):
            return [label_name(item) for item in found if item is not None]
    except (ValueError, RecursionError):
        pass
    inside, items, place = text.strip()[1:-1].strip().removesuffix(","), [], 0
    while place < len(inside):
        item = _ITEM.match(inside, place)
        if item is None:
            raise DataError(f"{short(text)} is not a list of labels; write ['a', 'b'], or a|b.")
        quoted = item[1] if item[1] is not None else item[2]
        items.append(label_name(item[3] if quoted is None else _ESCAPE.sub(r"\1", quoted)))
        place = item.end()
    return items


def check_cells(table: Table, column: str, values: Sequence[Any], remedy: str) -> None:
    """Raise if cells that are to be one label each may hold several: where parts of some are labels of others."""
    words = {value.strip() for value in values if isinstance(value, str) and not is_missing(value)}
    odd = sorted(word for word in words if "," in word)
    if odd and all(_DECIMAL_COMMA.fullmatch(word) for word in words):
        raise DataError(
            f"{table.source}: {odd[0]!r} in column {column!r} may be a number with a decimal comma, or several labels; "
            f"write a point, or state --label-separator ',', or {remedy}."
        )
    for mark in _DOUBTFUL:
        several = {word: [part.strip() for part in word.split(mark)] for word in words if mark in word}
        parts = Counter(part for mine in several.values() for part in set(mine) if part)
        shared = any(count > 1 or part in words for part, count in parts.items())
        if shared and len(parts) <= 2 * len(words):  # more parts than that are sentences, not labels
            raise DataError(
                f"{table.source}: {short(min(several))!r} in column {column!r} may be one label or several; state the "
                f"separator with --label-separator '{mark}', or {remedy}."
            )


def class_name(table: Table, column: str, row: int) -> str:
    """Return the single label of a row; raise if the cell holds a list or an object."""
    value = table.columns[column][row]
    if isinstance(value, (list, tuple, set, dict)):
        raise DataError(
            f"{table.at(row)}: {short(value)} in column {column!r} is not a single label; "
            f"use --kind multilabel for lists of labels, or choose another column with --label."
        )
    return label_name(value)


def label_indices(
    table: Table, task: Task, rows: Sequence[int], names: Sequence[Sequence[str]]
) -> tuple[list[list[int]], list[str]]:
    """Return the index of each of the rows' label names in the task's labels, and notes for the user."""
    lookup = {name: index for index, name in enumerate(task.labels)}
    notes = []
    numbers = {str(index): index for index in range(len(task.labels))}
    words = all(as_number(name) is None for name in task.labels)
    if words and any(names) and all(name in numbers for mine in names for name in mine):
        # GLUE and many Parquet files store indices and keep the names elsewhere.
        lookup = numbers
        notes.append(f"{table.source}: the numbers in {task.label!r} are read as indices into: {listed(task.labels)}.")
    pairs = ((row, name) for row, mine in zip(rows, names, strict=True) for name in mine)
    unknown = [(row, name) for row, name in pairs if name not in lookup]
    if unknown:
        row, name = unknown[0]
        count = len({row for row, _ in unknown})
        twin = next((label for label in task.labels if spelling(label) == spelling(name)), None)
        hint = f", which spell it {short(twin)!r}" if twin is not None else ""
        raise DataError(
            f"{table.at(row)}: the label {short(name)!r} is not one of the task's {len(task.labels)} labels "
            f"({listed(task.labels)}){hint}; {count} of {len(rows)} rows have an unknown label: correct them, remove "
            f"them, or train with rows that have it."
        )
    return [[lookup[name] for name in mine] for mine in names], notes


def check_index(value: Any, labels: int, what: str) -> int:
    """Return a prediction or target that is the index of a label; raise if it is not."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < labels:
        raise InputError(f"{what} is {value!r}, not the index of a label (0 to {labels - 1}).")
    return int(value)

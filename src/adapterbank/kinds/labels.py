"""Label names: how cells spell them, their order, and their indices. Kinds of task with labels share this file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.values import as_number, listed, short

if TYPE_CHECKING:
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

_WHOLE = re.compile(r"([+-]?\d+)\.0+")


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
        raise DataError(
            f"{table.at(row)}: the label {short(name)!r} is not one of the task's {len(task.labels)} labels "
            f"({listed(task.labels)}); {count} of {len(rows)} rows have an unknown label: correct them, remove "
            f"them, or train with rows that have it."
        )
    return [[lookup[name] for name in mine] for mine in names], notes


def check_index(value: Any, labels: int, what: str) -> int:
    """Return a prediction or target that is the index of a label; raise if it is not."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < labels:
        raise InputError(f"{what} is {value!r}, not the index of a label (0 to {labels - 1}).")
    return int(value)

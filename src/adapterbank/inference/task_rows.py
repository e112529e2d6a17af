"""Texts of several tasks in any order: grouped by task, with results back in order. Knows no banks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from adapterbank.errors import InputError
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.values import as_text
from adapterbank.kinds.words import Words
from adapterbank.tasks.columns import find_texts
from adapterbank.tasks.examples import located, read_examples
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import Table

RowResult = TypeVar("RowResult")


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task, with the position of each among all rows."""

    task: str | None
    """None is the bare encoder."""
    rows: list[tuple[Any, ...]]
    """The texts of each row; a label may follow them, as in training data."""
    places: list[int]

    def examples(self, task: Task | None) -> Examples:
        """Return the rows as examples of the task, one or two texts per row; labels are left out."""
        if task is None:
            seconds = [row[1] for row in self.rows if len(row) > 1]
            return Examples([row[0] for row in self.rows], seconds if len(seconds) == len(self.rows) else None)
        if KINDS[task.kind].words:
            return Examples([row[0] if len(row) == 1 else Words.of(row) for row in self.rows])
        width = len(task.text)
        if any(len(row) != width and not _is_labelled(row, task) for row in self.rows):
            remedy = "pass a second text for every row" if width == 2 else "pass no second texts"
            raise InputError(f"{self.task!r} reads {' and '.join(task.text)}; {remedy}.")
        return Examples([row[0] for row in self.rows], [row[1] for row in self.rows] if width == 2 else None)


def _is_labelled(row: tuple[Any, ...], task: Task) -> bool:
    """Return whether a row is one of training data. A second text is not a label, however many texts a task reads."""
    if len(row) != len(task.text) + 1:
        return False
    return len(row) == 3 or not isinstance(row[-1], str) or row[-1] in task.labels


def is_tabular(data: Any) -> bool:
    """Return whether data is a file or a table rather than a sequence of texts."""
    if isinstance(data, (list, tuple)):
        return bool(data) and isinstance(data[0], Mapping)
    named = hasattr(data, "columns") or hasattr(data, "column_names")  # frames; a frame's column has neither
    return named or isinstance(data, (str, os.PathLike, Mapping))


def by_task(
    task: str | Sequence[str | None] | None,
    texts: Iterable[Any],
    pairs: Sequence[str | None] | None,
) -> list[TaskRows]:
    """Group rows by task; `task` is one for all texts, or one for each."""
    if hasattr(texts, "tolist"):  # an array, or a column of a frame
        texts = [tuple(value) if isinstance(value, list) else as_text(value) for value in texts.tolist()]
    # A list of one word is the same text for every task, and its word is known to those that ask for words.
    single = (Words.of(text) if isinstance(text, list) and len(text) == 1 else text for text in texts)
    rows = [tuple(text) if isinstance(text, (tuple, list)) else (text,) for text in single]
    tasks = [task] * len(rows) if task is None or isinstance(task, str) else list(task)
    for what, count in (("tasks", len(tasks)), ("pairs", len(rows) if pairs is None else len(pairs))):
        if count != len(rows):
            raise InputError(f"There are {len(rows)} texts but {count} {what}; pass one for each text.")
    groups: dict[str | None, TaskRows] = {}
    for place, (name, row) in enumerate(zip(tasks, rows, strict=True)):
        second = None if pairs is None else pairs[place]
        group = groups.setdefault(name, TaskRows(name, [], []))
        group.rows.append(row if second is None or len(row) > 1 else (*row, second))
        group.places.append(place)
    return list(groups.values())


def table_rows(
    table: Table,
    tasks: Sequence[str | None],
    spec_of: Callable[[str], Task],
    text: str | None = None,
    text_pair: str | None = None,
) -> list[tuple[str, ...]]:
    """Return the texts of each row, which are in the columns of its own task (`examples.located`).

    A row without a task, for the bare encoder, has one text, in the column named or in one with a usual name.
    """
    if len(tasks) != table.rows:
        raise InputError(f"{table.source} has {table.rows} rows, but there are {len(tasks)} tasks; pass one for each.")
    read: dict[tuple[str, ...], Examples] = {}
    columns: dict[str | None, tuple[str, ...]] = {}
    for name in dict.fromkeys(tasks):
        spec = spec_of(name) if name else _bare(text or find_texts(table, count=1)[0])
        spec = located(table, spec, text, text_pair) if name else spec
        columns[name] = spec.text
        if spec.text not in read:
            read[spec.text] = read_examples(table, spec, need_targets=False)[0]
    found = [read[columns[name]] for name in tasks]
    return [(one.texts[i], one.pairs[i]) if one.pairs else (one.texts[i],) for i, one in enumerate(found)]


def _bare(column: str) -> Task:
    return Task("bare", "regression", (column,), "", (), "spearman")


def in_order(groups: Sequence[TaskRows], results: Iterable[Sequence[RowResult]]) -> list[RowResult]:
    """Return the results of all groups in the order of the rows."""
    placed = {place: result for group, own in zip(groups, results, strict=True)
              for place, result in zip(group.places, own, strict=True)}  # fmt: skip
    return [placed[place] for place in range(len(placed))]

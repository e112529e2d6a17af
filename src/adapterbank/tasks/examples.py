"""Rows of a table as the examples of a task. It knows no tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO

from adapterbank.errors import DataError
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.values import as_text, is_missing, listed, short
from adapterbank.kinds.words import Words, joined
from adapterbank.tasks.columns import find_columns, find_texts
from adapterbank.tasks.compound import has_columns, with_label, with_texts
from adapterbank.tasks.remarks import remarks
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import Table, is_plain_text, read_lines, read_table


@dataclass(frozen=True)
class Report:
    """What was found while reading."""

    rows: int
    """Rows of the table."""
    empty: int = 0
    """Rows with an empty text: dropped when targets are read, kept for prediction."""
    unlabelled: int = 0
    """Rows with a text and without a label that were dropped."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""
    remarks: list[str] = field(default_factory=list)
    """The same of what is odd about labels and repeated rows, which is for those who can change the data."""


def read_examples(
    table: Table, task: Task, *, need_targets: bool = True, drop_unlabelled: bool = False
) -> tuple[Examples, Report]:
    """Return the rows as examples; without targets every row is kept, so that predictions match the rows.

    Rows without a label are refused, or dropped if that is stated.
    """
    table = with_texts(table, task.text)
    parts = [_texts(table, name, words=KINDS[task.kind].words) for name in task.text]
    empty = [row for row in range(table.rows) if any(not part[row].strip() for part in parts)]
    examples = Examples(parts[0], parts[1] if len(parts) == 2 else None)
    if not need_targets:
        return examples, Report(table.rows, len(empty), notes=list(table.notes))
    kind = KINDS[task.kind]
    table = with_label(table, task.label, single=kind.single_label, separator=task.label_separator)
    if len(empty) == table.rows:
        raise DataError(
            f"{table.source}: every row is empty in {listed(task.text)}; choose another column with --text."
        )
    notes = [*table.notes, *([_dropped(table, empty, "an empty text")] if empty else [])]
    kept = sorted({*range(table.rows)} - {*empty})
    missing = unlabelled_rows(table, task, kept, blank_too=drop_unlabelled)
    if missing and not drop_unlabelled:
        raise DataError(_unlabelled(table, task, missing))
    if missing:
        notes.append(_dropped(table, missing, "no label"))
        kept = sorted({*kept} - {*missing})
    targets, more = kind.read_targets(table, task, kept)
    found = replace(examples.select(kept), targets=targets)
    return found, Report(table.rows, len(empty), len(missing), notes + more, remarks(table.source, task, kept, found))


def unlabelled_rows(table: Table, task: Task, rows: Iterable[int], *, blank_too: bool = False) -> list[int]:
    """Return which of the rows have no label; `blank_too` counts cells of whitespace where these are a label."""
    blank_is_label = KINDS[task.kind].blank_is_label and not blank_too
    column = table.columns[task.label]
    return [row for row in rows if is_missing(column[row]) and not (blank_is_label and isinstance(column[row], str))]


def _unlabelled(table: Table, task: Task, missing: Sequence[int]) -> str:
    also = f", as in {len(missing) - 1} more of {table.rows} rows" if len(missing) > 1 else ""
    where = f"{table.at(missing[0])}: column {task.label!r} is empty{also}"
    return f"{where}; fill it in, or leave out rows without a label with --drop-unlabelled."


def read_texts(source: str | os.PathLike[str] | TextIO, task: Task) -> Examples:
    """Return texts to predict from a table, or from a .txt file or an open stream with one text on each line.

    A tab separates the two texts of a line. The columns of a table are those of `located`.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _line_examples(_stream_lines(source), task, "standard input")
    if is_plain_text(source):
        return _line_examples(read_lines(source), task, os.fspath(source))
    table = read_table(source)
    return read_examples(table, located(table, task), need_targets=False)[0]


def located(table: Table, task: Task, text: str | None = None, text_pair: str | None = None) -> Task:
    """Return the task with its text columns in this table: those named, its own, or those with usual names."""
    if text is None and text_pair is None:
        if has_columns(table, task.text):
            return task
        known = task.label if has_columns(table, [task.label]) else None
        return replace(task, text=find_texts(table, label=known, kind=task.kind, count=len(task.text)))
    found = find_columns(table, text, text_pair, None, task.kind, need_label=False).text
    if len(found) != len(task.text):
        count = ("one text", "two texts")[len(task.text) - 1]
        raise DataError(f"{task.name!r} reads {count} a row, but {listed(found)} was named; name {count}.")
    return replace(task, text=found)


def labelled_as(
    table: Table, task: Task, text: str | None = None, text_pair: str | None = None, label: str | None = None
) -> Task:
    """Return the task with its columns in this table: its own, those named, or those with usual names."""
    named = text or text_pair or label
    if not named and has_columns(table, (*task.text, task.label)):
        return task
    label = label or (task.label if has_columns(table, [task.label]) else None)
    if not text and has_columns(table, task.text):
        text, text_pair = task.text[0], (task.text[1] if len(task.text) == 2 else None)
    found = find_columns(table, text, text_pair, label, task.kind)
    if len(found.text) != len(task.text):
        raise DataError(f"{table.source}: {task.name!r} reads {len(task.text)} texts a row; name them with --text.")
    assert found.label is not None
    return replace(task, text=found.text, label=found.label)


def _texts(table: Table, name: str, *, words: bool = False) -> list[str]:
    """Return the texts of a column; with `words`, a list is the words of a text."""
    values = [joined(value) if words else value for value in table.columns[name]]
    for row, value in enumerate(values):
        if isinstance(value, (list, tuple, dict, set, bytes)):
            raise DataError(
                f"{table.at(row)}: {short(value)} in column {name!r} is not a text; choose another with --text."
            )
    return [value if isinstance(value, Words) else as_text(value) for value in values]


def _dropped(table: Table, rows: Sequence[int], why: str) -> str:
    count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    return f"{table.source}: dropped {count} of {table.rows} with {why} (first: row {rows[0] + 1})."


# --- lines --------------------------------------------------------------------------------------------------


def _stream_lines(stream: TextIO) -> list[str]:
    try:
        lines = [line.removesuffix("\n").removesuffix("\r") for line in stream]
    except UnicodeDecodeError as error:
        raise DataError(f"Standard input is not UTF-8 ({error.reason}); convert it with iconv.") from None
    if not lines:
        raise DataError("Standard input is empty; pipe in one text on each line.")
    return [lines[0].removeprefix("\ufeff"), *lines[1:]]


def _line_examples(lines: Iterable[str], task: Task, source: str) -> Examples:
    if len(task.text) == 1:
        return Examples(list(lines))
    halves = [line.split("\t") for line in lines]
    for number, parts in enumerate(halves, 1):
        if len(parts) != 2:
            raise DataError(
                f"{source}, line {number}: {len(parts) - 1} tabs; the task {task.name!r} needs exactly "
                f"one, between {task.text[0]!r} and {task.text[1]!r}."
            )
    return Examples([first for first, _ in halves], [second for _, second in halves])

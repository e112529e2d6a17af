"""Rows of a table as the examples of a task, and one split cut into two. It knows no tokens."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.values import as_text, is_missing, listed, short
from adapterbank.tasks.columns import find_columns, find_texts, require_column
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import Table, is_plain_text, read_lines, read_table


@dataclass(frozen=True)
class Report:
    """What was found while reading."""

    rows: int
    """Rows of the table."""
    empty: int = 0
    """Rows with an empty text: dropped when targets are read, kept for prediction."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""


def read_examples(table: Table, task: Task, *, need_targets: bool = True) -> tuple[Examples, Report]:
    """Return the rows as examples; without targets every row is kept, so that predictions match the rows."""
    for name in task.text:
        require_column(table, name, "--text")
    parts = [_texts(table, name) for name in task.text]
    empty = [row for row in range(table.rows) if any(not part[row].strip() for part in parts)]
    examples = Examples(parts[0], parts[1] if len(parts) == 2 else None)
    if not need_targets:
        return examples, Report(table.rows, len(empty))
    require_column(table, task.label, "--label")
    if len(empty) == table.rows:
        raise DataError(
            f"{table.source}: every row is empty in {listed(task.text)}; choose another column with --text."
        )
    dropped = set(empty)
    kept = [row for row in range(table.rows) if row not in dropped]
    notes = [] if not empty else [_dropped(table, empty)]
    _check_filled(table, task, kept)
    targets, remarks = KINDS[task.kind].read_targets(table, task, kept)
    return replace(examples.select(kept), targets=targets), Report(table.rows, len(empty), notes + remarks)


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
        if all(name in table.columns for name in task.text):
            return task
        known = task.label if task.label in table.columns else None
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
    if not named and all(name in table.columns for name in (*task.text, task.label)):
        return task
    label = label or (task.label if task.label in table.columns else None)
    if not text and all(name in table.columns for name in task.text):
        text, text_pair = task.text[0], (task.text[1] if len(task.text) == 2 else None)
    found = find_columns(table, text, text_pair, label, task.kind)
    if len(found.text) != len(task.text):
        raise DataError(f"{table.source}: {task.name!r} reads {len(task.text)} texts a row; name them with --text.")
    assert found.label is not None
    return replace(task, text=found.text, label=found.label)


def split(examples: Examples, *, task: Task, fraction: float = 0.1, seed: int = 0) -> tuple[Examples, Examples]:
    """Split off a fraction for dev: the same rows for the same seed, with the same mix of single labels."""
    # RandomState, because numpy guarantees that its stream never changes, unlike that of newer generators.
    from numpy.random import RandomState

    if len(examples) < 2:
        raise DataError(f"There are {len(examples)} rows; splitting off dev rows needs 2 or more.")
    if not 0 < fraction < 1:
        raise InputError(f"The fraction of dev rows is {fraction}; it must be between 0 and 1, such as 0.1.")
    draw = RandomState(seed)
    order: list[int] = draw.permutation(len(examples)).tolist()
    size = min(max(1, round(len(examples) * fraction)), len(examples) - 1)
    groups: dict[Any, list[int]] = {}
    classes = examples.targets if KINDS[task.kind].single_label else None
    for row in order:
        groups.setdefault(None if classes is None else classes[row], []).append(row)
    shares = _shares([len(group) for group in groups.values()], size)
    dev = [row for group, share in zip(groups.values(), shares, strict=True) for row in group[:share]]
    # If every class has a single row, no class can spare one, and dev still needs a row.
    chosen = set(dev or order[:size])
    return (
        examples.select(row for row in range(len(examples)) if row not in chosen),
        examples.select(sorted(chosen)),
    )


def _shares(sizes: Sequence[int], wanted: int) -> list[int]:
    # Largest remainders: whole shares first, then one more where the remainder is largest; never a group's last row.
    exact = [size * wanted / sum(sizes) for size in sizes]
    most = [size - 1 for size in sizes]
    shares = [min(int(share), cap) for share, cap in zip(exact, most, strict=True)]
    # Of equal remainders the first, which is random too: groups are in the order of the shuffled rows.
    room = [(shares[place] - exact[place], place) for place in range(len(sizes)) if shares[place] < most[place]]
    heapq.heapify(room)
    for _ in range(min(wanted, sum(most)) - sum(shares)):
        _, place = heapq.heappop(room)
        shares[place] += 1
        if shares[place] < most[place]:
            heapq.heappush(room, (shares[place] - exact[place], place))
    return shares


def _check_filled(table: Table, task: Task, rows: Sequence[int]) -> None:
    blank_is_label = KINDS[task.kind].blank_is_label
    for row in rows:
        value = table.columns[task.label][row]
        if is_missing(value) and not (blank_is_label and isinstance(value, str)):
            raise DataError(f"{table.at(row)}: column {task.label!r} is empty; fill it in or remove the row.")


def _texts(table: Table, name: str) -> list[str]:
    values = table.columns[name]
    for row, value in enumerate(values):
        if isinstance(value, (list, tuple, dict, set, bytes)):
            raise DataError(
                f"{table.at(row)}: {short(value)} in column {name!r} is not a text; choose another with --text."
            )
    return [as_text(value) for value in values]


def _dropped(table: Table, empty: Sequence[int]) -> str:
    rows = "1 row" if len(empty) == 1 else f"{len(empty)} rows"
    return f"{table.source}: dropped {rows} of {table.rows} with an empty text (first: row {empty[0] + 1})."


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

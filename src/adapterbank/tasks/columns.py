"""Which columns of a table are texts and labels, and the task they state. It knows no files or examples."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.labels import label_name
from adapterbank.kinds.table import KINDS, find_kind
from adapterbank.kinds.values import is_missing, listed
from adapterbank.tasks.spec import Task
from adapterbank.tasks.tables import Table

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "context"),
    ("question", "passage"),
    ("query", "document"),
    ("query", "passage"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("text", "text_pair"),
    ("sentence_a", "sentence_b"),
    ("sentence_1", "sentence_2"),
    ("#1 string", "#2 string"),  # MRPC in the official GLUE download
    ("question", "answer"),
)
"""Usual names of two texts, most likely first, in lower case; tried before names of a single text."""

TEXTS = (
    *("text", "sentence", "content", "review", "tweet", "message", "body", "document", "utterance"),
    *("comment", "description", "headline", "title", "question", "query", "input", "abstract"),
)
"""Usual names of a single text."""

LABELS = (
    *("label", "labels", "gold_label", "answers", "class", "category", "target", "targets", "sentiment"),
    *("emotion", "intent", "topic", "score", "rating", "stars", "similarity", "is_duplicate", "quality"),
    *("tag", "tags", "genre", "genres", "y", "answer"),
)
"""Usual names of the label."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that state a task."""

    text: tuple[str, ...]
    label: str | None


def find_columns(
    table: Table,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    kind: str | None = None,
    need_label: bool = True,
) -> Columns:
    """Return the columns that were named, and find the others by their usual names."""
    row = find_kind(kind) if kind is not None else None
    given = tuple(name for name in (text, text_pair) if name is not None)
    if given and (text is None or (row is not None and len(given) < min(row.text_counts))):
        raise InputError(f"Only {given[0]!r} was named; name both columns, with --text and --text-pair.")
    named = [*given, *([label] if label is not None else [])]
    for name, option in zip((text, text_pair, label), ("--text", "--text-pair", "--label"), strict=True):
        if name is not None:
            require_column(table, name, option)
    if len(set(named)) < len(named):
        raise InputError(f"Two of the columns named are the same ({listed(named)}); name different ones.")
    usual = row.label_columns if row is not None else ()
    target = label or _by_name(table, usual or LABELS, taken=given)
    texts = given or find_texts(table, label=target, kind=kind)
    if target is None and need_label and not usual:
        rest = [name for name in table.columns if name not in texts]
        target = rest[0] if len(rest) == 1 else None
    if target is None and need_label:
        raise DataError(
            f"{table.source} has no column with a usual name for labels; name it with --label. "
            f"Its columns: {listed(table.columns)}."
        )
    return Columns(texts, target)


def find_texts(
    table: Table, *, label: str | None = None, kind: str | None = None, count: int | None = None
) -> tuple[str, ...]:
    """Find one or two text columns (`count` if given) by usual names, or as the only columns beside the label."""
    row = find_kind(kind) if kind is not None else None
    if count is None and row is not None and len(row.text_counts) == 1:
        count = row.text_counts[0]
    taken, usual = () if label is None else (label,), row.text_columns if row is not None else ()
    for names in (usual,) if usual else () if count == 1 else PAIRS:
        found = tuple(column for name in names if (column := _by_name(table, (name,), taken)) is not None)
        if len(found) == len(names):
            return found
    if not usual:
        single = _by_name(table, TEXTS, taken) if count != 2 else None
        rest = tuple(name for name in table.columns if name not in taken)
        if single is not None:
            return (single,)
        if len(rest) == (count or 1):
            return rest
    wanted = " and ".join(usual) or ("two texts" if count == 2 else "texts")
    raise DataError(
        f"{table.source} has no columns with usual names for {wanted}; name them with --text (and "
        f"--text-pair for a second). Its columns, from the first line or the keys: {listed(table.columns)}."
    )


def require_column(table: Table, name: str, option: str) -> None:
    """Raise unless the table has the column."""
    if name not in table.columns:
        near = difflib.get_close_matches(name, table.columns, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{table.source} has no column {name!r}.{hint} Choose with {option} from: {listed(table.columns)}."
        )


def infer_task(
    table: Table,
    columns: Columns,
    *,
    name: str,
    kind: str | None = None,
    labels: Sequence[str] | None = None,
    metric: str | None = None,
) -> Task:
    """Return the task that the columns state; what is not given is inferred from the rows that have a text."""
    chosen = find_kind(kind) if kind is not None else None
    if columns.label is None:
        raise DataError(f"{table.source} has no label column, so it states no task; name one with --label.")
    texts, column = [table.columns[name] for name in columns.text], table.columns[columns.label]
    rows = [row for row in range(table.rows) if not any(is_missing(text[row]) for text in texts)]
    values = [column[row] for row in rows if not is_missing(column[row])]
    if not values:
        raise DataError(f"{table.source}: no row has a text and a value in {columns.label!r}; see --label.")
    # The last row that fits: the first, classification, fits any values.
    chosen = chosen or next(row for row in reversed(KINDS.values()) if row.recognizes(columns, values))
    names = chosen.infer_labels(table, columns.label, rows) if labels is None else tuple(map(label_name, labels))
    return Task(
        name,
        chosen.name,
        columns.text,
        columns.label,
        names,
        metric or chosen.metrics[0],
        chosen.initial_threshold(values),
    )


def _by_name(table: Table, usual: Iterable[str], taken: Collection[str]) -> str | None:
    here = {name.strip().lower(): name for name in reversed(table.columns) if name not in taken}
    return next((here[name] for name in usual if name in here), None)

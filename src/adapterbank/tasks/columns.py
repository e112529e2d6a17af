"""Which columns of a table are texts and labels, and the task they state. It knows no files or examples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.labels import check_cells, label_name
from adapterbank.kinds.table import KINDS, find_kind
from adapterbank.kinds.values import is_missing, listed, short
from adapterbank.tasks.compound import join_names, parts_of, split_names, unknown_column, with_label, with_texts
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
    *("tokens", "words"),
)
"""Usual names of a single text."""

LABELS = (
    *("label", "labels", "gold_label", "answers", "class", "category", "target", "targets", "sentiment"),
    *("emotion", "intent", "topic", "score", "rating", "stars", "similarity", "is_duplicate", "quality"),
    *("tag", "tags", "genre", "genres", "y", "answer", "ner_tags", "upos", "pos_tags", "entities", "spans"),
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
    text, text_pair, label = (
        None if name is None else _resolved(table, name, option)
        for name, option in ((text, "--text"), (text_pair, "--text-pair"), (label, "--label"))
    )
    given = tuple(name for name in (text, text_pair) if name is not None)
    named = [part for name in (text, text_pair, label) if name is not None for part in parts_of(table, name)]
    if len(set(named)) < len(named):
        raise InputError(f"Two of the columns named are the same ({listed(named)}); name different ones.")
    usual = row.label_columns if row is not None else ()
    target = label or _by_name(table, usual or LABELS, taken=named)
    texts = given or find_texts(table, label=target, kind=kind)
    _check_header(table, [*(() if given else texts), *(() if label or target is None else (target,))])
    if target is None and need_label and not usual:
        rest = [name for name in table.columns if name not in texts]
        target = rest[0] if len(rest) == 1 else None
    if target is None and need_label:
        raise DataError(
            f"{table.source} has no column with a usual name for labels; name it with --label. "
            f"Its columns: {listed(table.columns)}.{_no_header(table)}"
        )
    return Columns(texts, target)


def find_texts(
    table: Table, *, label: str | None = None, kind: str | None = None, count: int | None = None
) -> tuple[str, ...]:
    """Find one or two text columns (`count` if given) by usual names, or as the only columns beside the label."""
    row = find_kind(kind) if kind is not None else None
    if count is None and row is not None and len(row.text_counts) == 1:
        count = row.text_counts[0]
    taken, usual = () if label is None else parts_of(table, label), row.text_columns if row is not None else ()
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
        f"--text-pair for a second). Its columns, from the first line or the keys: "
        f"{listed(table.columns)}.{_no_header(table)}"
    )


def require_column(table: Table, name: str, option: str) -> None:
    """Raise unless the table has the column."""
    if name not in table.columns:
        raise unknown_column(table, name, option)


def _resolved(table: Table, name: str, option: str) -> str:
    """Return the name of the columns that a user named, or gave by number from 1: one, or several in a list."""
    if name in table.columns:
        return name
    found = [_one_column(table, part, option) for part in split_names(name)]
    return found[0] if len(found) == 1 else join_names(found)


def _one_column(table: Table, name: str, option: str) -> str:
    if name in table.columns:
        return name
    from_0 = [*table.columns] == [str(place) for place in range(len(table.columns))]  # names that pandas gives
    if from_0 or not (name.isascii() and name.isdecimal() and 1 <= int(name[:9]) <= len(table.columns)):
        raise unknown_column(table, name, option)
    usual = {*TEXTS, *LABELS, *(part for pair in PAIRS for part in pair)}
    if table.assumed_header and not any(column.strip().lower() in usual for column in table.columns):
        raise DataError(
            f"{table.source}: is its first line a header ({listed(table.columns)})? Add --header if it is, and "
            f"--no-header if it is a row."
        )
    return [*table.columns][int(name) - 1]


def _check_header(table: Table, found: Iterable[str]) -> None:
    """Raise if a column that was found by its name has that name as a value: the first line is then a row."""
    odd = next((name for name in found if table.assumed_header and name in table.columns[name]), None)
    if odd is not None:
        raise DataError(
            f"{table.source}: {short(odd)!r} is the name of a column by the first line, and a value in it; add "
            f"--no-header if the first line is a row, and --header if it is not."
        )


def _no_header(table: Table) -> str:
    return " If the first line is a row, add --no-header." if table.assumed_header else ""


def infer_task(
    table: Table,
    columns: Columns,
    *,
    name: str,
    kind: str | None = None,
    labels: Sequence[str] | None = None,
    metric: str | None = None,
    label_separator: str | None = None,
) -> Task:
    """Return the task that the columns state; what is not given is inferred from the rows that have a text."""
    chosen = find_kind(kind) if kind is not None else None
    if columns.label is None:
        raise DataError(f"{table.source} has no label column, so it states no task; name one with --label.")
    single = chosen is not None and chosen.single_label
    table = with_texts(table, columns.text)
    table = with_label(table, columns.label, single=single, separator=label_separator)
    texts, column = [table.columns[name] for name in columns.text], table.columns[columns.label]
    rows = [row for row in range(table.rows) if not any(is_missing(text[row]) for text in texts)]
    values = [column[row] for row in rows if not is_missing(column[row])]
    if not values:
        raise DataError(f"{table.source}: no row has a text and a value in {columns.label!r}; see --label.")
    # The last row that fits: the first, classification, fits any values.
    chosen = chosen or next(row for row in reversed(KINDS.values()) if row.recognizes(columns, values))
    if label_separator is not None and not chosen.several_labels:
        raise InputError(f"A task of {chosen.name} has one label in a cell; leave out --label-separator.")
    is_label = chosen.fewest_labels and not chosen.words  # a tag may be of any characters
    if is_label and label_separator is None and (kind is None or chosen.several_labels):
        one = "--label-separator none" if chosen.several_labels else f"--kind {chosen.name} if it is one"
        check_cells(table, columns.label, values, f"use {one}")
    names = chosen.infer_labels(table, columns.label, rows) if labels is None else tuple(map(label_name, labels))
    return Task(
        name,
        chosen.name,
        columns.text,
        columns.label,
        names,
        metric or chosen.metrics[0],
        chosen.initial_threshold(values),
        label_separator,
    )


def _by_name(table: Table, usual: Iterable[str], taken: Collection[str]) -> str | None:
    here = {name.strip().lower(): name for name in reversed(table.columns) if name not in taken}
    return next((here[name] for name in usual if name in here), None)

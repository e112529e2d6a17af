"""What the columns of a table mean: texts, labels, and the task they pose. It knows no files or examples."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from adapterbank.errors import DataError, InputError, UnknownName
from adapterbank.metrics import DEFAULT_METRIC
from adapterbank.tasks.spec import KINDS, Task
from adapterbank.tasks.tables import Table, listed, short

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
    ("#1 string", "#2 string"),  # MRPC as GLUE hands it out
    ("question", "answer"),
)
"""Usual names of two texts, likeliest first; looked for before single ones, in lower case."""

TEXTS = (
    *("text", "sentence", "content", "review", "tweet", "message", "body", "document", "utterance"),
    *("comment", "description", "headline", "title", "question", "query", "input", "abstract"),
)
"""Usual names of one text."""

LABELS = (
    *("label", "labels", "gold_label", "answers", "class", "category", "target", "targets", "sentiment"),
    *("emotion", "intent", "topic", "score", "rating", "stars", "similarity", "is_duplicate", "quality"),
    *("tag", "tags", "genre", "genres", "y", "answer"),
)
"""Usual names of the label."""

ANSWERS = ("answers", "answer")
"""Usual names of the answer of a span task."""

SPAN_TEXTS = ("question", "context")

SEPARATOR = "|"
"""Between the labels of a row where a cell is one string."""

MOST_CLASSES = 1000
"""More than this is an identifier, not a class."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WHOLE = re.compile(r"([+-]?\d+)\.0+")


@dataclass(frozen=True)
class Columns:
    """The columns of a table that make a task."""

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
    _check_kind(kind)
    given = tuple(name for name in (text, text_pair) if name is not None)
    if given and (text is None or (kind == "span" and len(given) == 1)):
        raise InputError(f"Only {given[0]!r} was named; name both columns, with --text and --text-pair.")
    named = [*given, *([label] if label is not None else [])]
    for name, option in zip((text, text_pair, label), ("--text", "--text-pair", "--label"), strict=True):
        if name is not None:
            require_column(table, name, option)
    if len(set(named)) < len(named):
        raise InputError(f"Two of the columns named are the same ({listed(named)}); each has its own part.")
    target = label or _by_name(table, ANSWERS if kind == "span" else LABELS, taken=given)
    texts = given or find_texts(table, label=target, kind=kind)
    if target is None and need_label and kind != "span":
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
    """Find one or two text columns (`count` where given) by usual names, or as all that the label leaves."""
    taken = () if label is None else (label,)
    pairs = () if count == 1 else (SPAN_TEXTS,) if kind == "span" else PAIRS
    for first, second in pairs:
        found = (_by_name(table, (first,), taken), _by_name(table, (second,), taken))
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
    if kind != "span":
        single = _by_name(table, TEXTS, taken) if count != 2 else None
        rest = tuple(name for name in table.columns if name not in taken)
        if single is not None:
            return (single,)
        if len(rest) == (count or 1):
            return rest
    wanted = "question and context" if kind == "span" else "two texts" if count == 2 else "texts"
    raise DataError(
        f"{table.source} has no columns with usual names for {wanted}; name them with --text (and "
        f"--text-pair for a second). Its columns, as the first line or the keys name them: "
        f"{listed(table.columns)}."
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
    """Return the task that the columns pose; what is not stated is read off the rows that have a text."""
    _check_kind(kind)
    if columns.label is None:
        raise DataError(f"{table.source} has no label column, so it poses no task; name one with --label.")
    texts, column = [table.columns[name] for name in columns.text], table.columns[columns.label]
    rows = [row for row in range(table.rows) if not any(is_missing(text[row]) for text in texts)]
    values = [column[row] for row in rows if not is_missing(column[row])]
    if not values:
        raise DataError(f"{table.source}: no row has a text and a value in {columns.label!r}; see --label.")
    kind = kind or _infer_kind(columns, values)
    if labels is not None:
        names = tuple(label_name(label) for label in labels)
    elif kind == "classification":
        names = in_order(class_name(table, columns.label, row) for row in rows if not is_missing(column[row]))
        _check_classes(table, columns.label, names, len(values))
    elif kind == "multilabel":
        names = in_order(part for value in values for part in label_names(value))
    else:
        names = ()
    if kind == "regression":
        for row in rows:
            number_at(table, columns.label, row)
    threshold = 0.0 if kind == "span" and any(has_no_answer(value) for value in values) else None
    return Task(name, kind, columns.text, columns.label, names, metric or DEFAULT_METRIC[kind], threshold)


def _check_kind(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        raise UnknownName(kind, "a kind of task", KINDS)


def _by_name(table: Table, usual: Iterable[str], taken: Collection[str]) -> str | None:
    here = {name.strip().lower(): name for name in reversed(table.columns) if name not in taken}
    return next((here[name] for name in usual if name in here), None)


def _infer_kind(columns: Columns, values: Sequence[Any]) -> str:
    texts, label = tuple(name.strip().lower() for name in columns.text), (columns.label or "").strip().lower()
    if (texts == SPAN_TEXTS and label in ANSWERS) or any(isinstance(value, dict) for value in values):
        return "span"
    if any(isinstance(value, (list, tuple, set)) for value in values):
        return "multilabel"
    if any(isinstance(value, str) and SEPARATOR in value for value in values):
        return "multilabel"
    numbers = [as_number(value) for value in values]
    whole = all(number is None or number.is_integer() for number in numbers)
    return "classification" if whole or None in numbers else "regression"


def _check_classes(table: Table, column: str, names: tuple[str, ...], rows: int) -> None:
    if len(names) == 1:
        raise DataError(
            f"{table.source}: every row has the label {names[0]!r} in column {column!r}; a classifier needs "
            f"two labels at least, so add rows of another or choose another column with --label."
        )
    # From 20 rows on; below that a table of examples may well show each class once.
    if len(names) > MOST_CLASSES or (rows > 20 and len(names) > rows / 2):
        odd = [name for name in names if as_number(name) is None]
        remedy = "an identifier or a text, perhaps:"
        if len(odd) < len(names) / 2:
            remedy = f"for numbers state --kind regression{f' and mend {listed(odd, 3)}' if odd else ''}, or"
        raise DataError(
            f"{table.source}: column {column!r} has {len(names)} different labels in {rows} rows "
            f"({listed(names, 3)}), which is too many to be classes; {remedy} choose another column "
            f"with --label, or name the classes with --labels."
        )


# --- values -------------------------------------------------------------------------------------------------


def is_missing(value: Any) -> bool:
    """Tell whether a cell holds nothing: None, NaN or blanks."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def has_no_answer(value: Any) -> bool:
    """Tell whether a span cell says that its question has no answer: an empty list, as in SQuAD 2.0."""
    texts = value.get("text") if isinstance(value, dict) else value
    return isinstance(texts, (list, tuple)) and len(texts) == 0


def as_number(value: Any) -> float | None:
    """Return the number that a cell holds, or None; booleans are words, and 1_000 is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value.strip()) else None
    try:
        return float(value) if isinstance(value, (int, float, Decimal)) else None
    except OverflowError:
        return math.inf


def number_at(table: Table, column: str, row: int) -> float:
    """Return a regression target, or raise with its row and value."""
    value = table.columns[column][row]
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise DataError(
            f"{table.at(row)}: {short(value)!r} in column {column!r} is no finite number, which regression "
            f"needs; correct the row, or state --kind classification."
        )
    return number


def label_name(value: Any) -> str:
    """Write a label the same way whatever format carried it: 1, 1.0 and "1.0" are "1"; True is "true"."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value).strip()
    whole = _WHOLE.fullmatch(text)
    if whole:
        return whole[1]
    return text.lower() if text in ("True", "False") else text


def label_names(value: Any) -> list[str]:
    """Return the labels of a multilabel cell: a list, or one string with `|` between the names."""
    if isinstance(value, str):
        parts: Iterable[Any] = value.split(SEPARATOR)
    else:
        parts = value if isinstance(value, (list, tuple, set)) else (value,)
    return [label_name(part) for part in parts if not is_missing(part)]


def class_name(table: Table, column: str, row: int) -> str:
    """Return the label of a row of one class, or raise where it is no single value."""
    value = table.columns[column][row]
    if isinstance(value, (list, tuple, set, dict)):
        raise DataError(
            f"{table.at(row)}: {short(value)} in column {column!r} is not one label; "
            f"state --kind multilabel for lists of labels, or choose another column with --label."
        )
    return label_name(value)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once: numbers by size, false before true, words as they first appear."""
    unique = tuple(dict.fromkeys(names))
    sizes = {name: as_number(name) for name in unique}
    if all(size is not None for size in sizes.values()):
        return tuple(sorted(unique, key=lambda name: sizes[name] or 0.0))
    # The second of two labels is the positive one for F1, so the order of booleans is not left to chance.
    return ("false", "true") if set(unique) == {"false", "true"} else unique

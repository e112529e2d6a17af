"""A profile of a data set before training: sizes, label balance, lengths, duplicates, misspelt labels.

It knows no tokenizer: the caller gives token lengths, and everything else comes from the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from adapterbank.kinds.labels import spelling
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.values import is_missing
from adapterbank.tasks.compound import has_columns, with_label, with_texts
from adapterbank.tasks.spec import Task
from adapterbank.tasks.tables import Table

LONG_SHARE, LOST_SHARE = 0.1, 0.25
"""Training reads texts in windows if so many of them would lose more than so much of their tokens."""
PERCENTILES = (5, 25, 50, 75, 95, 99, 100)


def profile(
    task: Task, tables: Mapping[str, Table], lengths: Mapping[str, Sequence[int]], max_length: int
) -> dict[str, Any]:
    """Describe every split and the rows that splits share; `lengths` has the number of tokens of each row."""
    tables = {name: _resolved(task, table) for name, table in tables.items()}
    texts = {name: _texts(task, table) for name, table in tables.items()}
    return {
        "task": task.name,
        "kind": task.kind,
        "columns": {"text": list(task.text), "label": task.label},
        "max_length": max_length,
        "splits": {name: _split(task, table, texts[name], lengths[name], max_length) for name, table in tables.items()},
        "shared": _shared(texts),
        "warnings": unknown_labels(task, tables),
    }


def lose_much(lengths: Sequence[int], max_length: int) -> int:
    """Return how many texts would lose more than a quarter of their tokens at a limit."""
    return sum(length * (1 - LOST_SHARE) > max_length for length in lengths)


def _resolved(task: Task, table: Table) -> Table:
    """Return the table with the columns that the task's names stand for."""
    table = with_texts(table, task.text)
    if not has_columns(table, [task.label]):
        return table
    return with_label(table, task.label, single=KINDS[task.kind].single_label, separator=task.label_separator)


def unknown_labels(task: Task, tables: Mapping[str, Table]) -> list[str]:
    """Return a warning for each label that another split has and train has not, with train's spelling if it differs."""
    if not KINDS[task.kind].fewest_labels or "train" not in tables:
        return []
    counts = {name: _labels(task, table) for name, table in tables.items()}
    known = {spelling(label): label for label in counts["train"]}
    found = []
    for name, mine in counts.items():
        for label, rows in mine.items():
            if label not in counts["train"]:
                twin = known.get(spelling(label))
                how = f"train spells it {twin!r}" if twin is not None else "train has no row with it"
                found.append(f"{name} has the label {label!r} ({rows} rows); {how}.")
    return found


def _split(
    task: Task, table: Table, texts: Sequence[tuple[str, ...]], lengths: Sequence[int], max_length: int
) -> dict[str, Any]:
    import numpy

    filled = [row for row in texts if all(part.strip() for part in row)]
    repeated = len(filled) - len(set(filled))
    found: dict[str, Any] = {"rows": table.rows, "empty": table.rows - len(filled), "repeated": repeated}
    if lengths:
        values = numpy.percentile(lengths, PERCENTILES, method="inverted_cdf")
        found["tokens"] = {f"p{place}": int(value) for place, value in zip(PERCENTILES, values, strict=True)}
        found["longer"] = sum(length > max_length for length in lengths)
        many = lose_much(lengths, max_length) >= LONG_SHARE * len(lengths)
        found["windows"] = found["longer"] > 0 and (many or KINDS[task.kind].windows)
    return found | _targets(task, table)


def _targets(task: Task, table: Table) -> dict[str, Any]:
    values = [value for value in table.columns.get(task.label, []) if not is_missing(value)]
    if not values:
        return {"labelled": False}
    kind = KINDS[task.kind]
    counts = {"labels": dict(_labels(task, table).most_common())} if kind.fewest_labels else {}
    return {"labelled": True, **counts, **kind.profile(values)}


def _labels(task: Task, table: Table) -> Counter[str]:
    values = [value for value in table.columns.get(task.label, []) if not is_missing(value)]
    return Counter(name for value in values for name in KINDS[task.kind].cell_labels(value))


def _texts(task: Task, table: Table) -> list[tuple[str, ...]]:
    columns = [table.columns[name] for name in task.text]
    return [tuple("" if is_missing(part) else str(part) for part in row) for row in zip(*columns, strict=True)]


def _shared(texts: Mapping[str, Sequence[tuple[str, ...]]]) -> list[dict[str, Any]]:
    """Count the rows of each later split whose texts also occur in an earlier one, whatever their labels."""
    names = sorted(texts, key=lambda name: (name != "train", name))
    found = []
    for place, first in enumerate(names):
        known = {row for row in texts[first] if all(part.strip() for part in row)}
        for second in names[place + 1 :]:
            rows = sum(row in known for row in texts[second])
            if rows:
                found.append({"of": second, "in": first, "rows": rows})
    return found

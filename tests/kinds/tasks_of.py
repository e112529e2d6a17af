"""A task of each kind, for tests that need nothing of it but its kind, its labels and its metric; and tasks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapterbank.kinds.table import KINDS
from adapterbank.tasks.columns import find_columns, infer_task
from adapterbank.tasks.examples import read_examples
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import table_from


def kind_of(metric: str) -> str:
    """Return the first kind that the metric fits."""
    return next(kind.name for kind in KINDS.values() if metric in kind.metrics)


def task_of(kind: str, labels: Sequence[str] = (), metric: str = "") -> Task:
    """Return a task of the kind; its labels are left out if the kind has none."""
    row = KINDS[kind]
    columns = ("question", "context")[: row.text_counts[0]]
    return Task("t", kind, columns, "label", tuple(labels) if row.fewest_labels else (), metric or row.metrics[0])


def read_rows(rows: Any, **options: Any) -> Any:
    """Return the task and the examples that rows state."""
    table = table_from(rows)
    columns = find_columns(table, options.pop("text", None), None, options.pop("label", None), options.get("kind"))
    task = infer_task(table, columns, name="t", **options)
    return task, *read_examples(table, task)


def tags_of(examples: Examples, row: int = 0) -> list[str]:
    """Return the tags of a row of tagging."""
    return [tag for _, _, _, tag in (examples.targets or [])[row]]

"""A task of each kind, for tests that need nothing of it but its kind, its labels and its metric."""

from __future__ import annotations

from collections.abc import Sequence

from adapterbank.kinds.table import KINDS
from adapterbank.tasks.spec import Task


def kind_of(metric: str) -> str:
    """Return the first kind that the metric fits."""
    return next(kind.name for kind in KINDS.values() if metric in kind.metrics)


def task_of(kind: str, labels: Sequence[str] = (), metric: str = "") -> Task:
    """Return a task of the kind; its labels are left out if the kind has none."""
    row = KINDS[kind]
    columns = ("question", "context")[: row.text_counts[0]]
    return Task("t", kind, columns, "label", tuple(labels) if row.fewest_labels else (), metric or row.metrics[0])

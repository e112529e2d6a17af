"""Texts of several tasks in any order: grouped by task, with results back in order. Knows no banks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from adapterbank.errors import InputError
from adapterbank.tasks.spec import Examples

RowResult = TypeVar("RowResult")


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task, with the position of each among all rows."""

    task: str | None
    """None is the bare encoder."""
    rows: list[tuple[str, str | None]]
    places: list[int]

    def examples(self, columns: Sequence[str]) -> Examples:
        """Return the rows as examples of a task that reads these columns, one or two texts per row."""
        seconds = [second for _, second in self.rows if second is not None]
        if columns and len(seconds) != (len(self.rows) if len(columns) == 2 else 0):
            remedy = "pass a second text for every row" if len(columns) == 2 else "pass no second texts"
            raise InputError(f"{self.task!r} reads {' and '.join(columns)}; {remedy}.")
        return Examples(
            [text for text, _ in self.rows], seconds if seconds and len(seconds) == len(self.rows) else None
        )


def by_task(
    task: str | Sequence[str | None] | None,
    texts: Sequence[str | tuple[str, str]],
    pairs: Sequence[str | None] | None,
) -> list[TaskRows]:
    """Group rows by task; `task` is one for all texts, or one for each."""
    if isinstance(texts, str):
        raise InputError("texts is one string; pass a list of texts, such as [text].")
    tasks = [task] * len(texts) if task is None or isinstance(task, str) else list(task)
    for what, count in (("tasks", len(tasks)), ("pairs", len(texts) if pairs is None else len(pairs))):
        if count != len(texts):
            raise InputError(f"There are {len(texts)} texts but {count} {what}; pass one for each text.")
    groups: dict[str | None, TaskRows] = {}
    for place, (name, text) in enumerate(zip(tasks, texts, strict=True)):
        group = groups.setdefault(name, TaskRows(name, [], []))
        group.rows.append(text if isinstance(text, tuple) else (text, pairs[place] if pairs is not None else None))
        group.places.append(place)
    return list(groups.values())


def in_order(groups: Sequence[TaskRows], results: Iterable[Sequence[RowResult]]) -> list[RowResult]:
    """Return the results of all groups in the order of the rows."""
    placed = {place: result for group, own in zip(groups, results, strict=True)
              for place, result in zip(group.places, own, strict=True)}  # fmt: skip
    return [placed[place] for place in range(len(placed))]

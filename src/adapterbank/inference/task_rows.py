"""Texts of several tasks in any order: rows by task, and the answers back in order. Knows no banks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from adapterbank.errors import InputError
from adapterbank.tasks.spec import Examples

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task, and where each stands among all rows."""

    task: str | None
    """None is the bare encoder."""
    rows: list[tuple[str, str | None]]
    places: list[int]

    def examples(self, columns: Sequence[str]) -> Examples:
        """Return the rows as examples of a task that reads these columns: one text per row, or two."""
        seconds = [second for _, second in self.rows if second is not None]
        if columns and len(seconds) != (len(self.rows) if len(columns) == 2 else 0):
            remedy = "pairs too" if len(columns) == 2 else "no pairs"
            raise InputError(f"{self.task!r} reads {' and '.join(columns)}: give it {remedy}.")
        return Examples(
            [text for text, _ in self.rows], seconds if seconds and len(seconds) == len(self.rows) else None
        )


def by_task(
    task: str | Sequence[str | None] | None,
    texts: Sequence[str | tuple[str, str]],
    pairs: Sequence[str | None] | None,
) -> list[TaskRows]:
    """Group rows by their task: one for all texts, or one for each."""
    if isinstance(texts, str):
        raise InputError("texts is one string; give a list of texts, such as [text].")
    tasks = [task] * len(texts) if task is None or isinstance(task, str) else list(task)
    if len(tasks) != len(texts) or (pairs is not None and len(pairs) != len(texts)):
        raise InputError(f"There are {len(texts)} texts; give as many tasks and pairs.")
    found: dict[str | None, TaskRows] = {}
    for place, (name, text) in enumerate(zip(tasks, texts, strict=True)):
        mine = found.setdefault(name, TaskRows(name, [], []))
        mine.rows.append(text if isinstance(text, tuple) else (text, pairs[place] if pairs is not None else None))
        mine.places.append(place)
    return list(found.values())


def in_order(groups: Sequence[TaskRows], answers: Iterable[Sequence[Answer]]) -> list[Answer]:
    """Return the answers of all groups in the order of the rows."""
    placed = {place: one for group, mine in zip(groups, answers, strict=True)
              for place, one in zip(group.places, mine, strict=True)}  # fmt: skip
    return [placed[place] for place in range(len(placed))]

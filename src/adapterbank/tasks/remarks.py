"""Remarks on labelled rows: labels with two spellings, rows that repeat, texts with different labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from adapterbank.kinds.kind import Kind
from adapterbank.kinds.labels import spelling
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.values import short
from adapterbank.tasks.spec import Examples, Task

_MISSING = ("nan", "null", "na", "n/a", "#n/a", "none", "?", "-")
"""Labels that may stand for a missing one."""


def target_labels(kind: Kind, target: Any) -> Sequence[int]:
    """Return the indices of the labels of one row; none for kinds without labels."""
    return (target,) if kind.single_label else target if kind.several_labels else ()


def remarks(source: str, task: Task, rows: Sequence[int], examples: Examples) -> list[str]:
    """Return a sentence for each oddity of the examples; `rows` are their places in the table."""
    kind, targets = KINDS[task.kind], examples.targets or []
    counts = Counter(task.labels[index] for target in targets for index in target_labels(kind, target))
    return [*_spellings(source, counts), *_placeholders(source, counts), *_repeats(source, rows, examples)]


def _spellings(source: str, counts: Counter[str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for label in counts:
        groups.setdefault(spelling(label), []).append(label)
    found = []
    for group in (group for group in groups.values() if len(group) > 1):
        names = " and ".join(f"{short(label)!r} ({counts[label]})" for label in group)
        found.append(f"{source}: the labels {names} differ only in case, blanks or dashes, and count as different.")
    return found


def _placeholders(source: str, counts: Counter[str]) -> list[str]:
    odd = [label for label in counts if label.lower() in _MISSING]
    return [
        f"{source}: {label!r} counts as a label ({counts[label]} rows); if it stands for a missing one, empty the cell."
        for label in odd
    ]


def _repeats(source: str, rows: Sequence[int], examples: Examples) -> list[str]:
    first: dict[Any, tuple[int, Any]] = {}
    same: list[int] = []
    differing: dict[Any, tuple[int, int]] = {}
    for row, text, target in zip(rows, examples.keys(), examples.targets or [], strict=True):
        if text not in first:
            first[text] = (row, target)
        elif first[text][1] == target:
            same.append(row)
        else:
            differing.setdefault(text, (first[text][0], row))
    found = []
    if same:
        what = "1 row repeats" if len(same) == 1 else f"{len(same)} rows repeat"
        found.append(f"{source}: {what} the text and the label of another row (first: row {same[0] + 1}).")
    if differing:
        one, two = next(iter(differing.values()))
        what = "1 text occurs" if len(differing) == 1 else f"{len(differing)} texts occur"
        found.append(f"{source}: {what} with different labels (first: rows {one + 1} and {two + 1}).")
    return found

"""Units of a study: the runs that one process trains together. Knows no records and no training.

Runs with the same backbone, device, precision, dropout, length and data form a unit: they share their rows, so their
batches have the same lengths, and one call of the training loop trains all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from adapterbank.config import Config
from adapterbank.training.dataset import SOURCE

UNIT = 64
"""The largest number of runs in a unit: their data and initial weights are in memory at once."""
_SHARED = ("backbone", "device", "precision", "dropout", "max_length", "doc_stride", "long", "max_windows", *SOURCE)
"""The options that all runs of a unit have in common."""

Unit = tuple[Config, ...]


def units(runs: Iterable[Config], at_most: int = UNIT) -> list[Unit]:
    """Group runs that can be trained together, in their order; those that differ only in `average` stay together."""
    groups: dict[tuple[Any, ...], dict[Config, list[Config]]] = {}
    for run in runs:
        alike = groups.setdefault(tuple(getattr(run, name) for name in _SHARED), {})
        alike.setdefault(replace(run, average=False), []).append(run)
    return [unit for alike in groups.values() for unit in _cut(alike.values(), at_most)]


def _cut(groups: Iterable[Sequence[Config]], at_most: int) -> Iterator[Unit]:
    """Yield units of whole groups, of so many runs at most; a larger group is one."""
    unit: list[Config] = []
    for group in groups:
        if unit and len(unit) + len(group) > at_most:
            yield tuple(unit)
            unit = []
        unit += group
    if unit:
        yield tuple(unit)

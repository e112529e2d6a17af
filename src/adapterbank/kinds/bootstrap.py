"""The bootstrap: 95 % confidence intervals of scores that no formula gives, from counts of resampled rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from adapterbank.draws import RandomStream
from adapterbank.metrics import Counts, Metric

Sums = Callable[[np.ndarray], list[np.ndarray]]
"""How often each group of rows was drawn, `[groups, samples]` -> what is right, given and true, `[samples, labels]`."""

_SAMPLES = 1000
_DRAWS = 20_000_000
"""Rows that are drawn in all; a longer file has fewer samples, but `_FEWEST`."""
_FEWEST = 200
_AT_ONCE = 2_000_000
"""Numbers of a block of samples in memory."""


def intervals(
    metrics: Sequence[Metric], given: Sequence[Any], true: Sequence[Any], labels: int
) -> dict[str, tuple[float, float]]:
    """Return the 95 % percentile interval of each metric over samples of the rows; all have `from_counts`.

    `given` and `true` are checked predictions and targets: label indices, sets of them, or what the metrics'
    `row_counts` take. The samples depend on the number of rows alone, so that the same rows have the same intervals
    everywhere.
    """
    found: dict[str, tuple[float, float]] = {}
    for count in dict.fromkeys(metric.row_counts for metric in metrics):
        mine = [metric for metric in metrics if metric.row_counts is count]
        groups, sums = _rows(count(list(given), list(true))) if count else _pairs(given, true, labels)
        found |= _intervals(mine, groups, sums, isinstance(true[0], frozenset))
    return found


def _rows(counts: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, Sums]:
    """Return the group of each row, which is its own, and how to sum what is right, given and true in it."""
    columns = np.array(counts).T
    return np.arange(len(counts)), lambda drawn: [(column @ drawn)[:, None] for column in columns]


def _pairs(given: Sequence[Any], true: Sequence[Any], labels: int) -> tuple[np.ndarray, Sums]:
    """Return the group of each row, and how to sum each label's counts.

    Rows with the same prediction and the same target are one group, so that classes have few.
    """
    places: dict[tuple[Any, Any], int] = {}
    groups = np.array([places.setdefault(pair, len(places)) for pair in zip(given, true, strict=True)])
    a, b = ([one if isinstance(one, frozenset) else {one} for one in side] for side in zip(*places, strict=True))
    both = [one & other for one, other in zip(a, b, strict=True)]
    return groups, partial(_label_sums, [_holders(side, labels) for side in (both, a, b)])


def _holders(sets: Sequence[Any], labels: int) -> list[np.ndarray]:
    """Return the places of the sets that hold each label."""
    found: list[list[int]] = [[] for _ in range(labels)]
    for place, mine in enumerate(sets):
        for label in mine:
            found[label].append(place)
    return [np.array(places, dtype=np.int64) for places in found]


def _label_sums(sides: Sequence[list[np.ndarray]], drawn: np.ndarray) -> list[np.ndarray]:
    return [np.stack([drawn[groups].sum(0) for groups in holders], 1) for holders in sides]


def _intervals(metrics: Sequence[Metric], groups: np.ndarray, sums: Sums, sets: bool) -> dict[str, tuple[float, float]]:
    """Return the intervals over samples of rows that belong to these groups."""
    rows, kinds = len(groups), int(groups.max()) + 1
    count = min(_SAMPLES, max(_FEWEST, _DRAWS // rows))
    stream, found = RandomStream("bootstrap", rows), []
    for start in range(0, count, max(1, _AT_ONCE // rows)):
        size = min(max(1, _AT_ONCE // rows), count - start)
        samples = (groups[stream.integers(rows, rows)] for _ in range(size))
        drawn = np.stack([np.bincount(sample, minlength=kinds) for sample in samples], 1)
        hits, mine, wanted = sums(drawn)
        counts = Counts(hits, mine, wanted, rows, sets)
        found.append([metric.from_counts(counts) for metric in metrics if metric.from_counts])
    scores = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    ends = [np.percentile(mine, (2.5, 97.5)) for mine in scores]
    return {metric.name: (float(low), float(high)) for metric, (low, high) in zip(metrics, ends, strict=True)}

"""The bootstrap: 95 % confidence intervals of scores that no formula gives, from counts of resampled rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from adapterbank.draws import RandomStream
from adapterbank.metrics import Counts, Metric

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
        matrices: Sequence[Any]
        if count:
            matrices = [sums[:, None] for sums in np.array(count(list(given), list(true))).T]
        else:
            a, b = _indicators(given, labels), _indicators(true, labels)
            matrices = (a.multiply(b).tocsr(), a, b)
        found |= _intervals(mine, matrices, len(true), isinstance(true[0], frozenset))
    return found


def _intervals(
    metrics: Sequence[Metric], matrices: Sequence[Any], rows: int, sets: bool
) -> dict[str, tuple[float, float]]:
    """Return the intervals from what is right, given and true in each row, three times `[rows, labels]`."""
    count = min(_SAMPLES, max(_FEWEST, _DRAWS // rows))
    stream, found = RandomStream("bootstrap", rows), []
    for start in range(0, count, max(1, _AT_ONCE // rows)):
        size = min(max(1, _AT_ONCE // rows), count - start)
        weights = np.stack([np.bincount(stream.integers(rows, rows), minlength=rows) for _ in range(size)])
        hits, mine, wanted = (np.asarray((one.T @ weights.T).T) for one in matrices)
        counts = Counts(hits, mine, wanted, rows, sets)
        found.append([metric.from_counts(counts) for metric in metrics if metric.from_counts])
    scores = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    ends = [np.percentile(mine, (2.5, 97.5)) for mine in scores]
    return {metric.name: (float(low), float(high)) for metric, (low, high) in zip(metrics, ends, strict=True)}


def _indicators(rows: Sequence[Any], labels: int) -> csr_array:
    """Return which labels each row has, `[rows, labels]`, 0 or 1."""
    sets = [sorted(row) if isinstance(row, frozenset) else [row] for row in rows]
    columns = [label for row in sets for label in row]
    starts = np.cumsum([0, *map(len, sets)])
    return csr_array((np.ones(len(columns), dtype=np.int64), columns, starts), shape=(len(sets), labels))

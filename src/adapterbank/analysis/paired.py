"""Whether a method is above another: paired tests over seeds and tasks. Prints and draws nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

from adapterbank.analysis.run_table import RunRow
from adapterbank.draws import RandomStream

_ALL_SIGNS = 16
"""Most pairs of which every choice of signs is counted."""
_DRAWS = 100_000
_BLOCK = 1_000


class PairedTest(NamedTuple):
    """How much a method is above another, in points."""

    difference: float
    """The mean over tasks of the mean over seeds."""
    sem: float | None
    """Its standard error over seeds, if each task has two."""
    tasks: int
    pairs: int
    p_runs: float
    """How often a difference as large comes by chance if the methods are equal on each of these tasks."""
    p_tasks: float
    """How often it comes by chance if each method is as likely to be better on a task like these."""


def compare(gaps: Sequence[Sequence[float]]) -> PairedTest:
    """Compare two methods by the differences of their runs with the same seed, of each task.

    Both tests are sign-flip tests of the mean over tasks, two-sided: of all runs, and of the tasks' means.
    """
    means = [fmean(own) for own in gaps]
    several = all(len(own) > 1 for own in gaps)
    errors = [variance(own) / len(own) for own in gaps] if several else []
    weighted = [gap / len(own) / len(gaps) for own in gaps for gap in own]
    return PairedTest(
        difference=fmean(means),
        sem=math.sqrt(sum(errors)) / len(gaps) if several else None,
        tasks=len(gaps),
        pairs=len(weighted),
        p_runs=_by_chance(weighted),
        p_tasks=_by_chance([mean / len(means) for mean in means]),
    )


def gaps_by_task(
    ours: Mapping[str, Sequence[RunRow]], others: Mapping[str, Sequence[RunRow]], split: str, metrics: Mapping[str, str]
) -> list[list[float]]:
    """Return the differences of runs with the same seed, in points, of each task that both have scores for."""
    found = (
        gaps_by_seed(ours.get(task, ()), others.get(task, ()), partial(RunRow.score, split=split, metric=metric))
        for task, metric in metrics.items()
    )
    return [gaps for gaps in found if gaps]


def gaps_by_seed(
    ours: Iterable[RunRow], others: Iterable[RunRow], score: Callable[[RunRow], float | None]
) -> list[float]:
    """Return the differences of runs of one task with the same seed, in points, of those that have a score."""
    own, other = ({row.seed: found for row in rows if (found := score(row)) is not None} for rows in (ours, others))
    return [100 * (own[seed] - other[seed]) for seed in sorted(own.keys() & other.keys())]


def _by_chance(parts: Sequence[float]) -> float:
    """Return the share of choices of signs with which a sum is as far from 0 as it is."""
    values, limit = np.array(parts), abs(math.fsum(parts)) * (1 - 1e-9)
    if len(parts) <= _ALL_SIGNS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(parts))))
        return float((abs(signs @ values) >= limit).mean())
    stream, found = RandomStream("signs", len(parts)), 0
    for _ in range(_DRAWS // _BLOCK):
        drawn = 2.0 * stream.integers(_BLOCK * len(parts), 2).reshape(_BLOCK, -1) - 1.0
        found += int((abs(drawn @ values) >= limit).sum())
    return (found + 1) / (_DRAWS + 1)

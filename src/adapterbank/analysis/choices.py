"""Two methods on several tasks, with the settings of both chosen in the same way. Prints and draws nothing.

The best mean over seeds favours the method that has more settings with all seeds. So the difference is also computed
with settings that one seed chose, and with settings that all seeds but the scored one chose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import NamedTuple

from adapterbank.analysis.run_table import RunRow, RunTable, by_setting
from adapterbank.studies.selection import mean

Settings = Sequence[Sequence[RunRow]]
Score = Callable[[RunRow], float]


class Pair(NamedTuple):
    """One task: the settings of both methods, and the score that is compared, in points."""

    ours: Settings
    other: Settings
    score: Score


class Difference(NamedTuple):
    """The mean over tasks of both methods, in points, and the standard error of their difference."""

    chosen: str
    """How the settings were chosen."""
    ours: float
    other: float
    sem: float


def settings(rows: Sequence[RunRow]) -> Settings:
    """Return the runs of each setting that has a score on dev."""
    return by_setting(row for row in rows if row.dev is not None)


def differences(study: RunTable, pairs: Sequence[Pair]) -> list[Difference]:
    """Return the difference for each way to choose; none if no method has two repeated settings to choose from."""
    sides = [side for pair in pairs for side in (pair.ours, pair.other)]
    if not sides or not all(sides):
        return []
    best = [study.best(row for runs in side for row in runs) for side in sides]
    seeds = sorted(set.intersection(*({row.seed for row in runs} for runs in best)))
    if len(seeds) < 2 or all(len(_repeated(side, seeds)) == 1 for side in sides):
        return []
    first = f"on seed {seeds[0]} alone"
    return [
        _whole("on the mean over all seeds", pairs, iter(best)),
        _whole(f"{first}; of equals the smaller", pairs, (_on_seed(s, seeds[0], _trained) for s in sides)),
        _whole(f"{first}; of equals the worse for ours", pairs, _unluckily(pairs, seeds[0])),
        _left_out(f"on {len(seeds) - 1} seeds, scored on the other, in turn", pairs, seeds),
    ]


def _whole(chosen: str, pairs: Sequence[Pair], runs: Iterator[Sequence[RunRow]]) -> Difference:
    """Compare the means over all seeds of the chosen settings."""
    found = [tuple(mean(pair.score(row) for row in next(runs)) for _ in ("ours", "other")) for pair in pairs]
    sem = math.sqrt(sum((one.sem or 0) ** 2 for both in found for one in both)) / len(pairs)
    return Difference(chosen, fmean(ours.mean for ours, _ in found), fmean(other.mean for _, other in found), sem)


def _left_out(chosen: str, pairs: Sequence[Pair], seeds: Sequence[int]) -> Difference:
    """Score each seed with the settings that the other seeds chose."""

    def scored(side: Settings, score: Score, seed: int) -> float:
        rest = [other for other in seeds if other != seed]
        runs = min(_repeated(side, seeds), key=lambda runs: (-fmean(_devs(runs, rest)), _trained(runs)))
        return next(score(row) for row in runs if row.seed == seed)

    ours = [fmean(scored(pair.ours, pair.score, seed) for pair in pairs) for seed in seeds]
    other = [fmean(scored(pair.other, pair.score, seed) for pair in pairs) for seed in seeds]
    gaps = [a - b for a, b in zip(ours, other, strict=True)]
    return Difference(chosen, fmean(ours), fmean(other), stdev(gaps) / math.sqrt(len(gaps)))


def _on_seed(side: Settings, seed: int, tie: Callable[[Sequence[RunRow]], float]) -> Sequence[RunRow]:
    """Return the setting that is best on one seed; of equals the one with the least `tie`."""
    tried = [runs for runs in side if any(row.seed == seed for row in runs)]
    return min(tried, key=lambda runs: (-_devs(runs, [seed])[0], tie(runs)))


def _unluckily(pairs: Sequence[Pair], seed: int) -> Iterator[Sequence[RunRow]]:
    """Yield the settings of one seed, of equals that with which ours is lowest."""
    for pair in pairs:
        yield _on_seed(pair.ours, seed, partial(_level, 1, pair.score))
        yield _on_seed(pair.other, seed, partial(_level, -1, pair.score))


def _level(sign: int, score: Score, runs: Sequence[RunRow]) -> float:
    return sign * fmean(score(row) for row in runs)


def _repeated(side: Settings, seeds: Sequence[int]) -> list[Sequence[RunRow]]:
    return [runs for runs in side if {*seeds} <= {row.seed for row in runs}]


def _devs(runs: Sequence[RunRow], seeds: Sequence[int]) -> list[float]:
    return [row.dev for row in runs if row.seed in seeds and row.dev is not None]


def _trained(runs: Sequence[RunRow]) -> float:
    return runs[0].trained

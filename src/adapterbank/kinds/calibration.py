"""Calibration: one temperature and the thresholds of a task, fitted on rows that it was not trained on.

Knows outputs and targets only, so that held-out rows may come from a dev split or from a cross-validation. Nothing here
changes an output: a task's `temperature` and `thresholds` change what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from adapterbank.draws import RandomStream
from adapterbank.kinds import scoring
from adapterbank.kinds.kind import TEMPERATURES, Confidence
from adapterbank.kinds.table import KINDS
from adapterbank.metrics import METRICS, Counts, Metric

if TYPE_CHECKING:
    from adapterbank.tasks.spec import Task

FEWEST_ROWS = 50
"""Held-out rows below which nothing is fitted."""
FEWEST_OF_LABEL = 10
"""Held-out rows that must have a label, and that must not, for its threshold to be chosen."""
_EXACT, _STEPS = 1e-9, 100
"""How close to the best the inverse of a temperature is searched, and in how many steps at most."""
_GRID = np.arange(1, 100) / 100
"""The thresholds that are tried."""
_HALF = 49
"""The place of one half among them."""
_SWEEPS = 5
"""How often all labels are gone through at most; each label's best threshold depends on the others'."""
_FOLDS = 5
"""Parts of the held-out rows; thresholds are kept if those of four parts help on the fifth."""


def calibrate(task: Task, outputs: np.ndarray, targets: Sequence[Any], fewest: int = FEWEST_ROWS) -> Task:
    """Return the task with the temperature and the thresholds that fit held-out rows best.

    `outputs` are the head's, `[rows, labels]`, and `targets` as `Examples` has them. Either stays unset where there are
    fewer rows than `fewest`, where the kind has no probabilities, and where it does not help.
    """
    kind = KINDS[task.kind]
    if kind.confidence is None or kind.probabilities is None or len(targets) < fewest:
        return task
    logits = np.asarray(outputs, dtype=np.float64)
    temperature = fit_temperature(*kind.confidence.choices(logits, targets))
    likely = kind.probabilities(logits / (temperature or 1.0))
    return replace(task, temperature=temperature, thresholds=_fit_thresholds(task, kind.confidence, likely, targets))


# --- temperature ----------------------------------------------------------------------------------------------


def fit_temperature(logits: np.ndarray, right: np.ndarray) -> float | None:
    """Return the temperature T that makes the right options most likely; None if 1 is as good (Guo et al. 2017).

    The negative log-likelihood of softmax(x / T) is convex in 1 / T, and its slope is the sum of (p - y) x. Targets are
    smoothed by one more choice of which nothing is known, as in Platt (1999): otherwise T would be 0 where every answer
    is right. `logits` are `[choices, options]`, `right` the index of the right option of each choice.
    """
    wanted = np.zeros_like(logits)
    wanted[np.arange(len(right)), right] = 1
    smooth = (len(right) * wanted + 1 / logits.shape[1]) / (len(right) + 1)

    def slope(inverse: float) -> tuple[float, float]:
        """Return the slope, and its own slope: the sum of the variances of x."""
        p = np.exp(log_softmax(inverse * logits))
        means = (p * logits).sum(1, keepdims=True)
        return float(((p - smooth) * logits).sum()), float((p * (logits - means) ** 2).sum())

    coldest, hottest = TEMPERATURES
    found = round(1 / root(slope, 1 / hottest, 1 / coldest), 4)
    return found if _loss(logits / found, wanted) < _loss(logits, wanted) else None


def root(function: Callable[[float], tuple[float, float]], low: float, high: float) -> float:
    """Return where a growing function crosses 0 between two numbers, or the end that is nearest to it.

    `function` returns its value and its slope. Newton's steps begin at 1; one that leaves the numbers between which the
    root is known to be is replaced by their middle.
    """
    x = 1.0
    for _ in range(_STEPS):
        value, slope = function(x)
        low, high = (x, high) if value < 0 else (low, x)
        newton = x - value / slope if slope > 0 else np.nan
        following = newton if low <= newton <= high else (low + high) / 2
        if abs(following - x) < _EXACT:
            break
        x = following
    return following


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Return the logarithm of the softmax of each row."""
    shifted = x - x.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def _loss(x: np.ndarray, wanted: np.ndarray) -> float:
    return -float((log_softmax(x) * wanted).sum())


# --- thresholds -----------------------------------------------------------------------------------------------


def _fit_thresholds(
    task: Task, confidence: Confidence, likely: np.ndarray, targets: Sequence[Any]
) -> tuple[float, ...]:
    """Return the thresholds with the best score, or none if they do not help on rows that they were not chosen on."""
    metric = METRICS[task.metric]
    columns = confidence.columns(likely, targets, metric)
    if columns is None:
        return ()
    p, true = columns
    positives = true.sum(0)
    tuned = np.flatnonzero(np.minimum(positives, len(true) - positives) >= FEWEST_OF_LABEL)
    if not len(tuned):
        return ()
    default = confidence.thresholds([0.5] * p.shape[1])
    plain, crossed = confidence.choose(likely, default), confidence.choose(likely, default)
    part = RandomStream("folds").permutation(len(p)) % _FOLDS
    for fold in range(_FOLDS):
        rest, rows = part != fold, np.flatnonzero(part == fold)
        chosen = confidence.thresholds(_best_cuts(p[rest], true[rest], metric, tuned))
        for row, decision in zip(rows, confidence.choose(likely[rows], chosen), strict=True):
            crossed[row] = decision
    if scoring.score(task, crossed, targets) <= scoring.score(task, plain, targets):
        return ()
    return confidence.thresholds(_best_cuts(p, true, metric, tuned))


def _best_cuts(p: np.ndarray, true: np.ndarray, metric: Metric, tuned: np.ndarray) -> list[float]:
    """Return a threshold for each column, chosen one column after the other; those not in `tuned` stay at one half."""
    assert metric.from_counts is not None
    above = [_above(column, p.shape[0]) for column in p.T]
    given = np.stack(above, 1).astype(float)  # [grid, columns]
    hits = np.stack([_above(column[mine], int(mine.sum())) for column, mine in zip(p.T, true.T, strict=True)], 1)
    columns, now = np.arange(p.shape[1]), np.full(p.shape[1], _HALF)
    for _ in range(_SWEEPS):
        before = now.copy()
        for column in tuned:
            tried = np.tile(now, (len(_GRID), 1))
            tried[:, column] = np.arange(len(_GRID))
            counts = Counts(hits[tried, columns], given[tried, columns], true.sum(0), len(p), sets=True)
            now[column] = _nearest_best(metric.from_counts(counts))
        if (now == before).all():
            break
    return [float(cut) for cut in _GRID[now]]


def _above(values: np.ndarray, count: int) -> np.ndarray:
    """Return how many values are above each threshold of the grid."""
    return np.asarray(count - np.searchsorted(np.sort(values), _GRID, side="right"))


def _nearest_best(scores: np.ndarray) -> int:
    """Return the place of the best score; of equal ones, the place nearest to one half."""
    best = np.flatnonzero(scores >= scores.max() - 1e-12)
    return int(best[np.abs(best - _HALF).argmin()])

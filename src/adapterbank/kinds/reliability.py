"""Reliability: whether answers given with a probability of 0.8 are right in 80 of 100 rows. Fits nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adapterbank.kinds.calibration import log_softmax
from adapterbank.kinds.kind import HeadOutputs, ReportTable
from adapterbank.kinds.table import KINDS

BINS = 15
"""Bins of equal width, as in Guo et al. (2017)."""
_DIGITS = 6
"""Further digits are rounding errors and differ between machines."""
SHARES = (1.0, 0.9, 0.8, 0.7, 0.5)
"""The shares of the rows that a table of coverage has."""


def reliability(given: HeadOutputs, targets: Sequence[Any]) -> dict[str, Any]:
    """Return calibration error, reliability and coverage of a task's answers; empty for kinds without probabilities."""
    kind = KINDS[given.task.kind]
    if kind.confidence is None or kind.probabilities is None or not len(targets):
        return {}
    logits, right = kind.confidence.choices(given.logits, targets)
    likely = np.exp(log_softmax(logits))
    bins = in_bins(likely.max(1), likely.argmax(1) == right)
    decisions = kind.decide(given)
    certainty = kind.confidence.certainty(kind.probabilities(given.logits), decisions)
    correct = [decision == target for decision, target in zip(decisions, targets, strict=True)]
    return {
        "calibration_error": expected_error(bins),
        "reliability": bins,
        "coverage": coverage(certainty, np.array(correct)),
    }


def in_bins(top: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Group choices by their top probability; return the bins that have some: mean probability, and share of right."""
    places = np.clip(np.ceil(top * BINS) - 1, 0, BINS - 1).astype(int)  # a bin holds its upper edge
    return [
        {
            "from": place / BINS,
            "to": (place + 1) / BINS,
            "rows": int(mine.sum()),
            "confidence": round(float(top[mine].mean()), _DIGITS),
            "accuracy": round(float(right[mine].mean()), _DIGITS),
        }
        for place in range(BINS)
        if (mine := places == place).any()
    ]


def expected_error(bins: Sequence[Mapping[str, Any]]) -> float:
    """Return the expected calibration error: the mean over rows of the gap between accuracy and confidence."""
    total = sum(one["rows"] for one in bins)
    gaps = float(sum(one["rows"] * abs(one["accuracy"] - one["confidence"]) for one in bins))
    return float(round(gaps / total, _DIGITS))


def coverage(certainty: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Return, for each of `SHARES`, the confidence that so many rows reach, and the accuracy of these rows.

    Rows with equal confidence stand or fall together, so `coverage` may be larger than the share.
    """
    ordered, found = np.sort(certainty)[::-1], []
    for share in SHARES:
        least = ordered[max(0, int(np.ceil(share * len(ordered) - 1e-9)) - 1)]
        least = np.floor(least * 10**_DIGITS) / 10**_DIGITS  # not above any row that counts
        kept = certainty >= least
        shares = {"coverage": float(kept.mean()), "abstain": float(least), "accuracy": float(right[kept].mean())}
        found.append({name: round(value, _DIGITS) for name, value in shares.items()})
    return found


def tables(report: Mapping[str, Any]) -> list[ReportTable]:
    """Return what `adapterbank evaluate` prints of it."""
    if "reliability" not in report:
        return []
    bins = [
        [
            f"{one['from']:.3f} to {one['to']:.3f}",
            str(one["rows"]),
            f"{one['confidence']:.3f}",
            f"{one['accuracy']:.3f}",
        ]
        for one in report["reliability"]
    ]
    covered = [
        [f"{100 * one['coverage']:.1f} %", f"{one['abstain']:.3f}", f"{one['accuracy']:.4f}"]
        for one in report["coverage"]
    ]
    return [
        ReportTable("reliability (by the top probability)", ["probability", "rows", "mean", "right"], bins),
        ReportTable("coverage (answers with --abstain, and how many are right)", ["rows", "abstain", "right"], covered),
    ]

"""Outputs of rows -> what a task says of them, and what a metric compares. Knows no encoder and no slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adapterbank.inference import spans
from adapterbank.inference.rows import Rows
from adapterbank.slots import heads
from adapterbank.tasks.spec import Examples, Task


@dataclass  # not frozen: those take four times as long to make
class Prediction:
    """What a task says of one row; the fields that its kind has are set."""

    label: str | None = None
    """Classification: the likeliest label."""
    labels: tuple[str, ...] | None = None
    """Multi-label: every label more likely than not."""
    value: float | None = None
    """Regression."""
    answer: str | None = None
    """Span: the answer's text, with its first and last-plus-one character in the context."""
    start: int | None = None
    end: int | None = None
    null_odds: float | None = None
    """Span with questions that may have no answer: by how much "no answer" scores above the best answer."""
    best: tuple[dict[str, Any], ...] | None = None
    """Span, when asked for: the best answers with places, scores and probabilities."""
    probabilities: dict[str, float] | None = None
    embedding: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Bare backbone: the mean of the last hidden states."""

    def to_json(self) -> dict[str, Any]:
        """Give the fields that are set."""
        found: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        if self.probabilities is not None:  # more digits than these are rounding, and differ between machines
            found["probabilities"] = {
                name: int(p * 1e6 + 0.5) / 1e6 if p == p else p for name, p in self.probabilities.items()
            }
        if self.embedding is not None:
            found["embedding"] = self.embedding.tolist()
        return found


def decide(task: Task, examples: Examples, rows: Rows, given: Sequence[np.ndarray]) -> list[Any]:
    """Turn the outputs of a task's rows into what a metric compares, one for each example."""
    if task.kind == "span":
        return [one.choose(task.threshold).text for one in readings(examples, rows, given)]
    return heads.DECIDE[task.kind](np.stack(given)) if given else []


def readings(examples: Examples, rows: Rows, given: Sequence[np.ndarray], count: int = 1) -> list[spans.Reading]:
    """Read the answers of each example off the outputs of all its windows."""
    contexts = examples.pairs or []
    return [
        spans.read([given[row] for row in mine], [rows.tokens[row] for row in mine], text, count)
        for mine, text in zip(rows.by_example(len(examples)), contexts, strict=True)
    ]


def answered(task: Task, one: spans.Reading, best: int) -> Prediction:
    """Say what a span task answers, with as many of its best answers as are asked for."""
    answer = one.choose(task.threshold)
    odds = one.null_odds if task.threshold is not None else None
    listed = tuple(one.listed(task.threshold)[:best]) if best else None
    return Prediction(answer=answer.text, start=answer.start, end=answer.end, null_odds=odds, best=listed)


def decided(task: Task, given: Sequence[np.ndarray]) -> list[Prediction]:
    """Turn the outputs of a task's rows into predictions, all of them in one go."""
    return [Prediction(**fields) for fields in _said(task, given, lambda likely: likely)]


def told(task: Task, given: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Give what `to_json` of each prediction gives, to the bit, in less than half the time where rows are many."""
    return _said(task, given, lambda likely: np.asarray(np.floor(likely * 1e6 + 0.5) / 1e6))


def _softmax(out: np.ndarray) -> np.ndarray:
    shifted = np.exp(out - out.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


_LIKELY: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "classification": _softmax,
    "multilabel": lambda out: 0.5 * (1 + np.tanh(0.5 * out)),  # the sigmoid, without overflow
}
"""Outputs of rows -> how likely each label is."""


def _said(task: Task, given: Sequence[np.ndarray], digits: Callable[[np.ndarray], np.ndarray]) -> list[dict[str, Any]]:
    """Give the fields of each row's prediction that its task's kind has."""
    if not given:
        return []
    out = np.array(given)
    decisions = heads.DECIDE[task.kind](out)
    if task.kind == "regression":
        return [{"value": value} for value in decisions]
    names = task.labels
    likely = [dict(zip(names, row, strict=True)) for row in digits(_LIKELY[task.kind](out.astype(np.float64))).tolist()]
    if task.kind == "classification":
        return [{"label": names[k], "probabilities": mine} for k, mine in zip(decisions, likely, strict=True)]
    chosen = [tuple([names[k] for k in mine]) for mine in decisions]
    return [{"labels": one, "probabilities": mine} for one, mine in zip(chosen, likely, strict=True)]

"""Answers: a span head's outputs on the windows of a document -> the characters of the text. Knows no tensors.

The score of an answer is its start's output plus its end's. "No answer" has a score too, that of the first token; over
several windows the lowest counts, as each has to find nothing (BERT's SQuAD code does the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapterbank.encoder.batch import Tokens
from adapterbank.metrics import answer_scores

LONGEST_ANSWER = 30
"""Tokens of the longest answer, as in BERT's SQuAD code."""
_CANDIDATES = 20
"""Answers of each window that are looked at for a list of the best, as there."""


@dataclass(frozen=True)
class SpanAnswer:
    """A stretch of the document."""

    text: str
    start: int
    end: int
    """First and last-plus-one character; 0 and 0 for no answer."""
    score: float


@dataclass(frozen=True)
class Reading:
    """What a span head makes of one document."""

    answers: tuple[SpanAnswer, ...]
    """The best first, each text once; at least one."""
    null: float
    """The score of "no answer"."""

    @property
    def null_odds(self) -> float:
        """By how much "no answer" scores above the best answer."""
        return self.null - self.answers[0].score

    def choose(self, threshold: float | None) -> SpanAnswer:
        """Give the best answer; the empty one where "no answer" beats it by more than the threshold."""
        silent = threshold is not None and self.null_odds > threshold
        return SpanAnswer("", 0, 0, self.null) if silent else self.answers[0]

    def listed(self, threshold: float | None) -> list[dict[str, Any]]:
        """Give the answers with the share that each has of them all, "no answer" among them if it may be given."""
        every = [*self.answers, *([SpanAnswer("", 0, 0, self.null)] if threshold is not None else [])]
        every.sort(key=lambda answer: -answer.score)
        weights = np.exp(np.array([answer.score for answer in every]) - every[0].score)
        shares = weights / weights.sum()
        return [{**vars(answer), "probability": float(share)} for answer, share in zip(every, shares, strict=True)]


def read(outputs: Sequence[np.ndarray], rows: Sequence[Tokens], context: str, count: int = 1) -> Reading:
    """Find the `count` best answers over all windows of a document, from `[tokens, 2]` outputs of each."""
    found: list[SpanAnswer] = []
    null = min(float(out[0].sum()) for out in outputs)
    for out, row in zip(outputs, rows, strict=True):
        assert row.offsets is not None
        inside = np.flatnonzero(row.offsets[:, 0] >= 0)
        if len(inside):
            places = row.offsets[inside]
            for score, first, last in best_spans(out[inside], 1 if count == 1 else max(count, _CANDIDATES)):
                found.append(_answer(context, int(places[first, 0]), int(places[last, 1]), score))
    found.sort(key=lambda answer: -answer.score)  # stable: among equals the earlier window's
    once = {answer.text: answer for answer in reversed(found)}
    best = [answer for answer in found if once[answer.text] is answer][:count]
    return Reading(tuple(best) or (SpanAnswer("", 0, 0, null),), null)


def _answer(context: str, start: int, end: int, score: float) -> SpanAnswer:
    """Give the characters of some tokens without the blanks around them: ALBERT's pieces carry the one before."""
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    return SpanAnswer(text, start, start + len(text), score)


def best_spans(x: np.ndarray, count: int) -> list[tuple[float, int, int]]:
    """Give the best (score, first, last) of `[tokens, 2]` outputs, none longer than `LONGEST_ANSWER`."""
    width = min(LONGEST_ANSWER, len(x))
    ends = np.concatenate([x[:, 1], np.full(width - 1, -np.inf, x.dtype)])
    sums = x[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, width)  # [first, length - 1]
    flat = sums.ravel()
    order = [flat.argmax()] if count == 1 else np.argsort(-flat, kind="stable")[:count]
    found = [(float(flat[i]), int(i // width), int(i // width + i % width)) for i in order]
    return [span for span in found if span[2] < len(x)]


def tune(found: Sequence[Reading], targets: Sequence[Any]) -> float:
    """Find the threshold of "no answer" that gives the best F1 on these rows; below all odds if none is worth giving.

    SQuAD 2.0's own search (`squad.best_threshold`) calls silence everywhere 0, as its odds are probabilities. Ours are
    differences of scores and may be below that.
    """
    gains: dict[float, float] = {}
    for one, target in zip(found, targets, strict=True):
        gold = list(target[2]) if target[0] >= 0 else []
        said, silent = (answer_scores(text, gold, silence=True)[1] for text in (one.answers[0].text, ""))
        gains[one.null_odds] = gains.get(one.null_odds, 0.0) + said - silent
    threshold, now, best = min(gains, default=1.0) - 1.0, 0.0, 0.0
    for odds in sorted(gains):
        now += gains[odds]
        if now > best:
            best, threshold = now, odds
    return threshold

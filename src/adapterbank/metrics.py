"""Metrics: (predictions, targets) -> one number between -1 and 1. They know no tasks, models or files.

Every metric of the table grows with quality, so that the best run is the one with the largest value. That is why the
mean squared error is part of a regression's report but not a row of `METRICS`. Nothing is in per cent.

Which metrics fit a kind of task is stated in the kind's row (`kinds/`). Predictions and targets arrive here checked,
in the form that the kind's `check_prediction` and `check_target` return.
"""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adapterbank.errors import UnknownName


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    function: Callable[[list[Any], list[Any], int], float]
    """(checked predictions, checked targets, number of labels) -> the score."""
    summary: str
    label_count: int | None = None
    """How many labels the task must have, if that matters."""
    parts: tuple[str, ...] = ()
    """The metrics it is the mean of; a report includes them."""


def find_metric(name: str) -> Metric:
    """Return the metric of this name."""
    if name not in METRICS:
        raise UnknownName(name, "a metric", METRICS)
    return METRICS[name]


def _exact(given: list[Any], true: list[Any], _: int) -> float:
    # Accuracy compares indices, subset accuracy sets of indices.
    return sum(bool(a == b) for a, b in zip(given, true, strict=True)) / len(true)


def _f1(given: list[Any], true: list[Any], classes: int, average: str) -> float:
    from sklearn.metrics import f1_score

    if isinstance(true[0], frozenset):
        given, true = _indicators(given, classes), _indicators(true, classes)
    return float(f1_score(true, given, average=average, zero_division=0))


def _indicators(rows: list[frozenset[int]], classes: int) -> Any:
    import numpy

    matrix = numpy.zeros((len(rows), classes), dtype=numpy.int8)
    for row, indices in enumerate(rows):
        matrix[row, sorted(indices)] = 1
    return matrix


def _binary_f1(given: list[int], true: list[int], classes: int) -> float:
    return _f1(given, true, classes, "binary")


def _macro_f1(given: list[Any], true: list[Any], classes: int) -> float:
    return _f1(given, true, classes, "macro")


def _micro_f1(given: list[Any], true: list[Any], classes: int) -> float:
    return _f1(given, true, classes, "micro")


def _accuracy_f1(given: list[int], true: list[int], classes: int) -> float:
    return (_exact(given, true, classes) + _binary_f1(given, true, classes)) / 2


def _matthews(given: list[int], true: list[int], _: int) -> float:
    from sklearn.metrics import matthews_corrcoef

    # A single class has no correlation; scikit-learn would warn about a one-by-one confusion matrix.
    if len(set(given)) == 1 or len(set(true)) == 1:
        return 0.0
    return float(matthews_corrcoef(true, given))


def _correlation(given: list[float], true: list[float], name: str) -> float:
    from scipy import stats

    # Undefined for a constant. A model that predicts the same for every row has learned nothing, hence 0.
    if len(set(given)) == 1 or len(set(true)) == 1:
        return 0.0
    with warnings.catch_warnings():
        # scipy warns about nearly constant values; its result is used unless it is NaN.
        warnings.simplefilter("ignore")
        value = float(getattr(stats, name)(given, true).statistic)
    return value if math.isfinite(value) else 0.0


def _pearson(given: list[float], true: list[float], _: int) -> float:
    return _correlation(given, true, "pearsonr")


def _spearman(given: list[float], true: list[float], _: int) -> float:
    return _correlation(given, true, "spearmanr")


def _pearson_spearman(given: list[float], true: list[float], classes: int) -> float:
    return (_pearson(given, true, classes) + _spearman(given, true, classes)) / 2


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def answer_words(answer: str) -> list[str]:
    """Return an answer's words as SQuAD compares them: lower case, then no punctuation, then no articles."""
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()


def word_f1(given: list[str], true: list[str]) -> float:
    """Return the F1 of an answer's words; if either side has no words, 1 if both have none, as in SQuAD 2.0."""
    if not given or not true:
        return float(given == true)
    shared = sum((Counter(given) & Counter(true)).values())
    return 2 * shared / (len(given) + len(true))


def answer_scores(given: str, answers: Sequence[str], null_allowed: bool) -> tuple[float, float]:
    """Return the exact match and the F1 of an answer, each against the acceptable answer that fits best.

    With `null_allowed` they are SQuAD 2.0's, where questions may have no answer: acceptable answers without words do
    not count, and if none is left only an answer without words is right. Otherwise they are SQuAD 1.1's, which always
    expects an answer and gives F1 0 to an answer without words.
    """
    words, wanted = answer_words(given), [answer_words(answer) for answer in answers]
    named = [one for one in wanted if one]
    if null_allowed:
        wanted = named = named or [[]]
    return float(words in wanted), max((word_f1(words, one) for one in named), default=0.0)


def _answer_means(given: list[str], true: list[tuple[str, ...]]) -> tuple[float, float]:
    # The data decides which of the two official scripts applies: 2.0 if any question has no answer.
    null_allowed = ("",) in true
    scores = [answer_scores(text, answers, null_allowed) for text, answers in zip(given, true, strict=True)]
    return sum(exact for exact, _ in scores) / len(scores), sum(f1 for _, f1 in scores) / len(scores)


def _exact_match(given: list[str], true: list[tuple[str, ...]], _: int) -> float:
    return _answer_means(given, true)[0]


def _span_f1(given: list[str], true: list[tuple[str, ...]], _: int) -> float:
    return _answer_means(given, true)[1]


METRICS: dict[str, Metric] = {
    row.name: row
    for row in (
        Metric("accuracy", _exact, "share of rows with the right class"),
        Metric("f1", _binary_f1, "F1 of the second of two labels", label_count=2),
        Metric("macro_f1", _macro_f1, "mean of the F1 of each class"),
        Metric("micro_f1", _micro_f1, "F1 over all decisions together"),
        Metric("matthews", _matthews, "Matthews correlation, CoLA's; 0 for a constant"),
        Metric("accuracy_f1", _accuracy_f1, "mean of accuracy and F1, MRPC's", 2, ("accuracy", "f1")),
        Metric("subset_accuracy", _exact, "share of rows with exactly the right labels"),
        Metric("pearson", _pearson, "Pearson correlation; 0 for a constant"),
        Metric("spearman", _spearman, "Spearman rank correlation; 0 for a constant"),
        Metric(
            "pearson_spearman",
            _pearson_spearman,
            "mean of both correlations, STS-B's",
            parts=("pearson", "spearman"),
        ),
        Metric("exact_match", _exact_match, "share of answers that are acceptable ones, SQuAD's"),
        Metric("span_f1", _span_f1, "mean F1 of the answer's words, SQuAD's"),
    )
}

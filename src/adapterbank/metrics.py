"""Metrics: (predictions, targets) -> one number between -1 and 1. It knows no models, files or text columns.

Every metric of the table grows with quality, so that whoever keeps the best run may take the largest value;
that is why the mean squared error is a line of `report` but no row of `METRICS`. Nothing is in per cent.

What a prediction and a target are depends on the kind of the task:

    kind            prediction              target
    classification  class index             class index
    multilabel      indices of the labels   indices of the labels
    regression      number                  number
    span            answer text             (start, end, all acceptable answer texts)
"""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from adapterbank.errors import InputError, UnknownName


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    kinds: tuple[str, ...]
    """The kinds of task it can score."""
    function: Callable[[list[Any], list[Any], int], float]
    """(checked predictions, checked targets, number of labels) -> the score."""
    summary: str
    label_count: int | None = None
    """How many labels the task must have, where it matters."""
    parts: tuple[str, ...] = ()
    """The metrics it is the mean of; `report` gives them too."""


DEFAULT_METRIC = {
    "classification": "accuracy",
    "multilabel": "micro_f1",
    "regression": "spearman",
    "span": "span_f1",
}


def find_metric(name: str) -> Metric:
    """Return the row of the table with this name."""
    if name not in METRICS:
        raise UnknownName(name, "a metric", METRICS)
    return METRICS[name]


def check_metric(name: str, kind: str, labels: Sequence[str]) -> Metric:
    """Return the metric if it can score a task of this kind with these labels."""
    metric = find_metric(name)
    if kind not in metric.kinds:
        fitting = ", ".join(row.name for row in METRICS.values() if kind in row.kinds)
        raise InputError(f"Metric {name!r} cannot score a {kind} task; take one of: {fitting}.")
    if metric.label_count not in (None, len(labels)):
        raise InputError(
            f"Metric {name!r} needs exactly {metric.label_count} labels, and there are {len(labels)}; "
            f"take another, such as 'accuracy' or 'macro_f1'."
        )
    return metric


def score(metric_name: str, predictions: Iterable[Any], targets: Iterable[Any], labels: Sequence[str]) -> float:
    """Score predictions against targets; values that are no predictions are an error, never a score."""
    metric = find_metric(metric_name)
    given, true = _as_list(predictions), _as_list(targets)
    # Only classification and multilabel share metrics, and a list of indices is what tells them apart.
    lists = bool(true) and isinstance(true[0], (tuple, list, set, frozenset))
    kind = metric.kinds[0] if len(metric.kinds) == 1 or not lists else "multilabel"
    check_metric(metric_name, kind, labels)
    return metric.function(*_checked(kind, given, true, len(labels)), len(labels))


def report(
    task_kind: str, predictions: Iterable[Any], targets: Iterable[Any], labels: Sequence[str], metric: str
) -> dict[str, Any]:
    """Return what `evaluate` shows of a task: its own metric, the usual ones of its kind, and the details."""
    if task_kind not in _REPORTED:
        raise UnknownName(task_kind, "a kind of task", _REPORTED)
    own = check_metric(metric, task_kind, labels)
    given, true = _checked(task_kind, _as_list(predictions), _as_list(targets), len(labels))
    rows = dict.fromkeys((own.name, *own.parts, *_REPORTED[task_kind]))
    result: dict[str, Any] = {name: METRICS[name].function(given, true, len(labels)) for name in rows}
    result["rows"] = len(true)
    if task_kind == "regression":
        result["mse"] = sum((a - b) * (a - b) for a, b in zip(given, true, strict=True)) / len(true)
    if task_kind == "classification":
        result |= _class_details(given, true, labels)
    return result


_REPORTED = {
    "classification": ("accuracy", "macro_f1"),
    "multilabel": ("micro_f1", "macro_f1", "subset_accuracy"),
    "regression": ("pearson", "spearman"),
    "span": ("exact_match", "span_f1"),
}


def _class_details(given: list[int], true: list[int], labels: Sequence[str]) -> dict[str, Any]:
    from sklearn.metrics import (
        confusion_matrix,
        precision_recall_fscore_support,
    )

    places = list(range(len(labels)))
    columns = precision_recall_fscore_support(true, given, labels=places, zero_division=0)
    names = ("precision", "recall", "f1", "support")
    return {
        "confusion": confusion_matrix(true, given, labels=places).tolist(),
        "majority": max(Counter(true).values()) / len(true),
        "classes": {
            label: {name: column[place].item() for name, column in zip(names, columns, strict=True)}
            for place, label in enumerate(labels)
        },
    }


# --- what may be scored -------------------------------------------------------------------------------------


def _as_list(values: Any) -> list[Any]:
    # Arrays and tensors turn into plain numbers here, so that one check serves all of them.
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _checked(kind: str, given: list[Any], true: list[Any], classes: int) -> tuple[list[Any], list[Any]]:
    if len(given) != len(true):
        raise InputError(f"There are {len(given)} predictions for {len(true)} targets; each row needs both.")
    if not true:
        raise InputError("There is nothing to score: no predictions and no targets.")
    check_given, check_true = _CHECKS[kind]
    return (
        [check_given(value, classes, f"Prediction {row}") for row, value in enumerate(given, 1)],
        [check_true(value, classes, f"Target {row}") for row, value in enumerate(true, 1)],
    )


def _class_index(value: Any, classes: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < classes:
        raise InputError(f"{what} is {value!r}, not the index of a label (0 to {classes - 1}).")
    return int(value)


def _class_indices(value: Any, classes: int, what: str) -> frozenset[int]:
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise InputError(f"{what} is {value!r}, not a list of label indices.")
    return frozenset(_class_index(part, classes, what) for part in value)


def _number(value: Any, _: int, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what} is {value!r}, not a number.") from None
    if not math.isfinite(number):
        raise InputError(f"{what} is {number}; such a row has no score, so training or the data went wrong.")
    return number


def _answer(value: Any, _: int, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{what} is {value!r}, not the text of an answer.")
    return value


def _answers(value: Any, _: int, what: str) -> tuple[str, ...]:
    answers = tuple(value[2]) if isinstance(value, (tuple, list)) and len(value) == 3 else ()
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise InputError(f"{what} is {value!r}, not (start, end, acceptable answer texts).")
    return answers


_Check = Callable[[Any, int, str], Any]
_CHECKS: dict[str, tuple[_Check, _Check]] = {
    "classification": (_class_index, _class_index),
    "multilabel": (_class_indices, _class_indices),
    "regression": (_number, _number),
    "span": (_answer, _answers),
}


# --- the functions ------------------------------------------------------------------------------------------


def _exact(given: list[Any], true: list[Any], _: int) -> float:
    # One line for accuracy (indices) and subset accuracy (sets of indices).
    return sum(bool(a == b) for a, b in zip(given, true, strict=True)) / len(true)


def _f1(given: list[Any], true: list[Any], classes: int, average: str) -> float:
    from sklearn.metrics import f1_score

    if isinstance(true[0], frozenset):
        given, true = _indicators(given, classes), _indicators(true, classes)
    return float(f1_score(true, given, average=average, zero_division=0))


def _indicators(rows: list[frozenset[int]], classes: int) -> Any:
    import numpy

    matrix = numpy.zeros((len(rows), classes), dtype=numpy.int8)
    for row, places in enumerate(rows):
        matrix[row, sorted(places)] = 1
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

    # One class alone has no correlation; sklearn would warn of a one-by-one confusion matrix.
    if len(set(given)) == 1 or len(set(true)) == 1:
        return 0.0
    return float(matthews_corrcoef(true, given))


def _correlation(given: list[float], true: list[float], name: str) -> float:
    from scipy import stats

    # Undefined for a constant; a model that says the same of every row has learnt nothing, hence 0.
    if len(set(given)) == 1 or len(set(true)) == 1:
        return 0.0
    with warnings.catch_warnings():
        # scipy warns of nearly constant values; the number is still the best there is, unless it is NaN.
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
    """Give an answer's words as SQuAD compares them: lower case, no punctuation, no articles, in this order."""
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()


def word_f1(given: list[str], true: list[str]) -> float:
    """Give the F1 of an answer's words; without any word on either side 1 if both have none, as in SQuAD 2.0."""
    if not given or not true:
        return float(given == true)
    shared = sum((Counter(given) & Counter(true)).values())
    return 2 * shared / (len(given) + len(true))


def answer_scores(said: str, answers: Sequence[str], silence: bool) -> tuple[float, float]:
    """Give exact match and F1 of an answer, each with the acceptable answer that suits it best.

    They are SQuAD 2.0's with `silence`, where questions may have no answer: acceptable answers without words do not
    count, and if none is left only an answer without words is right. Else they are SQuAD 1.1's, which knows nothing of
    silence and gives F1 0 to it whatever the answer.
    """
    words, wanted = answer_words(said), [answer_words(answer) for answer in answers]
    named = [one for one in wanted if one]
    if silence:
        wanted = named = named or [[]]
    return float(words in wanted), max((word_f1(words, one) for one in named), default=0.0)


def _answer_means(given: list[str], true: list[tuple[str, ...]]) -> tuple[float, float]:
    # Which of the two official scripts counts is told by the data: has any question no answer?
    silence = ("",) in true
    scores = [answer_scores(text, answers, silence) for text, answers in zip(given, true, strict=True)]
    return sum(exact for exact, _ in scores) / len(scores), sum(f1 for _, f1 in scores) / len(scores)


def _exact_match(given: list[str], true: list[tuple[str, ...]], _: int) -> float:
    return _answer_means(given, true)[0]


def _span_f1(given: list[str], true: list[tuple[str, ...]], _: int) -> float:
    return _answer_means(given, true)[1]


_CLASS, _BOTH = ("classification",), ("classification", "multilabel")
METRICS: dict[str, Metric] = {
    row.name: row
    for row in (
        Metric("accuracy", _CLASS, _exact, "share of rows with the right class"),
        Metric("f1", _CLASS, _binary_f1, "F1 of the second of two labels", label_count=2),
        Metric("macro_f1", _BOTH, _macro_f1, "mean of the F1 of each class"),
        Metric("micro_f1", _BOTH, _micro_f1, "F1 over all decisions together"),
        Metric("matthews", _CLASS, _matthews, "Matthews correlation, CoLA's; 0 for a constant"),
        Metric("accuracy_f1", _CLASS, _accuracy_f1, "mean of accuracy and F1, MRPC's", 2, ("accuracy", "f1")),
        Metric("subset_accuracy", ("multilabel",), _exact, "share of rows with exactly the right labels"),
        Metric("pearson", ("regression",), _pearson, "Pearson correlation; 0 for a constant"),
        Metric("spearman", ("regression",), _spearman, "Spearman rank correlation; 0 for a constant"),
        Metric(
            "pearson_spearman",
            ("regression",),
            _pearson_spearman,
            "mean of both correlations, STS-B's",
            parts=("pearson", "spearman"),
        ),
        Metric("exact_match", ("span",), _exact_match, "share of answers that are acceptable ones, SQuAD's"),
        Metric("span_f1", ("span",), _span_f1, "mean F1 of the answer's words, SQuAD's"),
    )
}

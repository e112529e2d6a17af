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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterbank.errors import UnknownName

if TYPE_CHECKING:
    import numpy as np

_Z = 1.959963984540054
"""Half the width, in standard deviations, of the interval that holds 95 % of a normal distribution."""


@dataclass(frozen=True)
class Counts:
    """How often each label was right, given and true, for many samples or thresholds at once."""

    hits: np.ndarray
    """`[..., labels]`, as `given` and `true`."""
    given: np.ndarray
    true: np.ndarray
    rows: int
    sets: bool
    """Whether a row has a set of labels: a label that is neither given nor true then has an F1 of 0."""


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
    from_counts: Callable[[Counts], np.ndarray] | None = None
    """The same score from counts alone, `[...]`: for a bootstrap and for thresholds. That of two labels reads the last
    label's only."""
    row_counts: Callable[[list[Any], list[Any]], list[tuple[int, int, int]]] | None = None
    """(checked predictions, checked targets) -> what of each row was right, given and true, whose sums `from_counts`
    takes as those of one label; None where a row is a label or a set of labels."""
    interval: Callable[[float, int], tuple[float, float]] | None = None
    """(score, rows) -> its 95 % confidence interval, if a formula gives it."""


def find_metric(name: str) -> Metric:
    """Return the metric of this name."""
    if name not in METRICS:
        raise UnknownName(name, "a metric", METRICS)
    return METRICS[name]


def _exact(given: list[Any], true: list[Any], _: int) -> float:
    # Accuracy compares indices, subset accuracy sets of indices.
    return sum(bool(a == b) for a, b in zip(given, true, strict=True)) / len(true)


def _counts(given: list[Any], true: list[Any], classes: int) -> Counts:
    import numpy as np

    if isinstance(true[0], frozenset):
        a, b = _indicators(given, classes), _indicators(true, classes)
        return Counts((a & b).sum(0), a.sum(0), b.sum(0), len(true), sets=True)
    a, b = np.array(given), np.array(true)
    hits, mine, wanted = (np.bincount(one, minlength=classes) for one in (a[a == b], a, b))
    return Counts(hits, mine, wanted, len(true), sets=False)


def _indicators(rows: list[frozenset[int]], classes: int) -> np.ndarray:
    import numpy as np

    matrix = np.zeros((len(rows), classes), dtype=bool)
    for row, indices in enumerate(rows):
        matrix[row, sorted(indices)] = True
    return matrix


def _binary_f1(given: list[int], true: list[int], classes: int) -> float:
    return float(_binary_f1_of(_counts(given, true, classes)))


def _macro_f1(given: list[Any], true: list[Any], classes: int) -> float:
    counts = _counts(given, true, classes)
    scores = _label_f1(counts)  # of a class that is neither given nor true there is none
    return float(scores.mean() if counts.sets else scores[counts.given + counts.true > 0].mean())


def _micro_f1(given: list[Any], true: list[Any], classes: int) -> float:
    return float(_micro_f1_of(_counts(given, true, classes)))


def _accuracy_f1(given: list[int], true: list[int], classes: int) -> float:
    return (_exact(given, true, classes) + _binary_f1(given, true, classes)) / 2


def _matthews(given: list[int], true: list[int], classes: int) -> float:
    """Return the correlation of Gorodkin (2004), from whole numbers; 0 where it is undefined."""
    counts = _counts(given, true, classes)
    mine, wanted, rows = counts.given.tolist(), counts.true.tolist(), counts.rows
    shared = rows * int(counts.hits.sum()) - sum(a * b for a, b in zip(mine, wanted, strict=True))
    spread = (rows**2 - sum(a * a for a in mine)) * (rows**2 - sum(b * b for b in wanted))
    return shared / math.sqrt(spread) if spread else 0.0


def _correlation(given: list[float], true: list[float], function: Callable[[Any, Any], Any]) -> float:
    import numpy as np

    # Undefined for a constant. A model that predicts the same for every row has learned nothing, hence 0.
    if len(set(given)) == 1 or len(set(true)) == 1:
        return 0.0
    with np.errstate(all="ignore"):  # nearly constant and very large values
        value = float(function(np.array(given, dtype=float), np.array(true, dtype=float)))
    return value if math.isfinite(value) else 0.0


def _cosine(x: np.ndarray, y: np.ndarray) -> Any:
    """Return the cosine of the deviations from the means, scaled so that no square overflows."""
    import numpy as np

    units = []
    for part in (x - x.mean(), y - y.mean()):
        largest = abs(part).max()
        units.append(part / (largest * np.linalg.norm(part / largest)))
    found = np.clip(units[0] @ units[1], -1, 1)
    return np.round(found) if len(x) == 2 else found  # two points are on a line


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks from 1; equal values share the mean of theirs."""
    import numpy as np

    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[places])


def _pearson(given: list[float], true: list[float], _: int) -> float:
    return _correlation(given, true, _cosine)


def _spearman(given: list[float], true: list[float], _: int) -> float:
    import numpy as np

    return _correlation(given, true, lambda x, y: np.corrcoef(_ranks(x), _ranks(y))[0, 1])


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


OUTSIDE = "O"
Entity = tuple[str, int, int]
"""Its type, its first and its last-plus-one word."""
_TAG = re.compile(r"([BIESLU])-(.+)", re.DOTALL)
_BEGIN, _END = "BSU", "ESLU"


def parts_of(tag: str) -> tuple[str, str]:
    """Return the mark and the type of a tag of a scheme; ("O", "") for any other."""
    found = _TAG.fullmatch(tag)
    return (found[1], found[2]) if found else (OUTSIDE, "")


def marks_entities(tags: Iterable[str]) -> bool:
    """Return whether all tags are those of a scheme."""
    return all(tag == OUTSIDE or _TAG.fullmatch(tag) for tag in tags)


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence as CoNLL's `conlleval` reads them, whatever the scheme.

    An entity begins at B, S and U, where the type changes and after the end of another; it ends before those, before O,
    and at E, S, L and U.
    """
    found: list[Entity] = []
    start, kind, ended = 0, "", True
    for place, (mark, name) in enumerate([*map(parts_of, tags), (OUTSIDE, "")]):
        goes_on = bool(kind) and not ended and name == kind and mark not in _BEGIN
        if not goes_on:
            if kind:
                found.append((kind, start, place))
            start, kind = place, name
        ended = mark in _END
    return found


def found_and_true(given: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> tuple[set[Any], set[Any]]:
    """Return the entities of all rows as (type, row, first word, end), or the words if their tags are plain."""
    marked = marks_entities(tag for rows in (given, true) for row in rows for tag in row)
    parts = entities if marked else lambda tags: [(tag, place, place + 1) for place, tag in enumerate(tags)]
    given_set, true_set = (
        {(name, place, start, end) for place, row in enumerate(rows) for name, start, end in parts(row)}
        for rows in (given, true)
    )
    return given_set, true_set


def _tag_f1(given: list[Sequence[str]], true: list[Sequence[str]], _: int) -> float:
    found, wanted = found_and_true(given, true)
    return 2 * len(found & wanted) / (len(found) + len(wanted)) if found or wanted else 0.0


def _tag_accuracy(given: list[Sequence[str]], true: list[Sequence[str]], _: int) -> float:
    counts = _word_counts(given, true)
    return sum(right for right, _, _ in counts) / max(1, sum(words for _, _, words in counts))


def _entity_counts(given: list[Sequence[str]], true: list[Sequence[str]]) -> list[tuple[int, int, int]]:
    found, wanted = found_and_true(given, true)
    sums = [Counter(row for _, row, _, _ in some) for some in (found & wanted, found, wanted)]
    return [(sums[0][row], sums[1][row], sums[2][row]) for row in range(len(true))]


def _word_counts(given: list[Sequence[str]], true: list[Sequence[str]]) -> list[tuple[int, int, int]]:
    pairs = zip(given, true, strict=True)
    rights = [sum(a == b for a, b in zip(one, two, strict=True)) for one, two in pairs]
    return [(right, len(tags), len(tags)) for right, tags in zip(rights, true, strict=True)]


# --- the same scores from counts, and intervals ---------------------------------------------------------------


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    import numpy

    return numpy.asarray(numpy.divide(above, below, out=numpy.zeros(numpy.shape(below)), where=below > 0))


def _label_f1(counts: Counts) -> np.ndarray:
    return _ratio(2.0 * counts.hits, counts.given + counts.true)


def _binary_f1_of(counts: Counts) -> np.ndarray:
    return _label_f1(counts)[..., -1]


def _accuracy_f1_of(counts: Counts) -> np.ndarray:
    wrong = (counts.given + counts.true - 2 * counts.hits)[..., -1]
    found: np.ndarray = (1 - wrong / counts.rows + _binary_f1_of(counts)) / 2
    return found


def _macro_f1_of(counts: Counts) -> np.ndarray:
    import numpy

    counted = numpy.ones_like(counts.given) if counts.sets else (counts.given + counts.true) > 0
    return _ratio((_label_f1(counts) * counted).sum(-1), counted.sum(-1))


def _micro_f1_of(counts: Counts) -> np.ndarray:
    return _ratio(2.0 * counts.hits.sum(-1), (counts.given + counts.true).sum(-1))


def _matthews_of(counts: Counts) -> np.ndarray:
    import numpy

    given, true, rows = counts.given / counts.rows, counts.true / counts.rows, counts.rows
    spread = (1 - (given**2).sum(-1)) * (1 - (true**2).sum(-1))
    return _ratio(counts.hits.sum(-1) / rows - (given * true).sum(-1), numpy.sqrt(numpy.maximum(spread, 0)))


def _wilson(score: float, rows: int) -> tuple[float, float]:
    """Return Wilson's interval of a share; for a mean of row scores between 0 and 1 it is never too narrow."""
    middle, spread = score + _Z**2 / (2 * rows), score * (1 - score) / rows + (_Z / (2 * rows)) ** 2
    low, high = ((middle + sign * _Z * math.sqrt(spread)) / (1 + _Z**2 / rows) for sign in (-1, 1))
    return min(max(0.0, low), score), max(min(1.0, high), score)  # no rounding error leaves the score outside


def _fisher(score: float, rows: int) -> tuple[float, float]:
    """Return a correlation's interval by Fisher's transformation, with the variance of Bonett and Wright (2000).

    It is that of Spearman's, which is a little wider than Pearson's.
    """
    if rows < 5 or abs(score) >= 1:
        return (-1.0, 1.0) if rows < 5 else (score, score)
    half = _Z * math.sqrt((1 + score * score / 2) / (rows - 3))
    return math.tanh(math.atanh(score) - half), math.tanh(math.atanh(score) + half)


METRICS: dict[str, Metric] = {
    row.name: row
    for row in (
        Metric("accuracy", _exact, "share of rows with the right class", interval=_wilson),
        Metric("f1", _binary_f1, "F1 of the second of two labels", label_count=2, from_counts=_binary_f1_of),
        Metric("macro_f1", _macro_f1, "mean of the F1 of each class", from_counts=_macro_f1_of),
        Metric("micro_f1", _micro_f1, "F1 over all decisions together", from_counts=_micro_f1_of),
        Metric("matthews", _matthews, "Matthews correlation, CoLA's; 0 for a constant", from_counts=_matthews_of),
        Metric(
            "accuracy_f1",
            _accuracy_f1,
            "mean of accuracy and F1, MRPC's",
            label_count=2,
            parts=("accuracy", "f1"),
            from_counts=_accuracy_f1_of,
        ),
        Metric("subset_accuracy", _exact, "share of rows with exactly the right labels", interval=_wilson),
        Metric("pearson", _pearson, "Pearson correlation; 0 for a constant", interval=_fisher),
        Metric("spearman", _spearman, "Spearman rank correlation; 0 for a constant", interval=_fisher),
        Metric(
            "pearson_spearman",
            _pearson_spearman,
            "mean of both correlations, STS-B's",
            parts=("pearson", "spearman"),
            interval=_fisher,
        ),
        Metric("exact_match", _exact_match, "share of answers that are acceptable ones, SQuAD's", interval=_wilson),
        Metric(
            "tag_f1",
            _tag_f1,
            "F1 of entities as conlleval counts them; of plain tags, their accuracy",
            from_counts=_micro_f1_of,
            row_counts=_entity_counts,
        ),
        Metric(
            "tag_accuracy",
            _tag_accuracy,
            "share of words with the right tag",
            from_counts=_micro_f1_of,
            row_counts=_word_counts,
        ),
        Metric("span_f1", _span_f1, "mean F1 of the answer's words, SQuAD's", interval=_wilson),
    )
}

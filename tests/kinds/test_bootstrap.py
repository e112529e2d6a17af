"""`kinds.bootstrap`: intervals of F1 and the Matthews correlation, against scipy's bootstrap over scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import f1_score, matthews_corrcoef

from adapterbank.kinds.scoring import intervals, report
from adapterbank.metrics import METRICS
from kinds.tasks_of import task_of


def classes(rows: int, labels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    true = rng.integers(0, labels, rows)
    return np.where(rng.random(rows) < 0.7, true, rng.integers(0, labels, rows)), true


@pytest.mark.parametrize(
    ("metric", "labels", "oracle"),
    [
        ("f1", 2, lambda a, b: f1_score(b, a)),
        ("matthews", 3, lambda a, b: matthews_corrcoef(b, a)),
        ("macro_f1", 3, lambda a, b: f1_score(b, a, average="macro")),
    ],
)
def test_the_ends_are_close_to_those_of_scipy(metric, labels, oracle):
    given, true = classes(300, labels)
    low, high = intervals(task_of("classification", "abc"[:labels], metric), given, true)[metric]
    options = {"paired": True, "vectorized": False, "method": "percentile", "n_resamples": 999}
    wanted = scipy.stats.bootstrap((given, true), oracle, rng=np.random.default_rng(0), **options).confidence_interval
    assert (low, high) == pytest.approx(tuple(wanted), abs=0.01)


def test_the_intervals_of_labels_in_sets_hold_their_scores():
    rng = np.random.default_rng(0)
    true = rng.random((200, 5)) < 0.3
    given = true ^ (rng.random((200, 5)) < 0.1)
    rows = [[tuple(np.flatnonzero(row).tolist()) for row in flags] for flags in (given, true)]
    task = task_of("multilabel", "abcde")
    found, scores = intervals(task, *rows), report(task, *rows)
    assert set(found) == {"micro_f1", "macro_f1", "subset_accuracy"}
    for name, (low, high) in found.items():
        assert low < scores[name] < high
        assert high - low < 0.2


@pytest.mark.parametrize("labels", [("O", "B-a", "I-a", "B-b", "I-b"), ("NOUN", "VERB", "X")])
def test_the_intervals_of_tags_are_those_of_resampled_sentences(labels):
    rng = np.random.default_rng(0)
    true = [tuple(rng.choice(labels, rng.integers(1, 12)).tolist()) for _ in range(300)]
    given = [tuple(tag if rng.random() < 0.7 else str(rng.choice(labels)) for tag in row) for row in true]
    task, targets = task_of("tagging", labels), [[(0, 0, 0, tag) for tag in row] for row in true]
    found = intervals(task, given, targets)
    for name in ("tag_f1", "tag_accuracy"):
        drawn = [rng.integers(0, 300, 300) for _ in range(400)]
        scores = [METRICS[name].function([given[i] for i in one], [true[i] for i in one], 0) for one in drawn]
        assert found[name] == pytest.approx(np.percentile(scores, (2.5, 97.5)).tolist(), abs=0.01)


def test_the_same_rows_have_the_same_intervals():
    given, true = classes(100, 3)
    task = task_of("classification", "abc", "macro_f1")
    assert intervals(task, given, true) == intervals(task, given.tolist(), true.tolist())


def test_a_single_row_has_an_interval():
    found = intervals(task_of("classification", "ab", "accuracy_f1"), [1], [1])
    assert found["f1"] == [1.0, 1.0]
    assert found["accuracy"][0] < 0.5

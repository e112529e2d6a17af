"""`kinds.bootstrap`: intervals of F1 and the Matthews correlation, against scipy's bootstrap over scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import f1_score, matthews_corrcoef

from adapterbank.kinds.scoring import intervals, report
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


def test_the_same_rows_have_the_same_intervals():
    given, true = classes(100, 3)
    task = task_of("classification", "abc", "macro_f1")
    assert intervals(task, given, true) == intervals(task, given.tolist(), true.tolist())


def test_a_single_row_has_an_interval():
    found = intervals(task_of("classification", "ab", "accuracy_f1"), [1], [1])
    assert found["f1"] == [1.0, 1.0]
    assert found["accuracy"][0] < 0.5

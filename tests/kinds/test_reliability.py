"""`kinds.reliability`: the calibration error, the bins and the coverage, against scikit-learn and pandas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, softmax
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score

from adapterbank.encoder.batch import Tokens
from adapterbank.inference.predictions import predict
from adapterbank.inference.rows import Rows
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.reliability import BINS, SHARES, in_bins, reliability
from kinds.tasks_of import task_of


def outputs(task, x):
    one = Tokens(np.zeros(1, np.int64), np.zeros(1, np.int64))
    return HeadOutputs(task, None, Rows([one] * len(x), None), list(x))


def independent_error(top: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error from pandas' own bins."""
    frame = pd.DataFrame({"top": top, "right": right})
    groups = frame.groupby(pd.cut(frame.top, np.linspace(0, 1, 16)), observed=True)
    return float(sum(len(g) / len(frame) * abs(g.right.mean() - g.top.mean()) for _, g in groups))


def test_the_calibration_error_is_that_of_an_independent_computation():
    rng = np.random.default_rng(1)
    x, targets = 2 * rng.normal(size=(700, 3)), rng.integers(0, 3, 700)
    found = reliability(outputs(replace(task_of("classification", "abc"), temperature=1.7), x), targets.tolist())
    p = softmax(x / 1.7, axis=1)
    assert found["calibration_error"] == pytest.approx(independent_error(p.max(1), p.argmax(1) == targets), abs=1e-5)


def test_the_bins_are_those_of_scikit_learn():
    rng = np.random.default_rng(2)
    top = np.concatenate([rng.random(500), [0.0, 1 / BINS, 0.4, 1.0]])
    right = rng.random(504) < top
    bins = in_bins(top, right)
    accuracy, confidence = calibration_curve(right, top, n_bins=BINS)
    np.testing.assert_allclose([one["accuracy"] for one in bins], accuracy, atol=1e-6)
    np.testing.assert_allclose([one["confidence"] for one in bins], confidence, atol=1e-6)
    assert sum(one["rows"] for one in bins) == 504


def test_every_label_of_a_multilabel_row_is_a_choice():
    rng = np.random.default_rng(3)
    x, true = 2 * rng.normal(size=(200, 4)), rng.random((200, 4)) < 0.3
    targets = [tuple(np.flatnonzero(row).tolist()) for row in true]
    found = reliability(outputs(task_of("multilabel", "abcd"), x), targets)
    p = expit(x)
    expected = independent_error(np.maximum(p, 1 - p).ravel(), ((p > 0.5) == true).ravel())
    assert found["calibration_error"] == pytest.approx(expected, abs=1e-5)
    assert found["coverage"][0]["accuracy"] == pytest.approx(((p > 0.5) == true).all(1).mean())


@pytest.mark.parametrize("kind", ["classification", "multilabel"])
def test_the_coverage_is_what_predict_gives_with_that_confidence(kind):
    rng = np.random.default_rng(4)
    x, classes = 2 * rng.normal(size=(300, 2)), rng.integers(0, 2, 300).tolist()
    targets = classes if kind == "classification" else [(c,) for c in classes]
    given = outputs(replace(task_of(kind, "ab"), thresholds=(0.7, 0.3)), x)
    for share, one in zip(SHARES, reliability(given, targets)["coverage"], strict=True):
        answers = predict(given, abstain=one["abstain"])
        kept = [i for i, answer in enumerate(answers) if answer.abstained is None]
        assert len(kept) / 300 == pytest.approx(one["coverage"])
        assert one["coverage"] >= share
        said = [answers[i].label or answers[i].labels for i in kept]
        true = ["ab"[classes[i]] if kind == "classification" else ("ab"[classes[i]],) for i in kept]
        right = accuracy_score([str(s) for s in said], [str(t) for t in true])
        assert one["accuracy"] == pytest.approx(right, abs=1e-6)


def test_rows_of_equal_confidence_stand_together():
    x = np.array([[2.0, 0.0]] * 10)
    found = reliability(outputs(task_of("classification", "ab"), x), [0] * 9 + [1])["coverage"]
    assert {(one["coverage"], one["accuracy"]) for one in found} == {(1.0, 0.9)}


def test_kinds_without_probabilities_have_none():
    assert reliability(outputs(task_of("regression"), np.zeros((3, 1))), [0.0] * 3) == {}

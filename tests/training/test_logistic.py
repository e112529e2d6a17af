"""Tests of `adapterbank.training.logistic`: heads equal scikit-learn's regression, and no row scores itself."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from adapterbank.training.logistic import FOLDS, fit, fold_numbers, held_out


def clouds(classes: int, each: int = 9, width: int = 6, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    random = np.random.RandomState(seed)
    targets = [one for one in range(classes) for _ in range(each)]
    return random.randn(classes, width)[targets] + random.randn(len(targets), width), targets


def probabilities(outputs: np.ndarray) -> np.ndarray:
    shifted = np.exp(outputs - outputs.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_a_head_gives_the_probabilities_of_scikit_learns_regression(classes, balanced):
    vectors, targets = clouds(classes)
    vectors, targets = vectors[4:], targets[4:]  # the first class is rarer
    weight, bias = fit(vectors, targets, classes, strength=3.0, balanced=balanced)
    model = LogisticRegression(C=3.0, max_iter=1000, class_weight="balanced" if balanced else None)
    expected = model.fit(vectors, targets).predict_proba(vectors)
    np.testing.assert_allclose(probabilities(vectors @ weight.T + bias), expected, atol=1e-5)


def test_a_class_without_rows_is_never_the_answer():
    vectors, targets = clouds(3)
    weight, bias = fit(vectors, [2 * one for one in targets], 6)
    answers = (10 * np.random.RandomState(1).randn(500, vectors.shape[1]) @ weight.T + bias).argmax(1)
    assert set(answers.tolist()) == {0, 2, 4}


def test_the_outputs_for_a_row_come_from_a_head_that_never_saw_it():
    vectors, targets = clouds(3)
    folds, found = fold_numbers(targets, seed=5), held_out(vectors, targets, 3, seed=5)
    assert set(folds) == set(range(FOLDS))
    for fold in range(FOLDS):
        rest = folds != fold
        model = LogisticRegression(C=10, max_iter=1000).fit(vectors[rest], np.array(targets)[rest])
        np.testing.assert_allclose(probabilities(found[~rest]), model.predict_proba(vectors[~rest]), atol=1e-5)


def test_folds_share_every_class_equally_and_follow_from_the_seed():
    targets = [0] * 23 + [1] * 5 + [2]
    folds = fold_numbers(targets, seed=1)
    for one in (0, 1):
        counts = np.bincount(folds[np.array(targets) == one], minlength=FOLDS)
        assert counts.max() - counts.min() <= 1
    assert (folds == fold_numbers(targets, seed=1)).all()
    assert (folds != fold_numbers(targets, seed=2)).any()


@pytest.mark.parametrize("targets", [[0, 1], [0, 0, 1], [0, 1, 2]])
def test_a_class_of_one_row_is_scored_without_it(targets):
    found = held_out(np.eye(len(targets)), targets, 3, seed=0)
    assert np.isfinite(found).all()
    assert found.shape == (len(targets), 3)


def test_rows_with_one_key_are_in_one_fold_so_that_none_scores_itself():
    random = np.random.RandomState(0)
    vectors, targets = np.repeat(random.randn(20, 8), 3, 0), np.repeat(random.randint(0, 2, 20), 3).tolist()
    keys = np.repeat(np.arange(20), 3).tolist()
    folds = fold_numbers(targets, 0, keys)
    assert all(len(set(folds[3 * k : 3 * k + 3])) == 1 for k in range(20))
    found = held_out(vectors, targets, 2, seed=0, keys=keys).argmax(1)
    leaked = held_out(vectors, targets, 2, seed=0).argmax(1)
    assert (found == targets).mean() < 0.8 < (leaked == targets).mean()

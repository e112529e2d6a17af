"""Heads by logistic regression: the best linear classifier of fixed vectors, by scikit-learn. Knows no encoder."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence

import numpy as np

from adapterbank.draws import RandomStream

_STRENGTH, _CLASSES = 10.0, 8
STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
"""The strengths among which dev rows choose."""
FOLDS = 5
_STEPS = 1000
_LARGE = 10**8
"""Numbers above which vectors are kept in float32."""
_ABSENT = -100.0
"""Bias of a class without rows, which is then never the answer."""


def usual_strength(classes: int) -> float:
    """Return the inverse of the penalty (scikit-learn's `C`), where no dev rows choose it.

    With many classes, each has a small share of the loss, and a penalty that suits few would leave all answers unsure.
    """
    return _STRENGTH * max(1.0, classes / _CLASSES)


def fit(
    vectors: np.ndarray,
    classes: Sequence[int],
    outputs: int,
    *,
    strength: float | None = None,
    balanced: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight `[outputs, width]` and bias `[outputs]` of the regression of classes on vectors `[rows, width]`.

    Its probabilities are those of scikit-learn's `LogisticRegression(C=strength)`; with `balanced`, all classes weigh
    the same.
    """
    strength = usual_strength(outputs) if strength is None else strength
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=_STEPS, class_weight="balanced" if balanced else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # after a thousand steps the rest is rounding
        model.fit(vectors.astype(np.float32 if vectors.size > _LARGE else np.float64), classes)
    weight, bias = np.zeros((outputs, vectors.shape[1])), np.full(outputs, _ABSENT)
    found: np.ndarray = model.classes_
    if len(found) == 2:  # scikit-learn keeps the difference of the two classes
        weight[found], bias[found] = [-model.coef_[0] / 2, model.coef_[0] / 2], [0.0, model.intercept_[0]]
    else:
        weight[found], bias[found] = model.coef_, model.intercept_
    return weight.astype(np.float32), bias.astype(np.float32)


def held_out(
    vectors: np.ndarray,
    classes: Sequence[int],
    outputs: int,
    *,
    seed: int,
    balanced: bool = False,
    keys: Sequence[Hashable] | None = None,
) -> np.ndarray:
    """Return the outputs `[rows, outputs]` for each row of a regression on the other folds.

    Rows with one key, such as the same text, are in one fold.
    """
    folds, found = fold_numbers(classes, seed, keys), np.zeros((len(classes), outputs), np.float32)
    targets = np.asarray(classes)
    for fold in range(folds.max() + 1):
        rest = folds != fold
        if not rest.any():  # all rows have one key
            continue
        if len(set(targets[rest].tolist())) > 1:
            weight, bias = fit(vectors[rest], targets[rest].tolist(), outputs, balanced=balanced)
            found[~rest] = vectors[~rest] @ weight.T + bias
        else:
            found[~rest, targets[rest][0]] = 1.0
    return found


def fold_numbers(classes: Sequence[int], seed: int, keys: Sequence[Hashable] | None = None) -> np.ndarray:
    """Return the fold of each row: folds are equally large, and so are their shares of each class, but for keys."""
    first: dict[Hashable, int] = {}
    for row, key in enumerate(keys if keys is not None else range(len(classes))):
        first.setdefault(key, row)
    rows = np.array(list(first.values()))
    targets, order = np.asarray(classes)[rows], RandomStream(seed, "folds").permutation(len(rows))
    order = order[np.argsort(targets[order], kind="stable")]
    folds = np.empty(len(rows), int)
    folds[order] = np.arange(len(rows)) % min(FOLDS, len(rows))
    places = dict(zip(first, folds, strict=True))
    return np.array([places[key] for key in (keys if keys is not None else range(len(classes)))])

"""Tests of `adapterbank.api.estimator`: scikit-learn's own tools and checks accept it, for texts and pairs."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks
from sklearn.utils.validation import validate_data

from adapterbank import AdapterClassifier
from adapterbank.api.opened import open_bank
from adapterbank.api.options import ModelOptions
from adapterbank.errors import ArrayError
from families import save_random
from small_data import FAST, pairs, reviews

TEXTS, LABELS = map(list, zip(*reviews(48), strict=True))
GOOD = {**FAST, "epochs": 12, "device": "cpu"}


@pytest.fixture(scope="module")
def encoder(checkpoint):
    return str(checkpoint("bert")[0])


@pytest.fixture(scope="module")
def fitted(encoder):
    return AdapterClassifier(encoder, **GOOD).fit(TEXTS, LABELS)


def test_it_learns_and_predicts(fitted):
    likely = fitted.predict_proba(TEXTS)
    assert likely.shape == (48, 2)
    np.testing.assert_allclose(likely.sum(axis=1), 1, atol=1e-6)
    assert list(fitted.classes_) == ["negative", "positive"]
    assert (fitted.predict(TEXTS) == fitted.classes_[likely.argmax(axis=1)]).all()
    assert fitted.score(TEXTS, LABELS) > 0.9
    assert fitted.record_["params"]["trained"] == sum(one.size for one in fitted.package_.tensors().values())


def test_it_starts_from_the_folder_of_a_package(encoder, tmp_path):
    package = (
        open_bank(tmp_path / "bank", encoder, device="cpu").train("s", reviews(48), **{**GOOD, "epochs": 1}).package
    )
    found = AdapterClassifier(encoder, **{**GOOD, "epochs": 1}, start_from=str(package.path)).fit(TEXTS, LABELS)
    assert found.record_["start_from"]["package"] == "s@1"
    with pytest.raises(ArrayError, match="there is no bank to find it in; name a bank that has this task, or the fold"):
        AdapterClassifier(encoder, **GOOD, start_from="s").fit(TEXTS, LABELS)


@pytest.mark.parametrize(
    "form",
    [np.array, lambda rows: np.array(rows, dtype=object), pd.Series, tuple, lambda rows: pd.DataFrame({"t": rows}),
     lambda rows: np.array(rows)[:, None]],
    ids=["array", "objects", "series", "tuple", "frame", "column"],
)  # fmt: skip
def test_texts_of_every_form_are_read_alike(encoder, fitted, form):
    again = AdapterClassifier(encoder, **GOOD).fit(form(TEXTS), pd.Series(LABELS))
    assert (again.predict_proba(form(TEXTS)) == fitted.predict_proba(TEXTS)).all()


def test_pairs_are_tuples_or_two_columns(encoder):
    rows = [(first, second) for first, second, _ in pairs()]
    labels = [label == "yes" for *_, label in pairs()]
    found = AdapterClassifier(encoder, **GOOD).fit(rows, labels)
    assert found.classes_.tolist() == [False, True]
    assert (found.predict_proba(rows) == found.predict_proba(pd.DataFrame(rows))).all()
    with pytest.raises(ArrayError, match="X has one text a row, but was fitted with 2"):
        found.predict(["the cat"])


def test_many_classes_of_any_type_keep_their_order(encoder):
    labels = np.arange(48) % 12 * 10
    found = AdapterClassifier(encoder, **GOOD).fit(TEXTS, labels)
    assert found.classes_.tolist() == list(range(0, 120, 10))
    assert found.predict_proba(TEXTS).shape == (48, 12)
    assert set(found.predict(TEXTS)) <= set(labels)


def test_it_works_in_cross_validation_a_grid_search_and_a_pipeline(encoder):
    scores = cross_val_score(AdapterClassifier(encoder, **GOOD), TEXTS, LABELS, cv=2)
    assert scores.mean() > 0.5
    search = GridSearchCV(AdapterClassifier(encoder, **GOOD), {"lr": [1e-9, 1e-2], "size": [4]}, cv=2)
    search.fit(np.array(TEXTS), LABELS)
    assert search.best_params_ == {"lr": 1e-2, "size": 4}
    lower = FunctionTransformer(lambda rows: [text.lower() for text in rows])
    steps = make_pipeline(lower, AdapterClassifier(encoder, **GOOD)).fit([text.upper() for text in TEXTS], LABELS)
    assert steps.score(TEXTS, LABELS) > 0.9
    assert steps.set_params(adapterclassifier__epochs=1).get_params()["adapterclassifier__epochs"] == 1


def test_a_clone_has_its_options_and_nothing_else(fitted):
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(TEXTS)


def test_its_options_are_those_of_a_training_and_complete():
    names = set(AdapterClassifier().get_params())
    assert names == {"backbone", "progress", *ModelOptions.__annotations__}
    assert names == set(inspect.signature(AdapterClassifier).parameters)
    with pytest.raises(TypeError, match=r"has no option 'epoch'\. Did you mean 'epochs'\?"):
        AdapterClassifier(epoch=3)


def test_a_pickle_predicts_the_same_in_another_process(fitted, tmp_path):
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps(fitted))
    assert file.stat().st_size < 200_000  # without the encoder
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).predict_proba(sys.argv[2:]).tolist())"
    words = [sys.executable, "-c", code, file, *TEXTS[:3]]
    found = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stderr
    np.testing.assert_allclose(eval(found.stdout), fitted.predict_proba(TEXTS[:3]), atol=1e-6)


def test_a_pickle_refuses_another_encoder_under_the_same_name(tmp_path):
    save_random("bert", tmp_path / "encoder")
    made = pickle.dumps(AdapterClassifier(str(tmp_path / "encoder"), **GOOD).fit(TEXTS, LABELS))
    save_random("bert", tmp_path / "encoder", seed=1)
    with pytest.raises(Exception, match="was trained on backbone"):
        pickle.loads(made).predict(TEXTS)


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        ("one text", ["a"], "X is one string; pass a list of texts"),
        ([], [], "X has 0 samples"),
        (["a", None], ["a", "b"], "Row 2 of X is None; each row is a text"),
        (np.zeros((2, 1)), ["a", "b"], r"Row 1 of X is \[0.0\]; each row is a text"),
        ([("a", "b"), ("a",)], ["a", "b"], "Row 2 of X is"),
        (["a", "b"], ["a"], "There are 2 texts and 1 labels"),
        (["a", "b"], ["a", "a"], "y has one class, .*'a'.*; a classifier needs at least two"),
        (["a", "b"], [0.5, 0.7], "continuous"),
        ({"a", "b"}, ["a", "b"], "X is a set; pass a list"),
    ],
)
def test_what_cannot_be_learned_is_refused_in_one_sentence(encoder, rows, labels, message):
    with pytest.raises(ValueError, match=message) as caught:
        AdapterClassifier(encoder, **FAST).fit(rows, labels)
    assert "\n" not in str(caught.value)


def test_an_option_that_is_wrong_is_reported_by_fit(encoder):
    with pytest.raises(ValueError, match="epochs is 0; it must be from 1"):
        AdapterClassifier(encoder, epochs=0).fit(TEXTS, LABELS)
    with pytest.raises(ValueError, match="method is 'automl', which leaves nothing to predict with"):
        AdapterClassifier(encoder, method="automl").fit(TEXTS, LABELS)


# --- scikit-learn's own checks ------------------------------------------------------------------------------

WORDS = ("the", "cat", "dog", "house", "film", "fox", "mat", "was", "good", "bad")


class NumbersAsTexts(AdapterClassifier):
    """Writes rows of numbers as texts, since scikit-learn's checks send numbers; the rest is the estimator's own."""

    def fit(self, X, y):
        X = validate_data(self, X) if y is None else validate_data(self, X, y)[0]
        return super().fit(self.texts(X), y)

    def predict_proba(self, X):
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return super().predict_proba(self.texts(validate_data(self, X, reset=False)))

    @staticmethod
    def texts(X):
        digits = [[int(abs(value) * 10**k) % 10 for value in row for k in range(2)] for row in np.asarray(X, float)]
        return [" ".join(WORDS[digit] for digit in row) + " cat" for row in digits]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.one_d_array, tags.input_tags.string = True, False, False
        tags.classifier_tags.poor_score = True  # the words of rounded numbers do not tell the classes apart
        return tags


NOT_APPLICABLE = {
    "all that need rows of numbers": "scikit-learn leaves them out for an estimator of texts; `NumbersAsTexts` takes "
    "them instead, and passes each of them",
    "check_classifiers_train": "its last line, 83 % on blobs of numbers: the words of rounded numbers do not tell the "
    "classes apart (`poor_score`); the rest of it passes",
}
"""The checks of scikit-learn that do not apply to a classifier of texts, and why."""


@pytest.mark.filterwarnings("ignore:Can't test estimator:sklearn.exceptions.SkipTestWarning")
def test_scikit_learns_checks_of_estimators_of_texts_pass(encoder):
    found = check_estimator(AdapterClassifier(encoder, **FAST), on_fail=None)
    assert {one["check_name"]: one["status"] for one in found} == {"check_estimator_cloneable": "passed"}


@pytest.mark.slow
@parametrize_with_checks([NumbersAsTexts("", **{**FAST, "epochs": 1, "device": "cpu"})])
def test_scikit_learns_checks_pass_for_rows_of_numbers_that_are_written_as_texts(estimator, check, encoder):
    check(estimator.set_params(backbone=encoder))


def test_a_class_whose_texts_are_blank_keeps_its_column(encoder):
    fitted = AdapterClassifier(encoder, **FAST, device="cpu").fit(["", "", *TEXTS], ["a", "a", *LABELS])
    assert list(fitted.classes_) == ["a", "negative", "positive"]
    assert fitted.predict_proba(TEXTS).shape == (48, 3)

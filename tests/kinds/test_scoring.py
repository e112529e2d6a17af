"""Scores of a task's predictions: reports are plain JSON, and values that are no predictions are never scored."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy
import pytest
import sklearn.metrics as oracle

from adapterbank.errors import InputError, UnknownName
from adapterbank.kinds.scoring import check_metric, report, score
from adapterbank.kinds.table import KINDS, find_kind
from adapterbank.metrics import METRICS
from kinds.tasks_of import kind_of, task_of

TWO, FOUR = ("no", "yes"), ("a", "b", "c", "d")


def test_every_kind_names_metrics_that_exist_and_every_metric_fits_a_kind() -> None:
    for kind in KINDS.values():
        assert {*kind.metrics, *kind.reported} <= set(METRICS)
        assert set(kind.reported) <= set(kind.metrics)
        assert check_metric(kind.metrics[0], kind, TWO).name == kind.metrics[0]
    assert {name for kind in KINDS.values() for name in kind.metrics} == set(METRICS)


def test_a_mean_of_two_metrics_is_reported_with_both() -> None:
    found = report(task_of("classification", TWO, "accuracy_f1"), [0, 1, 1, 0], [0, 1, 0, 0])
    assert found["accuracy"] == oracle.accuracy_score([0, 1, 0, 0], [0, 1, 1, 0])
    assert found["f1"] == pytest.approx(oracle.f1_score([0, 1, 0, 0], [0, 1, 1, 0]))
    assert found["accuracy_f1"] == pytest.approx((found["accuracy"] + found["f1"]) / 2)


@pytest.mark.parametrize("seed", range(8))
def test_the_table_of_classes_is_that_of_sklearn(seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    labels = [str(label) for label in range(int(rng.integers(2, 9)))]
    given, true = (rng.integers(0, rng.integers(1, len(labels) + 1), 30).tolist() for _ in range(2))
    found = report(task_of("classification", labels), given, true)
    places = list(range(len(labels)))
    assert found["confusion"] == oracle.confusion_matrix(true, given, labels=places).tolist()
    columns = oracle.precision_recall_fscore_support(true, given, labels=places, zero_division=0)
    for place, label in enumerate(labels):
        assert list(found["classes"][label].values()) == [column[place] for column in columns]
        assert isinstance(found["classes"][label]["support"], int)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_nothing_to_score_and_unequal_lengths_are_errors(metric: str) -> None:
    task = task_of(kind_of(metric), TWO, metric)
    with pytest.raises(InputError, match="nothing to score"):
        score(task, [], [])
    with pytest.raises(InputError, match="1 predictions for 2 targets"):
        score(task, [0], [0, 0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, numpy.float32("nan"), None, "x", 10**400])
def test_values_that_are_not_finite_numbers_are_never_scored(bad: Any) -> None:
    task = task_of("regression")
    with pytest.raises(InputError, match="Prediction 2 is"):
        score(task, [1.0, bad], [1.0, 2.0])
    with pytest.raises(InputError, match="Target 1 is"):
        report(task, [1.0, 2.0], [bad, 2.0])


@pytest.mark.parametrize("bad", [2, -1, 0.0, math.nan, True, None, "yes", [1]])
def test_values_that_are_not_the_index_of_a_label_are_never_scored(bad: Any) -> None:
    task = task_of("classification", TWO)
    with pytest.raises(InputError, match=r"Prediction 2 is .* \(0 to 1\)"):
        score(task, [1, bad], [1, 0])
    with pytest.raises(InputError, match="Target 2 is"):
        report(task, [1, 0], [1, bad])


def test_labels_and_answers_of_another_shape_are_never_scored() -> None:
    many, span = task_of("multilabel", TWO), task_of("span")
    with pytest.raises(InputError, match="not a list of label indices"):
        score(many, [1], [(0, 1)])
    with pytest.raises(InputError, match="0 to 1"):
        score(many, [(0, 7)], [(0, 1)])
    with pytest.raises(InputError, match="not the text of an answer"):
        score(span, [3], [(0, 1, ("x",))])
    for bad in ("x", (0, 1), (0, 1, ()), (0, 1, (3,))):
        with pytest.raises(InputError, match="acceptable answer texts"):
            score(span, ["x"], [bad])


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(UnknownName, match=r"'acuracy' is not a metric. Did you mean 'accuracy'\?.*spearman"):
        check_metric("acuracy", KINDS["classification"], TWO)
    with pytest.raises(UnknownName, match=r"'ranking' is not a kind of task\. There are: classification, multilabel"):
        find_kind("ranking")


def test_a_metric_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(InputError, match="cannot score a regression task; choose one of: spearman, pearson"):
        check_metric("accuracy", KINDS["regression"], ())
    with pytest.raises(
        InputError, match="requires exactly 2 labels, but the task has 4; choose another, such as 'accuracy'"
    ):
        check_metric("f1", KINDS["classification"], FOUR)


def test_a_classification_report_has_confusion_majority_and_classes() -> None:
    true, given_ = [0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 0, 2]
    result = report(task_of("classification", FOUR, "matthews"), numpy.array(given_), true)
    assert result["confusion"] == [[2, 1, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert result["majority"] == 0.5
    assert result["rows"] == 6
    assert result["accuracy"] == pytest.approx(4 / 6)
    assert result["matthews"] == pytest.approx(oracle.matthews_corrcoef(true, given_))
    assert result["classes"]["b"] == {
        "precision": 0.5,
        "recall": 1.0,
        "f1": pytest.approx(2 / 3),
        "support": 1,
    }
    assert result["classes"]["d"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}


def test_every_report_is_plain_json_with_its_own_metric() -> None:
    cases: list[tuple[str, list[Any], list[Any], tuple[str, ...], str, set[str]]] = [
        ("classification", [0, 1], [0, 0], TWO, "f1", {"accuracy", "macro_f1", "f1"}),
        (
            "multilabel",
            [(0,), ()],
            [(0, 1), ()],
            TWO,
            "micro_f1",
            {"micro_f1", "macro_f1", "subset_accuracy"},
        ),
        ("regression", [0.5, 1], [0, 2], (), "pearson_spearman", {"pearson", "spearman", "mse"}),
        ("span", ["x"], [(0, 1, ("x",))], (), "span_f1", {"exact_match", "span_f1"}),
    ]
    for kind, given_, true, labels, metric, expected in cases:
        result = report(task_of(kind, labels, metric), given_, true)
        assert expected <= set(result)
        assert metric in result
        assert json.loads(json.dumps(result)) == result

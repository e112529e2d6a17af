"""Metrics agree with scikit-learn and scipy, and never turn nonsense into a score."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy
import pytest
import sklearn.metrics as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from adapterbank.errors import InputError, UnknownName
from adapterbank.metrics import DEFAULT_METRIC, METRICS, check_metric, find_metric, report, score
from adapterbank.tasks.spec import KINDS

TWO, FOUR = ("no", "yes"), ("a", "b", "c", "d")


def draw_classes(seed: int, classes: int, rows: int = 60) -> tuple[list[int], list[int]]:
    """Random predictions and targets."""
    draw = random.Random(seed)
    return [draw.randrange(classes) for _ in range(rows)], [draw.randrange(classes) for _ in range(rows)]


def test_every_kind_has_a_default_metric_that_fits_it() -> None:
    assert tuple(DEFAULT_METRIC) == KINDS
    for kind, name in DEFAULT_METRIC.items():
        assert kind in find_metric(name).kinds


def test_every_row_of_the_table_is_found_by_its_name() -> None:
    assert all(find_metric(name).name == name for name in METRICS)
    assert {kind for row in METRICS.values() for kind in row.kinds} == set(KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_class_metrics_agree_with_sklearn(seed: int) -> None:
    given_, true = draw_classes(seed, 4)
    assert score("accuracy", given_, true, FOUR) == pytest.approx(oracle.accuracy_score(true, given_))
    assert score("macro_f1", given_, true, FOUR) == pytest.approx(oracle.f1_score(true, given_, average="macro"))
    assert score("micro_f1", given_, true, FOUR) == pytest.approx(oracle.f1_score(true, given_, average="micro"))
    assert score("matthews", given_, true, FOUR) == pytest.approx(oracle.matthews_corrcoef(true, given_))


@pytest.mark.parametrize("seed", range(5))
def test_binary_metrics_take_the_second_label_as_positive(seed: int) -> None:
    given_, true = draw_classes(seed, 2)
    f1 = oracle.f1_score(true, given_, pos_label=1)
    assert score("f1", given_, true, TWO) == pytest.approx(f1)
    mean = (oracle.accuracy_score(true, given_) + f1) / 2
    assert score("accuracy_f1", given_, true, TWO) == pytest.approx(mean)


@pytest.mark.parametrize("seed", range(5))
def test_multilabel_metrics_agree_with_sklearn(seed: int) -> None:
    draw = random.Random(seed)
    rows = [[[i for i in range(4) if draw.random() < 0.4] for _ in range(30)] for _ in range(2)]
    given_, true = ([[int(i in row) for i in range(4)] for row in side] for side in rows)
    for name, average in (("micro_f1", "micro"), ("macro_f1", "macro")):
        expected = oracle.f1_score(numpy.array(true), numpy.array(given_), average=average, zero_division=0)
        assert score(name, rows[0], [tuple(row) for row in rows[1]], FOUR) == pytest.approx(expected)
    expected = oracle.accuracy_score(numpy.array(true), numpy.array(given_))
    assert score("subset_accuracy", rows[0], rows[1], FOUR) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_regression_metrics_agree_with_scipy(seed: int) -> None:
    draw = numpy.random.RandomState(seed)
    true = draw.rand(40).round(1)
    given_ = true + draw.randn(40)
    pearson, spearman = stats.pearsonr(given_, true).statistic, stats.spearmanr(given_, true).statistic
    assert score("pearson", given_, true, ()) == pytest.approx(pearson)
    assert score("spearman", given_.tolist(), true.tolist(), ()) == pytest.approx(spearman)
    assert score("pearson_spearman", given_, true, ()) == pytest.approx((pearson + spearman) / 2)
    assert report("regression", given_, true, (), "spearman")["mse"] == pytest.approx(
        oracle.mean_squared_error(true, given_)
    )


@pytest.mark.parametrize("seed", range(10))
def test_correlations_of_tied_numbers_agree_with_scipy(seed: int) -> None:
    draw = random.Random(seed)
    given_ = [float(draw.randrange(3)) for _ in range(25)]
    true = [draw.randrange(4) / 2 for _ in range(25)]
    pearson, spearman = stats.pearsonr(given_, true).statistic, stats.spearmanr(given_, true).statistic
    assert score("pearson", given_, true, ()) == pytest.approx(pearson, abs=1e-12)
    assert score("spearman", given_, true, ()) == pytest.approx(spearman, abs=1e-12)
    assert score("pearson_spearman", given_, true, ()) == pytest.approx((pearson + spearman) / 2, abs=1e-12)


@pytest.mark.parametrize(("said", "true"), [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_a_single_example_has_the_scores_of_sklearn(said: int, true: int) -> None:
    assert score("accuracy", [said], [true], TWO) == oracle.accuracy_score([true], [said])
    assert score("f1", [said], [true], TWO) == oracle.f1_score([true], [said], zero_division=0)
    assert score("macro_f1", [said], [true], TWO) == oracle.f1_score([true], [said], average="macro", zero_division=0)
    assert score("matthews", [said], [true], TWO) == 0.0
    assert score("spearman", [float(said)], [float(true)], ()) == 0.0  # scipy has no number for one row


def target(*answers: str) -> tuple[int, int, tuple[str, ...]]:
    """A span target; its place plays no part in the score."""
    return 0, 1, answers


def test_span_metrics_normalise_as_squad_does_and_take_the_best_answer() -> None:
    targets = [target("The Denver Broncos!", "Broncos"), target("24\u201310"), target("gold, silver")]
    given_ = ["denver   broncos", "24-10", "a silver medal"]
    assert score("exact_match", given_, targets, ()) == pytest.approx(1 / 3)
    # "silver medal" against "gold silver": one of two words both ways.
    assert score("span_f1", given_, targets, ()) == pytest.approx((1 + 0 + 0.5) / 3)


def test_an_answer_of_articles_alone_is_scored_as_the_version_of_the_data_scores_it() -> None:
    assert score("exact_match", ["the", "the"], [target("a"), target("x")], ()) == 0.5
    assert score("span_f1", ["the", "the"], [target("a"), target("x")], ()) == 0.0  # 1.1 knows no silence
    assert score("span_f1", ["the", "the", ""], [target("a"), target("x"), target("")], ()) == pytest.approx(2 / 3)
    assert score("span_f1", [""], [target("word")], ()) == 0.0


def test_a_question_without_an_answer_wants_silence() -> None:
    targets = [target(""), target(""), target("word")]
    for metric in ("exact_match", "span_f1"):
        assert score(metric, ["", "word", ""], targets, ()) == pytest.approx(1 / 3)
        assert score(metric, ["", "", "Word!"], targets, ()) == 1.0


def test_a_mean_of_two_metrics_is_reported_with_both() -> None:
    found = report("classification", [0, 1, 1, 0], [0, 1, 0, 0], TWO, "accuracy_f1")
    assert found["accuracy"] == oracle.accuracy_score([0, 1, 0, 0], [0, 1, 1, 0])
    assert found["f1"] == pytest.approx(oracle.f1_score([0, 1, 0, 0], [0, 1, 1, 0]))
    assert found["accuracy_f1"] == pytest.approx((found["accuracy"] + found["f1"]) / 2)


@pytest.mark.parametrize("metric", ["f1", "macro_f1", "micro_f1", "matthews", "accuracy_f1", "accuracy"])
@pytest.mark.parametrize(("given_", "true"), [([0, 0], [0, 1]), ([1, 1], [1, 1]), ([0, 0], [0, 0]), ([1], [0])])
def test_constant_classes_score_without_warnings(metric: str, given_: list[int], true: list[int]) -> None:
    value = score(metric, given_, true, TWO)
    assert 0 <= value <= 1
    assert metric != "matthews" or value == 0.0


@pytest.mark.parametrize("metric", ["pearson", "spearman", "pearson_spearman"])
@pytest.mark.parametrize(
    ("given_", "true"),
    [([3.0, 3.0], [1.0, 2.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.0], [2.0]), ([0.1] * 3, [1, 2, 3])],
)
def test_constant_numbers_correlate_by_zero(metric: str, given_: list[float], true: list[float]) -> None:
    assert score(metric, given_, true, ()) == 0.0


def test_nearly_constant_numbers_leak_no_warning() -> None:
    value = score("pearson", [1.0, 1.0 + 1e-16, 1.0 + 2.3e-16], [1.0, 2.0, 3.0], ())
    assert math.isfinite(value)
    assert math.isfinite(score("pearson", [1e300, -1e300, 2.0], [1.0, 2.0, 3.0], ()))


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_nothing_to_score_and_unequal_lengths_are_errors(metric: str) -> None:
    with pytest.raises(InputError, match="nothing to score"):
        score(metric, [], [], TWO)
    with pytest.raises(InputError, match="1 predictions for 2 targets"):
        score(metric, [0], [0, 0], TWO)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, numpy.float32("nan"), None, "x", 10**400])
def test_numbers_that_are_none_are_never_scored(bad: Any) -> None:
    with pytest.raises(InputError, match="Prediction 2 is"):
        score("pearson", [1.0, bad], [1.0, 2.0], ())
    with pytest.raises(InputError, match="Target 1 is"):
        report("regression", [1.0, 2.0], [bad, 2.0], (), "spearman")


@pytest.mark.parametrize("bad", [2, -1, 0.0, math.nan, True, None, "yes", [1]])
def test_classes_that_are_no_index_of_a_label_are_never_scored(bad: Any) -> None:
    with pytest.raises(InputError, match=r"Prediction 2 is .* \(0 to 1\)"):
        score("accuracy", [1, bad], [1, 0], TWO)
    with pytest.raises(InputError, match="Target 2 is"):
        report("classification", [1, 0], [1, bad], TWO, "accuracy")


def test_labels_and_answers_of_another_shape_are_never_scored() -> None:
    with pytest.raises(InputError, match="not a list of label indices"):
        score("micro_f1", [1], [(0, 1)], TWO)
    with pytest.raises(InputError, match="0 to 1"):
        score("subset_accuracy", [(0, 7)], [(0, 1)], TWO)
    with pytest.raises(InputError, match="not the text of an answer"):
        score("span_f1", [3], [target("x")], ())
    for bad in ("x", (0, 1), (0, 1, ()), (0, 1, (3,))):
        with pytest.raises(InputError, match="acceptable answer texts"):
            score("exact_match", ["x"], [bad], ())


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(UnknownName, match=r"'acuracy' is not a metric. Did you mean 'accuracy'\?.*spearman"):
        score("acuracy", [0], [0], TWO)
    with pytest.raises(UnknownName, match="a kind of task"):
        report("ranking", [0], [0], TWO, "accuracy")


def test_a_metric_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(InputError, match="cannot score a regression task; take one of: pearson, spearman"):
        check_metric("accuracy", "regression", ())
    with pytest.raises(InputError, match="needs exactly 2 labels, and there are 4"):
        score("f1", [0], [0], FOUR)


def test_a_classification_report_has_confusion_majority_and_classes() -> None:
    true, given_ = [0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 0, 2]
    result = report("classification", numpy.array(given_), true, FOUR, "matthews")
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
        ("span", ["x"], [target("x")], (), "span_f1", {"exact_match", "span_f1"}),
    ]
    for kind, given_, true, labels, metric, expected in cases:
        result = report(kind, given_, true, labels, metric)
        assert expected <= set(result)
        assert metric in result
        assert json.loads(json.dumps(result)) == result


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_a_perfect_prediction_is_never_beaten(rows: list[tuple[int, int]]) -> None:
    given_, true = [a for a, _ in rows], [b for _, b in rows]
    for metric in ("accuracy", "macro_f1", "micro_f1", "matthews"):
        assert score(metric, given_, true, FOUR) <= score(metric, true, true, FOUR) + 1e-12


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=20))
def test_correlations_stay_within_their_bounds(rows: list[tuple[float, float]]) -> None:
    given_, true = [a for a, _ in rows], [b for _, b in rows]
    for metric in ("pearson", "spearman", "pearson_spearman"):
        assert -1 - 1e-9 <= score(metric, given_, true, ()) <= 1 + 1e-9

"""Metrics agree with scikit-learn and scipy, and constants score without warnings."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy
import pytest
import sklearn.metrics as oracle
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from adapterbank.kinds import scoring
from adapterbank.metrics import METRICS, Counts, find_metric
from kinds.tasks_of import kind_of, task_of

TWO, FOUR = ("no", "yes"), ("a", "b", "c", "d")


def draw_classes(seed: int, classes: int, rows: int = 60) -> tuple[list[int], list[int]]:
    """Random predictions and targets."""
    draw = random.Random(seed)
    return [draw.randrange(classes) for _ in range(rows)], [draw.randrange(classes) for _ in range(rows)]


def score(metric: str, predictions: Any, targets: Any, labels: tuple[str, ...], kind: str = "") -> float:
    """The metric of predictions for a task that it fits."""
    return scoring.score(task_of(kind or kind_of(metric), labels, metric), predictions, targets)


def test_every_row_of_the_table_is_found_by_its_name() -> None:
    assert all(find_metric(name).name == name for name in METRICS)


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
        assert score(name, rows[0], [tuple(row) for row in rows[1]], FOUR, "multilabel") == pytest.approx(expected)
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
    found = scoring.report(task_of("regression"), given_, true)
    assert found["mse"] == pytest.approx(oracle.mean_squared_error(true, given_))


@pytest.mark.parametrize("seed", range(10))
def test_correlations_of_tied_numbers_agree_with_scipy(seed: int) -> None:
    draw = random.Random(seed)
    given_ = [float(draw.randrange(3)) for _ in range(25)]
    true = [draw.randrange(4) / 2 for _ in range(25)]
    pearson, spearman = stats.pearsonr(given_, true).statistic, stats.spearmanr(given_, true).statistic
    assert score("pearson", given_, true, ()) == pytest.approx(pearson, abs=1e-12)
    assert score("spearman", given_, true, ()) == pytest.approx(spearman, abs=1e-12)
    assert score("pearson_spearman", given_, true, ()) == pytest.approx((pearson + spearman) / 2, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([2, 4, 30]), st.lists(st.tuples(*[st.integers(0, 29)] * 2), min_size=1, max_size=60))
def test_class_metrics_equal_those_of_sklearn_where_classes_are_absent(
    labels: int, rows: list[tuple[int, int]]
) -> None:
    given_, true = [a % labels for a, _ in rows], [b % labels for _, b in rows]
    for average in ("micro", "macro"):
        wanted = oracle.f1_score(true, given_, average=average, zero_division=0)
        assert METRICS[f"{average}_f1"].function(given_, true, labels) == wanted
    if labels == 2:
        assert METRICS["f1"].function(given_, true, 2) == oracle.f1_score(true, given_, zero_division=0)
    if len({*given_, *true}) > 1:  # scikit-learn warns about a single class
        wanted = oracle.matthews_corrcoef(true, given_)
        assert METRICS["matthews"].function(given_, true, labels) == pytest.approx(wanted, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([2, 4, 30]), st.lists(st.tuples(*[st.frozensets(st.integers(0, 29))] * 2), min_size=1))
def test_metrics_of_sets_equal_those_of_sklearn_where_labels_are_absent(
    labels: int, rows: list[tuple[frozenset[int], frozenset[int]]]
) -> None:
    given_, true = ([row[side] & frozenset(range(labels)) for row in rows] for side in (0, 1))
    flags = [numpy.array([[label in row for label in range(labels)] for row in side]) for side in (true, given_)]
    for average in ("micro", "macro"):
        wanted = oracle.f1_score(*flags, average=average, zero_division=0)
        assert METRICS[f"{average}_f1"].function(given_, true, labels) == wanted


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([0, 1, 9]), st.integers(-12, 12), st.lists(st.tuples(*[st.floats(-9, 9)] * 2), min_size=2))
def test_correlations_equal_those_of_scipy_with_ties_and_in_every_unit(
    digits: int, power: int, rows: list[tuple[float, float]]
) -> None:
    given_, true = [round(a, digits) * 10.0**power for a, _ in rows], [round(b, digits) for _, b in rows]
    assume(len(set(given_)) > 1 and len(set(true)) > 1)
    for name, function in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        with numpy.errstate(all="ignore"):
            wanted = function(given_, true).statistic
        assert METRICS[name].function(given_, true, 0) == pytest.approx(wanted, abs=1e-12)


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
    assert score("span_f1", ["the", "the"], [target("a"), target("x")], ()) == 0.0  # 1.1 always expects an answer
    assert score("span_f1", ["the", "the", ""], [target("a"), target("x"), target("")], ()) == pytest.approx(2 / 3)
    assert score("span_f1", [""], [target("word")], ()) == 0.0


def test_a_question_without_an_answer_expects_an_empty_answer() -> None:
    targets = [target(""), target(""), target("word")]
    for metric in ("exact_match", "span_f1"):
        assert score(metric, ["", "word", ""], targets, ()) == pytest.approx(1 / 3)
        assert score(metric, ["", "", "Word!"], targets, ()) == 1.0


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


# --- the same scores from counts, and intervals ---------------------------------------------------------------


def counts_of(given_: list[Any], true: list[Any], labels: int, sets: bool) -> Counts:
    a, b = (
        numpy.array([[label in (row if sets else (row,)) for label in range(labels)] for row in rows])
        for rows in (given_, true)
    )
    return Counts((a & b).sum(0), a.sum(0), b.sum(0), len(true), sets)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 4]), st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=1, max_size=20))
def test_a_score_from_counts_is_the_score_itself(labels: int, rows: list[tuple[int, int]]) -> None:
    given_, true = [a % labels for a, _ in rows], [b % labels for _, b in rows]
    for metric in METRICS.values():
        if metric.from_counts and not metric.row_counts and metric.label_count in (None, labels):
            found = metric.from_counts(counts_of(given_, true, labels, sets=False))
            assert float(found) == pytest.approx(metric.function(given_, true, labels))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 4]), st.lists(st.tuples(*[st.frozensets(st.integers(0, 3))] * 2), min_size=1, max_size=20))
def test_a_score_of_sets_from_counts_is_the_score_itself(
    labels: int, rows: list[tuple[frozenset[int], frozenset[int]]]
) -> None:
    given_, true = ([row[side] & frozenset(range(labels)) for row in rows] for side in (0, 1))
    for name in ("micro_f1", "macro_f1"):
        found = METRICS[name].from_counts(counts_of(given_, true, labels, sets=True))
        assert float(found) == pytest.approx(METRICS[name].function(given_, true, labels))


_TAGS = st.lists(st.tuples(*[st.sampled_from(["O", "B-a", "I-a", "B-b", "I-b"])] * 2), max_size=9)


@settings(max_examples=60, deadline=None)
@given(st.lists(_TAGS, min_size=1, max_size=9))
def test_a_score_of_tags_from_the_counts_of_each_row_is_the_score_itself(rows: list[list[tuple[str, str]]]) -> None:
    given_, true = ([tuple(pair[side] for pair in row) for row in rows] for side in (0, 1))
    for name in ("tag_f1", "tag_accuracy"):
        metric = METRICS[name]
        hits, mine, wanted = numpy.array(metric.row_counts(given_, true)).sum(0)[:, None]
        found = metric.from_counts(Counts(hits, mine, wanted, len(true), sets=False))
        assert float(found) == pytest.approx(metric.function(given_, true, 5))


def test_the_f1_of_a_single_label_counts_the_rows_that_have_it() -> None:
    given_, true = [(0,), (), (), ()], [(0,), (0,), (), ()]
    wanted = oracle.f1_score([1, 1, 0, 0], [1, 0, 0, 0])
    for metric in ("micro_f1", "macro_f1"):
        assert score(metric, given_, true, ("odd",), "multilabel") == pytest.approx(wanted)


@pytest.mark.parametrize(("right", "rows"), [(0, 5), (5, 5), (1, 3), (37, 50), (999, 1000)])
def test_the_interval_of_a_share_is_wilsons(right: int, rows: int) -> None:
    wanted = stats.binomtest(right, rows).proportion_ci(0.95, method="wilson")
    assert METRICS["accuracy"].interval(right / rows, rows) == pytest.approx((wanted.low, wanted.high))


def test_the_interval_of_a_correlation_is_a_little_wider_than_pearsons() -> None:
    rng = numpy.random.default_rng(0)
    x = rng.normal(size=80)
    found = stats.pearsonr(x, x + rng.normal(size=80))
    wanted = found.confidence_interval(0.95)
    low, high = METRICS["pearson"].interval(found.statistic, 80)
    assert low < wanted.low < found.statistic < wanted.high < high
    assert (low, high) == pytest.approx((wanted.low, wanted.high), abs=0.04)
    assert METRICS["pearson"].interval(0.3, 4) == (-1.0, 1.0)
    assert METRICS["spearman"].interval(1.0, 40) == (1.0, 1.0)

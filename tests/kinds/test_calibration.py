"""`kinds.calibration`: temperature and thresholds against scikit-learn, and the rule for when they are fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar
from sklearn.metrics import f1_score, log_loss, precision_recall_curve

from adapterbank.inference.rows import Rows
from adapterbank.kinds.calibration import FEWEST_OF_LABEL, FEWEST_ROWS, calibrate, fit_temperature, root
from adapterbank.kinds.kind import TEMPERATURES, HeadOutputs
from adapterbank.kinds.scoring import score
from adapterbank.kinds.table import KINDS
from kinds.tasks_of import task_of

TWO, FOUR = ("no", "yes"), ("a", "b", "c", "d")


def drawn(rows: int, labels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits, and classes drawn with exactly their probabilities."""
    rng = np.random.default_rng(seed)
    x = 2 * rng.normal(size=(rows, labels))
    return x, (x + rng.gumbel(size=x.shape)).argmax(1)


def rare(rows: int, labels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of rare labels, and which are true, drawn with exactly their probabilities."""
    rng = np.random.default_rng(seed)
    x = 1.5 * rng.normal(size=(rows, labels)) - 2
    return x, rng.random(x.shape) < 1 / (1 + np.exp(-x))


def as_sets(flags: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(np.flatnonzero(row).tolist()) for row in flags]


def decided(task, outputs):
    return KINDS[task.kind].decide(HeadOutputs(task, None, Rows([], None), list(outputs)))


# --- temperature ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [0.4, 1.5, 4.0])
def test_the_temperature_has_the_smallest_log_loss_that_scikit_learn_finds(true):
    x, right = drawn(3000, 4)
    found = fit_temperature(true * x, right)

    def loss(t: float) -> float:
        z = np.exp(true * x / t - (true * x / t).max(1, keepdims=True))
        return float(log_loss(right, z / z.sum(1, keepdims=True), labels=range(4)))

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-6})
    assert found == pytest.approx(best.x, rel=0.02)  # the smoothing counts for one row in 3,000
    assert loss(found) <= best.fun + 1e-5
    assert found == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize(
    ("function", "slope"),
    [
        (lambda x: x - 0.3, lambda x: 1.0),
        (lambda x: x**3 - 2, lambda x: 3 * x**2),
        (lambda x: np.expm1(2 * (x - 19.9)), lambda x: 2 * np.exp(2 * (x - 19.9))),  # nearly flat, then steep
        (lambda x: np.tanh(50 * (x - 0.06)), lambda x: 50 / np.cosh(50 * (x - 0.06)) ** 2),  # steep, then nearly flat
        (lambda x: x**9 - 1e-9, lambda x: 9 * x**8),
    ],
)
def test_a_root_is_that_of_scipy(function, slope):
    calls = []
    found = root(lambda x: calls.append(x) or (float(function(x)), float(slope(x))), 0.05, 20.0)
    assert found == pytest.approx(brentq(function, 0.05, 20.0, xtol=1e-12), abs=1e-8)
    assert len(calls) < 60


def test_a_root_outside_is_the_nearest_end():
    for value, end in ((1.0, 0.05), (-1.0, 20.0)):
        assert root(lambda x, value=value: (value, 0.0), 0.05, 20.0) == pytest.approx(end)


def test_the_labels_of_a_multilabel_task_are_fitted_as_choices_of_two():
    x, true = rare(800, 5)
    task = calibrate(task_of("multilabel", "abcde"), 3 * x, as_sets(true))
    assert task.temperature == pytest.approx(3, rel=0.15)


def test_held_out_rows_that_are_all_right_do_not_make_it_certain_of_everything():
    right = np.arange(60) % 2
    x = np.where(np.eye(2)[right] > 0, 1.0, -1.0)
    found = fit_temperature(x, right)
    assert found is not None
    assert found > TEMPERATURES[0]
    assert 0.98 < 1 / (1 + np.exp(-2 / found)) < 0.995  # one row in 61 of which nothing is known


def test_outputs_that_say_nothing_have_the_largest_temperature():
    rng = np.random.default_rng(0)
    assert fit_temperature(5 * rng.normal(size=(400, 2)), rng.integers(0, 2, 400)) > 5
    assert fit_temperature(np.array([[5.0, 0.0]] * 60), np.ones(60, int)) == TEMPERATURES[1]
    assert fit_temperature(np.zeros((60, 3)), np.zeros(60, int)) is None


def test_the_likelihood_of_the_held_out_rows_never_gets_worse():
    for seed in range(20):
        x, right = drawn(60, 3, seed)
        found = fit_temperature(x, right) or 1.0
        before, after = (log_loss(right, KINDS["classification"].probabilities(x / t)) for t in (1.0, found))
        assert after <= before


# --- thresholds -----------------------------------------------------------------------------------------------


def test_the_threshold_of_two_classes_has_the_best_f1_of_scikit_learns_curve():
    x, true = rare(1500, 1)
    outputs, targets = np.hstack([0 * x, x]), true[:, 0].astype(int).tolist()
    task = calibrate(task_of("classification", TWO, "f1"), outputs, targets)
    precision, recall, _ = precision_recall_curve(targets, x[:, 0])
    best = (2 * precision * recall / np.maximum(precision + recall, 1e-9)).max()
    assert score(task, decided(task, outputs), targets) == pytest.approx(best, abs=0.01)  # cuts in hundredths
    assert sum(task.thresholds) == pytest.approx(1)
    assert task.thresholds[1] < 0.5


def test_macro_f1_of_many_labels_is_the_best_of_each():
    x, true = rare(1500, 4)
    task = calibrate(task_of("multilabel", FOUR, "macro_f1"), x, as_sets(true))
    for label, cut in enumerate(task.thresholds):
        precision, recall, _ = precision_recall_curve(true[:, label], x[:, label])
        best = (2 * precision * recall / np.maximum(precision + recall, 1e-9)).max()
        mine = KINDS["multilabel"].probabilities(x / (task.temperature or 1))[:, label] > cut
        assert f1_score(true[:, label], mine) == pytest.approx(best, abs=0.01)


@pytest.mark.parametrize("metric", ["micro_f1", "macro_f1"])
def test_thresholds_help_on_rows_they_were_not_chosen_on(metric):
    x, true = rare(3000, 6)
    plain = task_of("multilabel", "abcdef", metric)
    task = calibrate(plain, x[:1000], as_sets(true[:1000]))
    assert all(0 < cut < 0.5 for cut in task.thresholds)
    before, after = (score(plain, decided(one, x[1000:]), as_sets(true[1000:])) for one in (plain, task))
    assert after > before + 0.03


def test_a_label_with_few_rows_keeps_one_half():
    x, true = rare(400, 3)
    true[:, 2] = False
    true[: FEWEST_OF_LABEL - 1, 2] = True
    task = calibrate(task_of("multilabel", "abc", "macro_f1"), x, as_sets(true))
    assert task.thresholds[2] == 0.5
    assert task.thresholds[0] < 0.5


def test_outputs_that_need_no_threshold_get_none():
    x, true = rare(400, 3)
    certain = np.where(true, 4.0, -4.0)
    assert calibrate(task_of("multilabel", "abc"), certain, as_sets(true)).thresholds == ()
    assert calibrate(task_of("multilabel", "abc", "subset_accuracy"), x, as_sets(true)).thresholds == ()


@pytest.mark.parametrize("metric", ["accuracy", "matthews", "macro_f1"])
def test_metrics_other_than_f1_leave_the_most_probable_class(metric):
    x, right = drawn(200, 2)
    assert calibrate(task_of("classification", TWO, metric), x, right.tolist()).thresholds == ()


# --- the rule -------------------------------------------------------------------------------------------------


def test_nothing_is_fitted_on_few_rows_unless_fewer_are_asked_for():
    x, right = drawn(FEWEST_ROWS, 4)
    task, few = task_of("classification", FOUR), right[:-1].tolist()
    assert calibrate(task, 3 * x[:-1], few) == task
    assert calibrate(task, 3 * x, right.tolist()).temperature > 1.5
    assert calibrate(task, 3 * x[:-1], few, fewest=10).temperature > 1.5


def test_kinds_without_probabilities_are_left_alone():
    task = task_of("regression")
    assert calibrate(task, np.zeros((100, 1)), [0.0] * 100) == task


def test_a_task_without_a_calibration_answers_to_the_bit_as_before():
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    given = HeadOutputs(task_of("classification", FOUR), None, Rows([], None), list(x))
    assert given.logits.tobytes() == x.astype(np.float64).tobytes()
    hotter = replace(given, task=replace(given.task, temperature=2.0))
    assert KINDS["classification"].decide(hotter) == KINDS["classification"].decide(given)

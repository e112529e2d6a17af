"""Claims about the numbers of the figures: they are those of the records, computed by hand here."""

from __future__ import annotations

import math

import numpy as np
import pytest
from made import ablation, measured, record, write

from adapterbank.analysis import series
from adapterbank.analysis.run_table import load


@pytest.fixture
def study(tmp_path):
    def make(*found, ablations=()):
        return load([write(tmp_path / "records", *found, ablations=ablations)])

    return make


def lines(data, **wanted):
    return [line for line in data if all(line[key] == value for key, value in wanted.items())]


def test_the_tradeoff_has_the_percentiles_across_tasks_of_the_score_minus_full_fine_tuning(study):
    gaps = {"glue-cola": 0.02, "glue-rte": -0.04, "glue-sst2": 0.0}
    made = [record(task, "full", 0.8) for task in gaps] + [record(task, dev=0.8 + gap) for task, gap in gaps.items()]
    made += [record("paper-airline", "full", 0.5, 0.7), record("paper-airline", dev=0.9, test=0.65)]
    data = series.tradeoff(study(*made))
    (glue,) = lines(data, suite="GLUE", method="adapter")
    assert (glue["tasks"], glue["trained"], glue["option"]) == (3, 64_000, 64)
    expected = np.percentile([2.0, -4.0, 0.0], (20, 50, 80))
    assert [glue["p20"], glue["p50"], glue["p80"]] == pytest.approx(expected.tolist())
    (further,) = lines(data, suite="further", method="adapter")
    assert further["p50"] == pytest.approx(-5.0)
    assert lines(data, suite="all", method="adapter")[0]["tasks"] == 4
    assert {line["p50"] for line in lines(data, method="full")} == {0.0}


def test_a_point_of_the_tradeoff_names_its_tasks(study):
    made = [record(task, "full", 0.8) for task in ("glue-cola", "glue-rte")]
    made += [record("glue-cola", size=size) for size in (8, 64)] + [record("glue-rte", size=64)]
    found = {
        line["option"]: line["over"] for line in lines(series.tradeoff(study(*made)), suite="all", method="adapter")
    }
    assert found == {8: "glue-cola", 64: "glue-cola glue-rte"}


def test_the_best_setting_on_dev_represents_a_size(study):
    made = [record("paper-airline", "full", 0.5, 0.7)]
    made += [record("paper-airline", dev=0.6, test=0.5, lr=1e-3), record("paper-airline", dev=0.5, test=0.9, lr=1e-4)]
    (found,) = lines(series.tradeoff(study(*made)), suite="further", method="adapter")
    assert found["p50"] == pytest.approx(-20.0)


def test_a_task_without_full_fine_tuning_is_left_out_of_the_tradeoff(study):
    assert series.tradeoff(study(record())) == []


def test_sizes_have_mean_and_standard_error_over_seeds(study):
    made = [record(size=size, dev=0.5 + 0.01 * seed, seed=seed) for size in (1, 8, 64) for seed in range(3)]
    data = series.sizes(study(*made, record(method="layernorm", dev=0.4), record("glue-rte")))
    assert {line["task"] for line in data} == {"glue-cola"}
    assert [line["option"] for line in lines(data, method="adapter")] == [1, 8, 64]
    found = data[0]
    assert (found["dev"], found["sem"]) == pytest.approx((51.0, 1 / math.sqrt(3)))
    assert found["seeds"] == 3
    assert lines(data, method="layernorm")[0]["sem"] is None


def test_span_tasks_have_their_own_figure(study):
    made = [record("squad-v1", size=size, kind="span", metric="span_f1") for size in (2, 8, 64)]
    found = study(*made)
    assert series.sizes(found) == []
    assert [line["option"] for line in series.sizes(found, spans=True)] == [2, 8, 64]


def test_sigmas_are_drawn_for_adapters_with_several(study):
    made = [record(sigma=sigma, dev=dev) for sigma, dev in ((1e-4, 0.6), (1.0, 0.2))]
    data = series.sigmas(study(*made, record("glue-rte"), record(method="full")))
    assert [(line["task"], line["sigma"], line["dev"]) for line in data] == [
        ("glue-cola", 1e-4, 60.0),
        ("glue-cola", 1.0, 20.0),
    ]


def test_learning_rates_are_drawn_for_the_form_with_the_most_of_them(study):
    made = [record(size=8, lr=lr) for lr in (1e-4, 1e-3)] + [record(size=64, lr=lr) for lr in (1e-4, 3e-4, 1e-3)]
    made += [record(method="full", lr=lr, dev=dev) for lr, dev in ((5e-5, 0.7), (1e-3, 0.1))]
    data = series.rates(study(*made, record(method="layernorm")))
    assert [(line["option"], line["lr"]) for line in lines(data, method="adapter")] == [
        (64, 1e-4),
        (64, 3e-4),
        (64, 1e-3),
    ]
    assert [line["dev"] for line in lines(data, method="full")] == pytest.approx([70.0, 10.0])
    assert lines(data, method="layernorm") == []


def test_totals_count_one_encoder_plus_each_tasks_parameters_and_full_copies_separately(study):
    data = series.totals(study(record(size=64), record(size=8, dev=0.9), record(method="full", dev=0.6)))
    assert lines(data, method="adapter", form="64", tasks=10)[0]["encoders"] == pytest.approx(1.64)
    assert lines(data, method="adapter", form="best", tasks=10)[0]["encoders"] == pytest.approx(1.08)
    assert lines(data, method="full", tasks=10)[0]["encoders"] == pytest.approx(10.0)


def test_totals_of_models_without_an_encoder_count_none(study):
    data = series.totals(study(record(method="automl", trained=20_000)))
    assert lines(data, method="automl", tasks=10)[0]["encoders"] == pytest.approx(0.2)


def test_totals_of_a_single_size_are_drawn_once(study):
    assert {line["form"] for line in series.totals(study(record(size=64)))} == {"64"}


def test_each_figure_of_the_tradeoff_has_its_own_suites(study):
    found = study(record(method="full"), record(), record("mine", "full"), record("mine"))
    assert {line["suite"] for line in series.tradeoff(found, ["all"])} == {"all"}
    assert {line["suite"] for line in series.tradeoff(found, ["further", "GLUE"])} == {"further", "GLUE"}


def test_an_ablation_has_a_line_per_span(study):
    data = series.ablations(study(record(), ablations=(ablation(layers=3),)))
    assert len(data) == 6
    assert data[1] == {"package": "glue-cola@1", "first": 0, "last": 1, "accuracy change %": -2.0}


def test_between_sizes_with_equally_many_learning_rates_the_usual_one_is_drawn(tmp_path):
    made = [record("glue-rte", dev=0.6, size=size, lr=lr) for size in (8, 64, 256) for lr in (1e-4, 1e-3)]
    assert {line["option"] for line in series.rates(load([write(tmp_path, *made)]))} == {64}


def test_a_fitted_head_has_no_curves(study):
    fitted = record("tickets", "feature") | {"fitted": {"steps": 0, "strength": 10.0, "rows": 48}}
    assert series.curves(study(fitted)) == []
    assert {line["method"] for line in series.curves(study(fitted, record("tickets", lr=1e-3)))} == {"adapter"}


def test_reliability_adds_up_the_rows_of_all_seeds_and_prefers_test(study):
    made = [
        record("mine", seed=0, test=0.5, calibration={"dev": measured(1), "test": measured(9)}),
        record("mine", seed=1, test=0.5, calibration={"dev": measured(1), "test": measured(6, rows=30)}),
        record("other", calibration={"dev": measured(5)}),
        record("before", dev=0.9),
    ]
    found = series.reliability(study(*made))
    (mine,) = lines(found, task="mine")
    assert (mine["split"], mine["seeds"], mine["rows"]) == ("test", 2, 40)
    assert mine["accuracy"] == pytest.approx(15 / 40)
    assert mine["calibration_error"] == pytest.approx((0.1 + 0.6) / 2)
    assert [line["split"] for line in lines(found, task="other")] == ["dev"]
    assert not lines(found, task="before")


def test_coverage_is_the_mean_over_seeds(study):
    made = [record("mine", seed=seed, calibration={"dev": measured(right)}) for seed, right in enumerate((4, 8))]
    found = series.coverage(study(*made))
    assert [(line["coverage"], line["accuracy"], line["seeds"]) for line in found] == [
        (1.0, pytest.approx(0.6), 2),
        (0.5, pytest.approx(0.6), 2),
    ]


def test_a_record_with_a_calibration_of_another_shape_is_left_out(study):
    found = study(record("mine", calibration={"dev": {**measured(5), "reliability": [{"rows": "many"}]}}))
    assert not found.rows
    assert "calibration.dev.reliability[0]" in found.problems[0]

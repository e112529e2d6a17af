"""Claims about a study's own tables: intervals are those of scipy, and settings are what differs."""

from __future__ import annotations

from statistics import mean, stdev

import pytest
from made import record, write
from scipy import stats

from adapterbank.analysis import summary
from adapterbank.analysis.run_table import load

SCORES = (0.80, 0.83, 0.88)


def study_of(folder, *records):
    return load([write(folder, *records)])


def by_column(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_scores_of_several_seeds_have_students_interval(tmp_path):
    study = study_of(tmp_path, *(record("tickets", dev=dev, seed=k, test=dev - 0.1) for k, dev in enumerate(SCORES)))
    (line,) = by_column(summary.scores(study))
    low, high = stats.t.interval(0.95, 2, loc=mean(SCORES), scale=stdev(SCORES) / 3**0.5)
    assert line["dev"] == f"{100 * mean(SCORES):.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    assert line["test"].startswith(f"{100 * mean(SCORES) - 10:.1f} [")
    assert (line["seeds"], line["dev rows"], line["test rows"], line["train rows"]) == ("3", "100", "50", "1,000")
    assert not any("chance" in note for note in summary.scores(study).notes)


@pytest.mark.parametrize(
    ("metric", "dev", "shown"),
    [
        ("accuracy", (0.8, 0.9), "85.0 [21.5, 100.0]"),
        ("accuracy", (0.1, 0.2), "15.0 [0.0, 78.5]"),
        ("matthews", (0.1, 0.2), "15.0 [-48.5, 78.5]"),
        ("spearman", (-0.8, -0.6), "-70.0 [-100.0, 57.1]"),
    ],
)
def test_an_interval_does_not_leave_the_range_of_its_metric(tmp_path, metric, dev, shown):
    study = study_of(tmp_path, *(record("tickets", dev=one, metric=metric, seed=k) for k, one in enumerate(dev)))
    assert by_column(summary.scores(study))[0]["dev"] == shown


def test_a_single_run_has_wilsons_interval_if_its_metric_is_a_share_of_rows(tmp_path):
    study = study_of(tmp_path, record("tickets", dev=0.8), record("mood", dev=0.8, metric="f1"))
    mood, tickets = by_column(summary.scores(study))
    bounds = stats.binomtest(80, 100).proportion_ci(0.95, "wilson")
    assert tickets["dev"] == f"80.0 [{100 * bounds.low:.1f}, {100 * bounds.high:.1f}]"
    assert mood["dev"] == "80.0"
    assert (mood["test"], mood["test rows"]) == ("–", "–")
    assert any("may be chance" in note for note in summary.scores(study).notes)


def test_settings_have_the_options_that_differ_and_the_others_are_listed_once(tmp_path):
    rows = [record("tickets", dev=0.5 + lr, lr=lr, seed=seed) for lr in (1e-4, 1e-3) for seed in (0, 1)]
    study = study_of(tmp_path, *rows)
    first, second = by_column(summary.settings(study))
    assert (first["lr"], second["lr"], first["seeds"]) == ("0.001", "0.0001", "2")  # the best first
    assert "epochs" not in first
    shared = dict(summary.shared(study).rows)
    assert (shared["epochs"], shared["batch"], shared["train_norms"]) == ("10", "32", "on")
    assert not {"lr", "seed", "task", "method"} & shared.keys()


def test_a_variant_of_the_method_is_named(tmp_path):
    study = study_of(tmp_path, record("tickets", dev=0.9, sigma=0.1), record("tickets", dev=0.8))
    found = {line["method"]: line["dev"].split()[0] for line in by_column(summary.scores(study))}
    assert found == {"adapter 64": "80.0", "adapter 64, sigma 0.1": "90.0"}


def test_cost_has_time_and_parameters_by_method(tmp_path):
    study = study_of(tmp_path, *(record("tickets", seed=seed) for seed in range(3)), record("tickets", "full"))
    adapters, full = by_column(summary.cost(study))
    assert (adapters["method"], adapters["runs"], adapters["time in all"]) == ("adapter 64", "3", "0:00:36")
    assert (adapters["trained"], adapters["of the encoder"]) == ("64,000", "6.40 %")
    assert full["of the encoder"] == "100.00 %"


def test_notes_are_listed_once_for_each_task(tmp_path):
    noted = [{**record("tickets", seed=seed), "notes": ["10 rows are held out."]} for seed in range(3)]
    (line,) = by_column(summary.notes(study_of(tmp_path, *noted)))
    assert (line["runs"], line["such as"], line["note"]) == ("3", "adapter 64 seed 0", "10 rows are held out.")
    assert [table.name for table in summary.own_tables(study_of(tmp_path / "none"))] == []


@pytest.mark.parametrize(("value", "text"), [(0.8, "80.0"), (None, "–")])
def test_a_missing_score_is_a_dash(tmp_path, value, text):
    study = study_of(tmp_path, record("tickets", test=value))
    assert by_column(summary.scores(study))[0]["test"].startswith(text)

"""Paired tests over seeds and tasks, against SciPy's permutation test and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, variance

import numpy as np
import pytest
from made import record, write
from scipy import stats

from adapterbank.analysis import paired, tables
from adapterbank.analysis.run_table import load


def chance(values):
    """Return SciPy's exact p of the mean of paired differences."""
    zeros = np.zeros(len(values))
    found = stats.permutation_test(
        (np.array(values), zeros), lambda a, b, axis: (a - b).mean(axis), permutation_type="samples", vectorized=True,
        n_resamples=np.inf,
    )  # fmt: skip
    return found.pvalue


@pytest.mark.parametrize("seed", range(6))
def test_both_chances_are_those_of_scipy(seed):
    numbers = np.random.default_rng(seed)
    gaps = (numbers.normal(0.4 * seed, 1.0, (3, 4))).tolist()
    found = paired.compare(gaps)
    assert found.p_runs == pytest.approx(chance([gap for own in gaps for gap in own]))
    assert found.p_tasks == pytest.approx(chance([fmean(own) for own in gaps]))
    assert found.difference == pytest.approx(np.mean(gaps))
    assert found.sem == pytest.approx(math.sqrt(sum(variance(own) / 4 for own in gaps)) / 3)
    assert (found.tasks, found.pairs) == (3, 12)


def test_many_pairs_are_drawn_and_near_the_exact_chance():
    gaps = np.random.default_rng(0).normal(0.3, 1.0, (6, 5)).tolist()
    found = paired.compare(gaps)
    # The sum of 30 numbers with random signs is nearly normal.
    total, spread = sum(map(sum, gaps)), math.sqrt(sum(gap**2 for own in gaps for gap in own))
    assert found.p_runs == pytest.approx(2 * stats.norm.sf(abs(total) / spread), abs=0.01)
    assert paired.compare(gaps) == found


def test_a_task_counts_as_one_however_many_runs_it_has():
    assert paired.compare([[1.0] * 8, [-1.0]]).difference == 0.0
    assert paired.compare([[1.0] * 8, [-1.0]]).sem is None


@pytest.mark.parametrize(("gaps", "p_runs", "p_tasks"), [([[0.0, 0.0]], 1.0, 1.0), ([[2.0, 2.0, 2.0]], 0.25, 1.0)])
def test_the_least_chance_that_few_pairs_can_have(gaps, p_runs, p_tasks):
    found = paired.compare(gaps)
    assert (found.p_runs, found.p_tasks) == (p_runs, p_tasks)


@pytest.fixture
def study(tmp_path):
    scores = {("glue-rte", "adapter"): (61, 63, 65), ("glue-rte", "full"): (60, 60, 62, 99),
              ("glue-sst2", "adapter"): (80, 82), ("glue-sst2", "full"): (81, 85)}  # fmt: skip
    made = [
        record(task, method, 0.9, score / 200, seed=seed)
        for (task, method), own in scores.items()
        for seed, score in enumerate(own)
    ]
    for one in made:
        one["metrics"]["validation"] = {"accuracy": 2 * one["metrics"]["test"]["accuracy"]}
    return load([write(tmp_path / "records", *made)])


def test_the_table_compares_runs_of_one_seed_on_rows_that_chose_nothing(study):
    (table,) = [table for table in tables.with_ours(study) if table.name == "against-full"]
    line = dict(zip(table.columns, table.rows[0], strict=True))
    # RTE: 1, 3, 3; SST-2: -1, -3. The row of the fourth seed has no partner.
    assert line[""] == "GLUE, dev: adapters, best size"
    assert (line["tasks"], line["pairs of runs"]) == ("2", "5")
    assert line["difference"] == f"{(7 / 3 - 2) / 2:.2f}"
    assert line["s.e."] == f"{math.sqrt(variance([1, 3, 3]) / 3 + variance([1, 3]) / 2) / 2:.2f}"
    assert line["p, runs"] == f"{chance([1 / 3, 1, 1, -1 / 2, -3 / 2]):.3f}"
    assert line["p, tasks"] == "1.000"
    tests = [row for row in table.rows if row[0] == "GLUE, test: adapters 64"]
    assert [row[3] for row in tests] == [f"{(7 / 3 - 2) / 4:.2f}"]


def test_dev_rows_on_which_nothing_was_chosen_are_those_of_the_tables(study):
    chosen = {(row.task, row.method): row.dev for row in study.rows if row.seed == 0}
    assert chosen["glue-rte", "adapter"] == 0.61
    (table, *_) = tables.with_ours(study)
    assert next(row for row in table.rows if row[0] == "ours: adapters 64, dev")[-2].startswith("63.0")
    without = replace(study, rows=tuple(replace(row, dev=None) for row in study.rows))
    assert not tables.with_ours(without)[0].rows or "ours" not in tables.with_ours(without)[0].rows[0][0]


def test_each_way_to_train_has_a_line_and_the_figures_variants_have_none(tmp_path):
    ways = ({}, {"mix": 4}, {"average": True, "start_from": "mnli@1"}, {"size": "64to32"}, {"sigma": 0.1})
    made = [record("glue-rte", dev=0.5 + k / 10, trained=9, **way) for k, way in enumerate(ways)]
    study = load([write(tmp_path / "records", record("glue-rte", "full", 0.5), *made)])
    table1, against = tables.with_ours(study)
    assert {row[0]: row[-2] for row in table1.rows if "64" in row[0] and "ours" in row[0]} == {
        "ours: adapters 64, dev": "50.0",
        "ours: adapter 64, mix 4, dev": "60.0",
        "ours: adapter 64, start from mnli@1, average, dev": "70.0",
        "ours: adapter 64to32, dev": "80.0",
    }
    assert "GLUE, dev: adapter 64, mix 4" in {row[0] for row in against.rows}

"""Claims about the tables: our scores beside the paper's, with standard errors, and notes on what is missing."""

from __future__ import annotations

import pytest
from made import record, write

from adapterbank.analysis import paper, tables
from adapterbank.analysis.run_table import load
from adapterbank.tasks.catalog import CATALOG


def cells(table, name):
    (row,) = [row for row in table.rows if row[0] == name]
    return dict(zip(table.columns, row, strict=True))


def test_table_1_has_our_means_beside_the_papers(tmp_path):
    made = [record("glue-rte", dev=0.6 + 0.02 * seed, seed=seed) for seed in range(2)]
    made += [record("glue-sst2", dev=0.9, test=0.88), record("glue-rte", "full", 0.65)]
    table = tables.glue(load([write(tmp_path, *made)]))
    ours = cells(table, "ours: adapters 64, dev")
    assert (ours["RTE"], ours["SST-2"], ours["CoLA"]) == ("61.0 ± 1.0", "90.0", "–")
    assert (ours["mean"], ours["trained"]) == ("75.5 (2)", "6.40 %")
    assert cells(table, "ours: adapters 64, test")["SST-2"] == "88.0"
    assert cells(table, "paper: adapters 8–256, server")["CoLA"] == "59.5"
    assert any("No records of: CoLA" in note for note in table.notes)
    assert not any(row[0].startswith("ours: LoRA") for row in table.rows)


def test_the_best_size_is_chosen_per_task_on_dev(tmp_path):
    made = [record("glue-rte", dev=dev, size=size) for size, dev in ((8, 0.7), (64, 0.6))]
    table = tables.glue(load([write(tmp_path, *made)]))
    assert cells(table, "ours: adapters, best size, dev")["RTE"] == "70.0"
    assert cells(table, "ours: adapters 64, dev")["RTE"] == "60.0"


def test_the_best_size_within_the_papers_share_excludes_larger_ones(tmp_path):
    made = [record("glue-rte", dev=dev, size=size, trained=trained)
            for size, dev, trained in ((8, 0.6, 4_000), (64, 0.7, 36_000), (256, 0.8, 36_001))]  # fmt: skip
    table = tables.glue(load([write(tmp_path, *made)]))
    within = cells(table, "ours: adapters, best size up to 3.6 %, dev")
    assert (within["RTE"], within["trained"]) == ("70.0", "3.60 %")
    assert cells(table, "ours: adapters, best size, dev")["RTE"] == "80.0"


def test_a_small_share_is_not_rounded_to_zero(tmp_path):
    made = [record("glue-rte", "feature", trained=30), record("glue-rte", "layernorm", trained=500)]
    table = tables.glue(load([write(tmp_path, *made)]))
    assert cells(table, "ours: feature, dev")["trained"] == "0.003 %"
    assert cells(table, "ours: LayerNorm only, dev")["trained"] == "0.05 %"


def test_a_method_without_an_encoder_has_no_share(tmp_path):
    table = tables.glue(load([write(tmp_path, record("glue-rte", "automl", trained=30_000))]))
    assert cells(table, "ours: AutoML, no encoder, dev")["trained"] == "–"


def test_a_half_is_rounded_up_though_binary_numbers_may_be_below_it(tmp_path):
    made = [record("paper-emotion", dev=0.5, test=test, seed=k) for k, test in enumerate((0.3945, 0.397, 0.398))]
    made.append(record("paper-emotion", "full", 0.5, 0.3585))
    row = cells(tables.further(load([write(tmp_path, *made)])), "emotion")
    assert (row["ours: adapters"].split()[0], row["ours: full"]) == ("39.7", "35.9")  # 39.65 and 35.85


def test_the_metric_is_the_papers(tmp_path):
    made = record("glue-mrpc", dev=0.8, metric="accuracy_f1")
    made["metrics"]["dev"]["f1"] = 0.9
    assert cells(tables.glue(load([write(tmp_path, made)])), "ours: adapters 64, dev")["MRPC"] == "90.0"


def test_table_2_compares_the_same_tasks(tmp_path):
    made = [record("paper-sms_spam", dev=0.9, test=0.99, seed=seed) for seed in range(2)]
    table = tables.further(load([write(tmp_path, *made, record("paper-airline", "full", 0.5, 0.8))]))
    assert len(table.rows) == 18
    spam = cells(table, "sms spam")
    assert (spam["ours: adapters"], spam["paper: adapters"]) == ("99.0 ± 0.0", "95.1 ± 2.2")
    means = cells(table, "mean of the tasks we ran")
    assert (means["ours: adapters"], means["paper: adapters"]) == ("99.0 (1)", "95.1 (1)")
    assert (means["paper: full"], means["ours: variable"]) == ("83.6 (1)", "–")


def test_the_papers_tasks_are_in_the_catalog_and_its_printed_averages_are_reproduced():
    assert set(paper.FURTHER) | {task for task, _, _ in paper.GLUE_COLUMNS.values()} <= set(CATALOG)
    assert len(paper.FURTHER) == 17
    for k, average in enumerate((72.7, 73.7, 74.0, 73.3)):
        found = [row[k][0] if isinstance(row[k], tuple) else row[k] for row in paper.FURTHER.values()]
        assert sum(found) / 17 == pytest.approx(average, abs=0.1)
    assert all(len(scores) == len(paper.GLUE_COLUMNS) for _, scores, _ in paper.GLUE.values())


def test_every_run_is_listed_and_variants_are_named(tmp_path):
    table = tables.runs(load([write(tmp_path, record(), record(sigma=1e-4))]))
    assert sorted(row[3] for row in table.rows) == ["adapter 64", "adapter 64, sigma 0.0001"]
    assert table.csv().startswith("record,backbone,task")


def test_automatic_size_and_pruning_are_listed(tmp_path):
    auto, pruned = record(), record(seed=1)
    auto["sizing"] = {"reason": "Size 4 is enough."}
    pruned["pruned"] = {"removed": [0, 1], "metric": "accuracy", "before": 0.8, "after": 0.79}
    rows = tables.smaller(load([write(tmp_path, auto, pruned)])).rows
    assert {row[2] for row in rows} == {"Size 4 is enough.", "without layers 0, 1: accuracy 80.00 before, 79.00 after"}


def test_tables_without_our_scores_are_omitted(tmp_path):
    made = [record("glue-rte", dev=0.6), record("mine", dev=0.7)]
    assert [table.name for table in tables.with_ours(load([write(tmp_path / "one", *made)]))] == ["table1"]
    assert tables.with_ours(load([write(tmp_path / "two", made[1])])) == []


def test_table_1_notes_the_training_data_of_a_sentence_encoder(tmp_path):
    known, other = (record("glue-rte", dev=0.6) for _ in range(2))
    known["config"]["backbone"], other["config"]["backbone"] = "gte-small", "bert-base"
    assert any("MultiNLI" in note for note in tables.glue(load([write(tmp_path / "one", known)])).notes)
    assert not any("MultiNLI" in note for note in tables.glue(load([write(tmp_path / "two", other)])).notes)

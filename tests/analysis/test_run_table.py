"""Claims about the table of runs: records become rows, seeds a setting, and the best setting is chosen on dev."""

from __future__ import annotations

import pytest
from made import ablation, mark, record, write

from adapterbank.analysis.run_table import RunTable, by_setting, by_task, load
from adapterbank.errors import ConfigError, InputError


def test_a_record_becomes_a_row(tmp_path):
    (row,) = load([write(tmp_path, record("glue-rte", "top", 0.6, 0.55, top=2, seed=3))]).rows
    assert (row.task, row.catalog, row.method, row.option, row.seed) == ("glue-rte", "glue/rte", "top", 2, 3)
    assert (row.dev, row.test, row.trained, row.encoder) == (0.6, 0.55, 160_000, 1_000_000)
    assert (row.label, row.split, row.shown) == ("top 2", "dev", 0.6)


def test_a_task_with_test_labels_is_shown_on_test(tmp_path):
    (row,) = load([write(tmp_path, record("paper-sms_spam", dev=0.9, test=0.8))]).rows
    assert (row.split, row.shown) == ("test", 0.8)


def test_seeds_form_one_setting_and_a_repeated_seed_counts_once(tmp_path):
    made = [record(dev=0.5, seed=0), record(dev=0.6, seed=1), record(dev=0.1, seed=0), record(dev=0.7, lr=1e-4)]
    groups = by_setting(load([write(tmp_path, *made)]).rows)
    assert sorted(len(group) for group in groups) == [1, 2]
    assert sorted(row.dev for group in groups for row in group) == [0.5, 0.6, 0.7]


def test_a_setting_run_once_does_not_compete_with_a_repeated_one_unless_the_rule_says_so(tmp_path):
    made = [record(dev=0.5, seed=0), record(dev=0.6, seed=1), record(dev=0.99, lr=1e-4)]
    folder = write(tmp_path, *made)
    chosen = {}
    for by in ("repeated", "mean", "best"):
        study = load([folder], by)
        chosen[by] = {row.dev for row in study.best(study.rows)}
    assert chosen == {"repeated": {0.5, 0.6}, "mean": {0.99}, "best": {0.99}}
    assert load([folder]) == load([folder], "repeated")
    assert RunTable((), (), ()).best([]) == []
    with pytest.raises(ConfigError, match="by is 'luck'; it must be one of best, mean, repeated"):
        load([folder], "luck")


def test_precision_is_part_of_the_setting_and_the_device_is_not(tmp_path):
    made = [record(), record(seed=1, device="cpu"), record(seed=2, precision="fp32")]
    assert sorted(map(len, by_setting(load([write(tmp_path, *made)]).rows))) == [1, 2]


def test_runs_on_part_of_the_data_are_not_compared_with_those_on_all(tmp_path):
    small = record(dev=0.9)
    small["config"] = {**small["config"], "limit": 100, "data": {"train": {"rows": 100, "sha256": "x"}}}
    rows = load([write(tmp_path, small, record(dev=0.5))]).rows
    assert [row.dev for row in by_task(rows)["glue-cola"]] == [0.5]


def test_variants_and_pruned_runs_are_not_plain(tmp_path):
    pruned = record(seed=4)
    pruned["config"]["pruned"] = {"from": "glue-cola@1", "tolerance": 0.5}
    rows = load([write(tmp_path, record(), record(sigma=1e-4), record(layers="upper"), pruned)]).rows
    assert sorted(row.plain for row in rows) == [False, False, False, True]
    assert {row.label for row in rows} == {
        "adapter 64", "adapter 64, sigma 0.0001", "adapter 64, layers upper", "adapter 64, pruned",
    }  # fmt: skip


def test_unusable_files_are_reported_and_the_rest_is_read(tmp_path):
    write(tmp_path, record(), {**record(seed=9), "metrics": None}, ablations=(ablation(),))
    failed = {"config": record(seed=8)["config"], "failure": "out of memory"}
    write(tmp_path, failed)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "ablations" / "odd.json").write_text("[]")
    study = load([tmp_path])
    assert (len(study.rows), len(study.ablations)) == (1, 1)
    assert len(study.problems) == 4
    assert any("the run failed: out of memory" in text for text in study.problems)


def test_a_missing_folder_is_reported(tmp_path):
    with pytest.raises(InputError, match="no folder of records"):
        load([tmp_path / "none"])


def test_encoders_are_kept_separate(tmp_path):
    write(tmp_path, record(), record(seed=1), record(backbone="other"), ablations=(ablation(backbone="other"),))
    study = load([tmp_path])
    assert study.backbones == ["minilm", "other"]
    assert (len(study.of("minilm").rows), len(study.of("other").ablations)) == (2, 1)


def test_a_failure_is_no_problem_once_the_run_has_succeeded(tmp_path):
    went = record()
    failed = {"config": {**went["config"], "data": None}, "failure": "no data"}
    assert len(load([write(tmp_path / "one", failed)]).problems) == 1
    assert load([write(tmp_path / "two", failed, went)]).problems == ()


def test_a_bank_stands_for_its_records(tmp_path):
    (tmp_path / "bank.json").write_text("{}")
    write(tmp_path / "records", record())
    study = load([tmp_path])
    assert (len(study.rows), study.problems) == (1, ())


def test_encoders_with_the_same_last_name_have_their_own_files(tmp_path):
    study = load([write(tmp_path, record(backbone="a/x y"), record(backbone="b/x y"), record(backbone="z"))])
    assert sorted(map(study.suffix, study.backbones)) == ["-x-y", "-x-y-2", "-z"]
    assert study.of("z").suffix("z") == ""


def test_a_record_in_two_folders_is_one_run(tmp_path):
    folders = [write(tmp_path / name, record()) for name in ("one", "two")]
    assert len(load(folders).rows) == 1
    write(tmp_path / "two", {**record(), "seconds": 13.0})  # another run of it
    assert len(load(folders).rows) == 2


def test_the_states_of_unfinished_runs_are_not_records(tmp_path):
    write(tmp_path, record())
    state = tmp_path / "runs" / "0123456789abcdef" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    assert load([tmp_path]).problems == ()


def test_an_encoder_is_identified_by_its_sha256_whatever_its_name(tmp_path):
    folder = "models/minilm"
    made = [record(), record(seed=1), record(seed=2, backbone=folder, sha256=mark("minilm"))]
    study = load([write(tmp_path / "one", *made)])
    assert study.backbones == ["minilm"]
    assert len({row.setting for row in study.rows}) == 1
    other = load([write(tmp_path / "two", record(), record(seed=1, sha256="b" * 64))])
    assert sorted(other.backbones) == [f"minilm ({mark('minilm')[:8]})", "minilm (bbbbbbbb)"]


def test_a_problem_names_its_file_once(tmp_path):
    write(tmp_path, record())
    (tmp_path / "odd.json").write_text("[]")
    (tmp_path / "odder.json").write_text('{"config": {"method": "full"}, "task": {"metric": "f1"}, "metrics": [1]}')
    problems = load([tmp_path]).problems
    assert len(problems) == 2
    assert problems[0].startswith(f"{tmp_path / 'odd.json'} is left out: it is not a record: it has no 'config'")

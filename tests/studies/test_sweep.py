"""Claims about `adapterbank.studies.sweep`: each run of a grid is run once, with the result it has alone."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.errors import ConfigError, DataError, StorageError
from adapterbank.storage import records
from adapterbank.storage.record_store import open_store
from adapterbank.studies import selection, sweep
from adapterbank.studies.grid import make
from adapterbank.studies.sweep import SweepContext, make_context, run_unit
from adapterbank.studies.units import units
from adapterbank.training import run as runs
from small_data import FAST, process, reviews, scores, shell, write

TIMES = ("seconds", "examples_per_second", "created", "package", "history")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a folder with the data of two tasks."""
    for name, rows in (("a", reviews()), ("b", reviews(30)[6:])):
        write(tmp_path / f"{name}.csv", rows)
    write(tmp_path / "numbers.csv", scores(), ("text", "score"))
    write(tmp_path / "test.csv", reviews(8))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bank(here, bert):
    return open_bank("bank", bert, device="cpu")


def task(name, **more):
    return {"task": name, "train": f"{name}.csv", "dev": f"{name}.csv", **more}


def study(**options):
    """Return a grid of eight quick runs on two tasks."""
    return {"task": [task("a", test="test.csv"), task("b")], **FAST, "size": [4, 8], "seeds": 2, **options}


def records_of(bank):
    return records.read_all(bank.path / "records")


# --- the same result as alone --------------------------------------------------------------------------------------


def test_each_run_of_a_sweep_has_the_result_of_a_single_run(bank, bert, here):
    grid = study(method=["adapter", "layernorm", "full", "feature"], lr=[0.01], seeds=1)
    outcome = bank.sweep(grid)
    found = records_of(bank)
    assert outcome.progress.done == len(found) == 2 * (2 + 3)
    alone = open_bank("alone", bert, device="cpu")
    for record in found:
        config = {k: v for k, v in record["config"].items() if k not in ("data", "backbone_sha256")}
        expected = alone.train(**config).record
        expected["notes"] = [note for note in expected["notes"] if "of b@" not in note and "of a@" not in note]
        assert set(expected) == set(record)
        assert record["package"] is None
        for name in set(expected) - {*TIMES, "metrics"}:
            assert record[name] == expected[name], name
        assert record["metrics"].keys() == expected["metrics"].keys()
        for split, mine in expected["metrics"].items():
            assert record["metrics"][split]["accuracy"] == pytest.approx(mine["accuracy"], abs=1e-5)
        for epoch, theirs in zip(record["history"], expected["history"], strict=True):
            assert epoch["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert epoch["score"] == pytest.approx(theirs["score"], abs=1e-5)
    assert {"dev", "test"} == set(next(r for r in found if r["config"]["task"] == "a")["metrics"])


def test_data_is_read_and_tokenised_once_per_task(bank, monkeypatch):
    from adapterbank.training import builder, dataset

    read, made = [], []
    real_read, real_rows = dataset._read, builder.make_rows
    monkeypatch.setattr(dataset, "_read", lambda config, given: read.append(config.task) or real_read(config, given))
    monkeypatch.setattr(builder, "make_rows", lambda *a, **o: made.append(1) or real_rows(*a, **o))
    bank.sweep(study())
    assert sorted(read) == ["a", "b"]
    assert len(made) == 3 + 2  # train, dev and test of a; train and dev of b


def test_runs_of_one_task_are_trained_in_one_call_of_the_loop(bank, monkeypatch):
    calls, real = [], runs.train
    monkeypatch.setattr(runs, "train", lambda *a, **o: calls.append(len(a[1])) or real(*a, **o))
    bank.sweep(study())
    assert calls == [4, 4]


# --- runs with a record are not run again ---------------------------------------------------------------------


def test_a_run_with_a_record_is_not_run_again(bank, monkeypatch):
    bank.sweep(study())
    before = {path.name: path.read_bytes() for path in (bank.path / "records").iterdir()}
    assert len(before) == 8

    def never(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(runs, "train", never)
    outcome = bank.sweep(study())
    assert (outcome.progress.known, outcome.progress.done) == (8, 0)
    assert {path.name: path.read_bytes() for path in (bank.path / "records").iterdir()} == before


def test_the_record_of_a_single_run_counts(bank, bert):
    bank.train("a", "a.csv", "a.csv", "test.csv", **{**FAST, "size": 4, "seed": 1})
    progress = bank.sweep(study()).progress
    assert (progress.known, progress.done) == (1, 7)


def test_runs_with_changed_data_are_run_again(bank, here):
    bank.sweep(study())
    write(here / "b.csv", reviews(30)[4:])
    progress = bank.sweep(study()).progress
    assert (progress.known, progress.done) == (4, 4)


def test_a_limit_starts_so_many_runs_and_the_next_call_continues(bank):
    progress = bank.sweep(study(), limit=3).progress
    assert (progress.done, progress.left) == (3, 5)
    progress = bank.sweep(study(), limit=100).progress
    assert (progress.known, progress.done, progress.left) == (3, 5, 0)


def test_runs_that_were_refused_for_their_data_count_towards_a_limit_and_come_last(bank, here):
    grid = study(task=[task("gone"), task("a")], size=4, seeds=2)
    assert bank.sweep(grid, limit=2).progress.failed == 2
    assert bank.sweep(grid, limit=2).progress.done == 2
    write(here / "gone.csv", reviews())
    assert bank.sweep(grid, limit=1).progress.done == 1


def test_the_choice_is_among_the_records_of_the_current_data(bank, here):
    grid = study(task=[task("a")], lr=[0.02, 1e-6], size=4, seeds=1, select={"seeds": 1})
    bank.sweep(grid)
    for path in (bank.path / "records").iterdir():  # as if made yesterday
        record = records.read(path)
        path.unlink()
        records.write(path.parent, {**record, "created": "2020-01-01T00:00:00+00:00"})
    write(here / "a.csv", reviews(20))
    outcome = bank.sweep(grid)
    assert outcome.progress.done == 2
    ((_, choice),) = outcome.choices
    assert [record["config"]["data"]["train"]["rows"] for record in choice.runs] == [20]


def test_an_unusable_folder_of_records_is_reported_before_anything_is_trained(bank, monkeypatch):
    monkeypatch.setattr(runs, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(StorageError, match=r"a\.csv cannot be used: it is a file"):
        bank.sweep(study(), records="a.csv")


def test_a_record_that_appears_meanwhile_is_neither_changed_nor_duplicated(bank, bert):
    grid = make(study(), {"backbone": bert.name, "device": "cpu"})
    store = open_store(bank.path / "records")
    unit = units(grid.runs)[0]

    def race(event):  # another machine finishes every run of the unit first
        if event.kind == "running" and not store.all():
            run_unit(unit, bert, SweepContext(open_store(bank.path / "records")))

    run_unit(unit, bert, SweepContext(store, notify=race))
    assert len(list((bank.path / "records").iterdir())) == len(unit) == 4


# --- failures ---------------------------------------------------------------------------------------------


def test_a_diverging_run_is_recorded_and_the_other_runs_have_the_same_results_as_without_it(bank, bert, here):
    grid = study(task=[task("a")], lr=[0.01, 10], weight_decay=10, epochs=20, size=[4], seeds=[0, 1])
    outcome = bank.sweep(grid)
    assert (outcome.progress.done, outcome.progress.failed) == (2, 2)
    lost = [record for record in records_of(bank) if selection.failed(record)]
    assert [record["config"]["lr"] for record in lost] == [10.0, 10.0]
    assert all("probably too high: try --lr 1." in record["failure"] for record in lost)
    assert all("\n" not in record["failure"] and "metrics" not in record for record in lost)
    quiet = open_bank("quiet", bert, device="cpu")
    quiet.sweep({**grid, "lr": 0.01})
    for record, same in zip([r for r in records_of(bank) if r not in lost], records_of(quiet), strict=True):
        assert record["config"] == same["config"]
        assert [e["loss"] for e in record["history"]] == pytest.approx([e["loss"] for e in same["history"]], abs=1e-5)


def test_unsuitable_options_and_missing_data_fail_only_their_own_runs(bank, here):
    grid = study(task=[task("a"), task("gone")], layers=["all", "0,7"], size=[4], seeds=1)
    progress = bank.sweep(grid).progress
    assert (progress.done, progress.failed) == (1, 3)
    messages = sorted(failure for _, failure in progress.failures)
    assert any("layers is '0,7', but this backbone has layers 0 to 2" in one for one in messages)
    assert sum("gone.csv" in one for one in messages) == 2
    again = bank.sweep(grid).progress
    assert (again.known, again.failed) == (4, 0)
    assert sorted(failure for _, failure in again.failures) == messages
    write(here / "gone.csv", reviews())
    progress = bank.sweep(grid).progress
    assert (progress.known, progress.done, progress.failed) == (3, 1, 0)


def test_failed_runs_are_run_again_on_request(bank):
    grid = study(task=[task("a")], lr=[0.01, 10], weight_decay=10, epochs=20, size=4, seeds=1)
    bank.sweep(grid)
    again = bank.sweep(grid, retry=True).progress
    assert (again.known, again.failed) == (1, 1)
    assert len(records_of(bank)) == 2


@pytest.mark.parametrize("rare", [True, False])
def test_without_enough_memory_runs_are_trained_alone_and_one_that_is_too_large_fails(bank, monkeypatch, rare):
    real = runs.train

    def scarce(backbone, jobs, **options):
        if len(jobs) > 1 or (not rare and jobs[0].seed == 1):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(backbone, jobs, **options)

    monkeypatch.setattr(runs, "train", scarce)
    progress = bank.sweep(study(task=[task("a")], size=[4])).progress
    assert (progress.done, progress.failed) == ((2, 0) if rare else (1, 1))
    assert rare or "not enough memory" in progress.failures[0][1]


def test_a_full_disk_stops_the_sweep(bank, monkeypatch):
    def full(*_):
        raise StorageError("the disk is full")

    monkeypatch.setattr("adapterbank.storage.record_store.FolderStore.add", full)
    with pytest.raises(StorageError):
        bank.sweep(study())


# --- selection ----------------------------------------------------------------------------------------------


def test_the_chosen_setting_is_run_with_further_seeds(bank):
    grid = study(lr=[0.01, 1e-5], seeds=[0], select={"per": ["task"], "seeds": 3})
    outcome = bank.sweep(grid)
    assert outcome.progress.done == 2 * 4 + 2 * 2
    assert [choice.group["task"] for _, choice in outcome.choices] == ["a", "b"]
    for _, choice in outcome.choices:
        assert [record["config"]["seed"] for record in choice.runs] == [0, 1, 2]
        assert choice.settings == 4
        mine = [r for r in records_of(bank) if r["config"]["task"] == choice.group["task"] and r["config"]["seed"] == 0]
        assert max(selection.score(r) for r in mine) == selection.score(choice.runs[0])
    again = bank.sweep(grid)
    assert (again.progress.known, again.progress.done) == (12, 0)
    assert again.to_json()["chosen"] == outcome.to_json()["chosen"]


def test_the_rule_of_a_selection_decides_the_setting(bank, bert):
    store, scores = open_store(bank.path / "records"), {(4, 0): 0.9, (4, 1): 0.1, (8, 0): 0.6, (8, 1): 0.6}
    for by, size in (("best", 4), ("mean", 8), ("repeated", 8)):
        grid = make(study(task=[task("a")], select={"by": by, "seeds": 2}), {"backbone": bert.name})
        for run in grid.runs:
            dev = {"accuracy": scores[run.size, run.seed]}
            store.add({"config": run.to_json(), "task": {"metric": "accuracy"}, "metrics": {"dev": dev}})
        outcome = sweep.sweep(grid, make_context(bank.path, None), engine=lambda units, context: None)
        assert [choice.record["config"]["size"] for _, choice in outcome.choices] == [size]


def test_the_groups_of_a_selection_may_be_seeds(bank):
    outcome = bank.sweep(study(task=[task("a")], select={"per": ["seed"]}))
    assert [(choice.group, len(choice.runs)) for _, choice in outcome.choices] == [({"seed": 0}, 1), ({"seed": 1}, 1)]


def test_nothing_is_selected_before_the_grid_is_complete(bank):
    grid = study(seeds=[0], select={"seeds": 3})
    assert bank.sweep(grid, limit=3).progress.total == 4
    assert bank.sweep(grid).progress.total == 8


# --- packages -----------------------------------------------------------------------------------------------


def test_packages_are_kept_as_requested(bank, bert):
    assert bank.sweep(study(task=[task("a")]), keep="none").progress.done == 4
    assert bank.tasks() == []
    kept = open_bank("all", bert, device="cpu")
    kept.sweep(study(), keep="all")
    assert [task.name for task in kept.tasks()] == ["a", "b"]
    assert sum(len(kept.bank.versions(name)) for name in ("a", "b")) == 8
    assert {record["package"] for record in records_of(kept)} == {f"{n}@{v}" for n in "ab" for v in (1, 2, 3, 4)}
    assert all(finding.ok for finding in kept.audit())


def test_the_best_package_of_a_task_becomes_its_default(bank):
    outcome = bank.sweep(study(lr=[1e-5, 0.02], epochs=4), keep="best")
    for found in bank.tasks():
        score, config = outcome.progress.best[found.name]
        assert found.metrics["dev"]["accuracy"] == pytest.approx(score)
        assert (found.seed, found.recipe["lr"]) == (config.seed, config.lr)


def test_a_worse_run_later_does_not_become_the_default(bank):
    bank.sweep(study(task=[task("a")], lr=0.02, epochs=6), keep="best")
    before = bank.show("a")
    bank.sweep(study(task=[task("a")], lr=[0.02, 1e-6], epochs=6, seeds=3, size=[4, 8]), keep="best")
    assert bank.show("a").metrics["dev"]["accuracy"] >= before.metrics["dev"]["accuracy"]


def test_a_better_package_of_an_earlier_sweep_remains_the_default(bank):
    bank.sweep(study(task=[task("a")], lr=0.02, epochs=6, size=4, seeds=1), keep="best")
    before = bank.show("a")
    worse = study(task=[task("a")], lr=1e-6, epochs=1, size=4, seeds=1, max_length=16)
    assert bank.sweep(worse, keep="best").progress.done == 1
    assert bank.show("a").metrics["dev"]["accuracy"] == before.metrics["dev"]["accuracy"]
    assert len(bank.bank.versions("a")) == 1


@pytest.mark.parametrize(
    ("options", "message"), [({"keep": "some"}, "keep is 'some'; it must be one of none, best, all")]
)
def test_an_unknown_value_of_keep_is_refused(bank, options, message):
    with pytest.raises(ConfigError, match=message):
        bank.sweep(study(), **options)


def test_without_a_bank_a_folder_of_records_is_required():
    with pytest.raises(ConfigError, match="needs a bank, or a folder of records"):
        make_context(None, None)
    assert make_context(None, "here").bank is None


def test_damaged_records_are_reported_before_anything_is_run(bank):
    bank.sweep(study(task=[task("a")], size=4, seeds=1))
    (path,) = (bank.path / "records").iterdir()
    path.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        bank.sweep(study())


# --- interrupted sweeps -------------------------------------------------------------------------------------


def words(here, checkpoint, **options):
    (here / "study.yaml").write_text(json.dumps(study(**options)))
    encoder = checkpoint("bert")[0]
    return ["sweep", "study.yaml", "--bank", "bank", "--backbone", encoder, "--device", "cpu"]


def wait_for(running, ready):
    for _ in range(18_000):
        if ready() or running.poll() is not None:
            return
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_killed_sweep_continues_where_it_stopped(here, checkpoint, name):
    command = words(here, checkpoint, epochs=[1, 400], size=[4, 8], seeds=2)
    folder = here / "bank" / "records"
    with process(*command, cwd=here) as running:
        wait_for(running, lambda: len(list(folder.glob("[!.]*.json"))) >= 3)
        running.send_signal(getattr(signal, name))
        _, err = running.communicate(timeout=900)
    assert running.returncode == (-9 if name == "SIGKILL" else 130), err
    if name == "SIGINT":
        assert "Every finished run has a record. To continue:\n  adapterbank sweep study.yaml --bank bank" in err
        assert "Traceback" not in err
    before = {path.name: path.read_bytes() for path in folder.glob("[!.]*.json")}
    assert 3 <= len(before) < 16
    (here / "study.yaml").write_text(json.dumps(study(epochs=[1, 4], size=[4, 8], seeds=2)))
    found = shell(*command, "--json")
    assert found.code == 0
    assert (found.json["total"], found.json["known"] + found.json["done"], found.json["failed"]) == (16, 16, 0)
    assert found.json["known"] >= 3
    assert all((folder / path).read_bytes() == dataset for path, dataset in before.items())
    assert len(list(folder.glob("[!.]*.json"))) == 16 + sum(
        record["config"]["epochs"] == 400 for record in records.read_all(folder)
    )

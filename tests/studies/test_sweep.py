"""Claims about `adapterbank.studies.sweep`: the runs of a grid, each once, as if each had been run alone."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch

from adapterbank.api import open_bank
from adapterbank.errors import ConfigError, DataError, StorageError
from adapterbank.storage import records
from adapterbank.storage.record_store import open_store
from adapterbank.studies import selection, sweep
from adapterbank.studies.grid import make
from adapterbank.studies.sweep import SweepContext, make_context, run_unit, units
from adapterbank.training import run as runs
from small_data import FAST, process, reviews, scores, shell, write

TIMES = ("seconds", "examples_per_second", "created", "package", "history")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Be in a folder with two tasks' data."""
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
    """Give a grid of eight runs on two tasks, the options of which take a moment."""
    return {"task": [task("a", test="test.csv"), task("b")], **FAST, "size": [4, 8], "seeds": 2, **options}


def held(bank):
    return records.read_all(bank.path / "records")


# --- the same as alone --------------------------------------------------------------------------------------


def test_each_run_of_a_sweep_is_the_run_alone(bank, bert, here):
    grid = study(method=["adapter", "layernorm", "full", "feature"], lr=[0.01], seeds=1)
    outcome = bank.sweep(grid)
    found = held(bank)
    assert outcome.tally.done == len(found) == 2 * (2 + 3)
    alone = open_bank("alone", bert, device="cpu")
    for record in found:
        config = {k: v for k, v in record["config"].items() if k not in ("data", "backbone_sha256")}
        expected = alone.train(**config).record
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


def test_data_are_read_and_tokenised_once_a_task(bank, monkeypatch):
    from adapterbank.training import builder, dataset

    read, made = [], []
    real_read, real_rows = dataset._read, builder.make_rows
    monkeypatch.setattr(dataset, "_read", lambda config, given: read.append(config.task) or real_read(config, given))
    monkeypatch.setattr(builder, "make_rows", lambda *a, **o: made.append(1) or real_rows(*a, **o))
    bank.sweep(study())
    assert sorted(read) == ["a", "b"]
    assert len(made) == 3 + 2  # train, dev and test of a; train and dev of b


def test_runs_of_one_task_go_to_one_call_of_the_loop(bank, monkeypatch):
    calls, real = [], runs.train
    monkeypatch.setattr(runs, "train", lambda *a, **o: calls.append(len(a[1])) or real(*a, **o))
    bank.sweep(study())
    assert calls == [4, 4]


def test_units_are_runs_that_share_what_they_must():
    grid = make({**study(), "dropout": [0.0, 0.1], "max_length": [16, 32]})
    found = units(grid.runs)
    assert [len(unit) for unit in found] == [4] * 8
    assert [len(unit) for unit in units(grid.runs, at_most=3)] == [3, 1] * 8
    assert {run for unit in found for run in unit} == set(grid.runs)


# --- what has a record is not run again ---------------------------------------------------------------------


def test_a_run_with_a_record_is_not_run_again(bank, monkeypatch):
    bank.sweep(study())
    before = {path.name: path.read_bytes() for path in (bank.path / "records").iterdir()}
    assert len(before) == 8

    def never(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(runs, "train", never)
    outcome = bank.sweep(study())
    assert (outcome.tally.known, outcome.tally.done) == (8, 0)
    assert {path.name: path.read_bytes() for path in (bank.path / "records").iterdir()} == before


def test_a_single_runs_record_counts_as_any_other(bank, bert):
    bank.train("a", "a.csv", "a.csv", "test.csv", **{**FAST, "size": 4, "seed": 1})
    tally = bank.sweep(study()).tally
    assert (tally.known, tally.done) == (1, 7)


def test_changed_data_are_run_again(bank, here):
    bank.sweep(study())
    write(here / "b.csv", reviews(30)[4:])
    tally = bank.sweep(study()).tally
    assert (tally.known, tally.done) == (4, 4)


def test_a_limit_begins_so_many_and_the_next_call_goes_on(bank):
    tally = bank.sweep(study(), limit=3).tally
    assert (tally.done, tally.left) == (3, 5)
    tally = bank.sweep(study(), limit=100).tally
    assert (tally.known, tally.done, tally.left) == (3, 5, 0)


def test_a_limit_counts_runs_that_were_refused_for_their_data_and_they_come_last(bank, here):
    grid = study(task=[task("gone"), task("a")], size=4, seeds=2)
    assert bank.sweep(grid, limit=2).tally.failed == 2
    assert bank.sweep(grid, limit=2).tally.done == 2
    write(here / "gone.csv", reviews())
    assert bank.sweep(grid, limit=1).tally.done == 1


def test_the_choice_is_among_the_records_of_the_data_as_they_are_now(bank, here):
    grid = study(task=[task("a")], lr=[0.02, 1e-6], size=4, seeds=1, select={"seeds": 1})
    bank.sweep(grid)
    for path in (bank.path / "records").iterdir():  # as if made yesterday
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "created": "2020-01-01T00:00:00+00:00"}))
    write(here / "a.csv", reviews(20))
    outcome = bank.sweep(grid)
    assert outcome.tally.done == 2
    ((_, choice),) = outcome.choices
    assert [record["config"]["data"]["train"]["rows"] for record in choice.runs] == [20]


def test_a_place_for_records_that_is_none_is_told_before_anything_is_trained(bank, monkeypatch):
    monkeypatch.setattr(runs, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(StorageError, match=r"a\.csv cannot be used: it is a file"):
        bank.sweep(study(), records="a.csv")


def test_a_record_that_appears_meanwhile_is_neither_changed_nor_doubled(bank, bert):
    grid = make(study(), {"backbone": bert.name, "device": "cpu"})
    ledger = open_store(bank.path / "records")
    unit = units(grid.runs)[0]

    def race(news):  # another machine is quicker with every run of the unit
        if news.kind == "running" and not ledger.all():
            run_unit(unit, bert, SweepContext(open_store(bank.path / "records")))

    run_unit(unit, bert, SweepContext(ledger, hear=race))
    assert len(list((bank.path / "records").iterdir())) == len(unit) == 4


# --- what fails ---------------------------------------------------------------------------------------------


def test_a_diverging_run_is_recorded_and_its_neighbours_are_as_without_it(bank, bert, here):
    grid = study(task=[task("a")], lr=[0.01, 10], weight_decay=10, epochs=20, size=[4], seeds=[0, 1])
    outcome = bank.sweep(grid)
    assert (outcome.tally.done, outcome.tally.failed) == (2, 2)
    lost = [record for record in held(bank) if selection.failed(record)]
    assert [record["config"]["lr"] for record in lost] == [10.0, 10.0]
    assert all("most likely too high: try --lr 1." in record["failure"] for record in lost)
    assert all("\n" not in record["failure"] and "metrics" not in record for record in lost)
    quiet = open_bank("quiet", bert, device="cpu")
    quiet.sweep({**grid, "lr": 0.01})
    for record, same in zip([r for r in held(bank) if r not in lost], held(quiet), strict=True):
        assert record["config"] == same["config"]
        assert [e["loss"] for e in record["history"]] == pytest.approx([e["loss"] for e in same["history"]], abs=1e-5)


def test_options_that_do_not_fit_and_data_that_is_not_there_fail_their_own_runs_only(bank, here):
    grid = study(task=[task("a"), task("gone")], layers=["all", "0,7"], size=[4], seeds=1)
    tally = bank.sweep(grid).tally
    assert (tally.done, tally.failed) == (1, 3)
    said = sorted(failure for _, failure in tally.failures)
    assert any("layers is '0,7', but this backbone has layers 0 to 2" in one for one in said)
    assert sum("gone.csv" in one for one in said) == 2
    again = bank.sweep(grid).tally
    assert (again.known, again.failed) == (4, 0)
    assert sorted(failure for _, failure in again.failures) == said
    write(here / "gone.csv", reviews())
    tally = bank.sweep(grid).tally
    assert (tally.known, tally.done, tally.failed) == (3, 1, 0)


def test_failed_runs_are_run_again_when_asked(bank):
    grid = study(task=[task("a")], lr=[0.01, 10], weight_decay=10, epochs=20, size=4, seeds=1)
    bank.sweep(grid)
    again = bank.sweep(grid, retry=True).tally
    assert (again.known, again.failed) == (1, 1)
    assert len(held(bank)) == 2


@pytest.mark.parametrize("rare", [True, False])
def test_without_memory_for_all_runs_go_alone_and_one_that_is_too_large_fails(bank, monkeypatch, rare):
    real = runs.train

    def scarce(backbone, jobs, **options):
        if len(jobs) > 1 or (not rare and jobs[0].seed == 1):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(backbone, jobs, **options)

    monkeypatch.setattr(runs, "train", scarce)
    tally = bank.sweep(study(task=[task("a")], size=[4])).tally
    assert (tally.done, tally.failed) == ((2, 0) if rare else (1, 1))
    assert rare or "not enough memory" in tally.failures[0][1]


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
    assert outcome.tally.done == 2 * 4 + 2 * 2
    assert [choice.group["task"] for _, choice in outcome.choices] == ["a", "b"]
    for _, choice in outcome.choices:
        assert [record["config"]["seed"] for record in choice.runs] == [0, 1, 2]
        assert choice.settings == 4
        mine = [r for r in held(bank) if r["config"]["task"] == choice.group["task"] and r["config"]["seed"] == 0]
        assert max(selection.score(r) for r in mine) == selection.score(choice.runs[0])
    again = bank.sweep(grid)
    assert (again.tally.known, again.tally.done) == (12, 0)
    assert again.to_json()["chosen"] == outcome.to_json()["chosen"]


def test_nothing_is_selected_before_the_grid_is_whole(bank):
    grid = study(seeds=[0], select={"seeds": 3})
    assert bank.sweep(grid, limit=3).tally.total == 4
    assert bank.sweep(grid).tally.total == 8


# --- packages -----------------------------------------------------------------------------------------------


def test_packages_are_kept_as_asked(bank, bert):
    assert bank.sweep(study(task=[task("a")]), keep="none").tally.done == 4
    assert bank.tasks() == []
    kept = open_bank("all", bert, device="cpu")
    kept.sweep(study(), keep="all")
    assert [task.name for task in kept.tasks()] == ["a", "b"]
    assert sum(len(kept.bank.versions(name)) for name in ("a", "b")) == 8
    assert {record["package"] for record in held(kept)} == {f"{n}@{v}" for n in "ab" for v in (1, 2, 3, 4)}
    assert all(finding.ok for finding in kept.audit())


def test_the_best_package_of_a_task_is_its_default(bank):
    outcome = bank.sweep(study(lr=[1e-5, 0.02], epochs=4), keep="best")
    for found in bank.tasks():
        score, config = outcome.tally.best[found.name]
        assert found.metrics["dev"]["accuracy"] == pytest.approx(score)
        assert (found.seed, found.recipe["lr"]) == (config.seed, config.lr)


def test_a_worse_run_later_does_not_become_the_default(bank):
    bank.sweep(study(task=[task("a")], lr=0.02, epochs=6), keep="best")
    before = bank.show("a")
    bank.sweep(study(task=[task("a")], lr=[0.02, 1e-6], epochs=6, seeds=3, size=[4, 8]), keep="best")
    assert bank.show("a").metrics["dev"]["accuracy"] >= before.metrics["dev"]["accuracy"]


def test_a_better_package_of_an_earlier_sweep_stays_the_default(bank):
    bank.sweep(study(task=[task("a")], lr=0.02, epochs=6, size=4, seeds=1), keep="best")
    before = bank.show("a")
    worse = study(task=[task("a")], lr=1e-6, epochs=1, size=4, seeds=1, max_length=16)
    assert bank.sweep(worse, keep="best").tally.done == 1
    assert bank.show("a").metrics["dev"]["accuracy"] == before.metrics["dev"]["accuracy"]
    assert len(bank.bank.versions("a")) == 1


@pytest.mark.parametrize(("options", "said"), [({"keep": "some"}, "keep is 'some'; it must be one of none, best, all")])
def test_what_cannot_be_kept_is_refused(bank, options, said):
    with pytest.raises(ConfigError, match=said):
        bank.sweep(study(), **options)


def test_without_a_bank_records_need_a_place():
    with pytest.raises(ConfigError, match="needs a bank, or a folder of records"):
        make_context(None, None)
    assert make_context(None, "here").bank is None


def test_records_that_are_damaged_are_told_before_anything_is_run(bank):
    bank.sweep(study(task=[task("a")], size=4, seeds=1))
    (path,) = (bank.path / "records").iterdir()
    path.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        bank.sweep(study())


# --- stopped and killed -------------------------------------------------------------------------------------


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
def test_a_sweep_that_is_killed_goes_on_where_it_was(here, checkpoint, name):
    command = words(here, checkpoint, epochs=[1, 400], size=[4, 8], seeds=2)
    folder = here / "bank" / "records"
    with process(*command, cwd=here) as running:
        wait_for(running, lambda: len(list(folder.glob("[!.]*.json"))) >= 3)
        running.send_signal(getattr(signal, name))
        _, err = running.communicate(timeout=900)
    assert running.returncode == (-9 if name == "SIGKILL" else 130), err
    if name == "SIGINT":
        assert "What has ended has its record. To go on:\n  adapterbank sweep study.yaml --bank bank" in err
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


def test_the_state_of_an_unfinished_run_is_taken_up(bank, bert, monkeypatch):
    monkeypatch.setattr(sweep, "_KEEP_EVERY", 0.0)
    grid = study(task=[task("a")], epochs=5, size=[4])
    stopped = []

    def stop(tally):
        if tally.last.kind == "running" and tally.last.share > 0.5:
            stopped.append(tally.last.share)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bank.sweep(grid, watch=stop)
    assert len(list((bank.path / "runs").glob("*/state.json"))) == 2
    shares = []
    bank.sweep(grid, watch=lambda tally: shares.append(tally.last.share))
    assert min(share for share in shares if share) > 0.4
    assert list((bank.path / "runs").iterdir()) == []
    whole = open_bank("whole", bert, device="cpu")
    whole.sweep(grid)
    for resumed, unbroken in zip(held(bank), held(whole), strict=True):
        assert resumed["notes"][-1].startswith("Going on after epoch ")
        losses = [[epoch["loss"] for epoch in one["history"]] for one in (resumed, unbroken)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)

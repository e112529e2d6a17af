"""Claims about the table of runs: the oldest is started first, each once; ended runs do not change."""

from __future__ import annotations

import json
import sqlite3

import pytest

from adapterbank.errors import StorageError
from adapterbank.serving.jobs.run_store import RunStore, UnknownRun
from serving.training import DATA


def row_of(epoch, score=0.5):
    return {"epoch": epoch, "loss": 0.25, "score": score, "seconds": 1.0}


@pytest.fixture
def runs(tmp_path):
    return RunStore(tmp_path / "runs.sqlite3")


@pytest.fixture
def running(runs):
    """The id of a run that is running."""
    id = runs.add("t", {"epochs": 3}, DATA, None).id
    runs.begin()
    return id


def test_the_oldest_run_is_started_first_and_once_and_lists_are_newest_first(tmp_path):
    runs = RunStore(tmp_path / "runs.sqlite3")
    made = [runs.add(f"t{i}", {}, DATA, None).id for i in range(3)]
    assert [run.id for run in runs.list()] == made[::-1]
    begun = [RunStore(runs.path).begin().id for _ in range(3)]
    assert begun == made
    assert runs.begin() is None
    runs.put_back(made[1], counts=False)
    runs.add("t3", {}, DATA, None)
    again = runs.begin()
    assert (again.id, again.attempts) == (made[1], 1)


def test_an_ended_run_does_not_change(tmp_path):
    runs = RunStore(tmp_path / "runs.sqlite3")
    id = runs.add("t", {}, DATA, "alice").id
    runs.begin()
    assert runs.end(id, "done", version=2)
    assert not runs.end(id, "failed", failure="late")
    runs.update(id, progress={"epoch": 1})
    runs.put_back(id, counts=True)
    run = runs.cancel(id)
    assert (run.state, run.version, run.failure, run.progress, run.asked_by) == ("done", 2, None, None, "alice")


def test_old_runs_are_deleted_but_no_queued_one(tmp_path, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.jobs.run_store.KEPT", 2)
    runs = RunStore(tmp_path / "runs.sqlite3")
    waits = runs.add("t", {}, DATA, None).id
    ended = [runs.add("t", {}, DATA, None).id for _ in range(4)]
    for id in ended:
        runs.cancel(id)
    runs.forget_old()
    assert [run.id for run in runs.list()] == [ended[3], ended[2], waits]


def test_a_damaged_table_is_reported_with_a_remedy(tmp_path):
    (tmp_path / "runs.sqlite3").write_bytes(b"not a table of runs at all " * 100)
    with pytest.raises(StorageError, match=r"table of runs .* cannot be used"):
        RunStore(tmp_path / "runs.sqlite3")


def test_a_repeated_epoch_replaces_the_old_one_and_all_after_it(runs, running):
    for epoch in (1, 2, 3):
        runs.update(running, epochs=[row_of(epoch)])
    runs.update(running, epochs=[row_of(2, 0.75)])
    assert runs.get(running).history == [row_of(1), row_of(2, 0.75)]


def test_a_finished_run_has_the_history_of_its_record(runs, running):
    runs.update(running, epochs=[row_of(1), row_of(2)])
    runs.end(running, "done", version=1, history=[row_of(1, 0.75)])
    assert runs.get(running).history == runs.list()[0].history == [row_of(1, 0.75)]


def test_nothing_is_written_after_a_run_has_ended(runs, running):
    runs.end(running, "cancelled")
    runs.update(running, epochs=[row_of(1)])
    assert runs.get(running).history == []


def test_the_epochs_of_deleted_runs_are_deleted(runs, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.jobs.run_store.KEPT", 1)
    for number in range(3):
        id = runs.add(f"t{number}", {}, DATA, None).id
        runs.begin()
        runs.end(id, "done", version=1, history=[row_of(1)])
    runs.forget_old()
    with sqlite3.connect(runs.path) as db:
        assert db.execute("SELECT count(*) FROM epochs").fetchone() == (1,)
    assert [run.history for run in runs.list()] == [[row_of(1)]]


def test_a_table_of_format_1_is_converted_with_all_its_epochs(tmp_path, running, runs):
    runs.update(running, epochs=[row_of(1), row_of(2)])
    with sqlite3.connect(runs.path) as db:  # as it was
        db.execute("ALTER TABLE runs ADD COLUMN history TEXT NOT NULL DEFAULT '[]'")
        db.execute("UPDATE runs SET history = ?", (json.dumps([row_of(1), row_of(2)]),))
        db.execute("DROP TABLE epochs")
        db.execute("PRAGMA user_version = 1")
    for _ in range(2):
        again = RunStore(runs.path).get(running)
        assert (again.state, again.history) == ("running", [row_of(1), row_of(2)])


def test_a_table_of_format_2_is_converted_and_its_runs_are_started(runs):
    made = [runs.add("t", {}, DATA, key).id for key in ("alice", "alice", "bob")]
    with sqlite3.connect(runs.path) as db:  # as it was
        db.execute("ALTER TABLE runs DROP COLUMN spent")
        db.execute("ALTER TABLE runs DROP COLUMN turn")
        db.execute("PRAGMA user_version = 2")
    again = RunStore(runs.path)
    assert again.get(made[0]).spent == 0
    assert [again.begin().id for _ in made] == [made[0], made[2], made[1]]


def started(runs):
    """Start and end the next run; return its key."""
    run = runs.begin()
    runs.end(run.id, "done", version=1)
    return run.asked_by


def test_keys_take_turns_and_the_runs_of_a_key_keep_their_order(runs):
    for key in ("alice", "alice", "alice", None, None, "bob"):
        runs.add("t", {}, DATA, key)
    assert [started(runs) for _ in range(4)] == ["alice", None, "bob", "alice"]
    runs.add("t", {}, DATA, "bob")
    runs.add("t", {}, DATA, "carol")
    assert [started(runs) for _ in range(4)] == ["carol", None, "bob", "alice"]
    numbers = [run.turn for run in runs.list() if run.asked_by == "alice"]
    assert numbers == sorted(numbers, reverse=True)


def test_a_key_with_running_runs_waits_for_one_that_has_none(runs):
    made = [runs.add("t", {}, DATA, key).id for key in ("bob", "alice", "alice", "bob")]
    assert [runs.begin().id for _ in range(2)] == made[:2]
    runs.end(made[0], "done", version=1)  # the last start of bob is longest ago, and only alice has a running run
    assert runs.begin().id == made[3]


def test_a_run_that_a_stopping_server_puts_back_keeps_its_turn(runs):
    made = [runs.add("t", {}, DATA, key).id for key in ("alice", "bob")]
    for counts, following in ((False, made[0]), (True, made[1])):
        assert runs.begin().id == made[0]
        runs.put_back(made[0], counts=counts)
        if counts:
            assert runs.begin().id == following


def test_a_table_of_a_later_format_is_refused(runs):
    with sqlite3.connect(runs.path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StorageError, match="format 99"):
        RunStore(runs.path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("options", "x"),
        ("options", "[]"),
        ("options", "[" * 100_000),
        ("options", b"{}"),
        ("data", "{"),
        ("data", "{}"),
        ("data", json.dumps({**DATA, "format": "../../x"})),
        ("kept", "../tasks"),
        ("kept", ""),
        ("notes", "{}"),
        ("version", "many"),
        ("spent", "long"),
        ("created", b"\xff"),
        ("progress", "NaN"),
    ],
)
def test_a_damaged_row_is_a_failed_run_and_hides_no_other(runs, column, value):
    bad, good, late = (runs.add("t", {}, DATA, None).id for _ in range(3))
    with sqlite3.connect(runs.path) as db:
        db.execute(f"UPDATE runs SET {column} = ? WHERE id = ?", (value, bad))
    assert [(run.id, run.state) for run in runs.list()] == [(late, "queued"), (good, "queued"), (bad, "failed")]
    assert runs.begin().id == good
    runs.end_damaged()
    run = runs.get(bad)
    assert "damaged" in run.to_json()["failure"]
    assert (run.over, run.kept, run.options) == (True, None, {})
    assert runs.counts() == {"failed": 1, "running": 1, "queued": 1}


@pytest.mark.parametrize(
    ("column", "value"), [("id", "../../tasks"), ("id", "x"), ("task", "../t"), ("task", b"t"), ("state", "odd")]
)
def test_a_row_that_names_no_run_is_left_out_and_never_started(runs, column, value):
    bad, good = (runs.add("t", {}, DATA, None).id for _ in range(2))
    with sqlite3.connect(runs.path) as db:
        db.execute(f"UPDATE runs SET {column} = ? WHERE id = ?", (value, bad))
    assert [run.id for run in runs.list() if not run.over] == [good]
    assert runs.begin().id == good
    assert runs.begin() is None
    runs.end_damaged()
    assert runs.counts() == {"failed": 1, "running": 1}
    if column == "id":
        with pytest.raises(UnknownRun):
            runs.get(value)


def test_a_damaged_epoch_fails_its_run_only(runs, running):
    runs.update(running, epochs=[row_of(1)])
    with sqlite3.connect(runs.path) as db:
        db.execute("UPDATE epochs SET told = '[]'")
    other = runs.add("t", {}, DATA, None).id
    assert [(run.id, run.state) for run in runs.list()] == [(other, "queued"), (running, "failed")]

"""Claims about a run's history: an epoch is written once, whatever the number before it, and told as it always was."""

from __future__ import annotations

import asyncio
import json
import sqlite3

import pytest

from adapterbank.errors import StorageError
from adapterbank.serving.http.routes_train import follow
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.jobs.run_store import RunStore
from serving.training import new_bank, send


def row_of(epoch, score=0.5):
    return {"epoch": epoch, "loss": 0.25, "score": score, "seconds": 1.0}


@pytest.fixture
def runs(tmp_path):
    return RunStore(tmp_path / "runs.sqlite3")


@pytest.fixture
def running(runs):
    """Give the name of a run that is running."""
    id = runs.add("t", {"epochs": 3}, {}, None).id
    runs.begin()
    return id


@pytest.fixture
def idle(tmp_path, bert):
    return JobQueue(new_bank(tmp_path / "bank", bert), threads=1)


def written(runs, act):
    """Count the bytes of all values that the statements of an act write."""
    sizes = []
    original = sqlite3.connect

    class Counting(sqlite3.Connection):
        def execute(self, words, values=()):
            sizes.append(sum(len(str(value)) for value in values))
            return super().execute(words, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *given, **more: original(*given, factory=Counting, **more))
        act()
    return sum(sizes)


def test_the_thousandth_epoch_is_no_more_to_write_than_the_tenth(idle):
    run, heard = send(idle), {"history": [], "notes": []}
    idle.runs.begin()
    sizes = [
        written(idle.runs, lambda e=epoch: idle._hear(run.id, {"epoch": row_of(e), "progress": {"epoch": e}}, heard))
        for epoch in range(1, 1001)
    ]
    assert sizes[999] - sizes[9] <= 10  # the digits of the epoch
    assert [row["epoch"] for row in idle.get(run.id).history] == [*range(1, 1001)]


def test_what_is_remembered_of_a_running_run_does_not_grow_with_its_epochs(idle):
    run, heard = send(idle), {"history": [], "notes": []}
    idle.runs.begin()
    for epoch in range(1, 50):
        idle._hear(run.id, {"epoch": row_of(epoch)}, heard)
    assert len(json.dumps(heard)) < 200


def test_whether_to_stop_is_asked_without_reading_the_epochs(idle, monkeypatch):
    run = send(idle)
    idle.runs.begin()
    monkeypatch.setattr(RunStore, "get", None)
    assert idle._wanted(run.id) == ""
    with sqlite3.connect(idle.runs.path) as db:
        db.execute("UPDATE runs SET cancelling = 1")
    assert idle._wanted(run.id) == "cancel"


def test_an_epoch_that_is_done_again_takes_the_place_of_its_like_and_of_all_after_it(runs, running):
    for epoch in (1, 2, 3):
        runs.update(running, epochs=[row_of(epoch)])
    runs.update(running, epochs=[row_of(2, 0.75)])
    assert runs.get(running).history == [row_of(1), row_of(2, 0.75)]


def test_an_epoch_that_is_done_again_is_no_new_one(idle):
    run, heard = send(idle), {"history": [], "notes": []}
    idle.runs.begin()
    idle._hear(run.id, {"epoch": row_of(1)}, heard)
    idle.runs.put_back(run.id, counts=True)
    again = idle.runs.begin()
    assert again.history == [row_of(1)]
    idle._hear(run.id, {"epoch": row_of(1, 0.75)}, {"history": again.history[-1:], "notes": []})
    now = idle.get(run.id)
    assert (now.history, now.attempts) == ([row_of(1, 0.75)], 2)


def test_epochs_that_could_not_be_written_are_written_with_the_next(idle, monkeypatch):
    run, heard = send(idle), {"history": [], "notes": []}
    idle.runs.begin()

    def fail(*given):
        raise StorageError("the table is locked")

    with monkeypatch.context() as broken:
        broken.setattr(RunStore, "_open", fail)
        for epoch in (1, 2):
            idle._hear(run.id, {"epoch": row_of(epoch)}, heard)
    idle._hear(run.id, {"epoch": row_of(3)}, heard)
    assert idle.get(run.id).history == [row_of(1), row_of(2), row_of(3)]


def test_a_run_that_is_done_has_the_history_that_its_record_has(runs, running):
    runs.update(running, epochs=[row_of(1), row_of(2)])
    runs.end(running, "done", version=1, history=[row_of(1, 0.75)])
    assert runs.get(running).history == runs.list()[0].history == [row_of(1, 0.75)]


def test_what_comes_after_a_run_has_ended_is_not_written(runs, running):
    runs.end(running, "cancelled")
    runs.update(running, epochs=[row_of(1)])
    assert runs.get(running).history == []


def test_the_epochs_of_runs_that_are_forgotten_go_with_them(runs, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.jobs.run_store.KEPT", 1)
    for number in range(3):
        id = runs.add(f"t{number}", {}, {}, None).id
        runs.begin()
        runs.end(id, "done", version=1, history=[row_of(1)])
    runs.forget_old()
    with sqlite3.connect(runs.path) as db:
        assert db.execute("SELECT count(*) FROM epochs").fetchone() == (1,)
    assert [run.history for run in runs.list()] == [[row_of(1)]]


def test_a_stream_reads_an_epoch_once_and_all_of_them_when_the_state_has_changed(runs, running):
    asked = []

    async def look(after):
        asked.append(after)
        return runs.get(running, after)

    async def run():
        stream, parts = follow(look, 60, lambda: False), []
        for epoch in range(1, 6):
            runs.update(running, epochs=[row_of(epoch)], progress=None)
            parts.append(await anext(stream))
            if epoch == 1:
                parts.append(await anext(stream))  # its state
        runs.end(running, "done", version=1)
        return parts, [part async for part in stream]

    parts, last = asyncio.run(run())
    told = [json.loads(part.partition("data: ")[2]) for part in parts if part.startswith("event: progress")]
    assert [value["epoch"] for value in told] == [*range(1, 6)]
    assert [*dict.fromkeys(asked)] == [0, 1, 2, 3, 4, 5]
    assert asked.count(0) == 2
    assert len(json.loads(last[-1].partition("data: ")[2])["history"]) == 5


def test_a_table_of_the_first_format_is_read_with_all_its_epochs(tmp_path, running, runs):
    runs.update(running, epochs=[row_of(1), row_of(2)])
    with sqlite3.connect(runs.path) as db:  # as it was
        db.execute("ALTER TABLE runs ADD COLUMN history TEXT NOT NULL DEFAULT '[]'")
        db.execute("UPDATE runs SET history = ?", (json.dumps([row_of(1), row_of(2)]),))
        db.execute("DROP TABLE epochs")
        db.execute("PRAGMA user_version = 1")
    for _ in range(2):
        again = RunStore(runs.path).get(running)
        assert (again.state, again.history) == ("running", [row_of(1), row_of(2)])


def test_a_table_of_a_later_format_is_left_alone(runs):
    with sqlite3.connect(runs.path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StorageError, match="format 99"):
        RunStore(runs.path)

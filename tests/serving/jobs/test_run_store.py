"""Claims about the table of runs: the oldest first, each once, and what has ended stays as it is."""

from __future__ import annotations

import pytest

from adapterbank.errors import StorageError
from adapterbank.serving.jobs.run_store import RunStore


def test_the_oldest_is_begun_first_and_only_once_and_lists_are_newest_first(tmp_path):
    runs = RunStore(tmp_path / "runs.sqlite3")
    made = [runs.add(f"t{i}", {}, {}, None).id for i in range(3)]
    assert [run.id for run in runs.list()] == made[::-1]
    begun = [RunStore(runs.path).begin().id for _ in range(3)]
    assert begun == made
    assert runs.begin() is None
    runs.put_back(made[1], counts=False)
    runs.add("t3", {}, {}, None)
    again = runs.begin()
    assert (again.id, again.attempts) == (made[1], 1)


def test_a_run_that_has_ended_stays_as_it_is(tmp_path):
    runs = RunStore(tmp_path / "runs.sqlite3")
    id = runs.add("t", {}, {}, "alice").id
    runs.begin()
    assert runs.end(id, "done", version=2)
    assert not runs.end(id, "failed", failure="late")
    runs.update(id, progress={"epoch": 1})
    runs.put_back(id, counts=True)
    run = runs.cancel(id)
    assert (run.state, run.version, run.failure, run.progress, run.asked_by) == ("done", 2, None, None, "alice")


def test_old_runs_are_forgotten_but_none_that_waits(tmp_path, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.jobs.run_store.KEPT", 2)
    runs = RunStore(tmp_path / "runs.sqlite3")
    waits = runs.add("t", {}, {}, None).id
    ended = [runs.add("t", {}, {}, None).id for _ in range(4)]
    for id in ended:
        runs.cancel(id)
    runs.forget_old()
    assert [run.id for run in runs.list()] == [ended[3], ended[2], waits]


def test_a_damaged_table_is_told_in_a_sentence(tmp_path):
    (tmp_path / "runs.sqlite3").write_bytes(b"not a table of runs, by any means " * 100)
    with pytest.raises(StorageError, match=r"table of runs .* cannot be used"):
        RunStore(tmp_path / "runs.sqlite3")
